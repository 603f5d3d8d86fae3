"""Parts of PyTorch's side, and what a check does next, beside plain loops and recorded calls."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.optim import parse_expression, schedules
from parity import cli, pytest_plugin, run
from parity.cases import CASES, validity
from parity.cases.built_in import bert_case, mlp_case, t5_case
from parity.cases.named_outputs import named_outputs
from parity.compare.verdict import TensorRatio, Verdict
from parity.distributed import torch_ranks
from parity.distributed.mesh_training import Scaling, Training
from parity.distributed.overflow_case import overflowing_mlp
from parity.divergence import Divergence
from parity.explain import difference
from parity.explain.conventions.optimizers import Recipe
from parity.report import terminal
from parity.selftest import gpt2_check
from parity.settings import Settings
from parity.sides import torch_side
from parity.sides.torch_optimizers import base_rate, has_counterpart, torch_optimizer, torch_scheduler
from parity.unexercised.selections import Selections, caller
from tests.parity.mutants import attention


@contextmanager
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(torch_ranks.free_port()))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def test_one_rank_trains_as_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision, scaling in (("fp64", None), ("fp16", None), ("fp32", Scaling(8.0, 2))):
        case = overflowing_mlp(1e30) if precision == "fp16" else mlp_case.case(side=4, hidden=16)
        training = Training(lambda case=case: case, "data=1", None, precision, 2, 4, 3, scaling)  # type: ignore[misc]
        with one_rank(monkeypatch):
            (ours,) = torch_ranks._rank([training])  # type: ignore[misc]
        theirs = torch_side.run(case, precision, accumulate=2, steps=4, seed=3)
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-6)
        np.testing.assert_allclose(ours.grad_norms, theirs.grad_norms, rtol=1e-5)
        for name, x in theirs.last.params.items():
            np.testing.assert_allclose(ours.last.params[name], x, rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(ours.first.params[name], theirs.first.params[name], rtol=1e-5, atol=1e-7)
        assert not dist.is_initialized()
        assert ours.scales.tolist() == ([8, 8, 16, 16, 32] if scaling else theirs.scales.tolist())


def test_a_mesh_that_shards_layers_is_refused() -> None:
    with pytest.raises(UserError, match="'tensor=2' shards layers"):
        Training(mlp_case.case, "tensor=2", None)
    Training(mlp_case.case, "data=2", None)


def test_ranks_get_their_rows_of_each_micro_batch_and_one_image_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    batch = {"x": np.arange(12.0)}
    for rank, expected in ((0, [[0, 1, 2], [6, 7, 8]]), (1, [[3, 4, 5], [9, 10, 11]])):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        assert [x["x"].tolist() for x in torch_ranks._own_rows(batch, 2, "fp64")] == expected
    case = overflowing_mlp(7.5)
    images = [case.batch(seed, case.rows)["image"] for seed in range(60)]
    hit = [int((x == 7.5).sum()) for x in images]
    assert {*hit} == {0, 1}
    assert 0.15 < np.mean(hit) < 0.55
    plain = mlp_case.case(side=4, hidden=16).batch(0, case.rows)["image"]
    assert (images[0] == plain).sum() >= plain.size - 1
    assert all(x.reshape(case.rows, -1)[:, 1:].max() < 7 for x in images)


class Shared(nn.Module):
    """A layer that is used twice, with a buffer, a missing bias and an attribute."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = self.first
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("missing", None)
        self.scale = 3.0


def test_a_low_precision_copy_computes_the_gradients_of_the_float32_parameters() -> None:
    case = replace(CASES["mlp"](), buffers=None, state_like=None)
    model = Shared()
    weight = model.first.weight.detach().clone()
    copied = torch_side.LowPrecisionCopy(case, model, torch.bfloat16)
    masters = dict(copied.masters.named_parameters(remove_duplicate=False))
    assert copied.model is model
    assert {name: (x.dtype, x.requires_grad) for name, x in masters.items()} == {
        **dict.fromkeys(("first.weight", "second.weight"), (torch.float32, True)),
        "frozen": (torch.float32, False),
    }
    assert masters["first.weight"] is masters["second.weight"]
    assert torch.equal(masters["first.weight"], weight)
    assert copied.masters.scale == 3.0
    assert model.first.weight.dtype == torch.bfloat16
    with torch.no_grad():
        masters["first.weight"].fill_(1 + 2.0**-10)
    copied.round_params()
    assert (model.first.weight == 1).all()
    for times in (1, 2):
        model.first.weight.grad = torch.full((2, 2), 0.5, dtype=torch.bfloat16)
        model.count.fill_(times)
        copied.move_gradients()
        assert masters["first.weight"].grad is not None
        assert masters["first.weight"].grad.dtype == torch.float32
        assert masters["first.weight"].grad.tolist() == [[0.5 * times] * 2] * 2
        assert model.first.weight.grad is None
        assert masters["frozen"].grad is None
        assert dict(copied.masters.named_buffers())["count"].tolist() == [times] * 2


def rates(scheduler: Any, lr: float, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)
    made, found = scheduler(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


SCHEDULES = [
    "warmup_cosine(lr=0.4, warmup_steps=2, total_steps=6, final_lr=0.1)",
    "wsd(lr=0.4, warmup_steps=2, stable_steps=2, decay_steps=4, final_lr=0.1)",
    "wsd(lr=0.4, warmup_steps=1, stable_steps=0, decay_steps=3, decay='cosine')",
    "wsd(lr=0.4, warmup_steps=0, stable_steps=1, decay_steps=5, decay='1-sqrt')",
    "cosine_annealing_warm_restarts(lr=0.4, t_0=2, t_mult=2)",
    "cosine_annealing_lr(lr=0.4, t_max=3)",
    "one_cycle_lr(max_lr=0.4, total_steps=10)",
    "cyclic_lr(base_lr=0.1, max_lr=0.4, step_size_up=2)",
    "sequential(schedules=[constant_lr(lr=0.4, factor=0.5, total_iters=9), step_lr(lr=0.4, step_size=2)], "
    "milestones=[3])",
    "chained(schedules=[step_lr(lr=0.4, step_size=2), exponential_lr(lr=0.4, gamma=0.9)])",
]


def built(call: Any) -> Any:
    """Return the schedule of an expression."""
    if isinstance(call, list | tuple):
        return [built(x) for x in call]
    if not hasattr(call, "function"):
        return call
    return getattr(schedules, call.function)(**{name: built(x) for name, x in call.arguments.items()})


def test_schedules_of_pytorch_are_those_of_the_expression() -> None:
    for text in SCHEDULES:
        expression = parse_expression(f"sgd(learning_rate={text})")
        assert has_counterpart(expression)
        rate = expression.arguments["learning_rate"]  # type: ignore[union-attr]
        ours = [float(built(rate)(t)) for t in range(9)]
        theirs = rates(torch_scheduler(rate), base_rate(rate), 9)
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-8, err_msg=text)


def test_groups_of_parameters_have_the_hyperparameters_of_the_expression() -> None:
    a, b, c = (nn.Parameter(torch.ones(1)) for _ in range(3))
    named, paths = [("a", a), ("b", b), ("c", c)], {"a": "A", "b": "B"}
    expression = parse_expression("adamw(learning_rate=0.5, b1=0.8, weight_decay=0.3)")
    optimizer = torch_optimizer(expression, lambda path: path == "B", named, paths)
    groups = [([*map(id, group["params"])], group["weight_decay"]) for group in optimizer.param_groups]
    assert groups == [([id(a), id(c)], 0.3), ([id(b)], 0.0)]
    assert all(group["betas"] == (0.8, 0.999) and group["lr"] == 0.5 for group in optimizer.param_groups)
    alone = torch_optimizer(expression, lambda path: False, named, paths)
    assert [group["weight_decay"] for group in alone.param_groups] == [0.3]


def test_conventions_of_adagrad_nadam_radam_and_rprop_change_their_updates() -> None:
    def gradients(steps: int) -> list[list[float]]:
        return [[1.0, -2.0], [1.5, 1.0], [-1.0, 0.5], *([0.5, 0.25 * i] for i in range(steps))][:steps]

    def updates(kind: str, steps: int = 3, **options: Any) -> Any:
        given = {"b1": 0.9, "b2": 0.99, "eps": 1e-3, "weight_decay": 0.0, "decay": "coupled", **options}
        transformation = Recipe(kind, given, [0.5]).transformation()
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            p = jax.numpy.array([1.0, 2.0])
            state, found = transformation.init(p), []
            for gradient in gradients(steps):
                change, state = transformation.update(jax.numpy.array(gradient), state, p)
                found += np.asarray(change).tolist()
        return found

    def theirs(kind: str, steps: int = 3, **options: Any) -> Any:
        p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer, found = getattr(torch.optim, kind)([p], lr=0.5, **options), []
        for gradient in gradients(steps):
            p.grad, before = torch.tensor(gradient, dtype=torch.float64), p.detach().clone()
            optimizer.step()
            found += (p.detach() - before).tolist()
        return found

    adagrad: dict[str, Any] = {"lr_decay": 0.5, "initial_accumulator_value": 0.25, "eps": 1e-3}
    np.testing.assert_allclose(updates("Adagrad", **adagrad), theirs("Adagrad", **adagrad), rtol=1e-6)
    adam: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-3}
    np.testing.assert_allclose(
        updates("NAdam", momentum_decay=0.01), theirs("NAdam", momentum_decay=0.01, **adam), rtol=1e-6
    )
    np.testing.assert_allclose(updates("RAdam"), theirs("RAdam", **adam), rtol=1e-6)
    sizes: dict[str, Any] = {"etas": (0.6, 1.3), "step_sizes": (1e-3, 2.0)}
    rprop = Recipe("Rprop", {"lr": 0.5, "weight_decay": 0.0, "decay": "coupled", **sizes}, [1.0])
    assert rprop.transformation() is not None
    np.testing.assert_allclose(
        [x / 0.5 for x in updates("Rprop", lr=0.5, **sizes)], theirs("Rprop", **sizes), rtol=1e-6
    )
    waiting = updates("Rprop", lr=0.5, waits=True, **sizes)
    assert waiting[:2] == [0, 0] != updates("Rprop", lr=0.5, **sizes)[:2]
    late = [updates("RAdam", steps=9, **of)[-1] for of in ({}, {"eps_at": "corrected"})]
    assert late[0] == pytest.approx(theirs("RAdam", steps=9, **adam)[-1], rel=1e-6)
    assert abs(late[1] / late[0] - 1) > 1e-6
    plain = updates("NAdam", momentum_decay=None)
    m1, v1 = 0.1 * 1.0, 0.01 * 1.0
    first = (0.9 * m1 / (1 - 0.9**2) + 0.1 * 1.0 / (1 - 0.9)) / (math.sqrt(v1 / 0.01) + 1e-3)
    assert plain[0] == pytest.approx(-0.5 * first)


def test_the_options_of_long_attention_are_those_of_the_plain_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TOKENS": 6, "WINDOW": 3, "RATE": 0.0, "SEGMENTS": np.array([[0, 0, 0, 0, 1, 1]])}.items():
        monkeypatch.setattr(attention, name, value)
    model = attention.Attention().double()
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 6, 8)))
    found = model(x).detach().numpy()
    bias, sinks = np.linspace(-1, 1, 12).reshape(2, 6), np.array([0.5, 2.0])
    for row in range(2):
        for head in range(2):
            q = x[row, :, 4 * head : 4 * head + 4].numpy()
            for i in range(6):
                keys = [j for j in range(6) if 0 <= i - j < 3 and (i < 4) == (j < 4)]
                scores = np.array([2 * np.tanh(q[i] @ q[j] / 2) + bias[head, j] for j in keys])
                weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(sinks[head]))
                expected = (weights[:, None] * q[keys]).sum(0)
                np.testing.assert_allclose(found[row, i, 4 * head : 4 * head + 4], expected, rtol=1e-6)
    params = {name: p.numpy(force=True).astype(np.float32) for name, p in model.named_parameters()}
    ours = attention.attention_with_dropout({**params, "rng": jax.random.key(0)}, x.numpy().astype(np.float32))
    np.testing.assert_allclose(ours, found, rtol=1e-4, atol=1e-5)


def test_bugs_of_long_attention_change_what_both_passes_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    blockwise: Any = attention.blockwise
    for name in ("forward", "backward"):
        monkeypatch.setattr(blockwise, name, lambda *args, name=name, **blocks: (name, args, blocks))
    with attention.both_passes(lambda options, operands: (options + 1, operands * 2))():
        found = [getattr(blockwise, name)(1, "q", "k", "v", 5, size=3) for name in ("forward", "backward")]
        rest = blockwise.backward(1, "q", "k", "v", 5, "rest", size=3)
    given = (2, "q", "k", "v", 10)
    assert found == [(name, given, {"size": 3}) for name in ("forward", "backward")]
    assert rest == ("backward", (*given, "rest"), {"size": 3})


def test_batches_and_the_loss_of_t5_leave_out_what_is_padded() -> None:
    batch = t5_case._batch(0, 8, t5_case.CONFIG, t5_case.SOURCE, t5_case.TARGET)
    pad, tokens, labels = t5_case.CONFIG.pad_token_id, batch["tokens"], batch["labels"]
    assert [int((row != pad).sum()) for row in tokens] == 2 * [13, 11, 9, 7]
    assert [int((row[:4] != t5_case.IGNORE_INDEX).sum()) for row in labels] == 8 * [4]
    assert (labels[:, 4] == t5_case.IGNORE_INDEX).all()
    assert [int((row != t5_case.IGNORE_INDEX).sum()) for row in labels] == 2 * [11, 10, 9, 8]
    assert all((np.diff((row != pad).astype(int)) <= 0).all() for row in tokens)
    asked: dict[str, Any] = {}

    def model(tokens: Any, **given: Any) -> Any:
        asked.update(given)
        return SimpleNamespace(logits=torch.zeros(*given["labels"].shape, 5))

    given = {name: torch.from_numpy(np.where(x > 4, 4, x)) for name, x in batch.items()}
    total, weight = t5_case._torch_loss(model, given)  # type: ignore[arg-type]
    assert weight == int((labels != t5_case.IGNORE_INDEX).sum())
    assert total.item() == pytest.approx(weight * math.log(5), rel=1e-5)
    assert torch.equal(asked["attention_mask"], given["tokens"] != pad)
    model_of: Any = t5_case._torch_model(replace(t5_case.CONFIG, tie_word_embeddings=False))
    weight_of = model_of.lm_head.weight
    assert weight_of is not model_of.shared.weight
    assert t5_case.gated().name == "t5.gated"


def test_the_batches_of_the_selftest_are_those_of_its_recording() -> None:
    tokens = gpt2_check._batch(5, 2)["tokens"]
    assert tokens.tolist() == np.random.RandomState(5).randint(32, size=(2, 9)).tolist()
    case = gpt2_check.case()
    assert (case.rows, case.clip_norm, case.optimizer.lr, case.optimizer.eps) == (8, 0.6, 1e-3, 1e-5)  # type: ignore[union-attr]
    theirs: Any = case.torch_model()
    assert theirs.config.n_layer == 2


def examination(passed: bool = True, **of: Any) -> Any:
    verdict = Verdict(0.0, 0.0, "w", 0.0, None, () if passed else ("loss: 1",), **of)
    return SimpleNamespace(verdict=verdict)


def test_a_verdict_lists_its_faults_and_where_they_are() -> None:
    found = Divergence("forward", 1, "fc: mm", "a.py:1", "b.py:2", "", (), None, None, torch_built="T", jax_built="J")
    verdict = Verdict(0.0, 0.0, "w", 0.0, None, ("f",), first_divergence=found, stage="s", diagnosis="d", unlocated="u")
    assert verdict.lines == [
        *("f", "stage: s", "in PyTorch: fc: mm", "in JAX: b.py:2", "PyTorch's module: T", "assigned in JAX: J"),
        *("not located: u", "diagnosis: d"),
    ]
    shown = terminal.divergence(replace(found, parameters=tuple("abcdef"))).plain.splitlines()
    assert next(line.split("  ")[1:] for line in shown) == ["forward of step 1", "fc: mm"]
    assert shown[-1].split() == ["wrong", "gradients", "a,", "b,", "c,", "d,", "2", "more"]
    assert replace(verdict, first_divergence=None, stage=None, unlocated=None, diagnosis=None).lines == ["f"]
    tensors = tuple(TensorRatio(name, ratio, bar, 9) for name, ratio, bar in (("a", 3, 2), ("b", 8, 9), ("c", 1, 1)))
    worst = replace(verdict, tensors=tensors).worst_tensor
    assert worst is not None
    assert worst.what == "a"
    assert verdict.worst_tensor is None


def test_assert_matches_raises_with_the_lines_and_the_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def examine(case: Any, precision: str, **settings: Any) -> Any:
        given.append((precision, settings))
        return SimpleNamespace(verdict=examination(passed=precision == "fp64").verdict, notes=("a note",))

    monkeypatch.setattr(run, "examine", examine)
    case = CASES["mlp"]()
    run.assert_matches(case, "fp64", steps=2)
    with pytest.raises(AssertionError, match="mlp in bf16 differs from PyTorch\nloss: 1\na note"):
        run.assert_matches(case, "bf16")
    assert given == [("fp64", {"locate": True, "steps": 2}), ("bf16", {"locate": True})]


def test_a_difference_in_low_precision_is_placed_in_float64_or_its_first_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, settings, low = CASES["mlp"](), Settings(remat="full"), examination(passed=False).verdict
    exact = replace(examination(passed=False).verdict, stage="update: 1", diagnosis="d", unlocated="u")
    verdicts = {"fp64": exact}

    def check(case: Any, precision: str = "fp64", *, locate: bool = False, **given: Any) -> Any:
        if precision != "fp64":
            return examination(passed=given["remat"] == "none").verdict
        assert locate
        return verdicts["fp64"]

    monkeypatch.setattr(run, "check", check)
    monkeypatch.setattr("parity.compare.activations.activations", lambda *args, **options: options)
    placed = run._explained_low(case, "bf16", low, settings)
    assert (placed.stage, placed.diagnosis, placed.unlocated) == ("in fp64 as well: update: 1", "d", "u")
    verdicts["fp64"] = examination(passed=True).verdict
    found = Divergence("forward", 1, "fc", "", "", "", (), None, None)
    monkeypatch.setattr("parity.compare.activations.first_imprecise", lambda values: found)
    assert run._explained_low(case, "bf16", low, settings).first_divergence is found
    monkeypatch.setattr("parity.compare.activations.first_imprecise", lambda values: None)
    arises = "agrees with remat none: the difference arises only with remat full"
    assert run._explained_low(case, "bf16", low, settings).unlocated == f"agrees in fp64, differs in bf16: {arises}"
    precise = "agrees in fp64, differs in bf16: every module's first output is as precise as PyTorch's"
    assert run._explained_low(case, "bf16", low, Settings(accumulate=1, remat="none")).unlocated == precise


def test_a_batch_of_other_things_than_arrays_by_name_is_refused() -> None:
    validity.check_batch({"x": np.ones((2, 3)), "y": np.array([True, False])}, 2)
    for batch, line in (
        ({}, "an empty batch"),
        ([np.ones(2)], "returned list"),
        ({"x": [1, 2]}, "x of the batch is a list"),
        ({"x": np.array(["a", "b"])}, "x of the batch is an array of <U1"),
        ({"x": np.ones(3)}, r"has the shape \[3\]"),
        ({"x": np.ones(())}, r"has the shape \[\]"),
    ):
        with pytest.raises(UserError, match=line):
            validity.check_batch(batch, 2)


def test_the_dropout_rates_of_bert_are_different() -> None:
    config = bert_case._dropping(bert_case.BertConfig(), 0.4)
    rates = (config.hidden_dropout_prob, config.attention_probs_dropout_prob, config.classifier_dropout)
    assert (len({*rates}), max(rates)) == (3, 0.4)


def test_results_are_named_by_keys_places_and_fields() -> None:
    from torch.nn.utils.rnn import pack_padded_sequence

    x = np.ones(2)
    assert [*named_outputs(x)] == [""]
    assert [*named_outputs({"a": [x, (x, None)], "b": {"c": x, "d": 3, "e": "text", "f": 1j, "g": True}})] == [
        *("a/0", "a/1/0", "b/c")
    ]
    given = examination(passed=True).verdict
    assert named_outputs(replace(given, stage=x))["stage"] is x
    assert named_outputs(type(given)) == {}
    assert named_outputs(object()) == {}
    packed = pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 2]), batch_first=True)
    assert [*named_outputs(packed)][:2] == ["0", "1"]


def test_selections_that_took_one_side_have_a_line() -> None:
    selections = Selections()
    assert not selections.one_sided
    selections.add("a", "f.py", 1, np.array([True, False]))
    selections.add("b", "f.py", 2, np.array([False]))
    selections.add("b", "f.py", 2, np.array([False, False]))
    selections.add("c", "f.py", 3, np.array([True]))
    assert selections.one_sided
    assert [*selections.lines()] == ["b is False throughout: f.py:2", "c is True throughout: f.py:3"]
    selections.add("b", "f.py", 2, np.array([True]))
    selections.add("c", "f.py", 3, np.array([False]))
    assert not selections.one_sided
    import sys

    here = caller(sys._getframe(0), ())
    assert here is not None
    assert here[0] == __file__
    assert caller(sys._getframe(0), (__file__,)) != here
    assert caller(None, ()) is None


def row(name: str, precision: str, passed: bool, **of: Any) -> dict[str, Any]:
    return {"name": name, "precision": precision, "accumulate": 4, "passed": passed, **of}


def test_the_summary_of_marked_tests_lists_the_failed_ones_last(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row("long-name", "fp64", False, grad_rel_max=None),
        row("a", "bf16", True, error_ratio=1.25),
        row("b", "fp64_fp8", True, grad_rel_max=3e-16),
    ]
    assert pytest_plugin._lines(rows) == [
        "a          bf16      k=4  1.25 × PyTorch's error  held",
        "b          fp64_fp8  k=4  gradients 3.0e-16 apart  held",
        "long-name  fp64      k=4  gradients nan apart  DIFFERS",
    ]
    written = tmp_path / "rows.json"
    summary = pytest_plugin._Summary(written)
    lines: list[str] = []
    reporter = SimpleNamespace(section=lines.append, write_line=lines.append)
    summary.pytest_terminal_summary(reporter)
    summary.pytest_sessionfinish()
    assert not lines
    assert not written.exists()
    for when in ("setup", "call"):
        report = SimpleNamespace(when=when, user_properties=[("other", 1), ("parity", rows[1])])
        summary.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    monkeypatch.setattr("parity.report.document_of_rows", lambda rows: {"rows": len(rows)})
    summary.pytest_terminal_summary(reporter)
    summary.pytest_sessionfinish()
    assert lines[0] == "parity"
    assert len(lines) == 2
    assert written.read_text() == '{\n  "rows": 1\n}\n'
    monkeypatch.setattr(
        pytest_plugin, "_checked", lambda case, precision, settings: ({"p": precision}, settings["faults"])
    )
    case = CASES["mlp"]()

    def called(returned: Any, **kwargs: Any) -> Any:
        marker = SimpleNamespace(kwargs=kwargs)
        item = SimpleNamespace(
            get_closest_marker=lambda name: marker if kwargs else None,
            _fixtureinfo=SimpleNamespace(argnames=("a",)),
            funcargs={"a": returned, "b": 2},
            obj=lambda a: a,
            name="test_x",
            user_properties=[],
        )
        return pytest_plugin.pytest_pyfunc_call(item), item.user_properties  # type: ignore[arg-type]

    assert called(case) == (None, [])
    assert called(case, faults=[]) == (True, [("parity", {"p": "fp64"})])
    both = called(case, faults=[], precision=["fp32", "bf16"])
    assert both == (True, [("parity", {"p": "fp32"}), ("parity", {"p": "bf16"})])
    with pytest.raises(pytest.fail.Exception, match="mlp fp64: wrong\nmlp fp64: worse"):
        called(case, faults=["wrong", "worse"])
    with pytest.raises(pytest.fail.Exception, match="test_x returned int"):
        called(7, faults=[])


def test_the_lines_of_a_check_follow_its_order() -> None:
    verdict = Verdict(
        *(0.0, 0.0, "w", 0.0, 1.0, ("fault 1", "fault 2")),
        tensors=(TensorRatio("gradient of w", 9, 2, 3),),
        stage="a stage",
        diagnosis="a diagnosis",
    )
    examined = SimpleNamespace(verdict=verdict, notes=("n",), not_exercised=("m",))
    console, options = (
        Console(file=io.StringIO(), record=True, width=150, highlight=False),
        SimpleNamespace(dropout=0.5),
    )
    timed: Any = cli._timed
    result = timed(CASES["mlp"](), "bf16", Settings(), options, console, lambda *args: examined)
    first, *lines = console.export_text().splitlines()
    assert first.startswith("mlp bf16 differs in 0")
    assert [line.strip() for line in lines] == [
        *("fault 1", "fault 2", f"worst tensor: {verdict.worst_tensor}", "note: n", "not exercised: m", "a stage"),
        "a diagnosis",
    ]
    assert result.verdict is verdict


def test_a_difference_is_placed_by_location_chaos_stages_and_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    case, other = CASES["mlp"](), CASES["cnn"]()
    where: dict[str, Any] = {"torch": "fc", "torch_source": "", "jax_source": "", "last_match": ""}
    at = partial(Divergence, "forward", **where, parameters=(), torch_at=None, jax_at=None)
    asked: list[Any] = []
    located: dict[str, Any] = {"mlp": at(step=1, position=3), "cnn": at(step=2, position=1)}

    def locate(case: Any, *, seed: int, steps: int | None = None) -> Any:
        asked.append((case.name, seed, steps))
        return located[case.name]

    chaos: list[str | None] = [None]
    monkeypatch.setattr("parity.explain.locate.locate", locate)
    monkeypatch.setattr("parity.explain.stages.run_stages", lambda case, **given: SimpleNamespace(stages=[], case=case))
    monkeypatch.setattr("parity.explain.stages.at_fault", lambda stages: None)
    monkeypatch.setattr("parity.explain.stages.blame", lambda stages, stage: None)
    monkeypatch.setattr("parity.explain.diagnose.diagnose", lambda run, found: f"{run.case.name} convention")
    monkeypatch.setattr(difference, "_chaos", lambda *args: chaos[0])
    monkeypatch.setattr(difference, "arises", lambda settings, holds: None)
    ours = SimpleNamespace(losses=np.ones(3))
    examined: Any = SimpleNamespace(verdict=examination(passed=False).verdict, ours=ours)
    settings = Settings(accumulate=1, remat="none", steps=50, seed=4)
    found = difference.explain([case, other], examined, settings)
    assert found.first_divergence is located["cnn"]
    assert (found.diagnosis, found.stage, found.unlocated) == ("cnn convention", None, None)
    assert asked == [("mlp", 4, None), ("cnn", 4, None)]
    located |= {"mlp": None, "cnn": None}
    late = difference.explain([case], examined, settings)
    assert asked[-1] == ("mlp", 4, difference.JUDGED)
    assert late.unlocated == f"no operation differs in {difference.JUDGED} steps: the difference arises later"
    assert difference.explain([case], examined, replace(settings, steps=difference.JUDGED)).unlocated is None
    chaos[0] = "chaos"
    asked.clear()
    assert difference.explain([case], examined, settings).unlocated == "chaos"
    assert len(asked) == 1
    one: Any = SimpleNamespace(verdict=examined.verdict, ours=SimpleNamespace(losses=np.ones(1)))
    assert difference.explain([case], one, replace(settings, steps=1)).unlocated is None
