"""Whole models of 256 tokens, whose attention is computed block by block, train as in PyTorch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import pytest

from parity import check
from parity.case import Case
from parity.cases.built_in import gpt2_case, llama_case, t5_case

LONG = 256
CASES: dict[str, Callable[[], Case]] = {
    "gpt2 with dropout": partial(
        gpt2_case.case,
        config := replace(gpt2_case.CONFIG, n_positions=LONG, n_layer=1, n_embd=8, n_head=2),
        reference=config,
        dropout=0.2,
        rows=2,
        tokens=LONG + 1,
    ),
    "llama, packed, with a window": partial(
        llama_case.sized,
        "llama.packed",
        replace(
            llama_case.PACKED,
            **{"num_hidden_layers": 1, "hidden_size": 16, "head_dim": 8, "max_position_embeddings": LONG},
            **{"model_type": "mistral", "sliding_window": 40, "attention_bias": False, "mlp_bias": False},
        ),
        packed=True,
        rows=2,
        tokens=LONG,
    ),
    "t5 with padding": partial(
        t5_case.case,
        replace(t5_case.CONFIG, d_model=8, num_heads=2, num_layers=1, num_decoder_layers=1),
        rows=2,
        source=LONG,
        target=LONG,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_with_long_attention_trains_as_in_pytorch(name: str) -> None:
    case = CASES[name]()
    batch = case.batch(0, case.rows)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.params_like)
    traced = jax.make_jaxpr(lambda params: case.loss_fn(params, batch, jax.random.key(0))[0].total)(like)
    assert "fused_attention" in str(traced)
    verdict = check(case, steps=3)
    assert verdict.passed, verdict.faults
    assert max(verdict.loss_rel, verdict.grad_rel_max, verdict.param_rel_max) <= 1e-10
