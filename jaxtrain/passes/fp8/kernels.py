"""Compute the products of a function with its parameters in 8 bits.

A parameter is followed through conversions, layout operations, calls, checkpoints and scans to the products that use
it. The function is one in low precision already: a product in 8 bits replaces one in bfloat16 or float16, and reads the
parameter in the dtype that it is stored in.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.errors import UserError
from jaxtrain.passes.fp8.followed_parameter import Parameter
from jaxtrain.passes.fp8.fp8_settings import Fp8
from jaxtrain.passes.fp8.kernel_parts import Part, constrained_copy, gathering, quantized_part
from jaxtrain.passes.fp8.kernel_product import MULTIPLE, KernelProduct
from jaxtrain.passes.fp8.kernel_scales import KernelScales, Uses
from jaxtrain.passes.fp8.quantized_kernel import QuantizedKernel, Whole
from jaxtrain.passes.marks import looks_up
from jaxtrain.passes.numerics.autocast import DISABLED
from jaxtrain.passes.numerics.biased_product import NAME as BIASED_PRODUCT
from jaxtrain.passes.numerics.casts import LOWER_FLOATS, is_array
from jaxtrain.paths import Matching, path_name
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.follow import carried, enters, is_followed, moves, scan, used, uses


class KernelUse(NamedTuple):
    """A product with a parameter.

    Attributes:
      path: The parameter's path.
      kernels: Number of kernels in the parameter: those of all layers that are scanned over.
      reason: Why the product is not in 8 bits; None if it is.
    """

    path: str
    kernels: int
    reason: str | None


class KernelCopies(NamedTuple):
    """Kernels in 8 bits for a window, in which the parameters do not change.

    Attributes:
      of_params: For every parameter, the copies of its parts.
      are_whole: Whether they are gathered from other devices already.
    """

    of_params: tuple[dict[Part, QuantizedKernel], ...]
    are_whole: bool


def fp8_products(
    fn: Callable[..., Any],
    fp8: Fp8,
    scales: Any = None,
    probes: Any = None,
    copies: KernelCopies | None = None,
    whole: Whole | None = None,
    dtypes: Collection[Any] = LOWER_FLOATS,
) -> Callable[..., Any]:
    """Compute the products of a function `fn(params, …)` with its parameters in 8 bits.

    Args:
      fn: The function, under autocast or computed in low precision as a whole.
      fp8: The settings. "delayed" is "tensor" without `scales`.
      scales: With the scaling "delayed", the scales of each kernel, a tree like the parameters.
      probes: Zeros like `scales`: the gradient by them is the largest magnitudes that products have.
      copies: What `kernel_copies` returned for the parameters; None to quantize kernels where they are used.
      whole: On a mesh, returns a sharding without the axes over which parameters are gathered. Their numbers in 8 bits
        are, if the program constrains the parameters to shardings.
      dtypes: Dtypes of the products that are replaced.

    Returns:
      The same function. Products qualify whose kernel, of sizes that are multiples of 16, is a parameter that is
      neither excluded nor looked up in; not those of two parameters, nor batched ones.

    Raises:
      UserError: No product qualifies, when the function is called.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxtrain.passes.numerics.autocast import autocast
      >>> fn = fp8_products(autocast(lambda kernel, x: x @ kernel, jnp.bfloat16), Fp8())
      >>> text = str(jax.make_jaxpr(fn)(jnp.ones((16, 32)), jnp.ones((1, 16))))
      >>> "fp8_product" in text, "dot_general" in text
      (True, False)
    """

    def computed(*args: Any, **kwargs: Any) -> Any:
        context = _Context(_in_effect(fp8, scales), whole, copies, dtypes)
        result = _rewritten(fn, context, scales, probes)(*args, **kwargs)
        if all(use.reason for use in context.uses):
            raise UserError(_none_qualifies(context.uses))
        return result

    return computed


def kernel_copies(
    fn: Callable[..., Any],
    fp8: Fp8,
    scales: Any = None,
    whole: Whole | None = None,
    dtypes: Collection[Any] = LOWER_FLOATS,
    *,
    are_whole: bool = False,
) -> Callable[..., KernelCopies]:
    """Return a function of the arguments of `fn(params, …)` to the kernels of its products in 8 bits.

    Args:
      fn: The function, as for `fp8_products`.
      fp8: The settings.
      scales: As for `fp8_products`.
      whole: As for `fp8_products`.
      dtypes: As for `fp8_products`.
      are_whole: Whether to gather the kernels from other devices.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxtrain.passes.numerics.autocast import autocast
      >>> fn = autocast(lambda kernels, x: jax.lax.scan(lambda x, w: (x @ w, None), x, kernels)[0], jnp.bfloat16)
      >>> copies = kernel_copies(fn, Fp8())(jnp.ones((3, 16, 16)), jnp.ones((1, 16)))
      >>> [(kernel.columns.data.shape, kernel.columns.scale.shape) for kernel in copies.of_params[0].values()]
      [((3, 16, 16), (3, 1, 1))]
    """

    def copied(params: Any, *rest: Any) -> KernelCopies:
        context = _Context(_in_effect(fp8, scales), dtypes=dtypes)
        jax.eval_shape(_rewritten(fn, context, scales, scales), params, *rest)
        leaves = jax.tree.leaves(params)
        found: list[dict[Part, QuantizedKernel]] = [{} for _ in leaves]
        for position, (x, own) in enumerate(zip(leaves, _joined(len(leaves), scales, scales), strict=True)):
            for part, sharding in context.parts.get(position, {}).items():
                copy = quantized_part(context.fp8, part, x, own)
                found[position][part] = constrained_copy(copy, part, x.shape, sharding, whole, keeps_whole=are_whole)
        return KernelCopies(tuple(found), are_whole)

    return copied


def kernel_uses(fn: Callable[..., Any], fp8: Fp8, *args: Any) -> list[KernelUse]:
    """Return the products of a function `fn(params, …)` with its parameters, in 8 bits and not.

    Args:
      fn: The function, as for `fp8_products`.
      fp8: The settings.
      *args: Its arguments, or their shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxtrain.passes.numerics.autocast import autocast
      >>> params = {"body": jnp.ones((16, 16)), "head": jnp.ones((16, 32))}
      >>> fn = autocast(lambda params, x: x @ params["body"] @ params["head"], jnp.bfloat16)
      >>> [(use.path, use.reason) for use in kernel_uses(fn, Fp8(), params, jnp.ones((1, 16)))]
      [('body', None), ('head', 'excluded')]
    """
    context = _Context(_in_effect(fp8, None))
    jax.eval_shape(_rewritten(fn, context), *args)
    return context.uses


def format_uses(uses: Sequence[KernelUse]) -> str:
    """Return which kernels are in 8 bits and which are not, in one line.

    Example:
      >>> format_uses([KernelUse("blocks/fc/kernel", 12, None), KernelUse("head/kernel", 1, "excluded")])
      '12 kernels; not in 8 bits: head/kernel (excluded)'
    """
    low = sum(use.kernels for use in uses if use.reason is None)
    others = ", ".join(f"{use.path} ({use.reason})" for use in uses if use.reason is not None)
    return f"{low} kernel{'s' * (low != 1)}" + (f"; not in 8 bits: {others}" if others else "")


def _none_qualifies(uses: Sequence[KernelUse]) -> str:
    found = "; ".join(dict.fromkeys(f"{use.path or 'params'} ({use.reason})" for use in uses)) or "no parameter is one"
    return (
        f"precision fp8: no kernel qualifies for products in 8 bits, of the parameters in products: {found}: use bf16, "
        f"or kernels whose sizes are multiples of {MULTIPLE} and that are not excluded"
    )


@dataclass(frozen=True)
class _Context:
    """What products are computed with, and what is found of them.

    Attributes:
      fp8: The settings.
      whole: As for `fp8_products`.
      copies: As for `fp8_products`.
      dtypes: As for `fp8_products`.
      uses: The products with parameters.
      parts: The parts of each parameter that are kernels, with the parameter's sharding, by its position.
    """

    fp8: Fp8
    whole: Whole | None = None
    copies: KernelCopies | None = None
    dtypes: Collection[Any] = LOWER_FLOATS
    uses: list[KernelUse] = field(default_factory=list)
    parts: dict[int, dict[Part, Any]] = field(default_factory=dict)

    def note(self, args: Sequence[Any], reason: str | None) -> None:
        """Note a product with parameters."""
        for x in filter(is_followed, args):
            use = KernelUse(x.path, x.n_kernels, reason)
            if use not in self.uses:
                self.uses.append(use)

    def multiply(self, product: KernelProduct, args: Sequence[Any]) -> jax.Array:
        """Return a product in 8 bits."""
        (kernel,) = filter(is_followed, args[:2])
        part = product.part(args)
        if part is not None:
            self.parts.setdefault(kernel.position, {})[part] = kernel.sharding
        quantized = kernel.copy_of(part)
        is_whole = quantized is not None and self.copies is not None and self.copies.are_whole
        gathered = None if is_whole else gathering(part, kernel.shape, kernel.sharding, self.whole)
        return product.multiply([*args[:2], *map(used, args[2:])], self.fp8, quantized, gathered)


def _in_effect(fp8: Fp8, scales: Any) -> Fp8:
    return Fp8(exclude=fp8.exclude) if fp8.is_delayed and scales is None else fp8


def _rewritten(fn: Callable[..., Any], context: _Context, scales: Any = None, probes: Any = None) -> Callable[..., Any]:
    def computed(params: Any, *rest: Any, **kwargs: Any) -> Any:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        excluded = Matching(context.fp8.exclude)
        of_leaves = _joined(len(leaves), scales, probes)
        copies = [{}] * len(leaves) if context.copies is None else context.copies.of_params

        def evaluate(closed: ClosedJaxpr, values: list[Any]) -> list[Any]:
            given = [*values]
            of_params = zip(leaves, of_leaves, copies, strict=True)
            for i, (((path, _), own, of_parts), var) in enumerate(zip(of_params, closed.jaxpr.invars, strict=False)):
                if is_array(x := values[i]):
                    name = path_name(path)
                    reason = "excluded" if excluded(name) else "looked up" if _is_table(closed.jaxpr, var) else None
                    static = {"dtype": x.dtype, "path": name, "position": i, "shape": x.shape, "reason": reason}
                    given[i] = Parameter(x, own, tuple(of_parts.values()), **static, parts=tuple(of_parts))
            # Autocast traces its operations in one such region.
            run = _runner(context, disabled=-1)
            return [*map(used, run(closed.jaxpr, closed.consts, given))]

        return rewrite.retrace(fn, evaluate)(params, *rest, **kwargs)

    return computed


def _joined(n: int, scales: Any, probes: Any) -> list[KernelScales | None]:
    """Return the scales with the probe of each of n parameters, None for those without."""
    if scales is None:
        return [None] * n
    of_leaves = (jax.tree.leaves(tree, is_leaf=lambda x: x is None) for tree in (scales, probes))
    return [None if scale is None else KernelScales(scale, probe) for scale, probe in zip(*of_leaves, strict=True)]


def _runner(context: _Context, disabled: int) -> rewrite.Run:
    """Return a function that evaluates a jaxpr, called in so many regions in which autocast is disabled."""

    def rule(of_jaxpr: Uses, eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        del run
        args = [_used(of_jaxpr, v, x) for v, x in zip(eqn.invars, args, strict=True)]
        name, depth = op.of(eqn), disabled + _regions(eqn)
        inner = _runner(context, depth)
        if not any(map(is_followed, args)):
            return None
        if name == op.SCAN:
            return _scan(eqn, args, inner)
        if (product := KernelProduct.of(eqn)) is not None and any(map(is_followed, args[:2])):
            reason = product.refusal(args, depth, context.dtypes, is_delayed=context.fp8.is_delayed)
            context.note(args[:2], reason)
            if reason is None:
                return [context.multiply(product, args)]
        elif name not in op.FUNCTIONS and not moves(eqn) and _has_product(eqn):
            context.note(args, _KINDS.get(name, "in a function that is not followed"))
        return carried(eqn, args, inner)

    return lambda traced, consts, args: rewrite.interpret(traced, consts, args, partial(rule, Uses(traced)))


def _used(of_jaxpr: Uses, variable: Any, x: Any) -> Any:
    if not is_followed(x) or x.scales is None:
        return x
    return replace(x, scales=of_jaxpr.next_of(variable, x.scales))


_KINDS = {op.CONV_GENERAL_DILATED: "a convolution", op.RAGGED_DOT_GENERAL: "a grouped product"}


def _scan(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> list[Any]:
    """Scan over layers of parameters. Scales of whole parameters are repeated, so that each step has its own probe."""
    of_all = {i: x.scales for i, x in enumerate(args) if _is_whole(eqn, i, x)}
    args = [replace(x, scales=None) if i in of_all else x for i, x in enumerate(args)]

    def body(traced: Jaxpr, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        n = len(traced.invars)
        own = dict(zip(of_all, values[n:], strict=True))
        return run(traced, consts, [replace(x, scales=own[i]) if i in own else x for i, x in enumerate(values[:n])])

    return scan(eqn, [*args, *(scales.repeated(equations.trip_count(eqn)) for scales in of_all.values())], body)


def _is_whole(eqn: JaxprEqn, i: int, x: Any) -> bool:
    """Return whether operand i of a scan has scales that are not sliced, although a scan slices or shares it."""
    if not is_followed(x) or x.scales is None or equations.is_carry(eqn, i):
        return False
    return i < sum(equations.scan_sizes(eqn)) or not x.scales.n_leading


def _regions(eqn: JaxprEqn) -> int:
    """Return the number of regions, in which autocast is disabled, that an equation was traced in."""
    return sum(part.name == DISABLED for part in eqn.source_info.name_stack.stack)


def _has_product(eqn: JaxprEqn) -> bool:
    return any(op.of(inner) in (*op.PRODUCTS, BIASED_PRODUCT) for inner in equations.within(eqn))


def _is_table(traced: Jaxpr, var: Any) -> bool:
    """Return whether a program looks up rows of a parameter."""

    def passes(eqn: JaxprEqn, i: int) -> bool:
        del i
        return moves(eqn) or op.of(eqn) == op.CONVERT_ELEMENT_TYPE

    def enters_call(eqn: JaxprEqn, i: int) -> bool:
        return enters(eqn, i) and not looks_up(eqn, i)

    return any(
        use.eqn is not None and looks_up(use.eqn, use.position) for use in uses(traced, var, passes, enters_call)
    )
