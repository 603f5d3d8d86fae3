"""The evaluation of a jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.program import rewrite


def test_a_numpy_constant_has_the_dtype_of_the_mode_whichever_mode_traced_it_first() -> None:
    table = np.array([1.0, 0.5])

    def fn(x: jax.Array) -> jax.Array:
        return (jnp.arange(2)[:, None] * table) @ x

    plain = rewrite.transform(fn, lambda eqn, args, run: rewrite.bind(eqn, args))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        with jax.enable_x64(True):
            wide = jax.jit(fn)(np.ones(2))
        with jax.enable_x64(False):
            narrow = jax.jit(plain)(np.ones(2, np.float32))
    assert (wide.dtype, narrow.dtype) == (np.float64, np.float32)


def test_a_jaxpr_that_has_its_constants_needs_none() -> None:
    table = np.arange(3.0, dtype=np.float32)
    closed = jax.make_jaxpr(lambda x: x * jnp.asarray(table) + x[:1])(table)
    consts = () if hasattr(closed.jaxpr, "consts") else closed.consts  # open jaxprs have some since JAX 0.11
    (found,) = rewrite.interpret(closed.jaxpr, consts, [table + 1], lambda eqn, args, run: None)
    np.testing.assert_array_equal(found, (table + 1) * table + 1)


@pytest.mark.parametrize("mode", getattr(jax, "Inline", [False]))
def test_a_jitted_function_keeps_how_it_is_inlined(mode: object) -> None:
    def of_call(fn: object) -> list[object]:
        return [eqn.params["inline"] for eqn in jax.make_jaxpr(fn)(1.0).eqns if "inline" in eqn.params]  # type: ignore[arg-type]

    inner = jax.jit(jnp.sin, inline=mode)  # type: ignore[call-overload]
    assert of_call(rewrite.transform(inner, lambda eqn, args, run: None)) == of_call(inner)


@jax.custom_jvp
def doubled_sine(x):
    return x + 0.0


doubled_sine.defjvps(lambda tangent, _, x: tangent * 2 * jnp.sin(x))


def test_what_a_rewrite_cannot_change_is_bound_as_it_was_traced():
    """A derivative of its own may contain what is to be changed, though the function does not."""

    def sines_to_cosines(eqn, args, run):
        return [jnp.cos(args[0])] if is_sine(eqn) else None

    def is_sine(eqn):
        return eqn.primitive.name == "sin"

    def program(x):
        changed = jax.jit(jnp.sin)(x) + jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=2)[0]
        return changed + jax.jit(doubled_sine)(x) + jax.jit(jnp.exp)(x)

    rewritten = rewrite.transform(program, sines_to_cosines, is_sine)
    everywhere = rewrite.transform(program, sines_to_cosines)
    np.testing.assert_array_equal(rewritten(0.5), everywhere(0.5))
    np.testing.assert_array_equal(jax.grad(rewritten)(0.5), jax.grad(everywhere)(0.5))
    assert "sin" in str(jax.make_jaxpr(jax.grad(program))(0.5))

    def unchanged(x):
        return jax.jit(jnp.exp)(x)

    before = jax.make_jaxpr(unchanged)(0.5).eqns[0].params["jaxpr"]
    kept = jax.make_jaxpr(rewrite.transform(unchanged, sines_to_cosines, is_sine))(0.5)
    assert any(eqn.params.get("jaxpr") is before for eqn in kept.eqns)
