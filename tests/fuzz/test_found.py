"""Regression tests of invalid files, found by fuzzing, that were accepted or crashed the process."""

import json
import struct
import tracemalloc
import warnings
import zipfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from jaxtrain.data import FileTokenizer, image_folder, npz, table
from jaxtrain.data.files import archive
from jaxtrain.errors import UserError
from jaxtrain.interop.metadata import read_metadata
from jaxtrain.interop.torch_file import read_torch
from jaxtrain.interop.torch_run import torch_run
from jaxtrain.models.files.folder import read_json, read_tensors
from tests.fuzz.importers import LIKE, TABLE, bounded, checkpoint


def assert_refused(message, read, *args):
    with bounded(), pytest.raises(UserError, match=message) as error:
        read(*args)
    assert "\n" not in str(error.value)


# --- zip archives -------------------------------------------------------------------------------------------


def two_members(path, **second):
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("x.npy", b"x" * 1000)
        out.writestr("y.npy", b"y" * 1000)
        for name, value in second.items():
            setattr(out.filelist[1], name, value)


@pytest.mark.parametrize("reader", [npz, read_torch])
def test_overlapping_members_of_an_archive_are_refused(reader, tmp_path):
    two_members(tmp_path / "a.pt", header_offset=0)
    assert_refused("overlaps the next member", reader, tmp_path / "a.pt")


def test_a_multi_disk_archive_is_refused(tmp_path):
    two_members(tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    locator = b"PK\x06\x07" + struct.pack("<LQL", 7, 0, 9)
    end = whole.rindex(b"PK\x05\x06")
    (tmp_path / "a.pt").write_bytes(whole[:end] + locator + whole[end:])
    assert_refused("is not a readable zip archive", read_torch, tmp_path / "a.pt")


def test_a_zip_bomb_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((10, 50, 50, 50), np.uint8), y=np.arange(10) % 2)
    assert len(npz(tmp_path / "a.npz")[0]) > 0
    monkeypatch.setattr(archive, "ALWAYS_ALLOWED", 10**6)
    assert_refused("'x.npy' unpacks .* bytes to 1,250,128: possible zip bomb", npz, tmp_path / "a.npz")
    monkeypatch.setattr(archive, "MAX_RATIO", 1032)  # that of deflate
    assert len(npz(tmp_path / "a.npz")[0]) > 0


def test_a_compressed_checkpoint_is_refused(tmp_path):
    """A memory-mapped tensor would contain the compressed bytes."""
    torch.save({"w": torch.arange(9999.0)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as whole, zipfile.ZipFile(tmp_path / "b.pt", "w", 8) as out:
        for name in whole.namelist():
            out.writestr(name, whole.read(name))
    assert_refused("is compressed, which torch.save never does", read_torch, tmp_path / "b.pt")


# --- arrays -------------------------------------------------------------------------------------------------


def write_npz(path, header, data=bytes(640)):
    text = header.ljust(117).encode() + b"\n"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data)
        out.writestr("y.npy", b"")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("(1000000000000000,)", r"float32 \[1000000000000000\] by its header, but has 640 bytes"),
        ("(-1, -160)", r"\[-1, -160\] by its header, but has 640 bytes"),
        ("(159,)", r"\[159\] by its header, but has 640"),
        ("(", r"'x' cannot be read"),
    ],
)
def test_an_array_header_with_a_wrong_shape_is_refused(shape, message, tmp_path):
    write_npz(tmp_path / "a.npz", f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}")
    assert_refused(message, npz, tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.full((4, 2), np.nan), [0, 1, 0, 1], "holds inf or NaN"),
        (np.full((4, 2), 1e300), [0, 1, 0, 1], "holds inf or NaN in float32"),
        (np.zeros((4, 2)), [0, 1, 0, 2**32], "beyond int32"),
        (np.zeros((4, 2)), [0, 1, 0, -(2**63)], "beyond int32"),
    ],
)
def test_numbers_outside_the_range_of_the_target_dtype_are_refused(x, y, message, tmp_path):
    np.savez(tmp_path / "a.npz", x=x, y=np.array(y, np.int64))
    assert_refused(message, npz, tmp_path / "a.npz")


# --- tables -------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path):
    """A table of texts as an Arrow file."""
    pyarrow = pytest.importorskip("pyarrow")
    rows = pyarrow.table({"text": ["ab", "cd", "ef", "gh"]})
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", rows.schema) as out:
        out.write_table(rows)
    return tmp_path / "a.arrow"


def test_arrow_offsets_outside_the_file_are_refused(texts):
    """Arrow does not check them, which crashed the process."""
    offsets, wrong = struct.pack("<5i", 0, 2, 4, 6, 8), struct.pack("<5i", 0, 2, 2**31 - 1, 6, 8)
    content = texts.read_bytes()
    assert content.count(offsets) == 1
    texts.write_bytes(content.replace(offsets, wrong))
    rows = table(texts)
    assert rows[0] == {"text": "ab"}
    assert_refused("row 1 of .* is not a row that can be read", rows.__getitem__, 1)


def test_a_column_name_that_is_not_utf8_is_refused(texts):
    texts.write_bytes(texts.read_bytes().replace(b"text", b"te\x80t"))
    assert_refused("is not an Arrow file that can be read", table, texts)


def test_a_damaged_parquet_page_is_refused(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": [f"row {i}" for i in range(99)]}), tmp_path / "a.parquet")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[60:80] = bytes(20)
    (tmp_path / "a.parquet").write_bytes(content)
    assert_refused("is not a parquet file that can be read", table(tmp_path / "a.parquet").__getitem__, 0)


def test_a_row_group_that_decodes_to_far_more_than_the_file_is_refused(tmp_path, monkeypatch):
    """A dictionary with one long text, referenced by two thousand rows."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["x" * 10_000] * 2000}), tmp_path / "a.parquet")
    rows = table(tmp_path / "a.parquet")
    monkeypatch.setattr(archive, "ALWAYS_ALLOWED", 10**6)
    assert_refused("row group 0 of .* unpacks .* bytes to 10,", rows.__getitem__, 0)
    monkeypatch.undo()
    assert rows[1999] == {"text": "x" * 10_000}


@pytest.mark.parametrize(
    "dataset_state", [{}, [], {"_data_files": None}, {"_data_files": [{"filename": "../a.arrow"}]}, None]
)
def test_a_saved_dataset_with_an_invalid_list_of_files_is_refused(dataset_state, texts, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "state.json").write_text(json.dumps(dataset_state))
    assert_refused("save the dataset again", table, tmp_path / "set")


# --- tokenizers ---------------------------------------------------------------------------------------------


def write_tokenizer(path, vocabulary, **options):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, **options)).save(str(path))
    return path


def test_token_ids_beyond_the_vocabulary_are_refused(tmp_path):
    """An embedding has as many rows as tokens, and JAX clamps larger indices to its last row."""
    path = write_tokenizer(tmp_path / "tokenizer.json", {"a": 0, "b": 10**6}, unk_token="a")
    assert_refused("has 2 tokens numbered up to 1000000", FileTokenizer, path)


def test_a_tokenizer_that_cannot_encode_a_text_raises_an_error(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", {"a": 0, "b": 1})
    assert_refused("cannot encode 'x'", FileTokenizer(path).encode, "x")


# --- images -------------------------------------------------------------------------------------------------


def write_png(path, width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    path.parent.mkdir(exist_ok=True)
    data = chunk(b"IDAT", zlib.compress(bytes(100)))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b""))


@pytest.mark.parametrize("size", [(5000, 5000), (10000, 10000), (50000, 50000), (2**31 - 1, 2**31 - 1)])
def test_images_with_too_many_pixels_are_refused(size, tmp_path):
    write_png(tmp_path / "a" / "1.png", *size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in a user's Python
        assert_refused("1.png (is .*, more than 16,777,216 pixels|cannot be decoded)", image_folder, tmp_path)


def test_a_png_chunk_longer_than_the_file_allocates_little_memory(tmp_path):
    write_png(tmp_path / "a" / "1.png", 8, 8)
    content = (tmp_path / "a" / "1.png").read_bytes()
    start = content.index(b"IDAT") - 4
    pixels = zlib.compress(bytes(8 * 9))
    long = content[:start] + struct.pack(">I", 10**9) + b"IDAT" + pixels
    for name in ("1.png", "2.png"):
        (tmp_path / "a" / name).write_bytes(long)
    train, _ = image_folder(tmp_path)
    tracemalloc.start()
    assert train[0]["image"].shape == (8, 8, 1)
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


def test_an_image_of_another_format_than_its_suffix_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "a" / "1.png", "eps")
    assert_refused("1.png is not a readable png, jpg or bmp image", image_folder, tmp_path)


# --- PyTorch's checkpoints ----------------------------------------------------------------------------------


def endless():
    """Return a tuple of a hundred objects whose repr has 2¹⁰⁰ words."""
    value = ("x",)
    for _ in range(100):
        value = (value, value)
    return value


def changed(part, **entries):
    run = checkpoint("AdamW")
    return {**run, part: {**run[part], **entries}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: {(1, 2): torch.ones(1)}, "contains a tuple where names must be"),
        (lambda: {"model": {3: torch.ones(1)}}, "contains a int where names must be"),
        (lambda: {**checkpoint("AdamW"), "step": endless()}, "must be a count of at least 0"),
        (lambda: {**checkpoint("AdamW"), "step": float("inf")}, "step in .* must be a count of at least 0, got inf"),
        (lambda: {**checkpoint("AdamW"), "step": 2**40}, "must be a count of at least 0"),
        (lambda: {**checkpoint("AdamW"), "scheduler": {"last_epoch": endless()}}, "more than 1,000,000 numbers"),
        (lambda: changed("scheduler", _schedule_phases=[None]), "not as torch writes it"),
        (lambda: changed("scheduler", last_epoch=torch.ones(3)), "the scheduler's part contains a Tensor"),
        (lambda: changed("scaler", scale=b"x"), "the scaler's part contains a bytes"),
        (lambda: changed("scaler", growth_interval="x"), "growth_interval|not as torch writes it"),
        (lambda: changed("optimizer", param_groups=[None]), "has entries without names"),
        (lambda: changed("optimizer", state={0: None}), "has entries without names"),
        (lambda: changed("optimizer", param_groups=[]), "has the state of 0, 1, in none of its groups"),
    ],
)  # fmt: skip
def test_a_checkpoint_with_invalid_parts_is_refused(content, message, tmp_path):
    torch.save(content(), tmp_path / "a.pt")

    def read():
        run = torch_run(read_torch(tmp_path / "a.pt"), TABLE, LIKE)
        run.optimizer(), run.loss_scale()

    assert_refused(message, read)


def test_metadata_of_wrong_types_is_refused(tmp_path):
    torch.save({"model_names": 3, "param_groups": [], "group_names": [], "scheduler": None, "scaler": None, "count": 1},
               tmp_path / "a.pt")  # fmt: skip
    assert_refused("model_names must be list, got 3", read_metadata, tmp_path / "a.pt")


# --- folders of models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_outside_the_json_standard_are_refused(number, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"layer_norm_eps": {number}}}')
    assert_refused("is not valid JSON", read_json, tmp_path, "config.json")


def test_a_link_from_a_snapshot_to_a_file_outside_blobs_is_refused(tmp_path):
    """The Hub's cache consists of such links, but only to blobs/."""
    snapshot = tmp_path / "cache" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "cache" / "secret").write_text("{}")
    (snapshot / "config.json").symlink_to("../../secret")
    assert_refused("links out of its folder", read_json, snapshot, "config.json")
    (tmp_path / "cache" / "blobs").mkdir()
    (tmp_path / "cache" / "blobs" / "1").write_text("{}")
    (snapshot / "other.json").symlink_to("../../blobs/1")
    assert read_json(snapshot, "other.json") == {}


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    assert_refused("is a broken link", read_tensors, tmp_path)
