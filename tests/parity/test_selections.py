"""Selections by constants and by data, of which a run takes one side only, are reported with their line."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

import jaxtrain
from jaxtrain.interop import NameTable, TorchParam
from parity.case import AdamW, Case
from parity.cases.built_in import llama_case
from parity.run import examine
from parity.unexercised.one_sided import one_sided_selections

ROWS = WIDTH = 3


class Weights(torch.nn.Module):
    """Weights with constants that are selected when the model is built."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(WIDTH))
        self.constant = torch.where(torch.arange(WIDTH) < threshold, 1.0, 2.0)  # built


def case(theirs: Any = None, ours: Any = None, threshold: float = 1) -> Case:
    """Return a case whose loss multiplies the weights by `theirs(model, batch)` and by `ours(params, batch)`.

    The batches have "step" 0, 1, 2 …
    """

    def torch_loss(model: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        factor = 1.0 if theirs is None else theirs(model, batch)
        return (model.w * factor).sum() * batch["x"].sum(), ROWS

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        factor = 1.0 if ours is None else ours(params, batch)
        return jaxtrain.Loss((params["w"] * factor).sum() * batch["x"].sum(), ROWS), {}

    drawn: dict[int, int] = {}

    def batch(seed: int, rows: int) -> dict[str, np.ndarray]:
        step = drawn.setdefault(seed, len(drawn))
        return {"x": np.ones(rows, np.float32), "step": np.full(rows, step), "place": np.arange(rows)}

    return Case(
        name="selecting",
        torch_model=lambda: Weights(threshold),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like={"w": jax.ShapeDtypeStruct((WIDTH,), np.float32)},
        names=NameTable({"w": TorchParam("w")}),
        batch=batch,
        rows=ROWS,
        optimizer=AdamW(lr=1e-2),
        clip_norm=None,
    )


def summaries(lines: list[str]) -> list[str]:
    """Return what each line states, without the line of code."""
    return [line.partition(" throughout: ")[0] for line in lines]


def test_a_constant_that_the_constructor_selects_from_one_side_is_reported_with_its_line() -> None:
    assert one_sided_selections(case(threshold=1)) == []
    (line,) = one_sided_selections(case(threshold=5))
    assert line.startswith("condition of where is True throughout: tests/parity/test_selections.py:")
    assert line.endswith("self.constant = torch.where(torch.arange(WIDTH) < threshold, 1.0, 2.0)  # built")


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (lambda place, w: torch.where(place < 9, w, 0.0), ["condition of where is True"]),
        (lambda place, w: w.masked_fill(place > 9, 0.0), ["mask of masked_fill is False"]),
        (lambda place, w: w.masked_fill(place > 1, 0.0), []),
        (lambda place, w: w * place.clamp(min=0, max=1), ["x < min of clamp is False"]),
        (lambda place, w: w * torch.clip(place, 1), []),
        (lambda place, w: w * torch.minimum(place, torch.tensor(5)), ["x < y of minimum is True"]),
        (lambda place, w: w * torch.max(place, torch.tensor(1)), []),
        (lambda place, w: w * place.max(), []),
        (lambda place, w: torch.where(w > -9, w, 0.0), []),
        (lambda place, w: torch.where(w.detach() > -9, w, 0.0), []),
        (lambda place, w: w.clamp(min=-9), []),
    ],
)
def test_selections_of_pytorch_are_reported_unless_parameters_decide_them(select: Any, expected: list[str]) -> None:
    found = one_sided_selections(case(lambda model, batch: select(batch["place"], model.w)))
    assert summaries(found) == expected


@jax.jit
def jitted(keep: Any, w: Any) -> Any:
    return jnp.where(keep, w, 0)


def scanned(place: Any, w: Any) -> Any:
    return lax.scan(lambda x, keep: (jnp.where(keep, x, 2 * x), None), w, place >= 0)[0]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (lambda place, w: w * np.where(np.arange(WIDTH) < 9, 1, 0), ["condition of where is True"]),
        (lambda place, w: w * np.where(np.arange(WIDTH) < 1, 1, 0), []),
        (lambda place, w: jnp.where(place < 9, w, 0), ["condition of where is True"]),
        (lambda place, w: jitted(place < 9, w), ["condition of where is True"]),
        (scanned, ["condition of where is True"]),
        (lambda place, w: lax.select(place > 9, w, 2 * w), ["condition of select is False"]),
        (lambda place, w: w * jnp.clip(place, 0, 1), ["x < min of clip is False"]),
        (lambda place, w: w * np.minimum(np.arange(WIDTH), 1), []),
        (lambda place, w: w * jnp.maximum(place, -1), ["x > y of maximum is True"]),
        (lambda place, w: jnp.where(w > -9, w, 0), []),
        (lambda place, w: w[place] + np.maximum.reduce([1, 2]), []),
    ],
)
def test_selections_of_jax_are_reported_unless_parameters_decide_them(select: Any, expected: list[str]) -> None:
    found = one_sided_selections(case(ours=lambda params, batch: select(batch["place"], params["w"])))
    assert summaries(found) == expected
    assert all("tests/parity/test_selections.py" in line for line in found)


def test_a_selection_that_a_later_batch_decides_otherwise_is_not_reported() -> None:
    def later(step: int) -> Case:
        return case(
            lambda model, batch: torch.where(batch["step"][0] < step, model.w, 0.0),
            lambda params, batch: jnp.where(batch["step"][0] < step, params["w"], 0),
        )

    assert one_sided_selections(later(2)) == []
    assert len(one_sided_selections(later(3))) == 2


def test_a_program_that_cannot_be_traced_without_jit_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def ours(params: Any, batch: Any) -> Any:
        if jax.config.jax_disable_jit:
            raise ValueError("needs jit")
        return np.where(batch["place"] < 9, 1, 0)

    with caplog.at_level("INFO", "parity.unexercised.jax_selections"):
        assert one_sided_selections(case(ours=ours)) == []
    assert caplog.messages[0] == "selecting: not traced without jit: ValueError: needs jit"


@pytest.mark.parametrize(
    "loop",
    [
        lambda body, n: lax.scan(lambda x, i: (body(x), None), jnp.float32(1), jnp.arange(n))[0],
        lambda body, n: lax.scan(lambda x, _: (body(x), None), jnp.float32(1), length=n)[0],
        lambda body, n: lax.fori_loop(0, n, lambda i, x: body(x), jnp.float32(1)),
        lambda body, n: lax.map(lambda i: body(i * 1.0), jnp.arange(n)).sum(),
    ],
)
def test_only_short_loops_are_unrolled(loop: Any) -> None:
    def iterations(n: int) -> int:
        traced = []

        def ours(params: Any, batch: Any) -> Any:
            def body(x: Any) -> Any:
                traced.append(x)
                return x * params["w"].sum()

            return loop(body, n)

        one_sided_selections(case(ours=ours))
        return len(traced)

    assert iterations(5) == 5
    assert iterations(1000) <= 3


def test_only_the_first_selections_are_listed() -> None:
    select = "\n".join(f"w = np.where(np.arange({WIDTH}) < 9, 1, {i}) * w" for i in range(7))
    lines: dict[str, Any] = {"np": np}
    exec("def ours(params, batch):\n  w = params['w']\n  " + select.replace("\n", "\n  ") + "\n  return w", lines)
    found = one_sided_selections(case(ours=lines["ours"]))
    assert len(found) == 6
    assert found[-1] == "2 more selections took one side only"


def test_a_report_names_them_and_a_plain_check_does_without() -> None:
    constant = case(threshold=5)
    assert any("condition of where is True" in line for line in examine(constant, steps=2, locate=True).not_exercised)
    assert not any("condition of where" in line for line in examine(constant, steps=2).not_exercised)


def test_a_band_of_rotary_frequencies_without_a_frequency_is_reported_on_both_sides() -> None:
    assert one_sided_selections(llama_case.case()) == []
    rope = dataclasses.replace(llama_case.LLAMA3, rope_theta=10000.0)
    theirs, ours = one_sided_selections(
        llama_case.sized("llama", dataclasses.replace(llama_case.LLAMA, rope_parameters=rope))
    )
    assert theirs.startswith("condition of where is False throughout: transformers/modeling_rope_utils.py:")
    assert ours.startswith("condition of where is False throughout: jaxtrain/models/layers/rope.py:")
    assert ours.endswith("return np.where(is_between, between, scaled)")
