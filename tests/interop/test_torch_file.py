"""PyTorch's files: formats that are read, and one-line messages for files that are refused."""

import pickle
import resource
import sys
import tracemalloc
import warnings
import zipfile
from collections import OrderedDict

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch

import jaxtrain as jt
from jaxtrain.interop import LINEAR, NameTable, TorchParam
from jaxtrain.interop.torch_file import TorchCheckpoint, read_torch, write_torch
from jaxtrain.interop.torch_run import torch_run

TABLE = NameTable(
    {"wte": TorchParam("wte.weight"), "fc": TorchParam("h.{layer}.fc.weight", LINEAR), "out": TorchParam("out.weight")},
    tied={"head.weight": "wte.weight"},
)
LIKE = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in {"wte": (5, 3), "out": (2,)}.items()}
LIKE["fc"] = jax.ShapeDtypeStruct((2, 3, 4), np.float32)


def model(**changed):
    tensors = {
        "wte.weight": torch.arange(15.0).reshape(5, 3),
        "h.0.fc.weight": torch.arange(12.0).reshape(4, 3),
        "h.1.fc.weight": torch.arange(12.0).reshape(4, 3) + 1,
        "out.weight": torch.arange(2.0),
    }
    tensors["head.weight"] = tensors["wte.weight"]
    return {name: x for name, x in {**tensors, **changed}.items() if x is not None}


def params(path):
    checkpoint = read_torch(path)
    return TABLE.to_jax(checkpoint.model, LIKE)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.pt"


CALLS = {
    "GLOBAL": b"c__builtin__\nbytearray\n(\x8a\x05%stR",
    "builtins": b"cbuiltins\nbytearray\n(\x8a\x05%stR",
    "one argument": b"c__builtin__\nbytearray\n\x8a\x05%s\x85R",
    "STACK_GLOBAL": b"\x8c\x08builtins\x8c\tbytearray\x93\x8a\x05%s\x85R",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_file_that_allocates_memory_by_a_number_is_refused(call, path):
    write_pickle(path, CALLS[call] % (3 * 10**9).to_bytes(5, "little"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(jt.UserError, match="contains more than tensors"):
        read_torch(path)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 300


def write_pickle(path, value):
    """Write a checkpoint whose model is the value of some opcodes."""
    content = b"\x80\x02}X\x05\x00\x00\x00model" + value + b"s."
    with zipfile.ZipFile(path, "w") as archive:
        for name, member in {"data.pkl": content, "version": "3\n", "byteorder": "little"}.items():
            archive.writestr(f"archive/{name}", member)


def test_a_tensor_that_is_not_in_its_file_is_refused(path):
    write_pickle(path, b"}X\x01\x00\x00\x00actorch\nTensor\n(\x8a\x05" + (10**9).to_bytes(5, "little") + b"tRs")
    with pytest.raises(jt.UserError, match=r"has \d+ bytes, but a tensor of 4,000,000,000: save the model again"):
        read_torch(path)


def test_a_full_disk_is_named(path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(jt.UserError, match=r"cannot be written \(File too large\): choose another --out"):
            write_torch(path, TorchCheckpoint({"a": np.ones((1000, 100), np.float32)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("key", [None, "model", "state_dict", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_every_common_format_gives_the_same_model(key, prefix, path):
    tensors = OrderedDict((prefix + name, x) for name, x in model().items())
    torch.save(tensors if key is None else {key: tensors}, path)
    read = params(path)
    np.testing.assert_array_equal(read["wte"], model()["wte.weight"])
    np.testing.assert_array_equal(read["fc"][1], model()["h.1.fc.weight"].T)


def test_prefixes_of_wrappers_are_removed_unless_a_known_name_has_them(path):
    torch.save({"h.0._orig_mod.fc.weight": torch.ones(1), "module.out": torch.ones(1)}, path)
    assert set(read_torch(path).model) == {"h.0.fc.weight", "out"}
    assert set(read_torch(path, known=["module.out"]).model) == {"h.0.fc.weight", "module.out"}
    torch.save({"module.a": torch.ones(1), "a": torch.ones(1)}, path)
    with pytest.raises(jt.UserError, match="a and another tensor are both a"):
        read_torch(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_every_dtype_is_read_exactly(dtype, suffix, tmp_path):
    path, tensor = tmp_path / f"x.{suffix}", torch.tensor([[1.5, -2.0], [0.0, 300.0]]).to(dtype)
    safetensors.torch.save_file({"x": tensor}, path) if suffix == "safetensors" else torch.save({"x": tensor}, path)
    stored = read_torch(path).model["x"]
    array = np.asarray(stored)
    assert array.dtype == stored.dtype == (ml_dtypes.bfloat16 if dtype == torch.bfloat16 else str(dtype)[6:])
    assert stored.shape == array.shape == (2, 2)
    np.testing.assert_array_equal(array.astype(np.float64), tensor.double())
    write_torch(tmp_path / "out.pt", TorchCheckpoint({"x": array}))
    back = torch.load(tmp_path / "out.pt", weights_only=True)["model"]["x"]
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_tied_weights_stay_tied(path):
    tensors = TABLE.to_torch(TABLE.to_jax({k: np.asarray(v) for k, v in model().items()}, LIKE))
    write_torch(path, TorchCheckpoint({**tensors, "head.weight": tensors["wte.weight"]}))
    read = torch.load(path, weights_only=True)["model"]
    assert read["head.weight"].data_ptr() == read["wte.weight"].data_ptr()
    assert read["head.weight"].data_ptr() != read["out.weight"].data_ptr()


class Evil:
    def __reduce__(self):
        return print, ("run!",)


def huge():
    """Return a tensor of petabytes that stores one number."""
    return torch.zeros(1).expand(10**15)


NAN = torch.tensor([float("nan"), 1.0])
REFUSED = {
    "a number": (3, "contains a int: save a dictionary"),
    "nothing": ({}, "contains nothing, but no model"),
    "no model": ({"weights": {"w": torch.ones(1)}}, "contains weights, but no model"),
    "two models": ({"model": model(), "state_dict": model()}, "has both model and state_dict: keep one"),
    "a list of optimizers": ({"model": model(), "optimizer": [{}]}, "optimizer in .* is a list"),
    "an invalid optimizer": ({"model": model(), "optimizer": {"lr": 1}}, "no state and param_groups"),
    "a learning rate of NaN": (
        {"model": model(), "optimizer": {"state": {}, "param_groups": [{"params": [0], "lr": float("nan")}]}},
        "lr of the optimizer is nan: use an earlier checkpoint",
    ),
    "an invalid step": ({"model": model(), "step": -1}, "step in .* must be a count of at least 0, got -1"),
    "code": ({"model": model(), "hook": Evil()}, "contains more than tensors"),
    "values other than tensors": (
        {"model": model(bias="text", scale=2.0)},
        r"other values than tensors, bias \(str\), scale \(float\)",
    ),
    "NaN": ({"model": model(**{"out.weight": NAN})}, "out.weight contains inf or NaN"),
    "a petabyte": ({"model": model(**{"out.weight": huge()})}, r"mis-shaped out.weight: \(1000000000000000,\)"),
    "an additional petabyte": ({"model": model(extra=huge())}, "unexpected extra"),
    "a sparse tensor": ({"model": model(**{"out.weight": torch.eye(2).to_sparse()})}, "out.weight is a tensor of"),
    "a complex tensor": ({"model": model(**{"out.weight": torch.ones(2, dtype=torch.complex64)})}, "torch.complex64"),
    "a tensor without data": ({"model": model(**{"out.weight": torch.ones(2, device="meta")})}, "without data"),
    "untied": ({"model": model(**{"head.weight": torch.ones(5, 3)})}, "untied head.weight: differs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_checkpoint_is_refused_in_one_line(case, path, capsys):
    content, message = REFUSED[case]
    torch.save(content, path)
    with pytest.raises(jt.UserError, match=message) as error:
        params(path)
    assert "\n" not in str(error.value)
    assert "run!" not in capsys.readouterr().out


def test_quantized_weights_are_refused(path):
    torch.save(model(**{"out.weight": torch.ones(2, dtype=torch.int8)}), path)
    with pytest.raises(jt.UserError, match="the weights of out are stored as int8: convert quantized weights"):
        torch_run(read_torch(path), TABLE, LIKE)


def test_missing_unexpected_and_mis_shaped_tensors_are_listed_at_once(path):
    changed = {"wte.weight": torch.ones(4, 3), "head.weight": None, "h.1.fc.weight": None, "extra": torch.ones(1)}
    torch.save(model(**changed), path)
    with pytest.raises(jt.UserError) as error:
        params(path)
    for fault in ("mis-shaped wte.weight: (4, 3) for wte (5, 3)", "missing h.1.fc.weight", "unexpected extra"):
        assert fault in str(error.value)


def test_other_files_are_refused_in_one_line(tmp_path):
    old, text, cut, empty, plain = (tmp_path / n for n in ("old.pt", "a.pt", "cut.pt", "empty.pt", "plain.pkl"))
    torch.save(model(), old, _use_new_zipfile_serialization=False)
    text.write_text("hello")
    torch.save(model(), cut)
    cut.write_bytes(cut.read_bytes()[:-200])
    empty.touch()
    plain.write_bytes(pickle.dumps({"w": 1}))
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    for path in (old, text, cut, empty, plain, bad, tmp_path / "nowhere.pt", tmp_path):
        with pytest.raises(jt.UserError, match=path.name) as error:
            read_torch(path)
        assert "\n" not in str(error.value)


def test_what_stands_in_place_of_a_checkpoint_is_named(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    for name in ("a.pt", "a.safetensors"):
        (tmp_path / name).write_text(pointer)
        with pytest.raises(
            jt.UserError, match="is a pointer of Git LFS to a file that was not downloaded: run git lfs"
        ):
            read_torch(tmp_path / name)
        (tmp_path / name).write_text("")
        with pytest.raises(jt.UserError, match=f"{name} is empty: download or write it again"):
            read_torch(tmp_path / name)
    with warnings.catch_warnings(action="ignore"):  # deprecated
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    with pytest.raises(
        jt.UserError, match=r"is a model of torch\.jit\.save: save torch\.jit\.load\(path\)\.state_dict"
    ):
        read_torch(tmp_path / "script.pt")


def test_a_safetensors_header_with_false_shapes_is_refused(tmp_path):
    path = tmp_path / "invalid.safetensors"
    header = b'{"out.weight":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,8]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(jt.UserError, match="is not a safetensors file"):
        read_torch(path)


def test_without_torch_safetensors_files_are_still_read(tmp_path, monkeypatch):
    safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert np.asarray(read_torch(tmp_path / "x.safetensors").model["x"]).tolist() == [1, 1]
    with pytest.raises(jt.UserError, match=r"torch, which .* is not installed"):
        read_torch(tmp_path / "x.pt")
    with pytest.raises(jt.UserError, match=r"torch, which .* is not installed"):
        write_torch(tmp_path / "y.pt", TorchCheckpoint({}))


def test_tensors_are_read_one_at_a_time_and_each_is_freed_before_the_next(path):
    leaf = 2**20
    table = NameTable({f"p{i}": TorchParam(f"p{i}") for i in range(8)} | {"h": TorchParam("h.{layer}")})
    like = {f"p{i}": jax.ShapeDtypeStruct((leaf // 4,), np.float32) for i in range(8)}
    like["h"] = jax.ShapeDtypeStruct((4, leaf // 16), np.float32)
    tensors = {f"p{i}": torch.ones(leaf // 4) for i in range(8)} | {f"h.{i}": torch.ones(leaf // 16) for i in range(4)}
    torch.save(tensors, path)
    checkpoint = read_torch(path)
    tracemalloc.start()
    table.to_jax(checkpoint.model, like, put=lambda array, leaf: float(array.astype(leaf.dtype).sum()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A stack is filled in one array and cast into another.
    assert peak < 2.5 * leaf


def test_a_checkpoint_of_weights_only_has_no_optimizer(path):
    torch.save(model(), path)
    run = torch_run(read_torch(path), TABLE, LIKE)
    with pytest.raises(jt.UserError, match="has no optimizer"):
        run.optimizer()
