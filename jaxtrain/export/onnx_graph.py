"""Construction of ONNX graphs: values, nodes, initializers, and sizes that are known only at run time."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

OPSET = 18
IR_VERSION = 10
Shape = Sequence[Any]
"""Sizes as integers or as expressions over sizes of the inputs (`jax.export.symbolic_shape`)."""


@dataclass(frozen=True, eq=False)
class Value:
    """The value of a JAX variable in the graph.

    Attributes:
      name: Name of the tensor; empty for a constant that is not in the graph yet.
      array: The value, if it is known at export time.
      unexpanded: Whether axes that are to be broadcast have size 1, as ONNX's elementwise operators accept.
    """

    name: str
    array: np.ndarray | None = None
    unexpanded: bool = False


@dataclass
class Graph:
    """An ONNX graph under construction.

    Attributes:
      inputs: Shapes of the inputs by name.
      nodes: The nodes in the order of execution.
      initializers: The weights and constants by name.
      line: Source line of the equation that is being converted, " at file:line".
    """

    inputs: Mapping[str, Shape]
    nodes: list[Any] = field(default_factory=list)
    initializers: dict[str, np.ndarray] = field(default_factory=dict)
    line: str = ""
    _sizes: dict[str, Value] = field(default_factory=dict)
    _constants: dict[tuple[str, tuple[int, ...], bytes], str] = field(default_factory=dict)

    def node(self, operator: str, *inputs: Value, unexpanded: bool = False, **attributes: Any) -> Value:
        """Add a node with one output; return the output."""
        (output,) = self.node_with_outputs(operator, *inputs, outputs=1, unexpanded=unexpanded, **attributes)
        return output

    def node_with_outputs(
        self, operator: str, *inputs: Value, outputs: int, unexpanded: bool = False, **attributes: Any
    ) -> list[Value]:
        """Add a node; return its outputs."""
        from onnx import helper

        stem = f"{operator}_{len(self.nodes)}"
        names = [stem] if outputs == 1 else [f"{stem}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, [self.tensor(x) for x in inputs], names, stem, **attributes))
        return [Value(name, unexpanded=unexpanded) for name in names]

    def tensor(self, value: Value) -> str:
        """Return the name of the tensor; a new array becomes an initializer."""
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

    def expand(self, value: Value, shape: Shape) -> Value:
        """Broadcast `value` to `shape`, unless it has that shape already."""
        if not value.unexpanded:
            return value
        if value.array is not None and all(isinstance(size, int) for size in shape):
            return constant(np.broadcast_to(value.array, shape))
        return self.node("Expand", value, self.shape(shape))

    def shape(self, shape: Shape) -> Value:
        """Return a shape as int64[rank], the form that operators take."""
        if all(isinstance(size, int) for size in shape):
            return constant(np.array(shape, np.int64))
        return self.node("Concat", *map(self.size, shape), axis=0)

    def size(self, size: Any) -> Value:
        """Return a size as int64[1], computed from the sizes of the inputs."""
        # JAX has no public interface to the structure of these expressions except their text.
        return self._size(ast.parse(str(size).replace("^", "**"), mode="eval").body)

    def _size(self, part: ast.expr) -> Value:
        expression = ast.unparse(part)
        if expression not in self._sizes:
            self._sizes[expression] = self._compute_size(part)
        return self._sizes[expression]

    def _compute_size(self, part: ast.expr) -> Value:
        match part:
            case ast.Constant(value=int(number)):
                return constant(np.array([number], np.int64))
            case ast.Name(id=name):
                return self._size_of_input(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.node("Neg", self._size(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self.node(_ARITHMETIC[type(op)], self._size(left), self._size(right))
        raise NotImplementedError(f"size {ast.unparse(part)}")

    def _size_of_input(self, name: str) -> Value:
        for given, shape in self.inputs.items():
            for axis, size in enumerate(shape):
                if str(size) == name:
                    return self.node("Shape", Value(given), start=axis, end=axis + 1)
        raise NotImplementedError(f"size {name} belongs to no input")


_ARITHMETIC: dict[type[ast.operator], str] = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Pow: "Pow"}


def constant(array: Any, *, unexpanded: bool = False) -> Value:
    """Return a constant."""
    return Value("", np.asarray(array), unexpanded)


def integers(*numbers: int) -> Value:
    """Return a constant int64[N], the form of axes and bounds."""
    return constant(np.array(numbers, np.int64))


def element_type(dtype: Any) -> int:
    """Return ONNX's number of a dtype."""
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(np.dtype(jnp.dtype(dtype))))
