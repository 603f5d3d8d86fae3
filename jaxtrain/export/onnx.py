"""Export of a JAX function to ONNX, with symbolic input sizes.

The function is traced to a jaxpr. Calls are inlined, scans are unrolled, constants are folded, and every other equation
is converted to an ONNX operator.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxtrain.errors import UserError
from jaxtrain.export.onnx_graph import IR_VERSION, OPSET, Graph, Value, constant, element_type
from jaxtrain.export.onnx_operators import OPERATORS, unsupported
from jaxtrain.models.attention import FORWARD, as_formula
from jaxtrain.program import equations
from jaxtrain.program import operations as op
from jaxtrain.program.recorded_values import frames_of
from jaxtrain.program.rewrite import bind, make_jaxpr, unroll_scan

MAX_BYTES = 2**31 - 1
"""Largest size of a protobuf, and so of an ONNX file."""

_MAX_FOLDED = 2**16
"""Number of elements up to which constants are folded even if the result is larger than the operands."""

_JAX = str(Path(jax.__file__).parent)


def to_onnx(
    fn: Callable[..., Any], weights: Mapping[str, Any], inputs: Mapping[str, jax.ShapeDtypeStruct], output: str
) -> Any:
    """Convert a function to an ONNX model.

    Products and sums have the dtypes of the function.

    Args:
      fn: A function `fn(weights, *inputs)` that returns one array.
      weights: Its weights, stored in the file under their names.
      inputs: Shapes and dtypes of the inputs by name; sizes may be symbolic (`jax.export.symbolic_shape`).
      output: Name of the output.

    Returns:
      The `onnx.ModelProto`.

    Raises:
      UserError: An operation has no counterpart in ONNX, `onnx` is not installed, or the weights exceed 2 GiB.

    Example:
      >>> import jax.numpy as jnp
      >>> (rows,) = jax.export.symbolic_shape("rows")
      >>> x = jax.ShapeDtypeStruct((rows, 3), jnp.float32)
      >>> model = to_onnx(lambda w, x: jnp.tanh(x @ w["k"]), {"k": jnp.ones((3, 2))}, {"x": x}, "y")
      >>> [node.op_type for node in model.graph.node], model.graph.output[0].type.tensor_type.shape.dim[0].dim_param
      (['MatMul', 'Tanh', 'Identity'], 'rows')
    """
    onnx = _import("onnx")
    if (size := sum(x.nbytes for x in weights.values())) > MAX_BYTES:
        raise UserError(
            f"the weights take {size / 2**30:.1f} GiB and an ONNX file holds at most 2 GiB: export as stablehlo"
        )
    names = [*weights]
    with jax.default_matmul_precision("highest"):
        closed = make_jaxpr(lambda flat, *given: fn(dict(zip(names, flat, strict=True)), *given))(
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights.values()], *inputs.values()
        )
    graph = Graph({name: x.shape for name, x in inputs.items()})
    # Constants are folded on the CPU, regardless of the device of the training.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        given = [Value(name, np.asarray(x)) for name, x in weights.items()] + [Value(name) for name in inputs]
        (result,) = _convert(graph, closed.jaxpr, closed.consts, given)
    out: Any = closed.out_avals[0]
    graph.node("Identity", graph.expand(result, out.shape))
    graph.nodes[-1].output[0] = output

    def value_info(name: str, x: Any) -> Any:
        shape = [size if isinstance(size, int) else str(size) for size in x.shape]
        return onnx.helper.make_tensor_value_info(name, element_type(x.dtype), shape)

    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.nodes,
            "jaxtrain",
            [value_info(name, x) for name, x in inputs.items()],
            [value_info(output, out)],
            [onnx.numpy_helper.from_array(array, name) for name, array in graph.initializers.items()],
        ),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="jaxtrain",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def write_onnx(path: Path, model: Any) -> None:
    """Write the model returned by `to_onnx` to a file."""
    path.write_bytes(model.SerializeToString())


def load_onnx(path: Path) -> Callable[..., np.ndarray]:
    """Load an ONNX file in ONNX Runtime on the CPU; return a function from its inputs to its one output.

    Raises:
      UserError: `onnxruntime` is not installed.
    """
    session = _import("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]

    def run(*inputs: np.ndarray) -> np.ndarray:
        (output,) = session.run(None, dict(zip(names, inputs, strict=True)))
        return np.asarray(output)

    return run


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{name} is not installed: pip install 'jaxtrain[onnx]'") from error


def _convert(graph: Graph, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
    env: dict[Any, Value] = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(variable: Any) -> Value:
        if isinstance(variable, Literal):
            aval: Any = variable.aval
            return constant(np.asarray(variable.val, aval.dtype), unexpanded=True)
        return env[variable]

    for eqn in equations.of(jaxpr):
        graph.line = _line(eqn) or graph.line
        env.update(zip(eqn.outvars, _convert_equation(graph, eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _line(eqn: JaxprEqn) -> str:
    """Return the source line of an equation outside of JAX, as " at file:line"; empty if it is unknown."""
    outside = (frame for frame in frames_of(eqn) if not frame.file_name.startswith(_JAX))
    return next((f" at {frame.file_name}:{frame.line_num}" for frame in outside), "")


def _convert_equation(graph: Graph, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    name = op.of(eqn)
    if name in op.APPLICATIONS:
        body = equations.body(eqn)
        closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
        return _convert(graph, closed.jaxpr, closed.consts, inputs)
    if name == FORWARD.name:
        closed = as_formula(eqn)
        return _convert(graph, closed.jaxpr, closed.consts, inputs)
    if name == op.SCAN:
        return _unroll_scan(graph, eqn, inputs)
    if name == op.COND and inputs[0].array is not None:
        # The condition of an unrolled layer, which `lax.cond` has clamped.
        branch = equations.branches(eqn)[int(inputs[0].array)]
        return _convert(graph, branch.jaxpr, branch.consts, inputs[1:])
    if _is_foldable(eqn, inputs):
        arrays = [graph.expand(x, v.aval.shape).array for x, v in zip(inputs, eqn.invars, strict=True)]  # type: ignore[attr-defined]
        return [constant(np.asarray(out)) for out in bind(eqn, arrays)]
    if name not in OPERATORS:
        raise unsupported(graph, eqn, "no operator")
    return OPERATORS[name](graph, eqn, inputs)


def _is_foldable(eqn: JaxprEqn, inputs: Sequence[Value]) -> bool:
    """Return whether to fold the equation: its operands are constants and the file does not become larger."""
    shapes: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if any(x.array is None for x in inputs) or any(not isinstance(size, int) for x in shapes for size in x.shape):
        return False
    # Views are not folded, because the original array may be needed too.
    is_view = op.of(eqn) in (op.TRANSPOSE, op.BROADCAST_IN_DIM, op.NAME, op.STOP_GRADIENT, op.DIM_AS_VALUE)
    before = sum(x.array.size for x in inputs if x.array is not None)
    after = sum(v.aval.size for v in eqn.outvars)  # type: ignore[attr-defined]
    return not is_view and after <= max(before, _MAX_FOLDED)


def _unroll_scan(graph: Graph, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    """Unroll a scan; the weights of each layer of a stack become separate initializers."""
    return unroll_scan(
        eqn,
        inputs,
        partial(_convert, graph),
        index=partial(_row, graph),
        stack=lambda rows, aval: _stack_rows(graph, rows, aval.shape),
    )


def _stack_rows(graph: Graph, rows: Sequence[Value], shape: Any) -> Value:
    axis = constant(np.zeros(1, np.int64))
    return graph.node("Concat", *(graph.node("Unsqueeze", graph.expand(x, shape), axis) for x in rows), axis=0)


def _row(graph: Graph, stack: Value, i: int) -> Value:
    if stack.array is not None:
        return Value(f"{stack.name}/{i}" if stack.name else "", stack.array[i])
    return graph.node("Gather", stack, constant(np.int64(i)), axis=0)
