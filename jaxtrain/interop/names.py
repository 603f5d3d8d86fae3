"""Conversion of parameters between JAX paths and PyTorch's names and layouts.

A `NameTable` declares the PyTorch tensor of every JAX parameter path. Layouts only permute elements, so that the same
table converts weights, gradients and optimizer moments exactly.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.paths import path_name

Array = np.ndarray
Index = tuple[slice, ...]
LAYER = "{layer}"


@dataclass(frozen=True)
class Layout:
    """Permutation of the elements of a tensor between the frameworks.

    Attributes:
      to_jax: Conversion from PyTorch's array to JAX's.
      to_torch: Its inverse.
      source: Python expression that creates the layout, for generated code.
      part: Conversion of the slices of a part of JAX's array to those of the same part of PyTorch's; None if a part is
        cut out of the whole array.
    """

    to_jax: Callable[[Array], Array]
    to_torch: Callable[[Array], Array]
    source: str = ""
    part: Callable[[Index], Index] | None = None


AS_IS = Layout(lambda x: x, lambda x: x, "AS_IS", lambda index: index)
LINEAR = Layout(lambda x: x.T, lambda x: x.T, "LINEAR", lambda index: index[::-1])
"""Weight of `torch.nn.Linear`: [out, in] in PyTorch, [in, out] in JAX."""
OUT_IN = Layout(lambda x: x, lambda x: x, "OUT_IN", lambda index: index)
"""Weight of `torch.nn.Linear` that is [out, in] in JAX too, as in an imported module."""
CONV = Layout(
    lambda x: np.moveaxis(x, (0, 1), (-1, -2)),
    lambda x: np.moveaxis(x, (-1, -2), (0, 1)),
    "CONV",
    lambda index: (index[-1], index[-2], *index[:-2]),
)
"""Weight of `torch.nn.Conv1d`, `Conv2d` and `Conv3d`: [out, in, ...] in PyTorch, [..., in, out] in JAX."""


@functools.cache
def linear_after_flatten(channels: int, height: int, width: int) -> Layout:
    """Layout of a linear layer after a flattened image, which is (C, H, W) in PyTorch and (H, W, C) in JAX."""

    def to_jax(x: Array) -> Array:
        return x.reshape(-1, channels, height, width).transpose(2, 3, 1, 0).reshape(-1, x.shape[0])

    def to_torch(x: Array) -> Array:
        return x.reshape(height, width, channels, -1).transpose(3, 2, 0, 1).reshape(x.shape[1], -1)

    return Layout(to_jax, to_torch, f"linear_after_flatten({channels}, {height}, {width})")


@functools.cache
def linear_to_heads(heads: int, size: int) -> Layout:
    """Layout of a projection to queries, keys or values: [heads·size, in] in PyTorch, [in, heads, size] in flax."""
    return Layout(
        lambda x: x.T.reshape(-1, heads, size),
        lambda x: x.reshape(-1, heads * size).T,
        f"linear_to_heads({heads}, {size})",
    )


@functools.cache
def linear_from_heads(heads: int, size: int) -> Layout:
    """Layout of the output projection of attention: [out, heads·size] in PyTorch, [heads, size, out] in flax."""
    return Layout(
        lambda x: x.T.reshape(heads, size, -1),
        lambda x: x.reshape(heads * size, -1).T,
        f"linear_from_heads({heads}, {size})",
    )


@functools.cache
def bias_to_heads(heads: int, size: int) -> Layout:
    """Layout of the bias of `linear_to_heads`: [heads·size] in PyTorch, [heads, size] in flax."""
    return Layout(lambda x: x.reshape(heads, size), lambda x: x.reshape(-1), f"bias_to_heads({heads}, {size})")


@dataclass(frozen=True)
class TorchParam:
    """Name and layout of a PyTorch tensor; with `{layer}` in the name the JAX leaf stacks one tensor per layer.

    Attributes:
      name: The name.
      layout: The layout.
      layers: Numbers of the layers that are stacked; None counts from 0.

    Example:
      >>> TorchParam("h.{layer}.bias", layers=range(1, 4)).names(3)
      ['h.1.bias', 'h.2.bias', 'h.3.bias']
    """

    name: str
    layout: Layout = AS_IS
    layers: range | None = None

    @property
    def is_stack(self) -> bool:
        """Whether the JAX leaf stacks one tensor per layer."""
        return LAYER in self.name

    def names(self, count: int) -> list[str]:
        """Return the names of the tensors in a leaf; `count` is the size of its first axis."""
        return [name for _, name in self.numbered(count)]

    def numbered(self, count: int) -> list[tuple[int, str]]:
        """Return the names of the tensors in a leaf with the numbers of their layers, 0 for a single tensor."""
        if not self.is_stack:
            return [(0, self.name)]
        return [(i, self.name.replace(LAYER, str(i))) for i in self.layers or range(count)]

    def has(self, name: str) -> bool:
        """Return whether a tensor of this name is one of the leaf's."""
        prefix, is_stack, suffix = self.name.partition(LAYER)
        if not is_stack or not (name.startswith(prefix) and name.endswith(suffix)):
            return name == self.name
        number = name[len(prefix) : len(name) - len(suffix)]
        return number.isdigit() and (self.layers is None or int(number) in self.layers)


@dataclass(frozen=True)
class NameTable:
    """Table of the PyTorch tensors of a model's parameters.

    Args:
      params: PyTorch tensor by JAX path, such as "blocks/qkv/kernel".
      tied: PyTorch names that are aliases of others.

    Example:
      >>> table = NameTable({"kernel": TorchParam("fc.weight", LINEAR)})
      >>> params = table.to_jax({"fc.weight": np.ones((10, 4))}, like={"kernel": np.zeros((4, 10))})
      >>> params["kernel"].shape, table.to_torch(params)["fc.weight"].shape
      ((4, 10), (10, 4))
    """

    params: Mapping[str, TorchParam]
    tied: Mapping[str, str] = field(default_factory=dict)

    def to_jax(self, tensors: Mapping[str, Any], like: Any, put: Callable[[Array, Any], Any] | None = None) -> Any:
        """Convert PyTorch tensors to a tree of arrays.

        Tensors are read leaf by leaf with `numpy.asarray`, after all shapes are validated.

        Args:
          tensors: PyTorch tensors by name; anything with a shape and a dtype that `numpy.asarray` reads.
          like: Tree with the structure and shapes of the result.
          put: Function of (array, leaf of `like`) that stores each array before the next is read; None for NumPy.

        Returns:
          A tree as `like`, with the dtypes of `tensors`.

        Raises:
          UserError: Tensors are missing, unexpected or mis-shaped, or tied tensors differ; it lists all of them.
        """
        stored = self.stored(tensors, like)
        return jax.tree.map(lambda x, leaf: put(np.asarray(x), leaf) if put else np.asarray(x), stored, like)

    def stored(self, tensors: Mapping[str, Any], like: Any) -> Any:
        """Return the arrays of `to_jax` as `StoredLeaf`s, which are read later, in a tree as `like`.

        Raises:
          UserError: As `to_jax`.
        """
        wanted = self.check(tensors, like)
        return unflatten({path: StoredLeaf(tensors, self.params[path], leaf) for path, leaf in wanted.items()}, like)

    def check(self, tensors: Mapping[str, Any], like: Any) -> dict[str, Any]:
        """Return the leaves of `like` by path if `tensors` fit, or raise as `to_jax`; only tied tensors are read."""
        wanted = dict(leaves(like))
        self._check_paths(wanted)
        faults = self._faults(tensors, wanted)
        if faults:
            raise UserError(f"the tensors do not fit the model: {'; '.join(faults)}")
        return wanted

    def _faults(self, tensors: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
        faults, used = [], set(self.tied) & set(tensors)
        for path, leaf in wanted.items():
            param = self.params[path]
            wanted_shape = tuple(leaf.shape[1:] if param.is_stack else leaf.shape)
            for name in _names(param, leaf):
                used.add(name)
                if name not in tensors:
                    faults.append(f"missing {name}")
                elif _shape_laid_out(param.layout, tensors[name].shape) != wanted_shape:
                    faults.append(f"mis-shaped {name}: {tuple(tensors[name].shape)} for {path} {wanted_shape}")
        faults += [f"unexpected {name}" for name in sorted(set(tensors) - used)]
        return faults + [
            f"untied {alias}: differs from {name}"
            for alias, name in self.tied.items()
            if alias in tensors and name in tensors and not _equal(tensors[alias], tensors[name])
        ]

    def to_torch(self, params: Any) -> dict[str, Array]:
        """Return the leaves of parameters, gradients or moments under PyTorch's names, without tied aliases."""
        found = dict(leaves(params))
        self._check_paths(found)
        tensors: dict[str, Array] = {}
        for path, leaf in found.items():
            param, value = self.params[path], np.asarray(leaf)
            layers = list(value) if param.is_stack else [value]
            tensors.update(
                (name, param.layout.to_torch(layer)) for name, layer in zip(_names(param, value), layers, strict=True)
            )
        return tensors

    def torch_order(self, like: Any) -> list[str]:
        """Return the PyTorch names in the order of the table, layer by layer.

        Tables list entries in the order of `named_parameters()`.

        Example:
          >>> NameTable({"w": TorchParam("h.{layer}.w"), "b": TorchParam("h.{layer}.b")}).torch_order(
          ...     {"w": np.zeros(2), "b": np.zeros(2)}
          ... )
          ['h.0.w', 'h.0.b', 'h.1.w', 'h.1.b']
        """
        found = dict(leaves(like))
        order: list[str] = []
        for _, entries in itertools.groupby(self.params.items(), key=lambda entry: _stack(entry[1])):
            named = [x for path, param in entries for x in param.numbered(_count(found[path]))]
            order += [name for _, name in sorted(named, key=lambda x: x[0])]
        return order

    def only(self, paths: Iterable[str]) -> "NameTable":
        """Return the part of the table for these paths."""
        return NameTable({path: self.params[path] for path in paths})

    def _check_paths(self, found: Mapping[str, Any]) -> None:
        if set(found) != set(self.params):
            raise UserError(
                f"the name table does not fit the model: without an entry {sorted(set(found) - set(self.params))}, "
                f"without a leaf {sorted(set(self.params) - set(found))}"
            )


class StoredLeaf:
    """JAX array of PyTorch tensors, read by `numpy.asarray`, or a part of it by slices.

    Args:
      tensors: PyTorch tensors by name; parts are read of those that have them.
      param: Name and layout of the tensors.
      like: Array or shape of the leaf.

    Example:
      >>> weight = TorchParam("fc.weight", LINEAR)
      >>> leaf = StoredLeaf({"fc.weight": np.arange(6).reshape(2, 3)}, weight, np.zeros((3, 2)))
      >>> leaf[1:3, 0:1].tolist()
      [[1], [2]]
    """

    def __init__(self, tensors: Mapping[str, Any], param: TorchParam, like: Any) -> None:
        self._tensors = [tensors[name] for name in _names(param, like)]
        self._param, self.shape = param, tuple(like.shape)
        dtypes = [tensor.dtype for tensor in self._tensors]
        self.dtype = np.result_type(*dtypes) if dtypes else np.dtype(like.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        del copy
        array = self[tuple(slice(None) for _ in self.shape)]
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, index: Index) -> Array:
        """Read a part; a stack is filled layer by layer."""
        bounds = tuple(slice(*part.indices(size)) for part, size in zip(index, self.shape, strict=True))
        if not self._param.is_stack:
            return self._read(self._tensors[0], bounds, self.shape)
        layers, *part = bounds
        chosen = self._tensors[layers]
        stack = np.empty([len(chosen), *(x.stop - x.start for x in part)], self.dtype)
        for i, tensor in enumerate(chosen):
            stack[i] = self._read(tensor, tuple(part), self.shape[1:])
        return stack

    def _read(self, tensor: Any, part: Index, shape: tuple[int, ...]) -> Array:
        layout = self._param.layout
        if all((x.start, x.stop) == (0, size) for x, size in zip(part, shape, strict=True)):
            return layout.to_jax(np.asarray(tensor))
        if layout.part is None:
            return layout.to_jax(np.asarray(tensor))[part]
        return layout.to_jax(np.asarray(tensor[layout.part(part)]))


def require_floating(stored: Any, like: Any) -> None:
    """Raise `UserError` for integers stored in place of a parameter, as those of quantized weights without their scale.

    Args:
      stored: Arrays, or `StoredLeaf`s, in a tree as `like`.
      like: Tree of arrays or shapes.
    """
    for (path, leaf), array in zip(leaves(like), jax.tree.leaves(stored), strict=True):
        if np.dtype(array.dtype).kind in "biu" and jax.dtypes.issubdtype(leaf.dtype, np.inexact):
            raise UserError(
                f"the weights of {path} are stored as {np.dtype(array.dtype).name}: convert quantized weights to"
                " float32 first"
            )


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of a pytree in its order, keys joined by "/"."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield path_name(path), leaf


def _shape_laid_out(layout: Layout, shape: Any) -> tuple[int, ...] | None:
    """Return the shape in JAX's layout, None if the layout does not apply; allocates nothing."""
    try:
        return layout.to_jax(np.broadcast_to(np.zeros([], bool), tuple(shape))).shape
    except ValueError:
        return None


def _equal(a: Any, b: Any) -> bool:
    return a is b or np.array_equal(np.asarray(a), np.asarray(b))


def _stack(param: TorchParam) -> str:
    """Return the common prefix of the names in a stack of layers; empty for a single tensor."""
    return param.name.partition(LAYER)[0] if LAYER in param.name else ""


def _names(param: TorchParam, leaf: Any) -> list[str]:
    return param.names(_count(leaf))


def _count(leaf: Any) -> int:
    """Return the size of the first axis."""
    return int(leaf.shape[0]) if leaf.shape else 0


def unflatten(flat: Mapping[str, Any], like: Any) -> Any:
    """Return the tree with the structure of `like` and the leaves `flat`, given by path in any order.

    Example:
      >>> unflatten({"b/1": 3, "a": 1, "b/0": 2}, like={"a": 0, "b": [0, 0]})
      {'a': 1, 'b': [2, 3]}
    """
    return jax.tree.unflatten(jax.tree.structure(like), [flat[path] for path, _ in leaves(like)])
