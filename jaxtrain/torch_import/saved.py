"""A captured model as a folder: its graphs as JSON, its tensors as safetensors. Reading it needs no PyTorch.

Nothing in a folder is executed: operations are named, and their functions are those of the table here.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.interop import TorchParam, read_torch
from jaxtrain.torch_import.graph import (
    COND,
    CUSTOM,
    GETITEM,
    GRADIENT,
    RECOMPUTED,
    REPEAT,
    Captured,
    Graph,
    decode,
    dtype_of,
    encode,
    references,
)
from jaxtrain.torch_import.graph_model import GraphModel, Key, Params
from jaxtrain.torch_import.ops import TABLE
from jaxtrain.torch_import.ops.int64 import holds_int64, rounds

FORMAT = 1
GRAPHS, TENSORS = "model.json", "model.safetensors"
INVALID = (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError)


class SavedModel(GraphModel):
    """A model of `load_imported`: a pure function for the shapes with which it was saved.

    Attributes:
      params: Parameters by PyTorch's names; those of repeated layers are stacked.
      state: Buffers that training changes, by name; None if there are none.
      example: Shapes and dtypes of the example batch.
    """

    def __init__(
        self, folder: Path, contents: Mapping[str, Any], tensors: Mapping[str, Any], ops: Mapping[str, Any]
    ) -> None:
        self._folder, self._ops = folder, dict(ops)
        parts: dict[str, dict[str, Any]] = {"param": {}, "buffer": {}}
        for name, x in tensors.items():
            kind, _, own = name.partition("/")
            array = np.asarray(x)
            parts.setdefault(kind, {})[own] = array if holds_int64(array) or rounds(array) else jnp.asarray(array)
        self.params = {name: parts["param"][name] for name in contents["params"]}
        self._buffers = parts["buffer"]
        self.state = {name: self._buffers[name] for name in contents["state"]} or None
        self._keys, self._fixed = contents["keys"], contents.get("fixed", {})
        self._tied, self._persistent = contents["tied"], contents["persistent"]
        self._changed, self._frozen_tensors = frozenset(contents["changed"]), frozenset(contents["frozen"])
        self._stacks = {
            name: TorchParam(pattern, layers=layers and range(*layers))
            for name, (pattern, layers) in contents["stacks"].items()
        }
        self._captured = {
            _key(x): Captured(x["graph"], parts.get(f"constant{i}", {})) for i, x in enumerate(contents["graphs"])
        }
        first = next(iter(self._captured))
        shapes = [jax.ShapeDtypeStruct(spec.shape, dtype_of(spec.dtype)) for spec in first[2]]
        self.example = jax.tree.unflatten(first[3], shapes)
        for captured in self._captured.values():
            _check(
                captured.graph,
                {"param": self.params, "state": self._buffers, "constant": {**self._buffers, **captured.constants}},
            )

    def _capture(self, params: Params, batch: Any, *, train: bool) -> Captured:
        key = self._key(params, batch, train=train)
        if key not in self._captured:
            saved = "; ".join(map(_described, self._captured))
            raise UserError(
                f"{self._folder} has no graph for {_described(key)}, only for {saved}: call the imported model with "
                "the other shapes before it is saved"
            )
        return self._captured[key]


def save(model: GraphModel, folder: Path) -> None:
    """Write a model; `ImportedModel.save` describes it."""
    contents = {
        "format": FORMAT,
        "graphs": [_entry(key, captured.graph) for key, captured in model._captured.items()],
        "params": [*model.params],
        "state": [*(model.state or {})],
        "keys": model._keys,
        "fixed": model._fixed,
        "tied": dict(model._tied),
        "persistent": model._persistent,
        "changed": sorted(model._changed),
        "frozen": sorted(model._frozen_tensors),
        "stacks": {name: (x.name, x.layers and _bounds(x.layers)) for name, x in model._stacks.items()},
    }
    tensors: dict[str, Any] = {f"param/{name}": x for name, x in model.params.items()}
    tensors |= {f"buffer/{name}": x for name, x in model._buffers.items()}
    for i, captured in enumerate(model._captured.values()):
        tensors |= {f"constant{i}/{name}": x for name, x in captured.constants.items()}
    with _new_folder(folder) as partial:
        (partial / GRAPHS).write_text(json.dumps(encode(contents)) + "\n", encoding="utf-8")
        _write_tensors(partial / TENSORS, tensors)


def load_imported(folder: Path | str, *, ops: Mapping[str, Callable[..., Any]] | None = None) -> SavedModel:
    """Read a model that `ImportedModel.save` wrote. PyTorch need not be installed.

    Args:
      folder: The folder.
      ops: As for `from_torch`.

    Returns:
      The model. It can be called and trained with the shapes with which it was saved.

    Raises:
      UserError: The folder cannot be read, is not valid, or has an operation without a function.

    Example:
      >>> import tempfile
      >>> import torch
      >>> from jaxtrain.torch_import.model import from_torch
      >>> x = np.ones((4, 3), np.float32)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     from_torch(torch.nn.Linear(3, 2), x).save(f"{folder}/linear")
      ...     model = load_imported(f"{folder}/linear")
      >>> model(model.params, x)[0].shape
      (4, 2)
    """
    path = Path(folder)
    if not (path / GRAPHS).is_file():
        raise UserError(f"{path} has no {GRAPHS}: use a folder that model.save wrote")
    try:
        contents = decode(json.loads((path / GRAPHS).read_text(encoding="utf-8")))
        if contents["format"] != FORMAT:
            raise ValueError(f"format {contents['format']!r}")
        operations = {op for entry in contents["graphs"] for op in _operations(entry["graph"])}
    except INVALID as error:
        raise _invalid(path / GRAPHS, error) from error
    if missing := sorted(
        operations - TABLE.keys() - {COND, CUSTOM, GETITEM, GRADIENT, RECOMPUTED, REPEAT} - {*(ops or {})}
    ):
        raise UserError(
            f'{path} has the operation {missing[0]}, which has no function here: pass ops={{"{missing[0]}": function}}'
        )
    tensors = read_torch(path / TENSORS).model
    try:
        return SavedModel(path, contents, tensors, ops or {})
    except INVALID as error:
        raise _invalid(path, error) from error


def _invalid(path: Path, error: Exception) -> UserError:
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    return UserError(f"{path} is not what model.save wrote ({why}): save the model again")


def _entry(key: Key, graph: Graph) -> dict[str, Any]:
    train, dtype, specs, structure = key
    skeleton = _skeleton(jax.tree.unflatten(structure, range(len(specs))))
    return {"train": train, "dtype": dtype, "inputs": specs, "structure": skeleton, "graph": graph}


def _key(entry: Mapping[str, Any]) -> Key:
    structure = jax.tree.structure(_tree(entry["structure"]))
    return Key(entry["train"], entry["dtype"], entry["inputs"], structure)


def _skeleton(tree: Any) -> Any:
    """Return a batch of numbers as JSON, with the kinds of its containers."""
    if isinstance(tree, int | None):
        return tree
    if type(tree) is dict:
        return ["dict", [[key, _skeleton(x)] for key, x in tree.items()]]
    if type(tree) in (list, tuple):
        return [type(tree).__name__, [_skeleton(x) for x in tree]]
    raise UserError(f"a batch with a {type(tree).__name__} cannot be saved: use dicts, lists and tuples of arrays")


def _tree(skeleton: Any) -> Any:
    if isinstance(skeleton, int | None):
        return skeleton
    kind, items = skeleton
    if kind == "dict":
        return {key: _tree(x) for key, x in items}
    return {"list": list, "tuple": tuple}[kind](map(_tree, items))


def _bounds(layers: range) -> tuple[int, int, int]:
    return layers.start, layers.stop, layers.step


def _described(key: Key) -> str:
    train, dtype, specs, structure = key
    batch = jax.tree.unflatten(structure, [f"{spec.dtype}{list(spec.shape)}" for spec in specs])
    text = str(batch).replace("'", "")
    return f"{text} with {dtype} parameters in {'training' if train else 'evaluation'}"


def _operations(graph: Graph) -> Iterator[str]:
    """Yield the operations of a graph and of the graphs in it."""
    for node in graph.nodes:
        yield node.op
        for inner in node.kwargs.values():
            if isinstance(inner, Graph):
                yield from _operations(inner)


def _check(graph: Graph, given: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError if a graph reads a value or a tensor that there is not."""
    known: set[str] = set()
    for x in graph.inputs:
        if x.kind != "input" and tuple(given[x.kind][x.target].shape) != x.spec.shape:
            raise ValueError(f"{x.target} has not the shape {list(x.spec.shape)}")
        known.add(x.name)
    for node in graph.nodes:
        _require(references((node.args, node.kwargs)), known)
        known.add(node.name)
        for inner in node.kwargs.values():
            if isinstance(inner, Graph):
                _check(inner, {})
    _require(references((graph.outputs, graph.state)), known)


def _require(names: Iterator[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{name} is not computed")


def _write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise UserError(f"writing {path} needs safetensors: pip install safetensors") from error
    arrays = {name: np.array(x, order="C") for name, x in tensors.items()}
    if wrong := next((name for name, x in arrays.items() if np.iscomplexobj(x)), None):
        raise UserError(f"{wrong} is complex, which safetensors cannot hold: store its real and imaginary parts")
    save_file(arrays, path)


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` on success and removed on failure."""
    if folder.exists():
        raise UserError(f"{folder} already exists: choose another folder")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
