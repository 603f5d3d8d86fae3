"""Conditions that no batch meets are reported, and batches that meet them are generated."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from parity.cases import CASES
from parity.unexercised.conditions import ConditionCounter, cases_that_meet, count_conditions, unmet_conditions


def test_every_condition_is_counted() -> None:
    x = torch.tensor([[0.0, 2.0, 2.0], [-1.0, 0.0, 1.0]])
    hidden = torch.tensor([[True, True, False], [True, True, True]])
    with ConditionCounter() as counter:
        F.cross_entropy(x, torch.tensor([-100, 1]))
        F.nll_loss(x.log_softmax(-1), torch.tensor([7, 7]), ignore_index=7)
        x.masked_fill(~hidden, 0.0)
        q = torch.ones(1, 1, 2, 4)
        F.scaled_dot_product_attention(q, torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), attn_mask=hidden)
        F.relu(x), torch.relu(x), x.relu()
        F.hardtanh(x), F.leaky_relu(x), x.abs()
        x.clamp(min=-1.0, max=2.0)
        torch.clamp(x, 0.0)
        x.amax(-1), torch.max(x, 1), x.max(), torch.topk(x, 1)
    assert dict(counter.met) == {
        "label ignored": 3,
        "position masked": 2,
        "input of relu at 0": 6,
        "input of hardtanh at a bound": 2,
        "input of leaky_relu at 0": 2,
        "input of abs at 0": 2,
        "input of clamp at a bound": 5,
        "tie in amax": 1,
        "tie in max": 2,
        "tie in topk": 1,
    }
    assert counter.ignore_index == 7


def test_attention_without_a_boolean_mask_is_not_counted() -> None:
    q = torch.ones(1, 1, 2, 4)
    with ConditionCounter() as counter:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(2, 2))
    assert not counter.met


def test_a_condition_that_is_met_is_not_reported() -> None:
    case = CASES["mlp"]()

    def some_ignored(seed: int, rows: int) -> dict[str, np.ndarray]:
        batch = dict(case.batch(seed, rows))
        batch["label"] = np.where(np.arange(rows) == 1, -100, batch["label"])
        return batch

    assert "no label was ignored" in unmet_conditions(case)
    assert "no label was ignored" not in unmet_conditions(dataclasses.replace(case, batch=some_ignored))


def test_some_labels_are_ignored_and_others_unchanged() -> None:
    case = CASES["cnn"]()
    ((expected, changed),) = cases_that_meet(case)
    assert expected == "every third of label -100"
    assert count_conditions(changed).met["label ignored"] == -(-case.rows // 3)
    before, after = case.batch(3, 8), changed.batch(3, 8)
    np.testing.assert_array_equal(after["image"], before["image"])
    np.testing.assert_array_equal(after["label"][[1, 2, 4, 5, 7]], before["label"][[1, 2, 4, 5, 7]])
    # GPT-2's tokens are inputs too, which cannot be -100.
    assert [*cases_that_meet(CASES["gpt2"]())] == []


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_])
def test_a_mask_that_hides_nothing_is_named_and_made_ragged(dtype: type) -> None:
    case = CASES["mlp"]()

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return (model(batch["image"]).sum(1) * batch["mask"].sum(1)).sum(), len(batch["label"])

    def full(seed: int, rows: int) -> dict[str, np.ndarray]:
        return {**case.batch(seed, rows), "mask": np.ones((rows, 4), dtype)}

    masked = dataclasses.replace(case, torch_loss=loss, batch=full)
    expected = "True" if dtype == np.bool_ else "1.0" if dtype == np.float32 else "1"
    assert unmet_conditions(masked)[0] == f"mask is {expected} throughout"
    ((what, changed),) = cases_that_meet(masked)
    assert what == "mask 0 at the ends of rows"
    mask = changed.batch(0, 5)["mask"]
    assert mask.dtype == dtype
    np.testing.assert_array_equal(mask.sum(1), [4, 3, 2, 4, 3])
    assert (np.diff(mask.astype(int)) <= 0).all()


def test_a_batch_that_the_model_refuses_is_logged_and_a_bug_in_the_harness_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES["cnn"]()

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        if batch["label"].min() < 0:
            raise IndexError("target -100 is out of bounds")
        return case.torch_loss(model, batch)

    with caplog.at_level("INFO", "parity.unexercised.conditions"):
        assert [*cases_that_meet(dataclasses.replace(case, torch_loss=loss))] == []
    (line,) = caplog.messages
    assert line == "cnn, every third of label -100: refused by PyTorch: IndexError: target -100 is out of bounds"
    monkeypatch.setattr("parity.unexercised.conditions._every_third", lambda value: lambda x: {}["a bug of ours"])
    with pytest.raises(KeyError, match="a bug of ours"):
        [*cases_that_meet(case)]
