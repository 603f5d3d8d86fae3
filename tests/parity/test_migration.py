"""A run of GPT-2 with AdamW, OneCycleLR, GradScaler and accumulation continues in the other framework."""

from contextlib import nullcontext
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import jaxtrain as jt
import parity
from jaxtrain.interop.torch_file import read_torch, write_torch
from jaxtrain.interop.torch_run import to_torch, torch_run
from parity.bars import FIRST_BAR, LAST_BAR, RATIO_BAR
from parity.cases.built_in import gpt2_case, migration_case
from parity.compare.verdict import relative
from parity.sides.jax_side import arrays
from parity.sides.torch_side import model_of

STOPPED, LAST, K = 50, 100, 4
CONFIG = replace(gpt2_case.CONFIG, n_layer=1, n_embd=16, n_head=2, vocab_size=31)
CASE = gpt2_case.case(CONFIG, reference=CONFIG, rows=8)
BATCHES = list(CASE.batches(0, LAST))


@pytest.fixture(autouse=True, scope="module")
def on_one_thread():
    """Use one thread, as for so small a model PyTorch's threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Script:
    """A training script as PyTorch's users write it; `losses` and `scales` of its steps."""

    def __init__(self, dtype=torch.float32, low=None):
        self.model = model_of(CASE).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), eps=1e-5, weight_decay=0.1)
        self.scheduler = OneCycleLR(self.optimizer, 1e-2, total_steps=LAST + 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=12)
        self.low, self.losses, self.scales = low, [], []

    def train(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            window = 0.0
            for tokens in torch.from_numpy(batch["tokens"]).chunk(K):
                with torch.autocast("cpu", self.low) if self.low else nullcontext():
                    total, weight = CASE.torch_loss(self.model, {"tokens": tokens})
                    loss = total / weight / K
                self.scaler.scale(loss).backward()
                window += loss.item()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CASE.clip_norm)
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.get_scale() >= before:
                self.scheduler.step()
            self.losses.append(window)
            self.scales.append(self.scaler.get_scale())
        return self

    def parts(self):
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler")}

    def save(self, path):
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, path)
        return path

    def load(self, path):
        saved = torch.load(path, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])
        return self

    def params(self):
        return {name: p.detach().double().numpy().copy() for name, p in self.model.named_parameters()}

    def moments(self):
        named = dict(self.model.named_parameters())
        return {
            key: {name: self.optimizer.state[p][key].double().numpy().copy() for name, p in named.items()}
            for key in ("exp_avg", "exp_avg_sq")
        }


def in_jax(path, precision, batches):
    """Continue a checkpoint in JAX; return its run, its state after `batches`, losses and scales."""
    dtype = np.float64 if precision == "fp64" else np.float32
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), CASE.params_like)
    run = torch_run(read_torch(path), CASE.names, like)
    step = jt.train_step(
        CASE.loss_fn,
        run.optimizer(),
        precision=precision,
        accumulate=K,
        clip_norm=CASE.clip_norm,
        loss_scale=run.loss_scale(),
    )
    state, losses, scales = run.state(step, accumulate=K), [], []
    for batch in batches:
        state, metrics = step(state, arrays(batch, precision))
        losses.append(float(metrics["loss"]))
        scales.append(float(state.loss_scale.scale))
    return run, state, losses, scales


def save(run, state, path):
    write_torch(path, to_torch(state, run.metadata, run.expression, run.names))
    return path


def worst(ours, theirs):
    return max(relative(ours, theirs).values())


def assert_equal_to(ours, theirs, bar):
    assert worst(ours.params(), theirs.params()) < bar
    for key, moments in theirs.moments().items():
        assert worst(ours.moments()[key], moments) < bar, key
    assert ours.scaler.state_dict() == theirs.scaler.state_dict()
    ours, theirs = ours.scheduler.state_dict(), theirs.scheduler.state_dict()
    assert ours == {**theirs, "_last_lr": pytest.approx(theirs["_last_lr"], rel=1e-12)}


def test_both_directions_equal_the_uninterrupted_run_in_float64(tmp_path):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        whole = Script(torch.float64).train(BATCHES[:STOPPED])
        half = whole.save(tmp_path / "half.pt")
        whole.train(BATCHES[STOPPED : STOPPED + 1])
        after_one = Script(torch.float64).load(whole.save(tmp_path / "after_one.pt"))
        whole.train(BATCHES[STOPPED + 1 :])

        run, state, losses, _ = in_jax(half, "fp64", BATCHES[STOPPED : STOPPED + 1])
        first = Script(torch.float64).load(save(run, state, tmp_path / "first.pt"))
        assert losses[0] == pytest.approx(whole.losses[STOPPED], rel=FIRST_BAR)
        assert_equal_to(first, after_one, FIRST_BAR)

        run, state, losses, scales = in_jax(half, "fp64", BATCHES[STOPPED:])
        np.testing.assert_allclose(losses, whole.losses[STOPPED:], rtol=LAST_BAR)
        assert scales == whole.scales[STOPPED:]
        assert len(set(whole.scales[:STOPPED])) > 1
        assert len(set(scales)) > 1
        assert_equal_to(Script(torch.float64).load(save(run, state, tmp_path / "last.pt")), whole, LAST_BAR)

        # JAX from the start, PyTorch from half-way on.
        start = Script(torch.float64).save(tmp_path / "start.pt")
        run, state, losses, _ = in_jax(start, "fp64", BATCHES[:STOPPED])
        np.testing.assert_allclose(losses, whole.losses[:STOPPED], rtol=LAST_BAR)
        back = Script(torch.float64).load(save(run, state, tmp_path / "back.pt")).train(BATCHES[STOPPED:])
        np.testing.assert_allclose(back.losses, whole.losses[STOPPED:], rtol=LAST_BAR)
        assert_equal_to(back, whole, LAST_BAR)


def test_in_fp16_jax_continues_as_accurately_as_pytorch(tmp_path):
    whole = Script(low=torch.float16).train(BATCHES[:STOPPED])
    half = whole.save(tmp_path / "half.pt")
    theirs = whole.train(BATCHES[STOPPED:])
    truth = Script(torch.float64).load(half).train(BATCHES[STOPPED:])
    run, state, losses, scales = in_jax(half, "fp16", BATCHES[STOPPED:])
    ours = Script().load(save(run, state, tmp_path / "last.pt"))
    assert scales == theirs.scales[STOPPED:] == truth.scales

    def distances(script, losses):
        apart = [script.params()[name] - p for name, p in truth.params().items()]
        return np.linalg.norm(np.subtract(losses, truth.losses)), np.sqrt(sum((x**2).sum() for x in apart))

    pairs = zip(distances(ours, losses), distances(theirs, theirs.losses[STOPPED:]), strict=True)
    for jax_distance, torch_distance in pairs:
        assert 0 < jax_distance <= RATIO_BAR * torch_distance


@pytest.fixture(scope="module")
def case():
    return migration_case.case(rows=8)


@pytest.mark.parametrize(("precision", "steps"), [("fp64", 20), pytest.param("bf16", 4, marks=pytest.mark.nightly)])
def test_the_case_continues_where_pytorch_stopped(case, precision, steps):
    assert parity.check(case, precision, accumulate=2, steps=steps).passed


def test_a_perturbed_moment_is_detected(case):
    perturbing = optax.GradientTransformation(
        lambda p: perturbed(case.optimizer.jax.init(p)), case.optimizer.jax.update
    )
    verdict = parity.check(replace(case, optimizer=replace(case.optimizer, jax=perturbing)), steps=1)
    assert any(fault.startswith("exp_avg_sq after the first update") for fault in verdict.faults)


def perturbed(state):
    adam, *rest = state
    return adam._replace(nu=jax.tree.map(lambda v: v * (1 + 1e-8), adam.nu)), *rest
