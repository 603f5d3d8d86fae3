"""Read mutated files in a process with bounded memory: `python -m tests.fuzz.importers COUNT SEED [KIND …]`.

A valid file of each kind that jaxtrain reads is mutated repeatedly. Reading it must return arrays or raise `UserError`
within `SECONDS` and `MEMORY_BYTES`. The first file that does neither is kept, and reported with its traceback.
"""

import contextlib
import faulthandler
import io
import json
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import jaxtrain as jt
from jaxtrain.data import FileTokenizer, image_folder, npz, table
from jaxtrain.interop import LINEAR, NameTable, TorchParam
from jaxtrain.interop.metadata import CheckpointMetadata, read_metadata, write_metadata
from jaxtrain.interop.torch_file import read_torch
from jaxtrain.interop.torch_run import torch_run
from jaxtrain.models import from_pretrained, save_pretrained
from tests.fuzz.mutations import NASTY, damaged, mutated_archive, mutated_tree

SECONDS = 10
MEMORY_BYTES = 2 * 2**30
TABLE = NameTable({"w": TorchParam("fc.weight", LINEAR), "b": TorchParam("fc.bias")})
LIKE = {"w": jax.ShapeDtypeStruct((3, 2), np.float32), "b": jax.ShapeDtypeStruct((2,), np.float32)}
UNUSUAL_VALUES = [
    torch.ones(2), torch.ones(()), torch.zeros(1).expand(10**15), torch.tensor([float("nan"), 1.0]),
    torch.tensor(float("inf")), torch.ones(2, 3, dtype=torch.int64), torch.ones(2, device="meta"), torch.zeros(0, 3),
    torch.eye(2).to_sparse(), torch.ones((), dtype=torch.complex64),
    torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(2, 3).bfloat16(), (1, 2), float("nan"), float("inf"), b"x",
]  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of file: `name` of the mutated file, its possible `contents`, and `read`, which takes its folder."""

    name: str
    contents: Callable[[], st.SearchStrategy[bytes]]
    read: Callable[[Path], Any]
    prepare: Callable[[Path], None] = lambda folder: None
    share: float = 1.0  # share of the inputs


class Hang(BaseException):
    """Reading a file takes too long for its size."""


def mutated_json(valid: bytes) -> st.SearchStrategy[bytes]:
    """Mutate a JSON file as JSON or as bytes."""
    trees = mutated_tree(json.loads(valid)).map(lambda tree: json.dumps(tree).encode())
    return st.one_of(trees, trees, trees, damaged(valid))


def mutated_safetensors(valid: bytes) -> st.SearchStrategy[bytes]:
    """Mutate the header or the bytes of a safetensors file."""
    length = int.from_bytes(valid[:8], "little")
    header, body = json.loads(valid[8 : 8 + length]), valid[8 + length :]

    def packed(header: Any) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + body

    return st.one_of(damaged(valid), mutated_tree(header).map(packed))


@cache
def checkpoint(kind: str) -> dict[str, Any]:
    """Return a PyTorch checkpoint after three updates."""
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(3, 2)})
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2)
    one_cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=9, cycle_momentum=False)
    scheduler = {"AdamW": one_cycle, "SGD": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.StepLR(o, 2)], [4]
    )}.get(kind, torch.optim.lr_scheduler.ReduceLROnPlateau)(optimizer)  # fmt: skip
    for _ in range(3):
        model["fc"](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step(*([1.0] if kind == "RMSprop" else []))
    scaler = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 4, "_growth_tracker": 1}
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {**{name: part.state_dict() for name, part in parts.items()}, "scaler": scaler, "step": 3, "epoch": 1}


def written(content: Any) -> bytes:
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def torch_contents() -> st.SearchStrategy[bytes]:
    values = st.one_of(NASTY, st.sampled_from(UNUSUAL_VALUES))
    runs = [checkpoint(kind) for kind in ("AdamW", "SGD", "RMSprop")]
    trees = st.one_of(*(mutated_tree({**run, "model": dict(run["model"])}, values) for run in runs)).map(written)
    valid = written(runs[0])
    return st.one_of(trees, trees, trees, damaged(valid), mutated_archive(valid))


def read_run(folder: Path) -> None:
    run = torch_run(read_torch(folder / "x.pt"), TABLE, LIKE)
    scale = run.loss_scale()
    step = jt.train_step(lambda p, b, r: (jt.Loss(p["w"].sum(), 1), {}), run.optimizer(), loss_scale=scale)
    state = run.state(step)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def read_weights(folder: Path) -> None:
    params = TABLE.to_jax(read_torch(folder / "x.safetensors").model, LIKE)
    assert all(np.isfinite(x).all() for x in params.values())


def safetensors_contents() -> st.SearchStrategy[bytes]:
    from safetensors.numpy import save

    valid = save({"fc.weight": np.ones((2, 3), np.float32), "fc.bias": np.ones(2, np.float16)}, {"format": "pt"})
    return mutated_safetensors(valid)


METADATA = CheckpointMetadata(["fc.weight"], [{"lr": 0.1, "params": [0]}], [["fc.weight"]], {"last_epoch": 1}, {}, 3, 1)


def metadata_contents() -> st.SearchStrategy[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        write_metadata(Path(folder, "x.pt"), METADATA)
        valid = Path(folder, "x.pt").read_bytes()
    trees = mutated_tree(vars(METADATA), st.one_of(NASTY, st.sampled_from(UNUSUAL_VALUES))).map(written)
    return st.one_of(trees, trees, damaged(valid), mutated_archive(valid))


def npz_contents() -> st.SearchStrategy[bytes]:
    out = io.BytesIO()
    np.savez(out, x=np.arange(160, dtype=np.float32).reshape(10, 4, 4), y=np.arange(10) % 2)
    valid = out.getvalue()
    headers = st.sampled_from(
        [
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,), }",
            b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -160), }",
            b"{'descr': '<M8[s]', 'fortran_order': False, 'shape': (10,), }",
            b"{'descr': [('a', '<f4')], 'fortran_order': True, 'shape': (10, 4, 4), }",
            b"{'descr': '<f8', 'fortran_order': True, 'shape': (10, 2, 4), }",
            b"(" * 5000, b"{'descr': '<f4'}", b"__import__('os')", b"\xff",
        ]
    )  # fmt: skip

    def mutated_npy(member: bytes) -> st.SearchStrategy[bytes]:
        version = st.sampled_from([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09"])

        def npy(header: bytes, version: bytes) -> bytes:
            width = 2 if version == b"\x01\x00" else 4
            header = header.ljust(110) + b"\n"
            return b"\x93NUMPY" + version + len(header).to_bytes(width, "little") + header + member[128:]

        return st.one_of(damaged(member), st.builds(npy, headers, version))

    return st.one_of(mutated_archive(valid, mutated_npy), mutated_archive(valid, mutated_npy), damaged(valid))


def read_npz(folder: Path) -> None:
    for part in npz(folder / "x.npz"):
        assert part.images.dtype in (np.float32, np.uint8)
        assert np.isfinite(part.images).all()
        assert part.labels.dtype == np.int32


def columns() -> dict[str, list[Any]]:
    return {"text": ["é" * (i % 5) for i in range(40)], "label": list(range(40)), "pair": [[1.5, i] for i in range(40)]}


def arrow_contents(suffix: str) -> st.SearchStrategy[bytes]:
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    rows, out = pyarrow.table(columns()), io.BytesIO()
    if suffix == "parquet":
        pyarrow.parquet.write_table(rows, out, row_group_size=8)
    elif suffix == "feather":  # with compressed columns
        pyarrow.feather.write_feather(rows, out)
    else:
        opened = pyarrow.ipc.new_file if suffix == "arrow" else pyarrow.ipc.new_stream
        with opened(out, rows.schema) as writer:
            writer.write_table(rows, 8)
    return damaged(out.getvalue())


def read_table(name: str, folder: Path) -> None:
    rows = table(folder / name, ["text", "label", "pair"])
    for i in [*range(min(len(rows), 40)), len(rows) - 1][: len(rows)]:
        rows[i]


def save_dataset(folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns()).save_to_disk(folder / "set")


def dataset_contents(name: str) -> st.SearchStrategy[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        save_dataset(Path(folder))
        return (damaged if name.endswith(".arrow") else mutated_json)(Path(folder, name).read_bytes())


def tokenizer_contents() -> st.SearchStrategy[bytes]:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    vocabulary = {"[UNK]": 0, "[PAD]": 1, "a": 2, "b": 3, "ab": 4}
    made = [
        tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")),
        tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="[UNK]")),
        tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]")),
        tokenizers.Tokenizer(models.Unigram([("[UNK]", 0.0), ("a", -1.0), ("ab", -2.0)], 0)),
    ]
    for tokenizer in made:
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["[MASK]"])
    return st.one_of(*(mutated_json(tokenizer.to_str().encode()) for tokenizer in made))


def read_tokenizer(folder: Path) -> None:
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    tokens = tokenizer.encode("ab b é x" * 9)
    assert tokens.dtype == np.int32
    assert not len(tokens) or (tokens.min() >= 0 and tokens.max() < tokenizer.size)
    tokenizer.decode(tokens)
    tokenizer.special("mask")


def image_contents(suffix: str) -> st.SearchStrategy[bytes]:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(out, suffix)
    return damaged(out.getvalue())


def read_images(folder: Path) -> None:
    for part in image_folder(folder):
        for i in range(len(part)):
            assert part[i]["image"].dtype == np.uint8


def another_image(folder: Path) -> None:
    from PIL import Image

    (folder / "a").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "a" / "0.png")


@cache
def family(name: str) -> Any:
    """Return (config, module) of a tiny model."""
    from jaxtrain.models import bert, gpt2, llama, mixtral, resnet, t5, vit

    heads = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    decoder = {**heads, "vocab_size": 9, "intermediate_size": 8, "num_key_value_heads": 1, "head_dim": 4}
    return {
        "gpt2": lambda: (gpt2.GPT2Config(9, 8, 8, 1, 2), gpt2.GPT2),
        "llama": lambda: (llama.LlamaConfig(**decoder), llama.Llama),
        "mixtral": lambda: (mixtral.MixtralConfig(**decoder, num_local_experts=2), mixtral.Mixtral),
        "bert": lambda: (bert.BertConfig(**heads, vocab_size=9, intermediate_size=8), bert.Bert),
        "t5": lambda: (
            t5.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_decoder_layers=1, num_heads=2), t5.T5
        ),
        "resnet": lambda: (
            resnet.ResNetConfig(embedding_size=4, hidden_sizes=(4, 8), depths=(1, 1), layer_type="basic"), resnet.ResNet
        ),
        "vit": lambda: (vit.ViTConfig(**heads, intermediate_size=8, image_size=8, patch_size=4), vit.ViT),
    }[name]()  # fmt: skip


def save_family(name: str, folder: Path, **options: Any) -> None:
    config, kind = family(name)
    _, params, state = nnx.split(kind(config, rngs=nnx.Rngs(0)), nnx.Param, nnx.BatchStat, ...)[:3]
    params, state = nnx.to_pure_dict(params), nnx.to_pure_dict(state)
    save_pretrained(folder, params, config, model_state=state or None, **options)


def family_contents(name: str, file: str, **options: Any) -> st.SearchStrategy[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        save_family(name, Path(folder) / "m", **options)
        content = Path(folder, "m", file).read_bytes()
    return mutated_safetensors(content) if file.endswith(".safetensors") else mutated_json(content)


def model_kind(name: str, file: str = "config.json", share: float = 0.25, **options: Any) -> Kind:
    return Kind(
        f"m/{file}",
        partial(family_contents, name, file, **options),
        lambda folder: from_pretrained(folder / "m"),
        lambda folder: save_family(name, folder / "m", **options),
        share,
    )


KINDS = {
    "pt": Kind("x.pt", torch_contents, read_run),
    "metadata": Kind("x.pt", metadata_contents, lambda folder: read_metadata(folder / "x.pt"), share=0.3),
    "safetensors": Kind("x.safetensors", safetensors_contents, read_weights, share=2),
    "npz": Kind("x.npz", npz_contents, read_npz, share=2),
    "parquet": Kind("x.parquet", partial(arrow_contents, "parquet"), partial(read_table, "x.parquet"), share=2),
    "arrow": Kind("x.arrow", partial(arrow_contents, "arrow"), partial(read_table, "x.arrow"), share=2),
    "feather": Kind("x.feather", partial(arrow_contents, "feather"), partial(read_table, "x.feather")),
    "arrow stream": Kind("x.arrow", partial(arrow_contents, "stream"), partial(read_table, "x.arrow")),
    "dataset": Kind(
        "set/state.json", partial(dataset_contents, "set/state.json"), partial(read_table, "set"), save_dataset, 0.2
    ),
    "dataset rows": Kind(
        "set/data-00000-of-00001.arrow", partial(dataset_contents, "set/data-00000-of-00001.arrow"),
        partial(read_table, "set"), save_dataset, 0.2,
    ),
    "tokenizer": Kind("tokenizer.json", tokenizer_contents, read_tokenizer, share=2),
    "png": Kind("a/1.png", partial(image_contents, "png"), read_images, another_image, 2),
    "jpg": Kind("a/1.jpg", partial(image_contents, "jpeg"), read_images, another_image),
    "bmp": Kind("a/1.bmp", partial(image_contents, "bmp"), read_images, another_image),
    **{f"{name} config": model_kind(name) for name in ("gpt2", "llama", "mixtral", "bert", "t5", "resnet", "vit")},
    "model": model_kind("bert", "model.safetensors"),
    "index": model_kind("bert", "model.safetensors.index.json", 0.5, max_shard_size=1000),
}  # fmt: skip


def fuzz(name: str, count: int, number: int) -> dict[str, Any]:
    """Read `count` files of a kind; exit the process with a description if one is neither read nor rejected."""
    kind, outcomes, slowest = KINDS[name], Counter[str](), 0.0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        kind.prepare(folder)
        file = folder / kind.name

        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @seed(number)
        @given(kind.contents())
        def read(content: bytes) -> None:
            nonlocal slowest
            file.write_bytes(content)
            start = time.perf_counter()
            with bounded(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    kind.read(folder)
                    outcomes["read"] += 1
                except jt.UserError as error:
                    outcomes["refused"] += 1
                    causes = chain(error)
                    memory_errors = [e for e in causes if isinstance(e, MemoryError) or "allocate" in str(e)]
                    # Arrow allocates the declared size of a compressed column, which fails before it is used.
                    assert all(type(e).__name__ == "ArrowMemoryError" for e in memory_errors), memory_errors
            slowest = max(slowest, time.perf_counter() - start)

        try:
            read()
        except BaseException as error:
            kept = Path(tempfile.gettempdir(), f"jaxtrain-fuzz-{name.replace(' ', '-')}")
            kept.write_bytes(file.read_bytes())
            error.__notes__ = [f"file: {kept}"]  # Hypothesis would print the strategy with all its files
            raise
    return {**outcomes, "slowest_s": round(slowest, 2)}


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raise `Hang` after `SECONDS` of CPU time; terminate the process if C code blocks the signal."""

    def time_out(number: int, frame: Any) -> None:
        raise Hang

    faulthandler.dump_traceback_later(30 * SECONDS, exit=True)
    signal.signal(signal.SIGPROF, time_out)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()


def chain(error: BaseException | None) -> list[BaseException]:
    """Return the error and its causes."""
    return [] if error is None else [error, *chain(error.__cause__ or error.__context__)]


def main(count: int, number: int, *names: str) -> None:
    """Divide `count` files among the kinds and print the results as JSON."""
    chosen = names or tuple(KINDS)
    total = sum(KINDS[name].share for name in chosen)
    result = {}
    for name in chosen:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES, resource.RLIM_INFINITY))
        print(name, file=sys.stderr, flush=True)
        result[name] = fuzz(name, max(1, round(count * KINDS[name].share / total)), number)
    print(json.dumps(result))


if __name__ == "__main__":
    faulthandler.enable()
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
