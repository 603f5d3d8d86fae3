"""`jaxtrain COMMAND`: one file a command, errors in one line."""

import difflib
import importlib
import sys
from collections.abc import Sequence

from jaxtrain.cpu.host_memory import keep_host_memory
from jaxtrain.errors import UserError, is_out_of_memory

COMMANDS = {
    "train": "train a recipe: jaxtrain train [RECIPE] [--out DIR] [--resume [auto]] [--from CONFIG] [--field value …]",
    "plan": "the settings that fit, or what a mesh holds and sends: jaxtrain plan RECIPE [--memory 16GiB] [--mesh M]",
    "launch": "train in several processes of this machine: jaxtrain launch -n N -- train …",
    "doctor": "what is installed, which devices answer, what is wrong and what mends it",
    "sample": "write text from a trained language model: jaxtrain sample DIR",
    "import-torch": "take over a run of PyTorch's: jaxtrain import-torch CKPT --model RECIPE [--out DIR]",
    "report": "curves, settings and samples of one run or several: jaxtrain report DIR… [--out PAGE] [--serve [PORT]]",
    "eval": "a trained run's mistakes, example by example: jaxtrain eval DIR [--worst N] [--out PAGE.html]",
    "replay": "a step of a run again: where its first inf or NaN arises: jaxtrain replay DIR STEP",
    "profile": "where the time of a run's steps goes, and a trace of them: jaxtrain profile DIR [--steps N]",
    "export": "write a run for other programs: jaxtrain export DIR --format torch|onnx|stablehlo|huggingface [--out P]",
}


_LONGEST = 1000  # characters of an error
# Packages of the extra `run`: the base install is what `train_step` needs.
_RUN_PACKAGES = frozenset({"flax", "grain", "jinja2", "orbax", "PIL", "rich", "safetensors", "tensorboardX", "tyro"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0, 1 where something did not hold, 2 for wrong usage."""
    args = list(sys.argv[1:] if argv is None else argv)
    ours = args.index("--") if "--" in args else len(args)  # what follows is another command's
    debug = "--debug" in args[:ours]
    args = [*(a for a in args[:ours] if a != "--debug"), *args[ours:]]
    try:
        return _dispatch(args)
    except UserError as error:
        if debug:
            raise
        print(f"jaxtrain: {_one_line(str(error))}", file=sys.stderr)
        return error.exit_status
    except Exception as error:
        if debug or not is_out_of_memory(error):
            raise
        said = _one_line(str(error).partition("\n")[0])
        print(f"jaxtrain: out of memory ({said}): make batch_size or the model smaller", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxtrain: interrupted", file=sys.stderr)
        return 130


def _one_line(message: str) -> str:
    """The message with what is not to be printed written out, and cut: it may quote a file, which may hold anything."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in message)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print("usage: jaxtrain COMMAND …\n")
        print("\n".join(f"  {name:12} {text}" for name, text in COMMANDS.items()))
        print("\n  jaxtrain COMMAND --help says more; --debug shows tracebacks")
        return 0 if args else 2
    if args[0] not in COMMANDS:
        raise UserError(f"no command {args[0]!r}{nearest(args[0], COMMANDS)}: choose one of {', '.join(COMMANDS)}")
    keep_host_memory()  # before anything heavier is imported
    try:
        return int(importlib.import_module(f"jaxtrain.cli.{args[0].replace('-', '_')}").main(args[1:]))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _RUN_PACKAGES:
            raise
        raise UserError(f"jaxtrain {args[0]} needs {package}: pip install 'jaxtrain[run]'") from error


def nearest(word: str, known: Sequence[str] | dict[str, str]) -> str:
    """A remark that names the known word most like `word`; empty where none is alike."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {found[0]!r}" if found else ""
