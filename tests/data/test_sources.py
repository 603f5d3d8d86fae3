"""Sources: their examples, and the message of every user error."""

import contextlib
import io
import os
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from jaxtrain.data import (
    Arrays,
    Source,
    TokenWindows,
    check_labels,
    digits,
    image_folder,
    npz,
    pixels,
    split_text,
    stdlib_files,
    text_files,
    unigram_entropy,
)
from jaxtrain.data.text.text_files import warn_of_encoding
from jaxtrain.errors import UserError


def as_bytes(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


def write_files(root: Path, contents: dict[str, bytes]) -> list[Path]:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return [root / name for name in contents]


def write_images(root: Path, names: list[str], size: tuple[int, int] = (4, 2), mode: str = "RGB") -> None:
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, i if mode == "L" else None).save(root / name)


# --- Text ---------------------------------------------------------------------------------------------------


@given(content=st.binary(min_size=2, max_size=60), data=st.data())
def test_targets_of_the_windows_tile_the_text(content: bytes, data: st.DataObject) -> None:
    seq_len = data.draw(st.integers(1, len(content) - 1))
    text = TokenWindows(as_bytes(content), seq_len)
    windows = [text[i]["tokens"] for i in range(len(text))]
    inputs = bytes(np.concatenate([w[:-1] for w in windows]).tolist())
    targets = bytes(np.concatenate([w[1:] for w in windows]).tolist())
    covered = len(text) * seq_len
    assert len(content) - 1 - covered < seq_len
    assert (inputs, targets) == (content[:covered], content[1 : covered + 1])
    assert all(w.dtype == np.int32 and w.shape == (seq_len + 1,) for w in windows)


@pytest.mark.parametrize("code", np.typecodes["AllInteger"])
def test_tokens_of_every_dtype_are_right_or_refused(code: str) -> None:
    largest = np.iinfo(code).max
    text = TokenWindows(np.array([1, 2, largest], code), 1)
    assert text[0]["tokens"].tolist() == [1, 2]
    if largest < 2**31:
        assert text[1]["tokens"].tolist() == [2, largest]
    else:
        with pytest.raises(UserError, match=f"the token {largest}, beyond int32"):
            text[1]


def test_token_windows_check_their_bounds() -> None:
    text = TokenWindows(as_bytes(b"abcdefg"), 2)
    assert len(text) == 3
    for outside in (3, -1):
        with pytest.raises(IndexError):
            text[outside]


@pytest.mark.parametrize(
    ("content", "seq_len", "message"), [(b"ab", 2, "2 tokens"), (b"ab", 0, "seq_len must be at least 1, got 0")]
)
def test_a_text_shorter_than_a_window_is_refused(content: bytes, seq_len: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TokenWindows(as_bytes(content), seq_len)


@given(content=st.binary(min_size=1, max_size=200))
def test_unigram_entropy_is_between_zero_and_the_log_of_the_alphabet(content: bytes) -> None:
    entropy = unigram_entropy(as_bytes(content))
    assert 0 <= entropy <= np.log(len(set(content))) + 1e-12


def test_unigram_entropy_of_a_uniform_text_is_the_log_of_its_alphabet() -> None:
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(np.log(256))


# --- files of text ------------------------------------------------------------------------------------------


def test_stdlib_is_sorted_source_without_tests_or_packages() -> None:
    files = stdlib_files()
    root = Path(os.__file__).parent
    names = [f.relative_to(root).as_posix() for f in files]
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    parts = {part for name in names for part in name.split("/")}
    assert parts.isdisjoint({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"})
    assert all(f.suffix == ".py" for f in files)


def test_text_files_are_the_visible_regular_texts_in_order(tmp_path: Path) -> None:
    b, a = write_files(tmp_path, {"b.txt": b"b", "a/z.py": b"a\xff"})
    write_files(tmp_path, {".hidden": b"x", ".git/config": b"x", "empty": b"", "binary": b"x" * 8000 + b"\0"})
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.warns(UserWarning, match="has files that are not read: binary$"):
        assert text_files(tmp_path) == [a, b]
    assert text_files(str(b)) == [b]


def test_nul_after_the_first_8_kib_does_not_make_a_file_binary(tmp_path: Path) -> None:
    files = write_files(tmp_path, {"late": b"x" * 8192 + b"\0"})
    assert text_files(tmp_path) == files


def test_json_lines_read_as_text_are_warned_of(tmp_path: Path) -> None:
    files = write_files(tmp_path, {"a.jsonl": b'{"text": "a"}'})
    with pytest.warns(UserWarning, match=r"a\.jsonl is read as text, with its names and braces: tokenize its texts by"):
        assert text_files(tmp_path) == files


@pytest.mark.parametrize(("encoding", "is_lost"), [("utf-8", False), ("latin-1", True)])
def test_a_text_that_is_not_utf8_is_warned_of(encoding: str, is_lost: bool, tmp_path: Path) -> None:
    content = ("é" * 20 + "\n").encode(encoding)[1:-2]  # may start and end within a character
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_encoding(tmp_path / "a.txt", content)
        warn_of_encoding(tmp_path / "a.txt", "\ufffd".encode())
    assert [str(warning.message).partition(",")[0] for warning in caught] == [
        f"{tmp_path}/a.txt is not UTF-8"
    ] * is_lost


def test_missing_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        text_files(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no readable text"):
        text_files(tmp_path)
    with pytest.raises(UserError, match="has no readable text"):
        text_files(*write_files(tmp_path, {"empty": b""}))


@given(st.lists(st.integers(1, 5), min_size=2, max_size=12), st.sampled_from([0.01, 0.1, 0.5, 0.99]))
def test_split_assigns_every_file_to_one_side(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], fraction: float
) -> None:
    root = tmp_path_factory.mktemp("split")
    marked = {f"{i}": bytes([i]) * size for i, size in enumerate(sizes)}
    train, validation = split_text(write_files(root, marked), root, fraction)
    assert len(train) > 0
    assert len(validation) > 0
    assert set(train.tolist()).isdisjoint(validation.tolist())
    assert sorted([*train.tolist(), *validation.tolist()]) == sorted(b"".join(marked.values()))
    assert train.dtype == validation.dtype == np.uint8


def test_split_is_the_same_in_another_process_and_folder(tmp_path: Path) -> None:
    contents = {f"f{i}": bytes([i]) for i in range(20)}
    for root in ("one", "two"):
        write_files(tmp_path / root, contents)
    program = (
        "import sys, jaxtrain.data as d;"
        "sys.stdout.buffer.write(d.split_text(d.text_files(sys.argv[1]), sys.argv[1])[1].tobytes())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", program, str(tmp_path / "two")]
    elsewhere = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    files = [tmp_path / "one" / name for name in contents]
    # The other process skips f0 as a binary file, because its only byte is NUL.
    assert split_text(sorted(files[1:]), tmp_path / "one")[1].tobytes() == elsewhere


def test_split_holds_out_the_same_files_in_every_release(tmp_path: Path) -> None:
    files = write_files(tmp_path, {f"f{i}": bytes([i]) for i in range(10)})
    assert split_text(files, tmp_path, 0.3)[1].tolist() == [6, 8, 9]


def test_a_single_file_is_split_by_position(tmp_path: Path) -> None:
    train, validation = split_text(write_files(tmp_path, {"one": bytes(range(100))}), tmp_path)
    assert (train.tolist(), validation.tolist()) == (list(range(90)), list(range(90, 100)))


def test_text_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    files = write_files(tmp_path, {"one": b"x"})
    for too_few in (files, []):
        with pytest.raises(UserError, match="too short to split"):
            split_text(too_few, tmp_path)
    for fraction in (0.0, 1.0):
        with pytest.raises(UserError, match=r"validation_fraction must be in \(0, 1\), got"):
            split_text(files, tmp_path, fraction)


# --- arrays -------------------------------------------------------------------------------------------------


def test_digits_are_split_by_class_and_lie_in_the_unit_interval() -> None:
    train, validation = digits(0.2)
    assert train.images.shape[1:] == validation.images.shape[1:] == (8, 8, 1)
    assert (train.images.dtype, train.labels.dtype) == (np.float32, np.int32)
    assert (train.images.min(), train.images.max()) == (0, 1)
    train_counts, validation_counts = np.bincount(train.labels), np.bincount(validation.labels)
    assert len(train) + len(validation) == 1797
    assert (validation_counts == np.round((train_counts + validation_counts) * 0.2)).all()
    assert (digits(0.2)[1].images == validation.images).all()


def test_digits_without_scikit_learn_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        digits()


@pytest.mark.parametrize("keys", [("x", "y"), ("image", "label")])
def test_npz_holds_out_a_tenth_of_each_class(tmp_path: Path, keys: tuple[str, str]) -> None:
    images = np.arange(40, dtype=np.uint8)[:, None, None] * np.ones((1, 3, 3), np.uint8)
    arrays: dict[str, Any] = {keys[0]: images, keys[1]: np.arange(40) % 2}
    np.savez(tmp_path / "d.npz", **arrays)
    train, validation = npz(tmp_path / "d.npz")
    assert np.bincount(validation.labels).tolist() == [2, 2]
    seen = np.concatenate([train.images, validation.images])[:, 0, 0, 0]
    assert sorted(seen) == list(range(40))
    # Pinned: a different split in a later release would invalidate comparisons with older runs.
    assert validation.images[:, 0, 0, 0].tolist() == [2, 3, 23, 36]
    assert train.images.shape == (36, 3, 3, 1)
    assert (train[0]["image"].dtype, train[0]["label"].dtype) == (np.uint8, np.int32)


@pytest.mark.parametrize("keys", [("x_test", "y_test"), ("x_val", "y_val")])
def test_validation_arrays_of_an_npz_are_used(tmp_path: Path, keys: tuple[str, str]) -> None:
    held_out: dict[str, Any] = {keys[0]: np.full((1, 5), 7.0), keys[1]: np.array([1])}
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 5)), y=np.array([0, 1]), **held_out)
    train, validation = npz(tmp_path / "d.npz")
    assert (len(train), validation.images.tolist(), validation.labels.tolist()) == (2, [[7.0] * 5], [1])


OBJECTS = np.array([None, "a"], object)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.ones(1), "b": np.ones(1)}, "no array 'x', only a, b"),
        ({"x": np.ones((2, 3))}, "no array 'y', only x"),
        ({"x": np.ones((4, 3)), "y": np.arange(4), "x_test": np.ones((4, 3))}, "no array 'y_test'"),
        ({"x": np.ones((2, 3)), "y": np.arange(3)}, "3 labels for 2 images"),
        ({"x": np.ones((2, 3)), "y": np.ones(2)}, "'y' is float64"),
        ({"x": np.ones((2, 3)), "y": np.ones((2, 1), int)}, r"\[2, 1\]: save integers"),
        ({"x": np.ones((0, 3)), "y": np.ones(0, int)}, "'x' is empty"),
        ({"x": np.array(["a", "b"]), "y": np.arange(2)}, "save numbers"),
        ({"x": OBJECTS, "y": np.arange(2)}, "'x' is an array of objects"),
        ({"x": np.ones((2, 3)), "y": np.arange(2)}, "none for validation"),
        ({"x": np.array([[2**24 + 1], [-3]]), "y": np.arange(2)}, "'x' holds 16777217, which float32 rounds"),
        ({"x": np.array([[1], [2**63 + 1]], np.uint64), "y": np.arange(2)}, "'x' holds 9223372036854775809, which"),
        (
            {"x": np.ones((2, 3)), "y": np.arange(2), "x_val": np.ones((2, 4)), "y_val": np.arange(2)},
            r"'x' has images of float32 \[3\] and 'x_val' of float32 \[4\]: save both alike",
        ),
        (
            {"x": np.ones((2, 3), np.uint8), "y": np.arange(2), "x_val": np.ones((2, 3)), "y_val": np.arange(2)},
            r"'x' has images of uint8 \[3\] and 'x_val' of float32 \[3\]: save both alike",
        ),
    ],
)
def test_invalid_arrays_of_an_npz_are_reported(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(UserError, match=message) as raised:
        npz(tmp_path / "d.npz")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_first_are_warned_of(tmp_path: Path, channels: int) -> None:
    x, y = np.zeros((4, channels, 8, 9), np.uint8), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "first.npz", x=x, y=y)
    np.savez(tmp_path / "last.npz", x=x.transpose(0, 2, 3, 1), y=y)
    warning = (
        rf"'x' is read as images of {channels}x8 pixels with 9 channels: if channels are first, .* save x\.transpose"
    )
    with pytest.warns(UserWarning, match=warning):
        npz(tmp_path / "first.npz")
    assert npz(tmp_path / "last.npz")[0].images.shape == (2, 8, 9, channels)


def test_files_other_than_npz_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.ones(3))
    with pytest.raises(UserError, match="not an npz"):
        npz(tmp_path / "one.npy")
    for path in (tmp_path / "nowhere.npz", tmp_path):
        with pytest.raises(UserError, match="is not a file"):
            npz(path)


def test_damaged_npz_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez(stream, x=np.ones((40, 40)), y=np.arange(40))
    content = bytearray(stream.getvalue())
    content[1000] ^= 0xFF
    with pytest.raises(UserError, match="cannot be read"):
        npz(*write_files(tmp_path, {"d.npz": bytes(content)}))


@given(st.lists(st.integers(-3, 8), max_size=8), st.integers(1, 6))
def test_labels_are_accepted_exactly_if_all_are_within_the_classes(labels: list[int], classes: int) -> None:
    outside = [label for label in labels if not 0 <= label < classes]
    if outside:
        message = f"label {outside[0]} is outside 0..{classes - 1} ({len(outside)} of {len(labels)} labels are)"
        with pytest.raises(UserError, match=re.escape(message)):
            check_labels(np.array(labels, np.int32), classes)
    else:
        check_labels(np.array(labels, np.int32), classes)


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(UserError, match="got 2 images and 3 labels: lengths must match"):
        Arrays(np.zeros((2, 1), np.float32), np.zeros(3, np.int32))


# --- folders of images --------------------------------------------------------------------------------------


def test_image_folder_numbers_the_sorted_classes_and_holds_out_a_tenth_of_each(tmp_path: Path) -> None:
    write_images(tmp_path, [f"dog/{i}.png" for i in range(10)] + [f"cat/{i}.bmp" for i in range(20)])
    write_files(tmp_path, {"cat/notes.txt": b"x", ".cache/x": b"x", "readme": b"x"})
    with pytest.warns(UserWarning, match=r"has files that are not read: cat/notes\.txt, readme$"):
        train, validation = image_folder(tmp_path)
    assert train.classes == validation.classes == ("cat", "dog")
    assert (np.bincount(train.labels).tolist(), np.bincount(validation.labels).tolist()) == ([18, 9], [2, 1])
    assert not set(train.files) & set(validation.files)
    for source in (train, validation):
        for i, file in enumerate(source.files):
            assert source.classes[source[i]["label"]] == file.parent.name


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 3), ("P", 3)])
def test_images_are_decoded_to_uint8(tmp_path: Path, mode: str, channels: int) -> None:
    image = Image.fromarray(np.arange(8, dtype=np.uint8).reshape(2, 4) * 36).convert(mode)
    (tmp_path / "a").mkdir()
    for name in ("1.png", "2.png"):
        image.save(tmp_path / "a" / name)
    with contextlib.ExitStack() as stack:
        if mode == "RGBA":
            stack.enter_context(pytest.warns(UserWarning, match="channels that are not read: the transparency of 2"))
        example = image_folder(tmp_path)[0][0]
    assert (example["image"].dtype, example["label"].dtype) == (np.uint8, np.int32)
    expected = np.asarray(image.convert("L" if channels == 1 else "RGB")).reshape(2, 4, channels)
    assert example["image"].shape == (2, 4, channels)
    assert (example["image"] == expected).all()


def test_a_jpeg_is_turned_as_its_orientation_says(tmp_path: Path) -> None:
    for name in ("1.jpg", "2.JPG"):
        (tmp_path / "a").mkdir(exist_ok=True)
        image = Image.fromarray(np.arange(128, dtype=np.uint8).reshape(8, 16))
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(tmp_path / "a" / name, exif=exif, quality=100)
    found = image_folder(tmp_path)[0][0]["image"]
    assert found.shape == (16, 8, 1)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "a" / "1.jpg")))
    assert (found[..., 0] == expected).all()


def test_folders_of_splits_are_taken_as_they_are(tmp_path: Path) -> None:
    names = [f"{split}/{name}/{i}.png" for split in ("train", "Val", "test") for name in ("cat", "dog") for i in "12"]
    write_images(tmp_path, names)
    with pytest.warns(UserWarning, match="has folders that are not read: test$"):
        train, validation = image_folder(tmp_path)
    assert train.classes == validation.classes == ("cat", "dog")
    assert [sorted(file.relative_to(tmp_path).parts[0] for file in part.files) for part in (train, validation)] == [
        ["train"] * 4,
        ["Val"] * 4,
    ]
    assert [train.labels.tolist(), validation.labels.tolist()] == [[0, 0, 1, 1]] * 2
    write_images(tmp_path / "Val", ["bird/1.png"])
    with (
        pytest.warns(UserWarning, match="test$"),
        pytest.raises(UserError, match=r"Val/bird is no class of .*train: name the sub-f"),
    ):
        image_folder(tmp_path)


def test_folders_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "nested", ["images/cat/1.png", "images/dog/1.png"])
    with pytest.raises(UserError, match=r"nested has one sub-folder, .*: use .*nested/images, or a folder of classes"):
        image_folder(tmp_path / "nested")
    write_images(tmp_path / "flat", ["train/1.png", "val/1.png"])
    with pytest.raises(UserError, match=r"flat/train has no sub-folders: put the images of each class into one"):
        image_folder(tmp_path / "flat")
    write_images(tmp_path / "webp", ["a/1.png"])
    (tmp_path / "webp/a/2.WEBP").write_bytes(b"")
    with pytest.raises(UserError, match=r"2\.WEBP is neither png, jpg nor bmp: convert it, or remove it"):
        image_folder(tmp_path / "webp")


def test_pixels_are_divided_by_255_to_the_bit() -> None:
    every = np.arange(256, dtype=np.uint8).reshape(4, 64)
    for scale in (pixels, jax.jit(pixels)):
        scaled = np.asarray(scale(every))
        assert scaled.dtype == np.float32
        assert (scaled == every.astype(np.float32) / np.float32(255)).all()
    assert pixels(scaled) is scaled


def test_invalid_image_folders_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a folder"):
        image_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no sub-folders"):
        image_folder(tmp_path)
    write_images(tmp_path, ["a/1.png", "a/2.png", "a/3.png"])
    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match="b has no png"):
        image_folder(tmp_path)
    write_images(tmp_path, ["b/1.png", "b/2.png"], size=(5, 2))
    with pytest.raises(UserError, match=r"b/1\.png is 5x2 but .*a/1\.png is 4x2"):
        image_folder(tmp_path)
    (tmp_path / "a/2.png").write_bytes(b"not a picture")
    with pytest.raises(UserError, match=r"a/2\.png is not a readable png, jpg or bmp image"):
        image_folder(tmp_path)
    Image.fromarray(np.full((2, 4), 1000, np.uint16)).save(tmp_path / "a/2.png")
    with pytest.raises(UserError, match=r"a/2\.png has pixels of mode I;16"):
        image_folder(tmp_path)


def test_a_truncated_image_is_reported_when_it_is_decoded(tmp_path: Path) -> None:
    write_images(tmp_path, ["a/1.png", "a/2.png"], size=(64, 64))
    for file in (tmp_path / "a").iterdir():
        file.write_bytes(file.read_bytes()[:60])
    train, _ = image_folder(tmp_path)
    with pytest.raises(UserError, match=r"\.png cannot be decoded"):
        train[0]


# --- all sources --------------------------------------------------------------------------------------------


def test_every_source_can_be_pickled(tmp_path: Path) -> None:
    write_images(tmp_path, ["a/1.png", "a/2.png"])
    arrays = Arrays(np.ones((2, 3), np.float32), np.array([0, 1], np.int32))
    sources: list[Source] = [TokenWindows(as_bytes(b"abcdef"), 2), arrays, image_folder(tmp_path)[0]]
    for source in sources:
        copy = pickle.loads(pickle.dumps(source))
        assert len(copy) == len(source)
        for name, value in source[0].items():
            assert np.array_equal(copy[0][name], value)


def test_importing_the_sources_imports_no_optional_dependency() -> None:
    program = (
        "import sys, jaxtrain.data;"
        "assert not {'grain', 'sklearn', 'PIL', 'pyarrow', 'datasets', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
