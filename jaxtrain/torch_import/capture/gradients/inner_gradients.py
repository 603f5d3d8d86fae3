"""`torch.autograd.grad` and `torch.func.grad` inside `forward`.

PyTorch's own engine computes the gradients of the fake tensors of a trace, which tells shapes, unused inputs and
errors. The graph receives one operation for them, `GRADIENT`, in place of the operations of the backward pass.
"""

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.fx.experimental import proxy_tensor

from jaxtrain.torch_import.graph import CUSTOM, DETACH, GETITEM, GRADIENT, LEAF, Graph, Node, Spec, references
from jaxtrain.torch_import.nested_gradients import nodes_between
from jaxtrain.torch_import.refusals import first_line, refusal, source_line
from jaxtrain.torch_internals import (
    AutoDispatchBelowAutograd,
    TensorBase,
    apis,
    eager_transforms,
    engine_run_backward,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
    pytree,
    vmap_internals,
)

_LIBRARY = torch.library.Library("jaxtrain", "FRAGMENT")
_LIBRARY.define("gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] grad_outputs) -> Tensor[]")
_LIBRARY.define("leaf(Tensor x) -> Tensor")
_engine = engine_run_backward
_is_wrapped = is_functorch_wrapped_tensor


@torch.library.register_fake("jaxtrain::gradient")
def _shapes_of_gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], grad_outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in inputs]


@torch.library.register_fake("jaxtrain::leaf")
def _shape_of_leaf(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _eager(name: str) -> Callable[[Any], Any]:
    """Register the meaning of an operation for tensors with values; those of a trace have shapes alone."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args: Any) -> Any:
            tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            if all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors):
                return fn(*args)
            with AutoDispatchBelowAutograd():
                return getattr(torch.ops.jaxtrain, name)(*args)

        _LIBRARY.impl(name, kernel, "Autograd")
        return fn

    return register


@_eager("gradient")
def _gradient(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], grad_outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    found = torch.autograd.grad(outputs, inputs, grad_outputs, create_graph=True, materialize_grads=True)
    return list(found)


@_eager("leaf")
def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def add_node(operation: Any, args: tuple[Any, ...], results: Any) -> None:
    """Add an operation to the graph that is traced, if one is, whose results are given tensors."""
    mode: Any = proxy_tensor.get_proxy_mode()
    if mode is not None:
        given = pytree.tree_map(mode.tracer.unwrap_proxy, args)
        proxy = mode.tracer.create_proxy("call_function", operation, given, {})
        proxy_tensor.track_tensor_tree(results, proxy, constant=None, tracer=mode.tracer)


def _run_backward(
    outputs: Sequence[Any],
    grad_outputs: Sequence[Any],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any] = (),
    *args: Any,
    accumulate_grad: bool = True,
    **kwargs: Any,
) -> Any:
    """The engine, whose gradients are results of one operation of the graph."""
    if accumulate_grad:
        raise refusal("backward() inside forward", "use torch.autograd.grad, which returns gradients", user_line())
    if any(isinstance(x, GradientEdge) for x in (*outputs, *inputs)):
        raise refusal("torch.autograd.grad of a GradientEdge", "pass the tensor", user_line())
    if any(map(_is_wrapped, (*outputs, *grad_outputs, *inputs))):
        raise refusal("torch.autograd.grad inside torch.vmap", "pass vmap a function of torch.func.grad", user_line())
    run = functools.partial(_engine, outputs, grad_outputs, retain_graph, create_graph, inputs, *args, **kwargs)
    try:
        with proxy_tensor.disable_proxy_modes_tracing():
            found = run(accumulate_grad=False)
            # A result may be one of the arguments.
            found = tuple(None if x is None else x.view_as(x) for x in found)
    except RuntimeError as error:
        raise refusal(f"torch.autograd.grad: {first_line(error)}", "change that call", user_line()) from error
    of = [(x, grad) for x, grad in zip(inputs, found, strict=True) if grad is not None]
    kept = [i for i, grad in enumerate(grad_outputs) if grad is not None]
    given = [outputs[i] for i in kept], [x for x, _ in of], [grad_outputs[i] for i in kept]
    add_node(torch.ops.jaxtrain.gradient.default, given, [grad for _, grad in of])
    if create_graph:
        return found
    return tuple(None if x is None else x.detach() for x in found)


def _requires_grad_(self: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    """`Tensor.requires_grad_`, from which on the tensor is another value of the graph."""
    before = _requires_grad.__get__(self)
    TensorBase.requires_grad_(self, requires_grad)
    if requires_grad and not before and not isinstance(self, torch.nn.Parameter):
        add_node(torch.ops.jaxtrain.leaf.default, (self,), self)
    return self


_requires_grad: Any = TensorBase.requires_grad


class _RequiresGrad:
    """`Tensor.requires_grad`, whose assignment is `requires_grad_`."""

    def __get__(self, tensor: torch.Tensor | None, owner: Any = None) -> Any:
        return self if tensor is None else _requires_grad.__get__(tensor)

    def __set__(self, tensor: torch.Tensor, value: bool) -> None:
        _requires_grad_(tensor, value)


def _grad_and_value(
    func: Callable[..., Any], argnums: Any, has_aux: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """`torch.func.grad_and_value` by `torch.autograd.grad`."""
    if peek_interpreter_stack() is not None:
        raise refusal(
            "torch.func.grad inside a function of torch.vmap",
            "pass vmap the result of torch.func.grad itself",
            user_line(),
        )

    def scalar(*args: Any) -> Any:
        result = func(*args, **kwargs)
        value = result[0] if has_aux else result
        if not isinstance(value, torch.Tensor) or value.ndim:
            raise refusal("torch.func.grad of a function without a scalar result", "return a scalar", user_line())
        return result

    return _differentiated(scalar, argnums, has_aux, args)


def _differentiated(func: Callable[..., Any], argnums: Any, has_aux: bool, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the gradient of the sum of a function's values, and its result."""
    with contextlib.nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
        flat, spec = pytree.tree_flatten(eager_transforms._slice_argnums(args, argnums, as_tuple=False))
        given = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in flat]
        result = func(*_with_argnums(args, argnums, pytree.tree_unflatten(given, spec)))
        total = (result[0] if has_aux else result).sum()
        grads = torch.autograd.grad(total, given, create_graph=True, materialize_grads=True)
    return pytree.tree_unflatten(list(grads), spec), result


_vmap = apis.vmap_impl
_OF_GRADIENTS = {apis.grad(_vmap).__code__: False, apis.grad_and_value(_vmap).__code__: True}
"""Code of the functions that `torch.func.grad` and `grad_and_value` return: whether these return the value as well."""


def _vmap_of_gradient(
    func: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: int | None, *args: Any, **kwargs: Any
) -> Any:
    """`torch.vmap`; of a gradient, it is the gradient of the sum over rows, which do not depend on each other."""
    code: Any = getattr(func, "__code__", None)
    with_value = _OF_GRADIENTS.get(code)
    if with_value is None:
        return _vmap(func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
    dims = (in_dims,) * len(args) if isinstance(in_dims, int) else tuple(in_dims)
    if kwargs or out_dims != 0 or not all(x is None or isinstance(x, int) for x in dims):
        raise refusal(
            "torch.vmap of a gradient with nested axes", "map positional arguments to the first axis", user_line()
        )
    given = inspect.getclosurevars(func).nonlocals
    inner, argnums, has_aux = given["func"], given["argnums"], given["has_aux"]
    chosen = {argnums} if isinstance(argnums, int) else {*argnums}
    leaves = [(x, dim) for arg, dim in zip(args, dims, strict=True) for x in pytree.tree_leaves(arg)]
    rows = next(x.shape[dim] for x, dim in leaves if dim is not None)

    def mapped(i: int, dim: int | None) -> Any:
        if dim is not None:
            return pytree.tree_map(lambda x: x.movedim(dim, 0), args[i])
        is_chosen = i in chosen or i - len(args) in chosen
        return pytree.tree_map(lambda x: x.expand(rows, *x.shape), args[i]) if is_chosen else args[i]

    own = tuple(mapped(i, dim) for i, dim in enumerate(dims))
    axes = tuple(
        None if dim is None and i not in chosen and i - len(args) not in chosen else 0 for i, dim in enumerate(dims)
    )
    run = functools.partial(_vmap_of_gradient, inner, axes, 0, randomness, chunk_size)
    grads, result = _differentiated(run, argnums, has_aux, own)
    if with_value:
        return grads, result
    return (grads, result[1]) if has_aux else grads


def _with_argnums(args: tuple[Any, ...], argnums: Any, new: Any) -> tuple[Any, ...]:
    """Return arguments with new ones in the places of `argnums`."""
    places = {argnums: new} if isinstance(argnums, int) else dict(zip(argnums, new, strict=True))
    places = {place % len(args): x for place, x in places.items()}
    return tuple(places.get(i, x) for i, x in enumerate(args))


def _refusing(name: str, remedy: str = "use torch.func.grad or torch.autograd.grad") -> Callable[..., Any]:
    def transform(*_: Any, **__: Any) -> Any:
        raise refusal(f"{name} inside forward", remedy, user_line())

    return transform


def user_line() -> str:
    """Return the line of the user's code that is executed."""
    return source_line("".join(traceback.format_list(traceback.extract_stack()[:-1])))


_several = _refusing("torch.autograd.grad for several gradients at once", "call it for each of them")
GRADIENTS: tuple[tuple[Any, str, Any], ...] = (
    (torch.autograd, "_engine_run_backward", _run_backward),
    (vmap_internals, "_vmap", _several),
    (torch.autograd.functional, "_vmap", _several),
    (torch.Tensor, "requires_grad_", _requires_grad_),
    (torch.Tensor, "requires_grad", _RequiresGrad()),
    (eager_transforms, "grad_and_value_impl", _grad_and_value),
    (apis, "vmap_impl", _vmap_of_gradient),
    (eager_transforms, "_vjp_with_argnums", _refusing("torch.func.vjp or jacrev")),
    (eager_transforms, "_jvp_with_argnums", _refusing("torch.func.jvp or jacfwd")),
)
"""Replacements while a module is traced: owner, name and value."""


def unused_parameters(module: torch.nn.Module, outputs: Sequence[torch.Tensor]) -> frozenset[str]:
    """Return the parameters without a gradient, of a traced module whose `forward` has gradients of its own."""
    mode = proxy_tensor.get_proxy_mode()
    target = torch.ops.jaxtrain.gradient.default
    if mode is None or not mode.tracer.graph.find_nodes(op="call_function", target=target):
        return frozenset()
    params = {name: x for name, x in module.named_parameters() if x.requires_grad}
    ends = tuple(x for x in outputs if x.requires_grad)
    if not params or not ends:
        return frozenset(params)
    with proxy_tensor.disable_proxy_modes_tracing():
        found = _engine(ends, tuple(map(torch.ones_like, ends)), True, False, (*params.values(),), True, False)
    return frozenset(name for name, grad in zip(params, found, strict=True) if grad is None)


def refuse_lost_gradients(graph: Graph) -> None:
    """Refuse a gradient with respect to a value that the outputs do not depend on in the graph.

    PyTorch has one, through another view of the same memory or after an operation in place.
    """
    cut = [node for node in graph.nodes if node.op not in (DETACH, LEAF)]
    for node in graph.nodes:
        if node.op != GRADIENT:
            continue
        outputs, inputs, _ = ([*references(part)] for part in node.args)
        for name in inputs:
            if name not in outputs and not nodes_between(cut, [name], outputs):
                raise refusal(
                    "torch.autograd.grad with respect to a tensor that the outputs do not read as it is",
                    "take the gradient with respect to the tensor that they are computed from, not a view of it",
                    node.source,
                )


def refuse_saved_results(graph: Graph) -> None:
    """Refuse derivatives of a gradient through an `autograd.Function` that saves what its `forward` computes.

    PyTorch takes such a tensor as a constant, or as a result of the function, where it is one.
    """
    detached = {x.args[0].name for x in graph.nodes if x.op == DETACH}
    for node in graph.nodes:
        results = [x.name for x in graph.nodes if x.op == GETITEM and x.args[0].name == node.name]
        if node.op != GRADIENT or detached.issuperset(results):
            continue
        outputs, inputs, _ = ([*references(part)] for part in node.args)
        for inner in nodes_between(graph.nodes, inputs, outputs):
            if inner.op == CUSTOM and not _saves_inputs_alone(inner):
                raise refusal(
                    f"a gradient through {inner.kwargs['function']}, which saves what its forward computes, is "
                    "differentiated",
                    "save its inputs alone and compute the rest in backward",
                    inner.source,
                )


def _saves_inputs_alone(node: Node) -> bool:
    forward: Graph = node.kwargs["forward"]
    inputs, nodes = {x.name for x in forward.inputs}, {x.name: x for x in forward.nodes}

    def is_input(name: str) -> bool:
        made = nodes.get(name)
        if made is None:
            return name in inputs
        floating = isinstance(made.spec, Spec) and made.spec.dtype.startswith(("float", "bfloat", "complex"))
        return not floating or (made.op in _COPIES and is_input(made.args[0].name))

    return all(is_input(ref.name) for ref in forward.outputs[node.kwargs["outputs"] :])


_COPIES = (DETACH, "aten.clone.default", "aten.alias.default")
