"""The settings that every training run has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run: by default AdamW under a linear warm-up and a cosine decay to a tenth."""

    steps: int
    """Optimizer updates to make."""
    batch_size: int
    """Examples (sequences, images) to an update, all its micro-batches together."""
    lr: float
    """Peak learning rate."""
    data: Path | None = None
    """Your own data instead of the recipe's."""
    accumulate: int = 1
    """Micro-batches the batch is cut into, one after the other in memory."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "bf16_params"] = "fp32"
    """Dtype of matrix products and convolutions; master parameters are float32, but in bf16_params."""
    mesh: str | None = None
    """Devices to train on, as in "data=2,fsdp=4" (also tensor, sequence); None: one, or of several processes all."""
    remat: str = "none"
    """What blocks compute again: none; full; all but dots, dots_no_batch, names:A,B or offload:A,B."""
    unroll: bool = False
    """Compile the layers one by one: longer to compile, faster to run."""
    optimizer: str = "adamw"
    """One of jaxtrain.optim, alone or with its arguments, as in "sgd(momentum=0.9)"."""
    schedule: str = "warmup-cosine"
    """warmup-cosine, wsd, onecycle, linear, constant; or one of PyTorch's, as in "step_lr(lr=0.1, step_size=30)"."""
    warmup_steps: int = 20
    """Updates over which the learning rate rises from 0."""
    weight_decay: float = 0.1
    """The optimizer's decay, on matrices only."""
    beta2: float = 0.99
    """Adam's memory of squared gradients: short, for short runs."""
    clip_norm: float | None = 1.0
    """Bound on the global gradient norm."""
    loss_scale: str | None = None
    """What fp16 scales the loss by: "dynamic_loss_scale(growth_interval=500)", "static_loss_scale(scale=1024.0)"."""
    seed: int = 0
    """Of initial weights, data order and dropout."""
    log_every: int = 10
    """Updates between two lines of metrics.jsonl."""
    eval_every: int = 50
    """Updates between two evaluations."""
    histograms: bool = False
    """Show TensorBoard at each evaluation how the parameters are distributed."""
    save_every: int = 100
    """Updates between two checkpoints."""
    keep_last: int = 3
    """Checkpoints to keep: this many of the newest."""
    keep_best: int = 1
    """And this many of the lowest eval_loss, of those saved at an evaluation."""
    keep_every: int | None = None
    """And those of every so many updates."""
    allow_recompile: int = 0
    """How often a batch of another shape may make the step compile again."""
    max_skips: int = 100
    """Updates skipped in a row, their fp16 gradients inf or NaN, that end the run."""
    spike_factor: float | None = None
    """A loss of more than so many times the median of the last 64 is a spike; None: none is."""
    on_spike: Literal["stop", "rollback"] = "stop"
    """End the run, or go back to the last checkpoint and past the batches since."""
    stall_seconds: float = 600.0
    """After how long a wait for a batch to say so; 0: never."""
