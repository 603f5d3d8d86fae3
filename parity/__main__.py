"""Entry point of `parity` and `python -m parity`."""

import importlib
import sys


def main(program: str = "parity") -> int:
    """Run the command line of `program`, "parity" or "benchmarks"; without its packages, name the extra to install."""
    try:
        cli = importlib.import_module(f"{program}.cli")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "jaxtrain", "parity", "benchmarks"):
            raise
        print(f"{program}: {program} needs {package}: pip install 'jaxtrain[parity]'", file=sys.stderr)
        return 2
    return int(cli.main())


if __name__ == "__main__":
    sys.exit(main())
