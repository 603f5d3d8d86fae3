"""A JAX function as an ONNX file, sizes of its inputs left open.

The function is traced to a jaxpr, calls within it are taken in, scans are unrolled, what depends on nothing is computed
now, and every other equation becomes the ONNX operator that means the same.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxtrain.errors import UserError
from jaxtrain.export.onnx_graph import IR_VERSION, OPSET, Graph, Value, constant, element_type
from jaxtrain.export.onnx_operators import OPERATORS, unsupported
from jaxtrain.transforms.jaxpr import bind, scan_sizes

MOST_BYTES = 2**31 - 1
"""Of a protobuf, which an ONNX file is."""

_CALLS = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "core_call"), "call_jaxpr"),
}
"""Equations that call a function, and the parameter that holds it."""

_SMALL = 2**16
"""Elements, to which an array is computed now even if it is larger than what it is computed from."""

_JAX = str(Path(jax.__file__).parent)


def to_onnx(
    fn: Callable[..., Any], weights: Mapping[str, Any], inputs: Mapping[str, jax.ShapeDtypeStruct], output: str
) -> Any:
    """The `onnx.ModelProto` of `fn(weights, *inputs)`, which returns one array, called `output`.

    `weights` go into the file under their names; sizes of the inputs may be `jax.export.symbolic_shape`s. Products
    and sums are of the dtypes that `fn` has them in. Raises `UserError` for an operation that is not known here,
    where `onnx` is not installed, and where the file would be larger than such can be.

    >>> import jax.numpy as jnp
    >>> (rows,) = jax.export.symbolic_shape("rows")
    >>> x = jax.ShapeDtypeStruct((rows, 3), jnp.float32)
    >>> model = to_onnx(lambda w, x: jnp.tanh(x @ w["k"]), {"k": jnp.ones((3, 2))}, {"x": x}, "y")
    >>> [node.op_type for node in model.graph.node], model.graph.output[0].type.tensor_type.shape.dim[0].dim_param
    (['MatMul', 'Tanh', 'Identity'], 'rows')
    """
    onnx = _imported("onnx")
    if (size := sum(x.nbytes for x in weights.values())) > MOST_BYTES:
        raise UserError(f"the weights are {size / 2**30:.1f} GiB and an ONNX file holds 2: export them as stablehlo")
    names = [*weights]
    with jax.default_matmul_precision("highest"):
        closed = jax.make_jaxpr(lambda flat, *given: fn(dict(zip(names, flat, strict=True)), *given))(
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights.values()], *inputs.values()
        )
    graph = Graph({name: x.shape for name, x in inputs.items()})
    # On the CPU, whatever the model was trained on.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        given = [Value(name, np.asarray(x)) for name, x in weights.items()] + [Value(name) for name in inputs]
        (result,) = _evaluated(graph, closed.jaxpr, closed.consts, given)
    out: Any = closed.out_avals[0]
    made = graph.node("Identity", graph.whole(result, out.shape))
    graph.nodes[-1].output[0] = output
    del made

    def said(name: str, x: Any) -> Any:
        shape = [size if isinstance(size, int) else str(size) for size in x.shape]
        return onnx.helper.make_tensor_value_info(name, element_type(x.dtype), shape)

    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.nodes,
            "jaxtrain",
            [said(name, x) for name, x in inputs.items()],
            [said(output, out)],
            [onnx.numpy_helper.from_array(array, name) for name, array in graph.initializers.items()],
        ),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="jaxtrain",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def write_onnx(path: Path, model: Any) -> None:
    """Write what `to_onnx` made."""
    path.write_bytes(model.SerializeToString())


def runs(path: Path) -> Callable[..., np.ndarray]:
    """The one output of an ONNX file as a function of its inputs, computed by ONNX Runtime on the CPU.

    Raises `UserError` where `onnxruntime` is not installed.
    """
    session = _imported("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]

    def run(*inputs: np.ndarray) -> np.ndarray:
        (output,) = session.run(None, dict(zip(names, inputs, strict=True)))
        return np.asarray(output)

    return run


def _imported(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{name} is not installed: pip install 'jaxtrain[onnx]'") from error


def _evaluated(graph: Graph, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
    env: dict[Any, Value] = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(variable: Any) -> Value:
        if isinstance(variable, Literal):
            aval: Any = variable.aval
            return constant(np.asarray(variable.val, aval.dtype), loose=True)
        return env[variable]

    for eqn in jaxpr.eqns:
        graph.line = _line(eqn) or graph.line
        env.update(zip(eqn.outvars, _outputs(graph, eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _line(eqn: JaxprEqn) -> str:
    """Where the equation was written, outside of JAX; empty where that is not known."""
    traceback = eqn.source_info.traceback
    frames: list[Any] = [] if traceback is None else traceback.frames
    written = (frame for frame in frames if not frame.file_name.startswith(_JAX))
    return next((f" at {frame.file_name}:{frame.line_num}" for frame in written), "")


def _outputs(graph: Graph, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    if name in _CALLS:
        body = eqn.params[_CALLS[name]]
        closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
        return _evaluated(graph, closed.jaxpr, closed.consts, inputs)
    if name == "scan":
        return _unrolled(graph, eqn, inputs)
    if _is_known(eqn, inputs):
        arrays = [graph.whole(x, v.aval.shape).array for x, v in zip(inputs, eqn.invars, strict=True)]  # type: ignore[attr-defined]
        return [constant(np.asarray(out)) for out in bind(eqn, arrays)]
    if name not in OPERATORS:
        raise unsupported(graph, eqn, "is an operation")
    return OPERATORS[name](graph, eqn, inputs)


def _is_known(eqn: JaxprEqn, inputs: Sequence[Value]) -> bool:
    """Whether the equation can be computed now; and is worth it, the file being no larger for it."""
    shapes: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if any(x.array is None for x in inputs) or any(not isinstance(size, int) for x in shapes for size in x.shape):
        return False
    # What is only seen otherwise is kept once; it may be needed as it is, too.
    kept = eqn.primitive.name in ("transpose", "broadcast_in_dim", "name", "stop_gradient", "dim_as_value")
    before = sum(x.array.size for x in inputs if x.array is not None)
    after = sum(v.aval.size for v in eqn.outvars)  # type: ignore[attr-defined]
    return not kept and after <= max(before, _SMALL)


def _unrolled(graph: Graph, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    """A scan step by step; of weights stacked by layer each layer's have a name of their own."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    n_consts, n_carry = scan_sizes(eqn)
    consts, carry, stacks = inputs[:n_consts], inputs[n_consts : n_consts + n_carry], inputs[n_consts + n_carry :]
    steps: list[list[Value]] = [[]] * length
    for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
        outs = _evaluated(graph, body.jaxpr, body.consts, [*consts, *carry, *(_row(graph, x, i) for x in stacks)])
        carry, steps[i] = outs[:n_carry], outs[n_carry:]
    shapes = [v.aval.shape for v in body.jaxpr.outvars[n_carry:]]
    return [*carry, *(_stacked(graph, ys, shape) for ys, shape in zip(zip(*steps, strict=True), shapes, strict=True))]


def _stacked(graph: Graph, rows: Sequence[Value], shape: Any) -> Value:
    axis = constant(np.zeros(1, np.int64))
    return graph.node("Concat", *(graph.node("Unsqueeze", graph.whole(x, shape), axis) for x in rows), axis=0)


def _row(graph: Graph, stack: Value, i: int) -> Value:
    if stack.array is not None:
        return Value(f"{stack.name}/{i}" if stack.name else "", stack.array[i])
    return graph.node("Gather", stack, constant(np.int64(i)), axis=0)
