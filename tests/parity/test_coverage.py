"""What a check did not exercise is said, and tried."""

import dataclasses

import jax
import pytest

import jaxtrain.step
from jaxtrain.clip import clip_grad_norm
from parity.cases import CASES, gpt2, mlp
from parity.run import examine


def test_a_bound_between_the_norms_and_inputs_that_reach_everything_leave_nothing_to_say() -> None:
    case = CASES["maml"]()
    norms = examine(case, steps=4).theirs.grad_norms
    assert examine(dataclasses.replace(case, clip_norm=float(sorted(norms)[1]) * 1.001), steps=4).unseen == ()


def test_positions_that_no_batch_is_long_enough_for_are_named() -> None:
    found = examine(gpt2.case(tokens=9), steps=3).unseen
    assert "transformer.wpe.weight: 8 of 16 rows never had a gradient" in found


def test_one_step_is_too_few() -> None:
    assert any("one step shows nothing of momentum" in line for line in examine(mlp.case(), steps=1).unseen)


@pytest.mark.parametrize(("bound", "said"), [(1e3, "no step was clipped"), (1e-3, "every step was clipped")])
def test_a_bound_that_clips_never_or_always_is_said_and_another_tried(bound: float, said: str) -> None:
    case = dataclasses.replace(mlp.case(), clip_norm=bound)
    found = examine(case, steps=3, locate=True)
    assert found.verdict.passed
    assert any(line.startswith(said) for line in found.unseen)
    assert any(line.startswith("clipping holds with clip_norm") for line in found.unseen)


def test_a_fault_that_only_clipping_shows_is_found_although_the_bound_never_clips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def halved(grads: object, bound: float | None) -> tuple[object, jax.Array]:
        clipped, norm = clip_grad_norm(grads, bound)
        return jax.tree.map(lambda c, g: jax.numpy.where(norm > bound, c / 2, g), clipped, grads), norm

    monkeypatch.setattr(jaxtrain.step, "clip_grad_norm", halved)
    case = dataclasses.replace(mlp.case(), clip_norm=1e3)
    assert examine(case, steps=3).verdict.passed
    found = examine(case, steps=3, locate=True).verdict
    assert not found.passed
    assert found.faults[0].startswith("clip_norm ")
