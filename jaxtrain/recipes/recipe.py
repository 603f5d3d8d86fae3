"""The settings common to all training runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run; by default AdamW with linear warmup and cosine decay to a tenth of the peak learning rate."""

    steps: int
    """Number of optimizer updates."""
    batch_size: int
    """Examples (sequences, images) per update, over all its micro-batches."""
    lr: float
    """Peak learning rate."""
    data: Path | None = None
    """Path of your own data, instead of the recipe's."""
    accumulate: int = 1
    """Number of micro-batches per update, processed one after another to save memory."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "bf16_params"] = "fp32"
    """Dtype of matrix products and convolutions; parameters are float32, except with bf16_params."""
    mesh: str | None = None
    """Device mesh, such as "data=2,fsdp=4" (also tensor, sequence); None: one device, or all of several processes."""
    remat: str = "none"
    """Rematerialization of blocks: none, full, or all but dots, dots_no_batch, names:A,B or offload:A,B."""
    unroll: bool = False
    """Unroll the loop over layers: slower to compile, faster to run."""
    optimizer: str = "adamw"
    """Optimizer of jaxtrain.optim, with or without arguments, such as "sgd(momentum=0.9)"."""
    schedule: str = "warmup-cosine"
    """warmup-cosine, wsd, onecycle, linear, constant, or a PyTorch schedule such as "step_lr(lr=0.1, step_size=30)"."""
    warmup_steps: int = 20
    """Number of updates over which the learning rate rises from 0."""
    weight_decay: float = 0.1
    """Weight decay of the optimizer, applied to matrices only."""
    beta2: float = 0.99
    """Adam's decay rate of the second moment; the default suits short runs."""
    clip_norm: float | None = 1.0
    """Maximum global gradient norm; None disables clipping."""
    loss_scale: str | None = None
    """Loss scale for fp16: "dynamic_loss_scale(growth_interval=500)", "static_loss_scale(scale=1024.0)"."""
    seed: int = 0
    """Seed of initial parameters, data order and dropout."""
    log_every: int = 10
    """Write a line of metrics.jsonl every n updates."""
    eval_every: int = 50
    """Evaluate every n updates."""
    histograms: bool = False
    """Write histograms of the parameters to TensorBoard at each evaluation."""
    save_every: int = 100
    """Save a checkpoint every n updates."""
    keep_last: int = 3
    """Number of newest checkpoints to keep."""
    keep_best: int = 1
    """Also keep the n checkpoints with the lowest eval_loss, of those saved at an evaluation."""
    keep_every: int | None = None
    """Also keep the checkpoints at multiples of this number of updates."""
    allow_recompile: int = 0
    """Number of times the step may be recompiled for a batch of another shape."""
    max_skips: int = 100
    """Stop after this many consecutive updates skipped because of inf or NaN in fp16 gradients."""
    spike_factor: float | None = None
    """A loss above this multiple of the median of the last 64 is a spike; None disables the check."""
    on_spike: Literal["stop", "rollback"] = "stop"
    """On a spike, stop the run, or return to the last checkpoint and skip the batches since."""
    stall_seconds: float = 600.0
    """Warn when a batch takes longer than this many seconds; 0 disables the warning."""
