"""The GAN: the parameters that each step updates, and their gradients."""

from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np

from jaxtrain.data.batches import training_batches
from tests.examples.test_examples import tiny

RING = "gan.py::Ring"


def test_even_steps_update_the_discriminator_and_odd_steps_the_generator(chain):
    run = chain(RING)
    names = ["discriminator", "generator"]
    for step, (before, after) in enumerate(pairwise(run.params)):
        different = jax.tree.map(lambda one, two: bool((one != two).any()), before, after)
        assert [name for name in names if any(jax.tree.leaves(different[name]))] == [names[step % 2]]
    moments = run.whole.state.opt_state
    counts = [
        int(leaf) for path, leaf in jax.tree.leaves_with_path(moments) if jax.tree_util.keystr(path).endswith(".count")
    ]
    assert counts == [3, 3]


def test_the_sum_of_the_losses_has_the_gradients_of_each():
    task = replace(tiny(RING), seed=3).task()
    batch, rng = next(training_batches(task.train, 16, 0)), jax.random.key(1)
    grads = jax.grad(lambda params: task.loss_fn(params, batch, rng)[0].total)(task.params)
    for name in ("generator", "discriminator"):
        alone = jax.grad(lambda part, name: task.loss_fn({**task.params, name: part}, batch, rng)[1][name].total)(
            task.params[name], name
        )
        jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7), grads[name], alone)
