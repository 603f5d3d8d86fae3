"""`jaxtrain data NAME`: write examples to fine-tune on that every machine has, or tokenize corpora."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxtrain.cli import nearest
from jaxtrain.data import tokenizer
from jaxtrain.data.corpus import SHARD_TOKENS, TOKENIZER, tokenize_corpus
from jaxtrain.data.finetuning import write_stdlib_pairs
from jaxtrain.errors import UserError
from jaxtrain.flags import parse

_PAIRS = "jaxtrain data stdlib-pairs [--out DIR]"
_TOKENIZE = "jaxtrain data tokenize CORPUS… [--tokenizer FILE] [--out DIR]"


@dataclass(frozen=True)
class Data:
    """Write questions about Python's standard library with their answers, its docstrings, as conversations.

    The held-out pairs are of the modules that the recipes on its source, such as gpt-stdlib, hold out too."""

    out: Path = Path("stdlib-pairs")
    """Folder to create, with train.jsonl and validation.jsonl."""


@dataclass(frozen=True)
class Tokenize:
    """Tokenize corpora once, into shards that gpt-stdlib and llama-stdlib read as --data.

    A corpus is a text file or a folder of them, one document each; or JSON Lines or a table, one document a row. The
    same command continues after an interruption."""

    out: Path = Path("tokens")
    """Folder to create."""
    tokenizer: Path | None = None
    """Path of a tokenizer.json; without one, tokens are bytes."""
    text_column: str = "text"
    """Column of the texts in JSON Lines and tables."""
    validation: float = 0.1
    """Fraction of the documents that is held out."""
    shard_tokens: int = SHARD_TOKENS
    """Number of tokens after which a shard ends."""
    workers: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    """Number of processes that tokenize."""


def main(args: list[str]) -> int:
    """Parse, write, print the counts and the next command."""
    commands = {"stdlib-pairs": _write_pairs, "tokenize": _tokenize}
    usage = f"{_PAIRS} or {_TOKENIZE}"
    if args and args[0] in ("-h", "--help"):
        for command in commands.values():
            with contextlib.suppress(SystemExit):  # printing the help exits
                command(["--help"])
        return 0
    if not args or args[0].startswith("-"):
        raise UserError(f"a name is required: {usage}")
    if args[0] not in commands:
        raise UserError(f"no data {args[0]!r}{nearest(args[0], list(commands))}: {usage}")
    commands[args[0]](args[1:])
    return 0


def _write_pairs(args: list[str]) -> None:
    options = parse(Data(), args, "jaxtrain data stdlib-pairs")
    with Console(stderr=True).status("reading Python's standard library"):
        pairs = write_stdlib_pairs(options.out)
    print(*pairs.lines(), sep="\n")
    print(f"wrote {options.out}: jaxtrain train finetune --model FOLDER --data {options.out}")


def _tokenize(args: list[str]) -> None:
    first_flag = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    options = parse(Tokenize(), args[first_flag:], "jaxtrain data tokenize CORPUS…")
    if not first_flag:
        raise UserError(f"a corpus is required: {_TOKENIZE}")
    with Console(stderr=True).status("reading the corpora") as status:
        manifest = tokenize_corpus(
            args[:first_flag],
            tokenizer(options.tokenizer),
            options.out,
            shard_tokens=options.shard_tokens,
            column=options.text_column,
            validation_fraction=options.validation,
            workers=options.workers,
            message=lambda line: status.update(f"tokenizing: {line}"),
        )
    for split, shards in (("train", manifest.train), ("validation", manifest.validation)):
        tokens, documents = (sum(counts) for counts in zip(*((s.tokens, s.documents) for s in shards), strict=True))
        print(f"{split:12} {tokens:,} tokens in {documents:,} documents, {len(shards):,} shards")
    flags = "" if options.tokenizer is None else f" --tokenizer {options.out / TOKENIZER}"
    print(f"wrote {options.out}: jaxtrain train gpt-stdlib --data {options.out}{flags}")
