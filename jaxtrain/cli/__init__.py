"""`jaxtrain COMMAND`: one module per command, errors in one line."""

import difflib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jaxtrain
from jaxtrain.cli.user_code import print_own_traceback as print_own_traceback
from jaxtrain.cpu.host_memory import keep_host_memory
from jaxtrain.cpu.program_log import hide_log_of_loaded_programs
from jaxtrain.cpu.threads import reserve_collective_threads
from jaxtrain.errors import UserError, escape_unprintable, is_out_of_memory
from jaxtrain.interrupts import raised_interrupts

COMMANDS = {
    "train": "train a recipe: jaxtrain train [RECIPE] [--out DIR] [--resume [auto]] [--from CONFIG] [--field value …]",
    "data": "tokenize corpora, or write examples: jaxtrain data tokenize CORPUS…, jaxtrain data stdlib-pairs",
    "new": "write a recipe to edit: jaxtrain new FILE.py [--from RECIPE]",
    "plan": "find settings that fit in memory, or size a mesh: jaxtrain plan RECIPE [--memory 16GiB] [--mesh M]",
    "explain": "list the passes of the program, why and what each gains: jaxtrain explain RECIPE [--device h100]",
    "launch": "train in several processes on this machine: jaxtrain launch -n N -- train …",
    "doctor": "check the installation and the devices, and suggest fixes",
    "sample": "generate text with a trained language model: jaxtrain sample DIR",
    "import-torch": "continue a PyTorch run: jaxtrain import-torch CKPT --model RECIPE [--out DIR]",
    "port": "write a PyTorch training script as a proved run: jaxtrain port [--out DIR] SCRIPT [its arguments]",
    "bench": "time your own work in JAX and in PyTorch: jaxtrain bench FILE.py::NAME [--minutes M] [--html PAGE]",
    "from-torch": "write a PyTorch module as JAX source: jaxtrain from-torch FILE.py::FACTORY [--out model.py]",
    "report": "write a page of curves, settings and samples: jaxtrain report DIR… [--out PAGE] [--serve [PORT]]",
    "eval": "list the examples with the highest loss: jaxtrain eval DIR [--worst N] [--out PAGE.html]",
    "replay": "rerun a step and locate its first inf or NaN: jaxtrain replay DIR STEP",
    "profile": "trace a run's steps and show where their time goes: jaxtrain profile DIR [--steps N]",
    "export": "export a run to other formats: jaxtrain export DIR --format torch|onnx|stablehlo|huggingface [--out P]",
}


_MAX_LENGTH = 1000  # characters of a printed error
# Packages of the extra `run`; the base install is what `train_step` needs.
_RUN_PACKAGES = frozenset(
    {
        "cloudpickle",
        "flax",
        "grain",
        "jinja2",
        "markupsafe",
        "orbax",
        "PIL",
        "rich",
        "safetensors",
        "tensorboardX",
        "tensorstore",
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
      argv: Arguments after the program name; `sys.argv[1:]` by default.

    Returns:
      The exit status: 0 for success, 1 if the run or a check failed, 2 for invalid usage, 130 after Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    end = args.index("--") if "--" in args else len(args)  # the rest belongs to another command
    debug = "--debug" in args[:end]
    args = [*(a for a in args[:end] if a != "--debug"), *args[end:]]
    format_warning, warnings.formatwarning = warnings.formatwarning, _format_warning
    try:
        with raised_interrupts():
            return _dispatch(args)
    except UserError as error:
        if debug:
            raise
        print(f"jaxtrain: {_one_line(str(error))}", file=sys.stderr)
        return error.exit_status
    except Exception as error:
        if debug:
            raise
        if not is_out_of_memory(error):
            if not print_own_traceback(error):
                raise
            return 1
        reason = _one_line(str(error).partition("\n")[0])
        print(f"jaxtrain: out of memory ({reason}): reduce batch_size or the model's size", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxtrain: interrupted", file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = format_warning


def _format_warning(message: Warning | str, *_: Any, **__: Any) -> str:
    """Format a warning as one line, without the line of code that issued it."""
    return f"jaxtrain: warning: {_one_line(str(message))}\n"


def _one_line(message: str) -> str:
    """Escape non-printable characters, which a quoted file may contain, and shorten the message."""
    text = escape_unprintable(message)
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH // 2]} … {text[-_MAX_LENGTH // 2 :]}"


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print("usage: jaxtrain COMMAND …\n")
        print("\n".join(f"  {name:12} {text}" for name, text in COMMANDS.items()))
        print("\n  jaxtrain COMMAND --help lists its flags; --debug shows tracebacks; jaxtrain --version")
        return 0 if args else 2
    if args[0] == "--version":
        print(f"jaxtrain {jaxtrain.__version__}")
        return 0
    if args[0] not in COMMANDS:
        raise UserError(f"no command {args[0]!r}{nearest(args[0], COMMANDS)}: choose one of {', '.join(COMMANDS)}")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows its number
            stream.reconfigure(errors="backslashreplace")
    keep_host_memory()  # three calls of mallopt, which must precede the import of NumPy and JAX
    reserve_collective_threads(os.environ)
    hide_log_of_loaded_programs(os.environ)
    try:
        return int(importlib.import_module(f"jaxtrain.cli.{args[0].replace('-', '_')}").main(args[1:]))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _RUN_PACKAGES:
            raise
        raise UserError(f"jaxtrain {args[0]} needs {package}: pip install 'jaxtrain[run]'") from error


def nearest(word: str, known: Sequence[str] | dict[str, str]) -> str:
    """Return ", did you mean ..." for the most similar known word; the empty string if none is similar."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {found[0]!r}" if found else ""
