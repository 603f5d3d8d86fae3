"""Which products are in 8 bits, through the structure of a program."""

import dataclasses
import functools
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.passes import Fp8, kernel_uses, policy
from jaxtrain.passes.fp8.fp8_product import fp8_product
from jaxtrain.passes.fp8.kernel_parts import EACH, Part, after, as_matrix, placed
from jaxtrain.passes.fp8.kernel_scales import KernelScales
from jaxtrain.program.equations import visit

BF16 = jnp.bfloat16
twice = jt.kernel(lambda x: x + x)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape), np.float32)


PARAMS = {
    "table": normal(32, 16),
    "layers": {"first": {"kernel": normal(3, 16, 32), "bias": normal(3, 32)}, "second": normal(3, 16, 32)},
    "heads": normal(16, 2, 8),
    "out": normal(2, 8, 16),
    "left": normal(48, 16),
    "odd": normal(16, 24),
    "one": normal(16, 16),
    "two": normal(16, 16, seed=1),
    "low": normal(16, 16, seed=2),
    "disabled": normal(16, 16, seed=3),
    "wide": normal(16, 16, seed=4),
    "batched": normal(2, 16, 16),
    "filter": normal(1, 16, 16),
    "branch": normal(16, 16, seed=5),
    "head": {"kernel": normal(16, 32)},
}
IN_8_BITS = {"layers/first/kernel": 3, "layers/second": 3, "heads": 1, "out": 1, "left": 1, "low": 1}
IN_LOW_PRECISION = {
    "table": "looked up",
    "odd": "16×24 is not a multiple of 16",
    "one": "a product of parameters",
    "two": "a product of parameters",
    "disabled": "autocast is disabled",
    "wide": "in float32",
    "batched": "a batched product",
    "filter": "a convolution",
    "branch": "in a function that is not followed",
    "head/kernel": "excluded",
}


def model(params, tokens):
    x = params["table"][tokens]  # [rows, positions, 16]

    @jt.block
    def layer(x, of_layer):
        hidden = twice(x @ of_layer["first"]["kernel"] + of_layer["first"]["bias"][None, None])
        return x + jax.checkpoint(lambda h, w: h @ w.T)(hidden, of_layer["second"])

    x, _ = lax.scan(lambda x, of_layer: (layer(x, of_layer), None), x, params["layers"])
    heads = jax.jit(lambda x, w: jnp.einsum("btd,dhe->bthe", x, w))(x, params["heads"])
    x = x + checkpoint_name(jnp.einsum("bthe,hed->btd", heads, params["out"]), "attended")
    y = jnp.einsum("nd,btd->nbt", params["left"], x)
    x = x + (x.astype(BF16) @ params["low"].astype(BF16)).astype(np.float32)
    others = x @ params["odd"], x @ (params["one"] @ params["two"]), x @ params["table"].T, x @ params["head"]["kernel"]
    with jt.autocast_disabled():
        disabled = x.astype(BF16) @ params["disabled"].astype(BF16)
        wide = x.astype(np.float32) @ params["wide"]
    batched = jnp.einsum("ptd,pde->pte", x[:2], params["batched"])
    filtered = lax.conv_general_dilated(x, params["filter"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    branch = lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: -x @ w, params["branch"])
    return x, y, *others, disabled, wide, batched, filtered, branch


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 5)))


def test_kernels_are_followed_to_their_products():
    numerics = policy("fp8")
    uses = kernel_uses(dataclasses.replace(numerics, fp8=None).apply(model), numerics.fp8, PARAMS, TOKENS)
    assert {use.path: use.kernels for use in uses if use.reason is None} == IN_8_BITS
    assert {use.path: use.reason for use in uses if use.reason is not None} == IN_LOW_PRECISION

    excluded = kernel_uses(policy("bf16").apply(model), Fp8(exclude=("layers/*", "he?ds")), PARAMS, TOKENS)
    assert {use.path for use in excluded if use.reason is None} == {"out", "left", "low", "head/kernel"}


def test_scales_follow_their_kernels():
    """Each kernel of a stack holds its own scale, and still does after a change of the layout."""
    scale = jnp.arange(24.0).reshape(4, 2, 3)
    changes = {
        "slice": lambda w: lax.slice(w, (1, 0, 0, 0), (3, 2, 8, 4)),
        "strides": lambda w: lax.slice(w, (1, 1, 0, 0), (4, 2, 8, 4), (2, 1, 1, 1)),
        "half of each": lambda w: lax.slice(w, (0, 0, 2, 0), (4, 2, 6, 4)),
        "dynamic slice": lambda w: lax.dynamic_slice(w, (2, 1, 0, 0), (2, 1, 8, 4)),
        "squeeze": lambda w: lax.squeeze(lax.slice(w, (0, 1, 0, 0), (4, 2, 8, 4)), (1,)),
        "row of each": lambda w: lax.squeeze(lax.slice(w, (0, 0, 2, 0), (4, 2, 3, 4)), (2,)),
        "transpose": lambda w: lax.transpose(w, (0, 1, 3, 2)),
        "reshape": lambda w: lax.reshape(w, (4, 2, 2, 16)),
        "transposed stack": lambda w: lax.transpose(w, (1, 0, 2, 3)),
        "reshaped stack": lambda w: lax.reshape(w, (8, 8, 4)),
    }
    for name, change in changes.items():
        kernels, found = jnp.broadcast_to(scale[..., 1:2, None], (4, 2, 8, 4)), KernelScales(scale, -scale)
        for eqn in jax.make_jaxpr(change)(kernels).eqns:
            indices = [np.int32(v.val) for v in eqn.invars[1:]]
            found, kernels = found.after(eqn, indices), eqn.primitive.bind(kernels, *indices, **eqn.params)
        # Kernels in another order have the scale of the first.
        assert found.n_leading == (0 if name.endswith("stack") else 1 if name == "squeeze" else 2), name
        expected = kernels.reshape(*kernels.shape[: found.n_leading], -1)[..., 0]
        np.testing.assert_array_equal(found.scale[..., 1], expected, err_msg=name)
        np.testing.assert_array_equal(found.probe, -found.scale)

    def observed(probe):
        (first, second), (only,) = KernelScales(scale, probe).split(2), KernelScales(scale, 0 * probe).split(1)
        assert first.scale is second.scale is only.scale is scale
        return (3 * first.probe + 5 * second.probe + only.probe).sum()

    np.testing.assert_array_equal(jax.grad(observed)(scale), jnp.full_like(scale, 5))


def test_kernels_of_a_mesh_stay_on_their_devices():
    """A matrix is sharded so that each device has the elements that it has of the parameter, or not at all."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"))

    def held(spec, ids):
        of_devices = NamedSharding(mesh, spec).devices_indices_map(ids.shape)
        return {device: {*np.asarray(ids)[part].ravel().tolist()} for device, part in of_devices.items()}

    def same(x):
        return x

    def half(x):
        return lax.slice(x, (0, 0, 2), (8, 2, 4))

    cases = [
        (P("fsdp", "tensor"), 0, same, (0,), True),
        (P("fsdp", "tensor"), 0, same, (0, 1), False),
        (P(("fsdp", "tensor")), 0, same, (0, 1), True),
        (P(None, None, "fsdp"), 0, same, (2,), True),
        (P(None, None, "fsdp"), 0, lambda x: lax.transpose(x, (2, 0, 1)), (0,), True),
        (P("fsdp", None, "tensor"), 0, lambda x: lax.transpose(x, (1, 2, 0)), (2,), False),
        (P("fsdp"), 0, half, (0,), True),
        (P("fsdp", None, "tensor"), 0, half, (0,), False),
        (P("tensor"), 0, lambda x: lax.reshape(x, (16, 4)), (0,), True),
        (P(None, "tensor"), 0, lambda x: lax.reshape(x, (16, 4)), (0,), False),
        (P("fsdp"), 0, lambda x: lax.rev(x, (1,)), (0,), False),
        (P("fsdp", "tensor"), 1, same, (0,), True),
        (P("fsdp", None, "tensor"), 1, lambda x: lax.transpose(x, (1, 0)), (0,), True),
    ]
    for i, (spec, scans, change, contracted, is_placed) in enumerate(cases):
        ids = jnp.arange(64.0).reshape(8, 2, 4)
        eqns = jax.make_jaxpr(change)(ids[(0,) * scans]).eqns
        part = Part((EACH,) * scans + functools.reduce(after, eqns, ()), contracted)
        found = placed(part, ids.shape, NamedSharding(mesh, spec))
        assert (found is not None) == is_placed, i
        if found is not None:
            matrix = functools.partial(as_matrix, contracted=contracted)
            matrices = (jax.vmap if scans else same)(lambda x: matrix(change(x)))(ids)  # noqa: B023
            kept = {*matrices.ravel().tolist()}
            before = {device: own & kept for device, own in held(spec, ids).items()}
            assert held(P(*found.each, *found.matrix), matrices) == before, i


def test_output_heads_of_imported_modules_are_excluded():
    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.ModuleDict({name: torch.nn.Linear(16, 16) for name in ("up", "output")})
            self.lm_head = torch.nn.Linear(16, 16)
            self.heads = torch.nn.Sequential(OrderedDict(head=torch.nn.Linear(16, 32)))

        def forward(self, x):
            return self.heads(self.lm_head(self.body["output"](self.body["up"](x))))

    batch = {"x": np.zeros((2, 16), np.float32)}
    imported = jt.from_torch(Classifier(), batch)
    loss_fn = imported.loss(lambda y, batch: jt.Loss.of(y.mean(-1)))
    uses = kernel_uses(policy("bf16").apply(loss_fn), Fp8(), imported.params, batch, jax.random.key(0))
    assert {use.path: use.reason for use in uses} == {
        "body.up.weight": None,
        "body.output.weight": None,
        "lm_head.weight": "excluded",
        "heads.head.weight": "excluded",
    }


@pytest.mark.parametrize("name", ["fp8", "fp8_row"])
def test_products_are_those_of_the_operands_written_by_hand(name):
    fp8 = policy(name).fp8

    def product(x, kernel, *bias):
        return fp8_product(x.astype(BF16), kernel, *bias, fp8=fp8, result=BF16)

    def by_hand(params, tokens):
        x = params["table"][tokens]
        for i in range(3):
            first, second = jax.tree.map(lambda w, i=i: w[i], (params["layers"]["first"], params["layers"]["second"]))
            hidden = product(x, first["kernel"], first["bias"].astype(BF16)[None, None])
            hidden = (2 * hidden.astype(np.float32)).astype(BF16)
            x = x + product(hidden, second.T).astype(np.float32)
        heads = product(x, params["heads"].reshape(16, 16))
        x = x + product(heads, params["out"].reshape(16, 16)).astype(np.float32)
        y = product(x, params["left"].T).transpose(2, 0, 1)
        # The conversion in the model is followed: the kernel is read in float32.
        return x + product(x, params["low"]).astype(np.float32), y

    def loss(compute, params):
        x, y, *_ = compute(params, TOKENS)
        return (x**2).sum() + (y.astype(np.float32) ** 2).sum()

    ours, expected = (
        jax.jit(jax.value_and_grad(lambda params, f=f: loss(f, params)))(PARAMS)
        for f in (policy(name).apply(model), by_hand)
    )
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


def test_a_function_without_such_a_kernel_raises_an_error():
    odd = policy("fp8").apply(lambda params, x: x @ params["odd"] @ params["head"])
    message = r"no kernel qualifies .* odd \(8×24 is not a multiple of 16\); head \(excluded\): use bf16"
    with pytest.raises(UserError, match=message):
        odd({"odd": jnp.ones((8, 24)), "head": jnp.ones((24, 16))}, jnp.ones((2, 8)))
    with pytest.raises(UserError, match="fp8 scaling 'rows' is unknown: choose one of tensor, delayed, row, block"):
        Fp8("rows")
    with pytest.raises(UserError, match="exclude must be a tuple of patterns of parameter paths, got 'head'"):
        Fp8(exclude="head")
    with pytest.raises(UserError, match="a policy with fp8 needs a compute_dtype"):
        jt.Policy(np.float32, fp8=Fp8())


def test_a_product_with_its_own_derivative_and_one_of_an_inner_policy_are_left_alone():
    @jax.custom_jvp
    def own(x, w):
        return x @ w

    own.defjvp(lambda primals, tangents: (own(*primals), tangents[0] @ primals[1]))
    params = {name: normal(16, 16) for name in ("own", "inner", "body")}

    def inner(params, x):
        x = policy("bf16").apply(lambda w: own(x, params["own"]) @ w)(params["inner"])
        return x.astype(np.float32) @ params["body"]

    numerics = policy("fp8")
    uses = kernel_uses(dataclasses.replace(numerics, fp8=None).apply(inner), numerics.fp8, params, jnp.ones((1, 16)))
    assert [use.path for use in uses if use.reason is None] == ["body"]
    traced = jax.make_jaxpr(numerics.apply(inner))(params, jnp.ones((1, 16)))
    assert sum(eqn.primitive.name == "fp8_product" for eqn in visit(traced.jaxpr)) == 1
