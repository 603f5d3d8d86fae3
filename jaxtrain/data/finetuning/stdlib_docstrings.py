"""Questions about Python's standard library and their answers, its documentation: examples that every machine has.

The source files are parsed, not imported. A pair is of one of four kinds, and its answer is the first paragraph of the
docstring, or as many of its first sentences as fit:

| kind | question |
| --- | --- |
| signature | `textwrap: def indent(text, prefix, predicate=None):` |
| function | `What does textwrap.indent do?` |
| class | `What is textwrap.TextWrapper?` |
| module | `What is the module textwrap for?` |
"""

import ast
import inspect
import json
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.data.text.text_files import split_files, stdlib_files
from jaxtrain.errors import UserError

MAX_BYTES = 240
"""Largest size of a question and its answer together, in UTF-8: with special tokens they fit in rows of 256 bytes."""
_MIN_WORDS = 3  # shorter answers, such as "Deprecated.", say nothing about the question
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Pair(NamedTuple):
    """A question and its answer.

    Attributes:
      module: The module that documents the answer.
      question: Text of the user.
      answer: Text of the assistant.
    """

    module: str
    question: str
    answer: str

    def row(self) -> dict[str, Any]:
        """Return the pair as a conversation."""
        messages = [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]
        return {"messages": messages}


@dataclass(frozen=True)
class StdlibPairs:
    """Pairs of Python's standard library.

    Attributes:
      train: Pairs of the modules that are not held out.
      validation: Pairs of the held-out modules.
      known: Number of pairs of held-out modules that were omitted because the source of the others has their answers.
    """

    train: tuple[Pair, ...]
    validation: tuple[Pair, ...]
    known: int

    def lines(self) -> list[str]:
        """Return the counts, as sentences."""
        count = lambda pairs: f"{len(pairs):,} pairs of {len({pair.module for pair in pairs}):,} modules"  # noqa: E731
        return [
            f"{count(self.train)} to train on",
            f"{count(self.validation)} held out, whole modules; {self.known:,} pairs of them were omitted because the "
            "source of other modules contains their answers",
        ]


def stdlib_pairs() -> StdlibPairs:
    """Return the pairs of the standard library, which depend on its files alone.

    The held-out modules are the files that `split_documents` holds out: a model that was trained on the source of the
    standard library, as `jaxtrain train gpt-stdlib` does by default, has not read them.

    Raises:
      UserError: This Python is installed without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    return split_pairs(*split_files(stdlib_files(), root), root)


def split_pairs(train_files: Iterable[Path], held_out: Iterable[Path], root: Path) -> StdlibPairs:
    """Return the pairs of two groups of source files below a folder; held-out answers occur in no other file.

    Files that are not UTF-8 or not valid Python are skipped.
    """
    train_files = list(train_files)
    train, seen = _unique(train_files, root), _words(file.read_text("utf-8", "replace") for file in train_files)
    questions = {pair.question for pair in train}
    candidates = [pair for pair in _unique(held_out, root) if pair.question not in questions]
    validation = tuple(pair for pair in candidates if pair.answer not in seen)
    return StdlibPairs(train, validation, len(candidates) - len(validation))


def write_stdlib_pairs(folder: Path) -> StdlibPairs:
    """Write `train.jsonl` and `validation.jsonl`, conversations to fine-tune on.

    Args:
      folder: The folder to create.

    Returns:
      The pairs.

    Raises:
      UserError: The folder exists or cannot be created, or this Python is installed without its sources.
    """
    pairs = stdlib_pairs()
    try:
        folder.mkdir()
    except OSError as error:
        raise UserError(f"{folder} cannot be created ({error.strerror}): choose another folder") from None
    for name in ("train", "validation"):
        rows = (json.dumps(pair.row(), ensure_ascii=False) + "\n" for pair in getattr(pairs, name))
        (folder / f"{name}.jsonl").write_text("".join(rows), "utf-8")
    return pairs


def module_pairs(module: str, source: str) -> Iterator[Pair]:
    """Yield the pairs of a module.

    Args:
      module: Its name.
      source: Its source.

    Raises:
      SyntaxError: The source is not valid Python.

    Example:
      >>> source = "def area(r: float) -> float:\\n    '''Return the area of a circle.\\n\\n    In square meters.'''"
      >>> for pair in module_pairs("shapes", source):
      ...     print(pair.question, pair.answer)
      shapes: def area(r: float) -> float: Return the area of a circle.
      What does shapes.area do? Return the area of a circle.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes in the source
        tree = ast.parse(source)
    for question, node in [(f"What is the module {module} for?", tree), *_questions(module, tree, ())]:
        answer = _answer(ast.get_docstring(node, clean=False) or "", MAX_BYTES - len(question.encode()))
        if answer is not None:
            yield Pair(module, question, answer)


def _questions(
    module: str, parent: ast.Module | ast.ClassDef, classes: tuple[str, ...]
) -> Iterator[tuple[str, _Definition]]:
    """Yield questions about the definitions in a module or class."""
    for node in parent.body:
        if not isinstance(node, _Definition):
            continue
        name = ".".join((module, *classes, node.name))
        if isinstance(node, ast.ClassDef):
            yield f"What is {name}?", node
            yield from _questions(module, node, (*classes, node.name))
        else:
            yield f"{module}: {''.join(f'class {c}: ' for c in classes)}{_signature(node)}", node
            if not node.name.startswith("_"):
                yield f"What does {name} do?", node


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{keyword} {node.name}({ast.unparse(node.args)}){returns}:"


def _answer(docstring: str, size: int) -> str | None:
    """Return the first paragraph of a docstring, or the first sentences of it that fit in a number of bytes."""
    paragraph = _words([inspect.cleandoc(docstring).partition("\n\n")[0]])
    answer = ""
    for sentence in _SENTENCE.split(paragraph):
        longer = f"{answer} {sentence}".strip()
        if len(longer.encode()) > size:
            break
        answer = longer
    return answer if len(answer.split()) >= _MIN_WORDS and ">>>" not in answer else None


def _unique(files: Iterable[Path], root: Path) -> tuple[Pair, ...]:
    """Return the pairs of files without repeated questions."""
    found: dict[str, Pair] = {}
    for file in files:
        try:
            pairs = list(module_pairs(_module(file.relative_to(root)), file.read_text("utf-8")))
        except (UnicodeDecodeError, SyntaxError):
            continue
        for pair in pairs:
            found.setdefault(pair.question, pair)
    return tuple(found.values())


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _words(texts: Iterable[str]) -> str:
    """Return texts with single spaces for white space."""
    return " ".join(word for text in texts for word in text.split())
