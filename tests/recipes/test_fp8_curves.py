"""`gpt-stdlib` trains in fp8 as in bf16, within the noise of seeds."""

import json

import numpy as np
import pytest

from docs.images.fp8 import COLORS, RESULTS, RESULTS_OF_RECIPE, compare, final_losses, run

SEEDS = range(5)
SIZE = "--n-layer 2 --n-embd 64 --seq-len 64 --steps 150 --eval-every 150 --eval-sequences 1024"
MARGIN = 0.03
"""Nats per byte within which the 95% interval of the difference of the mean losses must lie: about 1% of the loss."""


def assert_within_the_noise_of_seeds(found):
    assert found["p_welch"] > 0.05, found
    assert -MARGIN < found["least"] < found["most"] < MARGIN, found


def test_the_published_statistics_follow_from_the_published_curves():
    published = json.loads(RESULTS.read_text())
    bf16, fp8 = final_losses(published["curves"])
    assert {len(runs) for runs in published["curves"].values()} == {10}
    found = compare(bf16, fp8)
    assert found == pytest.approx(published["comparison"], rel=1e-6)
    assert_within_the_noise_of_seeds(found)
    assert_within_the_noise_of_seeds(compare(bf16[:5], fp8[:5]))
    # A difference of two standard deviations of the seeds would be found with five of them.
    with pytest.raises(AssertionError):
        assert_within_the_noise_of_seeds(compare(bf16[:5], fp8[:5] + 2 * found["seed_sd"]))


def test_the_published_statistics_of_the_recipe_follow_from_its_curves():
    published = json.loads(RESULTS_OF_RECIPE.read_text())
    bf16, fp8 = final_losses(published["curves"])
    assert len(bf16) == len(fp8) >= 5
    assert "--n-layer" not in published["flags"]
    assert compare(bf16, fp8) == pytest.approx(published["comparison"], rel=1e-6)
    for n in (5, len(bf16)):
        assert compare(bf16[:n], fp8[:n])["p_welch"] > 0.05


@pytest.mark.nightly
def test_losses_in_fp8_are_within_the_noise_of_seeds(tmp_path):
    curves = {precision: [run(tmp_path, precision, seed, SIZE) for seed in SEEDS] for precision in COLORS}
    found = compare(*final_losses(curves))
    assert np.isfinite([*found.values()]).all()
    assert_within_the_noise_of_seeds(found)
