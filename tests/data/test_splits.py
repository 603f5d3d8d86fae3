"""Names of files and folders decide what is held out, in every format, and files that are not read are named."""

import json
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxtrain.data import image_folder, split_table, split_text, table, text_files
from jaxtrain.data.corpus.corpus_documents import corpus_parts
from jaxtrain.data.files.splits import split_of
from jaxtrain.data.finetuning import read_examples, split_examples
from jaxtrain.data.text.tokenizer import ByteTokenizer
from jaxtrain.errors import UserError

ROWS = 12
HELD_OUT = ("validation", "valid", "val", "dev", "eval", "test", "testing")


def write_rows(file: Path, texts: Iterable[str]) -> None:
    rows = [{"text": text} for text in texts]
    file.parent.mkdir(parents=True, exist_ok=True)
    match file.suffix:
        case ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".txt":
            file.write_text("".join(row["text"] + "\n" for row in rows))
        case ".parquet":
            pyarrow = pytest.importorskip("pyarrow.parquet")
            pyarrow.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), file)


def read_split_examples(root: Path) -> tuple[list[str], ...]:
    return tuple([part[i].text for i in range(len(part))] for part in split_examples(root))


def read_split_table(root: Path) -> tuple[list[str], ...]:
    return tuple([str(part[i]["text"]) for i in range(len(part))] for part in split_table(root, ["text"]))


def read_split_text(root: Path) -> tuple[list[str], ...]:
    return tuple(bytes(part).decode().split() for part in split_text(text_files(root), root))


def read_corpus(root: Path) -> tuple[list[str], ...]:
    texts = ByteTokenizer()
    parts = {part.split: part.documents for part in corpus_parts(root, "text", 0.1)}
    return tuple(
        " ".join(texts.decode(documents.encode(i, texts)) for i in range(len(documents))).split()
        for documents in (parts["train"], parts["validation"])
    )


READERS: dict[str, list[Callable[[Path], tuple[list[str], ...]]]] = {
    ".jsonl": [read_split_examples, read_corpus],
    ".parquet": [read_split_examples, read_split_table, read_corpus],
    ".txt": [read_split_text, read_corpus],
}
# As scripts, the Hub, WikiText and archives name them.
NAMES = ("{}", "{}-00000-of-00002", "data/{}-00000-of-00001", "wiki.{}", "{}/part", "my_{}_2", "{}2")


def warnings_of(read: Callable[[], Any]) -> tuple[Any, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = read()
    return found, "\n".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize("suffix", READERS)
def test_names_decide_what_is_held_out(suffix: str, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for number, name in enumerate(NAMES):
        root, held_out = tmp_path / str(number), str(draws.choice(HELD_OUT))
        train = ("train", "Training")[int(draws.integers(2))]
        for split in (train, held_out.upper() if draws.integers(2) else held_out):
            write_rows(root / f"{name.format(split)}{suffix}", [f"{split.lower()}{i}" for i in range(ROWS)])
        for read in READERS[suffix]:
            (ours, theirs), said = warnings_of(lambda: read(root))  # noqa: B023
            assert ours == [f"{train.lower()}{i}" for i in range(ROWS)], (name, held_out)
            assert theirs == [f"{held_out}{i}" for i in range(ROWS)], (name, held_out)
            assert said == ""
        # Neither part is read as the other, or both as one.
        if suffix != ".txt":
            for whole in [read_examples, table][: 2 if suffix == ".parquet" else 1]:
                with pytest.raises(UserError, match="has several splits: use one of its files or sub-folders"):
                    whole(root)


@pytest.mark.parametrize("suffix", READERS)
def test_files_of_other_splits_and_formats_are_named(suffix: str, tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_rows(tmp_path / f"{split}{suffix}", ["a"] * ROWS)
    others = ["test" + suffix] if suffix == ".txt" else ["test" + suffix, "more.csv", "train.jsonl.gz"]
    for other in others:
        (tmp_path / other).write_text("a\nb\n") if suffix != ".parquet" else (tmp_path / other).write_bytes(b"")
        for read in READERS[suffix][: 1 if suffix == ".jsonl" else 2]:
            assert other in warnings_of(lambda: read(tmp_path))[1], (read, other)  # noqa: B023
        (tmp_path / other).unlink()


def test_a_held_out_file_among_files_without_a_split_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ["a"] * ROWS)
    write_rows(tmp_path / "test.jsonl", ["b"] * ROWS)
    message = (
        rf"{re.escape(str(tmp_path))}/test\.jsonl is held out by its name, but no file of .* is named train: name "
    )
    with pytest.raises(UserError, match=message):
        split_examples(tmp_path)


def test_several_splits_of_the_hub_are_refused(tmp_path: Path) -> None:
    for name in ("train_sft", "train_gen", "test_sft"):
        for i in range(2):
            write_rows(tmp_path / f"{name}-{i:05d}-of-00002.jsonl", ["a"])
    with pytest.raises(UserError, match="has the splits train_gen and train_sft: use a folder with the files of one"):
        split_examples(tmp_path)


def test_words_within_others_are_no_split() -> None:
    names = ("latest.txt", "evaluate.py", "training_data.jsonl", "constrain.txt", "devices/a.txt", "a.txt")
    assert [split_of(Path(name)) for name in names] == [None, None, "training", None, None, None]


@pytest.mark.parametrize(("train", "held_out"), [("Train", "Val"), ("training", "testing"), ("TRAIN", "dev")])
def test_splits_of_images(train: str, held_out: str, tmp_path: Path) -> None:
    for split in (train, held_out):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (2, 2)).save(tmp_path / split / name / f"{split}.png")
    ours, theirs = image_folder(tmp_path)
    assert ours.classes == ("cat", "dog")
    assert [{file.stem for file in part.files} for part in (ours, theirs)] == [{train}, {held_out}]


def test_folders_of_images_that_are_no_classes(tmp_path: Path) -> None:
    for fold in ("fold1", "fold2"):
        for name in ("cat", "dog"):
            (tmp_path / fold / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (2, 2)).save(tmp_path / fold / name / f"{i}.png")
    with pytest.raises(
        UserError, match=r"all sub-folders of .* have the sub-folders cat, dog: use one of them, or name"
    ):
        image_folder(tmp_path)
    (tmp_path / "fold1" / "__MACOSX").mkdir()
    (tmp_path / "fold1" / "__MACOSX" / "cat.png").write_bytes(b"")
    assert image_folder(tmp_path / "fold1")[0].classes == ("cat", "dog")
