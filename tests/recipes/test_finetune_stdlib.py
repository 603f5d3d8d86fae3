"""Fine-tuning on real data: the runs of the tutorial, for three seeds."""

import pytest

from docs.images import finetuning


@pytest.mark.nightly  # half an hour
def test_fine_tuning_lowers_the_loss_on_held_out_modules(tmp_path):
    finetuning.run(tmp_path / "runs")
    losses = finetuning.losses(tmp_path / "runs")
    for pretrained, lora, full in zip(losses["pretrained"], losses["LoRA"], losses["full"], strict=True):
        assert lora < pretrained - 0.4
        assert full < pretrained - 0.4
        assert lora < full + 0.1
