"""Evaluate a function some of whose parameters have another form than an array: with adapters, quantized, noisy.

The model is not changed. It is traced with the arrays that the forms stand for, and its jaxpr is evaluated with the
forms in their places, through scans and rematerialized blocks. A product by a form is computed as the form defines it;
any other operation uses its array.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxtrain.passes import biased_products
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.follow import Apply, Followed, carried, used


class Product(NamedTuple):
    """A product of activations by a kernel, as an equation of a jaxpr computes it.

    Attributes:
      eqn: The equation, a dot_general without batch axes.
    """

    eqn: JaxprEqn

    def __call__(self, x: jax.Array, kernel: Any) -> jax.Array:
        """Multiply by the kernel, an array or a form without an addition, in the equation's layout."""
        if isinstance(kernel, KernelForm):
            return kernel.product(self, x)[0]
        (product,) = rewrite.bind(self.eqn, [x, kernel])
        return product

    def by(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Multiply by another kernel [in, out]."""
        (contracted, _), batch = equations.contraction(self.eqn)
        return lax.dot_general(x, kernel, ((contracted, (0,)), batch), precision=equations.precision(self.eqn))


class Form(Followed):
    """A parameter that is not stored as the array it stands for; a pytree, so that scans slice it by layer."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""

    @property
    @abstractmethod
    def dtype(self) -> Any:
        """Dtype of the array."""

    @property
    def ndim(self) -> int:
        """Number of axes of the array."""
        return len(self.shape)

    @abstractmethod
    def array(self) -> jax.Array:
        """Return the array."""

    def used(self) -> jax.Array:
        """Return the array."""
        return self.array()

    def rows(self, found: jax.Array) -> jax.Array:
        """Return rows that were looked up in the array, as in an embedding."""
        return found

    def moved(self, eqn: JaxprEqn, rest: Sequence[Any], apply: Apply) -> Any:
        """Return rows that are looked up; other equations use the array."""
        del rest
        return self.rows(apply(self.array())) if op.of(eqn) == op.GATHER else None


class KernelForm(Form):
    """The kernel of a linear layer, or a stack of them."""

    @property
    @abstractmethod
    def inputs_axis(self) -> int:
        """Axis of a kernel, 0 or 1, along which activations are multiplied."""

    @abstractmethod
    def transpose(self) -> Self:
        """Return the form of the transposed kernel."""

    def moved(self, eqn: JaxprEqn, rest: Sequence[Any], apply: Apply) -> Any:
        """As `Form.moved`, and the form of the transposed or converted kernel."""
        if op.of(eqn) == op.CONVERT_ELEMENT_TYPE and _is_floating(eqn):
            return self.astype(equations.dtype(eqn))
        is_transpose = op.of(eqn) == op.TRANSPOSE and equations.permutation(eqn) == (1, 0)
        return self.transpose() if is_transpose else super().moved(eqn, rest, apply)

    def astype(self, dtype: Any) -> "KernelForm":
        """Return the form of the kernel converted to a floating-point dtype."""
        return _Converted(self, np.dtype(dtype))

    @abstractmethod
    def product(self, product: Product, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the product of activations, and what is added to it after a bias; None for nothing."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Converted(KernelForm):
    """A kernel in another dtype, as a model converts it to that of its activations."""

    kernel: KernelForm
    to: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kernel.shape

    @property
    def dtype(self) -> Any:
        return self.to

    @property
    def inputs_axis(self) -> int:
        return self.kernel.inputs_axis

    def transpose(self) -> "_Converted":
        return replace(self, kernel=self.kernel.transpose())

    def array(self) -> jax.Array:
        return self.kernel.array().astype(self.to)

    def product(self, product: Product, x: jax.Array) -> tuple[jax.Array, None]:
        """Return x W. For the gradient of x the kernel is computed again."""
        return jax.checkpoint(lambda x, kernel: product(x, kernel.array()))(x, self), None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredKernel(KernelForm):
    """A kernel [..., in, out] that is stored in a lower precision than the model computes with.

    Attributes:
      stored: The kernel, or a stack of kernels.
      to: Dtype of the model.
      out_in: Whether the kernel is [out, in].
    """

    stored: Any
    to: Any = field(metadata={"static": True})
    out_in: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return tuple(self.stored.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the model."""
        return self.to

    @property
    def inputs_axis(self) -> int:
        """Axis of the inputs."""
        return int(self.out_in)

    def transpose(self) -> "StoredKernel":
        """Return the transposed kernel."""
        return replace(self, stored=self.stored.T, out_in=not self.out_in)

    def array(self) -> jax.Array:
        """Return the converted kernel."""
        converted: jax.Array = self.stored.astype(self.to)
        return converted

    def product(self, product: Product, x: jax.Array) -> tuple[jax.Array, None]:
        """Return x W. For the gradient of x the kernel is converted again."""
        return jax.checkpoint(lambda x, kernel: product(x, kernel.array()))(x, self), None


def is_form(x: Any) -> bool:
    """Return whether a node of a pytree is a form."""
    return isinstance(x, Form)


def evaluate(apply: Callable[[Any], Any], params: Any, forms: Any) -> Any:
    """Evaluate `apply(params)` with forms in the places of parameters.

    Args:
      apply: Function of the parameters alone.
      params: Parameters, which may include forms; only shapes and dtypes are used.
      forms: The same tree, with the forms and arrays to evaluate with.

    Returns:
      The result of `apply`.
    """
    like = jax.tree.map(_shape, params, is_leaf=is_form)

    def evaluate_traced(closed: ClosedJaxpr, _: list[Any]) -> list[Any]:
        leaves = jax.tree.leaves(forms, is_leaf=is_form)
        return [*map(used, rewrite.interpret(closed.jaxpr, closed.consts, leaves, _Rule(closed)))]

    return rewrite.retrace(apply, evaluate_traced)(like)


def accepts_forms(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute(model, params, *inputs)` for parameters that may include forms."""

    @wraps(compute)
    def computed(model: Any, params: Any, *inputs: Any) -> Any:
        if not any(map(is_form, jax.tree.leaves(params, is_leaf=is_form))):
            return compute(model, params, *inputs)
        return evaluate(lambda arrays: compute(model, arrays, *inputs), params, params)

    return computed


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_form(x) else x


class _Rule:
    """Evaluation rule for equations that have forms as arguments.

    As in PyTorch a bias is added before the addition of an adapter, which `pending` holds until then.
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.totals = dict(_biased(closed.jaxpr))
        self.pending: dict[Var, Any] = {}

    def __call__(self, eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        if eqn.outvars and eqn.outvars[0] in self.pending:
            (total,) = rewrite.bind(eqn, args)
            return [total + self.pending.pop(eqn.outvars[0]).astype(total.dtype)]
        if not any(map(is_form, args)):
            return None
        name = op.of(eqn)
        if name == op.WHILE:
            loop = equations.while_loop(eqn)
            n_consts = loop.n_condition + loop.n_body
            return rewrite.HIGHER_ORDER[name](eqn, [*args[:n_consts], *map(used, args[n_consts:])], run)
        if name == op.DOT_GENERAL and _multiplies_by_form(eqn, args):
            return self._product(eqn, *args)
        return carried(eqn, args, run)

    def _product(self, eqn: JaxprEqn, x: jax.Array, form: KernelForm) -> list[Any]:
        product, addition = form.product(Product(eqn), x)
        total = self.totals.get(eqn.outvars[0])
        if addition is None:
            return [product]
        if total is None:
            return [product + addition.astype(product.dtype)]
        self.pending[total] = addition
        return [product]


def _is_floating(eqn: JaxprEqn) -> bool:
    return bool(jnp.issubdtype(equations.dtype(eqn), np.floating))


def _biased(traced: Jaxpr) -> Iterator[tuple[Var, Var]]:
    """Yield (product, its sum with a bias) of this jaxpr and of those it calls."""
    sums = {found.total: found.product for found in biased_products(traced)}
    for eqn in equations.visit(traced):
        product = sums.get(eqn.outvars[0]) if eqn.outvars else None
        if product is not None and any(v is product for v in eqn.invars):
            yield product, eqn.outvars[0]


def _multiplies_by_form(eqn: JaxprEqn, args: list[Any]) -> bool:
    """Whether the equation multiplies activations by a form along its inputs."""
    x, kernel = args
    (_, contracted), batch = equations.contraction(eqn)
    if is_form(x) or not isinstance(kernel, KernelForm) or kernel.ndim != 2:
        return False
    return contracted == (kernel.inputs_axis,) and batch == ((), ())
