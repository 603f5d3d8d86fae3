"""Random numbers. Dropout masks are drawn by `jax.random.bernoulli`, which `parity` shares with PyTorch."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models.layers.dropout import dropout as drop
from jaxtrain.torch_import.ops.table import op


def _drops(x: Any, p: float, train: bool | None) -> bool:
    return train is not False and 0 < p < 1


@op("dropout.default", random=_drops)
def dropout(x: jax.Array, p: float, train: bool, *, rng: jax.Array | None) -> jax.Array:
    """Set elements to 0 with probability p, and scale the others."""
    if not train:
        return x
    # With p = 1 there is nothing to scale.
    return x * 0 if p == 1 else drop(x, p, rng)


@op("native_dropout.default", random=_drops)
def native_dropout(x: jax.Array, p: float, train: bool | None, *, rng: jax.Array | None) -> tuple[jax.Array, None]:
    """Dropout. Nobody reads its mask but PyTorch's own backward pass."""
    return dropout(x, p, train is not False, rng=rng), None


@op("bernoulli.p", "bernoulli_.float", random=True)
def bernoulli(x: jax.Array, p: float = 0.5, *, rng: jax.Array) -> jax.Array:
    """Ones with probability p."""
    return jax.random.bernoulli(rng, p, x.shape).astype(x.dtype)


@op("bernoulli.default", random=True)
def bernoulli_of(x: jax.Array, *, rng: jax.Array) -> jax.Array:
    """Ones with the probabilities x."""
    return jax.random.bernoulli(rng, jax.lax.stop_gradient(x)).astype(x.dtype)


@op("rand.default", random=True)
def rand(size: Sequence[int], *, dtype: Any = None, rng: jax.Array) -> jax.Array:
    """Uniform numbers in [0, 1)."""
    return jax.random.uniform(rng, size, dtype or np.float32)


@op("rand_like.default", random=True)
def rand_like(x: jax.Array, *, dtype: Any = None, rng: jax.Array) -> jax.Array:
    """Uniform numbers in [0, 1) in the shape of x."""
    return jax.random.uniform(rng, x.shape, dtype or x.dtype)


@op("randn.default", random=True)
def randn(size: Sequence[int], *, dtype: Any = None, rng: jax.Array) -> jax.Array:
    """Standard normal numbers."""
    return jax.random.normal(rng, size, dtype or np.float32)


@op("randn_like.default", random=True)
def randn_like(x: jax.Array, *, dtype: Any = None, rng: jax.Array) -> jax.Array:
    """Standard normal numbers in the shape of x."""
    return jax.random.normal(rng, x.shape, dtype or x.dtype)


@op("uniform.default", random=True)
def uniform(x: jax.Array, low: float = 0.0, high: float = 1.0, *, rng: jax.Array) -> jax.Array:
    """Uniform numbers in the shape of x."""
    return jax.random.uniform(rng, x.shape, x.dtype, low, high)


@op("normal_functional.default", random=True)
def normal(x: jax.Array, mean: float = 0.0, std: float = 1.0, *, rng: jax.Array) -> jax.Array:
    """Normal numbers in the shape of x."""
    return mean + std * jax.random.normal(rng, x.shape, x.dtype)


@op("exponential.default", random=True)
def exponential(x: jax.Array, lambd: float = 1.0, *, rng: jax.Array) -> jax.Array:
    """Exponentially distributed numbers in the shape of x."""
    return jax.random.exponential(rng, x.shape, x.dtype) / lambd


@op("randint.low", random=True)
def randint(low: int, high: int, size: Sequence[int], *, dtype: Any = None, rng: jax.Array) -> jax.Array:
    """Integers in [low, high)."""
    return jax.random.randint(rng, size, low, high, dtype or jnp.int32)


@op("randperm.default", random=True)
def randperm(n: int, *, dtype: Any = None, rng: jax.Array) -> jax.Array:
    """A permutation of the integers below n."""
    return jax.random.permutation(rng, n).astype(dtype or jnp.int32)


@op("randint.default", random=True)
def randint_below(high: int, size: Sequence[int], *, dtype: Any = None, rng: jax.Array) -> jax.Array:
    """Integers in [0, high)."""
    return randint(0, high, size, dtype=dtype, rng=rng)


@op("randint_like.default", random=True)
def randint_like(x: jax.Array, high: int, *, dtype: Any = None, rng: jax.Array) -> jax.Array:
    """Integers in [0, high) in the shape of x."""
    return jax.random.randint(rng, x.shape, 0, high).astype(dtype or x.dtype)


@op("randint_like.low_dtype", random=True)
def randint_like_from(x: jax.Array, low: int, high: int, *, dtype: Any = None, rng: jax.Array) -> jax.Array:
    """Integers in [low, high) in the shape of x."""
    return jax.random.randint(rng, x.shape, low, high).astype(dtype or x.dtype)


@op("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor", random=True)
def normal_of(mean: Any, std: Any = 1.0, *, rng: jax.Array) -> jax.Array:
    """Normal numbers of given means and deviations."""
    shape, dtype = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std)), jnp.result_type(mean, std)
    return jax.lax.stop_gradient(mean + std * jax.random.normal(rng, shape, dtype))


@op("normal.float_float", random=True)
def normal_of_size(mean: float, std: float, size: Sequence[int], *, dtype: Any = None, rng: jax.Array) -> jax.Array:
    """Normal numbers of one mean and deviation."""
    return mean + std * jax.random.normal(rng, size, dtype or np.float32)


@op("multinomial.default", random=True)
def multinomial(x: jax.Array, num_samples: int, replacement: bool = False, *, rng: jax.Array) -> jax.Array:
    """Indices drawn with the probabilities x, without replacement by the largest perturbed logarithms."""
    logits = jnp.log(jax.lax.stop_gradient(x))
    if replacement:
        return jax.random.categorical(rng, logits[..., None, :], shape=(*x.shape[:-1], num_samples))
    perturbed = logits + jax.random.gumbel(rng, logits.shape, logits.dtype)
    return jax.lax.top_k(perturbed, num_samples)[1]


@op("_standard_gamma.default", random=True)
def standard_gamma(x: jax.Array, *, rng: jax.Array) -> jax.Array:
    """Numbers of the gamma distributions of shapes x, with their implicit gradient."""
    return jax.random.gamma(rng, x, dtype=x.dtype)


@op("_sample_dirichlet.default", random=True)
def sample_dirichlet(x: jax.Array, *, rng: jax.Array) -> jax.Array:
    """Points of the Dirichlet distributions of concentrations x, without a gradient."""
    logarithms = jax.random.loggamma(rng, jax.lax.stop_gradient(x), dtype=x.dtype)
    return jax.nn.softmax(logarithms, axis=-1)


@op("poisson.default", random=True)
def poisson(x: jax.Array, *, rng: jax.Array) -> jax.Array:
    """Numbers of the Poisson distributions of means x."""
    return jax.random.poisson(rng, jax.lax.stop_gradient(x)).astype(x.dtype)


@op("binomial.default", random=True)
def binomial(count: jax.Array, prob: jax.Array, *, rng: jax.Array) -> jax.Array:
    """Numbers of successes, with the probabilities prob."""
    count, prob = jax.lax.stop_gradient((count, prob))
    return jax.random.binomial(rng, count, prob, dtype=prob.dtype).astype(count.dtype)


def _draws_slopes(*args: Any, training: bool = False, **kwargs: Any) -> bool:
    return args[4] if len(args) > 4 else training


@op("rrelu_with_noise_functional.default", random=_draws_slopes)
def rrelu(
    x: jax.Array,
    noise: jax.Array,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    *,
    rng: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """ReLU with random slopes of negative values, with the slopes."""
    if not training or rng is None:
        return jnp.where(x > 0, x, x * ((lower + upper) / 2)), noise
    slopes = jax.random.uniform(rng, x.shape, x.dtype, lower, upper)
    slopes = jnp.where(x <= 0, slopes, 1)
    return x * slopes, slopes
