"""An ONNX graph as it grows: values, nodes, weights, and sizes known only when it runs."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

OPSET = 18
IR_VERSION = 10
Shape = Sequence[Any]
"""Of sizes that are numbers, or expressions over the sizes of the inputs (`jax.export.symbolic_shape`)."""


@dataclass(frozen=True, eq=False)
class Value:
    """What a JAX variable is in the graph: the name of a tensor that a node computes, or an array known already.

    A `loose` one has size 1 on axes along which it is yet to be repeated, as ONNX's elementwise operators do
    themselves.
    """

    name: str
    array: np.ndarray | None = None
    loose: bool = False


@dataclass
class Graph:
    """Nodes in the order in which they run.

    `inputs` are the shapes of what is given, by name; `line` is where in the program the last node comes from.
    """

    inputs: Mapping[str, Shape]
    nodes: list[Any] = field(default_factory=list)
    initializers: dict[str, np.ndarray] = field(default_factory=dict)
    line: str = ""
    _sizes: dict[str, Value] = field(default_factory=dict)
    _constants: dict[tuple[str, tuple[int, ...], bytes], str] = field(default_factory=dict)

    def node(self, operator: str, *inputs: Value, loose: bool = False, **attributes: Any) -> Value:
        """The one output of a new node."""
        (made,) = self.node_of_many(operator, *inputs, outputs=1, loose=loose, **attributes)
        return made

    def node_of_many(
        self, operator: str, *inputs: Value, outputs: int, loose: bool = False, **attributes: Any
    ) -> list[Value]:
        """The outputs of a new node."""
        from onnx import helper

        stem = f"{operator}_{len(self.nodes)}"
        names = [stem] if outputs == 1 else [f"{stem}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, [self.tensor(x) for x in inputs], names, stem, **attributes))
        return [Value(name, loose=loose) for name in names]

    def tensor(self, value: Value) -> str:
        """The name of the tensor; an array that is not in the graph yet becomes an initializer."""
        if value.array is None:
            return value.name
        if value.name:
            self.initializers[value.name] = value.array
            return value.name
        key = (value.array.dtype.name, value.array.shape, value.array.tobytes())
        if key not in self._constants:
            self._constants[key] = f"constant_{len(self._constants)}"
            self.initializers[self._constants[key]] = value.array
        return self._constants[key]

    def whole(self, value: Value, shape: Shape) -> Value:
        """`value`, which is to be of `shape`, repeated along the axes where it still has to be."""
        if not value.loose:
            return value
        if value.array is not None and all(isinstance(size, int) for size in shape):
            return constant(np.broadcast_to(value.array, shape))
        return self.node("Expand", value, self.shape(shape))

    def shape(self, shape: Shape) -> Value:
        """int64 [rank]: a shape as operators take it."""
        if all(isinstance(size, int) for size in shape):
            return constant(np.array(shape, np.int64))
        return self.node("Concat", *map(self.size, shape), axis=0)

    def size(self, size: Any) -> Value:
        """int64 [1]: a size, by arithmetic over those of the inputs."""
        # JAX reads these expressions from text as it writes them, but has no public way to look into them.
        return self._size(ast.parse(str(size).replace("^", "**"), mode="eval").body)

    def _size(self, part: ast.expr) -> Value:
        written = ast.unparse(part)
        if written not in self._sizes:
            self._sizes[written] = self._computed(part)
        return self._sizes[written]

    def _computed(self, part: ast.expr) -> Value:
        match part:
            case ast.Constant(value=int(number)):
                return constant(np.array([number], np.int64))
            case ast.Name(id=name):
                return self._of_input(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.node("Neg", self._size(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self.node(_ARITHMETIC[type(op)], self._size(left), self._size(right))
        raise NotImplementedError(f"the size {ast.unparse(part)}")

    def _of_input(self, name: str) -> Value:
        for given, shape in self.inputs.items():
            for axis, size in enumerate(shape):
                if str(size) == name:
                    return self.node("Shape", Value(given), start=axis, end=axis + 1)
        raise NotImplementedError(f"the size {name}, which no input has")


_ARITHMETIC: dict[type[ast.operator], str] = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Pow: "Pow"}


def constant(array: Any, *, loose: bool = False) -> Value:
    """An array that the graph holds."""
    return Value("", np.asarray(array), loose)


def integers(*numbers: int) -> Value:
    """int64 [N], as operators take axes and bounds."""
    return constant(np.array(numbers, np.int64))


def element_type(dtype: Any) -> int:
    """ONNX's number for a dtype."""
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(np.dtype(jnp.dtype(dtype))))
