"""Entry point of `python -m benchmarks`."""

import sys


def main() -> int:
    """Run the command line; without its packages, name the extra that brings them."""
    try:
        from benchmarks.cli import main as run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "jaxtrain", "parity", "benchmarks"):
            raise
        print(f"benchmarks: benchmarks needs {package}: pip install 'jaxtrain[parity]'", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
