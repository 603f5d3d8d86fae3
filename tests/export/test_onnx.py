"""Exported primitives in ONNX Runtime, with a symbolic batch size, are as accurate as JAX in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxtrain.errors import UserError
from jaxtrain.export.verify import Trial, verify
from jaxtrain.interop.names import leaves, unflatten
from jaxtrain.models import functional
from jaxtrain.models.vit import ViT, ViTConfig
from jaxtrain.program import equations

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from jaxtrain.export.onnx import load_onnx, to_onnx, write_onnx  # noqa: E402
from jaxtrain.export.onnx_operators import OPERATORS  # noqa: E402

MESSAGE = r"^[^\n]+ cannot be exported to ONNX \([^\n]+\): export it as stablehlo$"
SHAPE = (4, 6)
GENERATOR = np.random.default_rng(0)
W = {
    "w": GENERATOR.normal(size=(6, 5)).astype(np.float32),
    "stack": GENERATOR.normal(size=(3, 6, 6)).astype(np.float32) / 3,
    "conv": GENERATOR.normal(size=(3, 2, 6, 8)).astype(np.float32),
    "depthwise": GENERATOR.normal(size=(3, 3, 1, 6)).astype(np.float32),
    "rows": GENERATOR.normal(size=(7, 6)).astype(np.float32),
}


def layers(w, x):
    step = jax.checkpoint(lambda x, k: (jnp.tanh(x @ k), (x * 2).sum(-1)))
    x, sums = lax.scan(step, x, w["stack"])
    x, _ = lax.scan(lambda x, k: (x @ k, None), x, w["stack"], reverse=True)
    return x + sums.sum(0)[..., None]


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def conv(kernel, padding, **how):
    def fn(w, x):
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x[:, :, None] + x[:, None], w[kernel], (2, 1), padding, dimension_numbers=dims, **how
        )

    return fn


def gathered(w, x):
    places = jnp.minimum(jnp.abs(x) * 2, 2).astype(np.int32)
    rows = w["rows"][places] + w["stack"][:, places[:, :, 0]].sum(0)[:, :, None]
    return rows + (w["w"][places, places] * w["stack"][:, places, places].sum(0))[..., None]


def updated(w, x):
    filled = lax.dynamic_update_slice(jnp.full((x.shape[0], 9, 6), 7.0), x, (0, 0, 0))
    cut = lax.dynamic_slice(x, (0, 3, 0), (x.shape[0], 2, 6))  # clamped to 2
    filled = lax.dynamic_update_slice(filled, cut * w["w"][None, :2, :1], (0, 8, 0))  # clamped to 7
    return lax.dynamic_update_slice(filled, x[:, :2, 4:], (0, 2, 1))


def logic(w, x):
    del w
    kept = ((x > 0) & (x < 1)) | ~(x >= -1) | (x == 0)
    return jnp.where(kept & (x != 2) & (x <= 3), x, -x)


def polynomial(x, coefficients):
    """Evaluate by `lax.polynomial`, which JAX has since 0.12."""
    if hasattr(lax, "polynomial"):
        return lax.polynomial(x, coefficients)
    return sum(c * x**n for n, c in enumerate(coefficients))


def one_minus_square(x):
    return lax.one_minus_square(x) if hasattr(lax, "one_minus_square") else 1 - x * x


def each(*fns):
    return lambda w, x: jnp.stack([fn(x) for fn in fns])


CASES = {
    "rounding": each(jnp.abs, jnp.ceil, jnp.floor, jnp.negative, jnp.sign, jnp.square, jax.nn.relu, doubled),
    "exponential": each(jnp.cos, jnp.exp, jnp.sin, jnp.tanh, jax.nn.sigmoid, jax.nn.silu),
    "erf": each(jax.scipy.special.erf, jax.scipy.special.erfc, partial(jax.nn.gelu, approximate=False)),
    "softmax": each(jax.nn.softmax, jax.nn.log_softmax),
    "sqrt": lambda w, x: jnp.sqrt(jnp.abs(x)) + lax.rsqrt(jnp.abs(x) + 1),
    "pow": lambda w, x: jnp.abs(x) ** 1.5 + x**3,
    "min": lambda w, x: jnp.minimum(x, 0.5) / jnp.maximum(x, 0.25),
    "clamp": lambda w, x: lax.clamp(jnp.full_like(x, -1), x, jnp.full_like(x, 0.5)),
    "logic": logic,
    "any": lambda w, x: (x > 1).any(-1).astype(np.float32) + (x > -1).all(-1),
    "argmax": lambda w, x: x.argmax(1).astype(np.float32) - x.argmin(1),
    "extremes": lambda w, x: x.max((0, 2)) - x.min((0, 2)),
    "mean": lambda w, x: (x - x.mean((0, 1), keepdims=True)).sum(0),
    "top_k": lambda w, x: lax.top_k(x, 2)[0] * lax.top_k(x, 2)[1],
    "reshape": lambda w, x: x.reshape(-1, 3).reshape(x.shape[0], 2, -1).T,
    "squeeze": lambda w, x: lax.squeeze(x[:, 1:2, ::2], [1]),
    "join": lambda w, x: jnp.concatenate([*jnp.split(x, 3, axis=-1), x[:, :, 1:-1]], axis=-1),
    "unstack": lambda w, x: jnp.stack(jnp.unstack(x, axis=1)[::-1], axis=-1),
    "pad": lambda w, x: jnp.pad(x, ((0, 0), (1, 2), (0, 0)), constant_values=3.0),
    "iota": lambda w, x: x + lax.broadcasted_iota(np.float32, x.shape, 1) * lax.stop_gradient(x),
    "last": lambda w, x: x[:, -1] + lax.slice_in_dim(x, 1, 3, axis=1).sum(1),
    "strided": lambda w, x: x[:, 1:4:2, ::3] * x[:, :1, 4:],
    "first": lambda w, x: x[0] + x[:, 2:, 1].sum(),
    "gather": gathered,
    "take": lambda w, x: jnp.take(x, np.array([3, 1]), axis=1, mode="clip"),
    "filled": lambda w, x: jnp.concatenate([x.sum(-1), jnp.full((x.shape[0], 9 - x.shape[1]), 7.0)], axis=1),
    "updated": updated,
    "ones": lambda w, x: jnp.ones((x.shape[0] * 2, 1)) * x.reshape(-1, 12) @ jnp.ones((12, 2)),
    "product": lambda w, x: x @ w["w"],
    "batched": lambda w, x: jnp.einsum("bij,bkj->bik", x, x * 2),
    "contracted": lambda w, x: jnp.einsum("bij,bijk->bk", x, x[..., None] * w["w"][None, None]),
    "outer": lambda w, x: jnp.einsum("bi,jk->bijk", x[:, 0], w["w"]),
    "conv": conv("conv", [(1, 2), (0, 1)], rhs_dilation=(1, 2)),
    "depthwise": conv("depthwise", "SAME", feature_group_count=6),
    "layers": layers,
    "kinds": lambda w, x: lax.scan(lambda x, i: (lax.cond(i, jnp.sin, jnp.cos, x), None), x, np.arange(2) > 0)[0],
    "copy": lambda w, x: jnp.array(lax.optimization_barrier(x), copy=True) * np.eye(6, dtype=np.float32)[:4][None],
    "logarithms": lambda w, x: jnp.log2(jnp.abs(x) + 1) + jnp.log10(jnp.abs(x) + 1),
    "one minus square": lambda w, x: one_minus_square(x),
    "polynomial": lambda w, x: polynomial(x, [0.5, w["w"][0, 0], 2.0]),
    "logged": lambda w, x: jnp.log(jnp.abs(x) + 1).transpose(2, 0, 1),
    "name": lambda w, x: jax.ad_checkpoint.checkpoint_name(x, "here") - 1,
}  # fmt: skip


def batch_of(rows):
    return (np.random.default_rng(rows).normal(size=(rows, *SHAPE)) * 1.5).astype(np.float32)


def symbolic(shape):
    return jax.ShapeDtypeStruct((*jax.export.symbolic_shape("batch"), *shape), np.float32)


def trial(fn, w, x):
    fn = jax.jit(fn)
    ours = np.asarray(fn(w, x), np.float64)
    with jax.enable_x64(True):
        wide = {name: value.astype(np.float64) for name, value in w.items()}
        return Trial([x], np.asarray(fn(wide, x.astype(np.float64)), np.float64), ours)


def check(fn, w, x, path, spec):
    write_onnx(path, to_onnx(fn, w, {"x": spec}, "y"))
    verify([trial(fn, w, x)], [load_onnx(path)(x)], "the graph")


@pytest.mark.parametrize("name", CASES)
def test_onnx_runtime_computes_the_outputs_of_jax(name, tmp_path):
    spec = symbolic(SHAPE)
    with jax.numpy_dtype_promotion("standard"):
        check(CASES[name], W, batch_of(3), tmp_path / "y.onnx", spec)


def primitives(jaxpr_, found):
    for eqn in jaxpr_.eqns:
        found.add(eqn.primitive.name)
        for inner in equations.inner_jaxprs(eqn):
            primitives(inner, found)
    return found


def test_every_operator_is_covered():
    spec = symbolic(SHAPE)
    with jax.numpy_dtype_promotion("standard"):
        found = set().union(*(primitives(jax.make_jaxpr(fn)(W, spec).jaxpr, set()) for fn in CASES.values()))
    since_0_12 = {"log2", "one_minus_square", "polynomial"}
    assert OPERATORS.keys() - found <= (set() if hasattr(lax, "polynomial") else since_0_12)


def test_weights_keep_their_names_and_are_stored_once(tmp_path):
    def tied(w, x):
        return w["rows"][x.astype(np.int32)[:, :, 0]] @ w["rows"].T

    model = to_onnx(tied, W, {"x": symbolic(SHAPE)}, "y")
    assert [x.name for x in model.graph.initializer if x.dims == [7, 6]] == ["rows"]
    assert {"stack", "w"}.isdisjoint(x.name for x in model.graph.initializer)
    layered = to_onnx(layers, W, {"x": symbolic(SHAPE)}, "y")
    assert {"stack/0", "stack/1", "stack/2"} <= {x.name for x in layered.graph.initializer}


@pytest.mark.parametrize(
    ("fn", "reason"),
    {
        "sort": (lambda w, x: jnp.sort(x), "sort at "),
        "transposed": (
            lambda w, x: lax.conv_transpose(x, W["w"][None, :, :], (2,), "SAME"),
            "(transposed convolution",
        ),
        "scattered": (lambda w, x: x.at[:, 0].set(1.0), "scatter at "),
        "out of bounds": (
            lambda w, x: jnp.take(w["w"], x.astype(np.int32), axis=0, mode="fill"),
            "(fill value for indices",
        ),
        "two rows": (
            lambda w, x: jax.vmap(lambda i: lax.dynamic_slice(w["w"], (i, 0), (2, 5)))(x[:, 0, 0].astype(np.int32)),
            "(several rows per index)",
        ),
        "start of a batch": (lambda w, x: lax.dynamic_slice(x, (1, 0, 0), (1, 4, 6)), "(start index other than 0"),
        "start at run time": (
            lambda w, x: lax.dynamic_update_slice(w["w"], w["w"][:2], (x[0, 0, 0].astype(np.int32), 0)),
            "(start index known only",
        ),
        "padded between": (
            lambda w, x: lax.pad(x, np.float32(0), [(0, 0, 0), (0, 0, 1), (0, 0, 0)]),
            "(padding between",
        ),
    }.values(),
)
def test_an_unsupported_operation_raises_an_error_with_its_name_and_line(fn, reason):
    with pytest.raises(UserError, match=MESSAGE) as error:
        to_onnx(fn, W, {"x": symbolic(SHAPE)}, "y")
    assert reason in str(error.value)
    assert f" at {__file__}:" in str(error.value)


def test_weights_larger_than_a_protobuf_raise_an_error():
    huge = np.broadcast_to(np.float32(0), (2**15, 2**14 + 1))
    with pytest.raises(UserError, match=r"2\.0 GiB and an ONNX file holds at most 2 GiB"):
        to_onnx(lambda w, x: x, {"w": huge}, {"x": symbolic(SHAPE)}, "y")


def test_a_vit_is_exported(tmp_path):
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    apply, params = functional(ViT(config, rngs=nnx.Rngs(0)))
    weights = dict(leaves(params))
    images = GENERATOR.normal(size=(2, 8, 8, 3)).astype(np.float32)

    def fn(w, x):
        return apply(unflatten(w, params), x)

    check(fn, weights, images, tmp_path / "vit.onnx", jax.ShapeDtypeStruct(images.shape, np.float32))
