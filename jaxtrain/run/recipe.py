"""The settings of a training run."""

import inspect
import threading
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import optax

from jaxtrain.errors import UserError
from jaxtrain.fields import LARGEST, Bound, Count, CountOrZero, NotNegative, Positive, Rate
from jaxtrain.run.task import Task

Precision = Literal[
    "fp32",
    "tf32",
    "bf16",
    "fp16",
    "bf16_compute",
    "bf16_params",
    "bf16_params_stochastic",
    "bf16_params_kahan",
    "fp8",
    "fp8_delayed",
    "fp8_row",
    "fp8_block",
]
"""The precisions of a run."""

_DECAY = Bound(lambda x: 0 <= x < 1, "be in [0, 1)", "0.999 averages about the last 1000 updates")
_SPIKE = Bound(lambda x: 1 < x <= LARGEST, "be > 1, for example 10")
_STALL = Bound(lambda x: 0 <= x <= threading.TIMEOUT_MAX, "be at least 0", "0 never warns")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run: its settings, and `task`, which makes its data, model and loss.

    Subclass it as a frozen, keyword-only dataclass. The fields of both are flags of the command line and are written to
    config.json, so they are numbers, strings, booleans, paths and None. By default the optimizer is AdamW with linear
    warmup and cosine decay to a tenth of the peak learning rate; a subclass may define `make_optimizer`, which
    removes the flag `--optimizer`.

    Example:
      >>> import jax.numpy as jnp, jaxtrain as jt, numpy as np, optax
      >>> @dataclass(frozen=True, kw_only=True)
      ... class Line(Recipe):
      ...     width: int = 1
      ...
      ...     def task(self):
      ...         x = np.ones((8, self.width), np.float32)
      ...         return jt.Task(
      ...             init=lambda: {"w": jnp.zeros(self.width)},
      ...             loss_fn=lambda params, batch, rng: (jt.Loss.of((batch["x"] @ params["w"] - batch["y"]) ** 2), {}),
      ...             train={"x": x, "y": x.sum(1)},
      ...         )
      ...
      ...     def make_optimizer(self):
      ...         return optax.sgd(self.lr)
      >>> Line(width=2).task().params
      {'w': Array([0., 0.], dtype=float32)}
    """

    steps: Count = 1000
    """Number of optimizer updates."""
    batch_size: Count = 32
    """Examples (sequences, images) per update, over all its micro-batches."""
    lr: Positive = 1e-3
    """Peak learning rate."""
    accumulate: Count = 1
    """Number of micro-batches per update, processed one after another to save memory."""
    precision: Precision = "fp32"
    """Dtype of matrix products and convolutions, and with bf16_compute and bf16_params of all activations; parameters
    are float32, except with bf16_params, which rounds them to nearest, stochastically or with Kahan compensation. In
    fp8 only products with a kernel are in 8 bits, all others in bf16."""
    fp8_exclude: str | None = None
    """In fp8, kernels whose products are in bf16: patterns of their paths, such as "head/*"; None: output heads."""
    mesh: str | None = None
    """Device mesh, such as "data=2,fsdp=4" (dcn, pipeline, sequence, tensor); None: one device, or all of several
    processes."""
    gradient_sums: Literal["whole", "sharded"] = "whole"
    """Along fsdp, what a device keeps of the gradients between micro-batches: whole sums of its own rows', added over
    devices once an update, or its part of the sums over all rows, added in every micro-batch to save memory."""
    reshard_after: Literal["forward", "window"] = "forward"
    """Along fsdp, how long a device keeps gathered parameters: for a layer's forward pass, and again for its backward
    pass, or for all micro-batches of an update."""
    pipeline_chunks: Count = 1
    """Along pipeline, the chunks of layers of a device: more shorten the bubble, and communicate more."""
    remat: str = "none"
    """Rematerialization of blocks: none, full, or all but dots, dots_no_batch, names:A,B or offload:A,B."""
    unroll: bool = False
    """Unroll the loop over layers: slower to compile, faster to run."""
    optimizer: str = "adamw"
    """Optimizer of jaxtrain.optim, with or without arguments, such as "sgd(momentum=0.9)"."""
    schedule: str = "warmup-cosine"
    """warmup-cosine, wsd, onecycle, linear, constant, or a PyTorch schedule such as "step_lr(lr=0.1, step_size=30)"."""
    warmup_steps: CountOrZero = 20
    """Number of updates over which the learning rate rises from 0."""
    weight_decay: NotNegative = 0.1
    """Weight decay of the optimizer; parameters whose last name is bias or scale do not decay."""
    beta2: Rate = 0.99
    """Adam's decay rate of the second moment; the default suits short runs."""
    clip_norm: Positive | None = 1.0
    """Maximum global gradient norm; None disables clipping."""
    frozen: str | None = None
    """Parameters that are not trained: shell patterns of their paths, such as "wte*,blocks/*/bias"; None trains all."""
    ema: Annotated[float, _DECAY] | None = None
    """Decay of a moving average of the parameters, which is then evaluated, sampled and exported; None for none."""
    loss_scale: str | None = None
    """Loss scale for fp16: "dynamic_loss_scale(growth_interval=500)", "static_loss_scale(scale=1024.0)", or one by
    layer, "per_layer_loss_scale(underflow=1e-6)"."""
    seed: CountOrZero = 0
    """Seed of initial parameters, data order and dropout."""
    workers: CountOrZero = 0
    """Number of processes that read and transform examples; 0 reads in threads."""
    log_every: Count = 10
    """Write a line of metrics.jsonl every n updates."""
    eval_every: Count = 50
    """Evaluate every n updates."""
    histograms: bool = False
    """Write histograms of the parameters to TensorBoard at each evaluation."""
    watch_precision: CountOrZero = 0
    """Measure what 16 or 8 bits lose, layer by layer, at the first of every n updates; 0 never. A measurement takes
    about as long as a micro-batch."""
    save_every: Count = 100
    """Save a checkpoint every n updates."""
    keep_last: Count = 3
    """Number of newest checkpoints to keep."""
    keep_best: CountOrZero = 1
    """Also keep the n checkpoints with the best evaluation, by default the lowest loss."""
    patience: Count | None = None
    """Stop after this many evaluations in a row without a better one; None trains to the last step."""
    keep_every: Count | None = None
    """Also keep the checkpoints at multiples of this number of updates."""
    allow_recompile: CountOrZero = 0
    """Number of times the step may be recompiled for a batch of another shape."""
    deterministic: bool = False
    """On a GPU, compute the same bits on repetition and after a resume; slower. CPUs always do."""
    max_skips: Count = 100
    """Stop after this many consecutive updates skipped because of inf or NaN in fp16 gradients."""
    spike_factor: Annotated[float, _SPIKE] | None = None
    """A loss above this multiple of the median of the last 64 is a spike; None disables the check."""
    on_spike: Literal["stop", "rollback"] = "stop"
    """On a spike, stop the run, or return to the last checkpoint and skip the batches since."""
    stall_seconds: Annotated[float, _STALL] = 600.0
    """Warn when a batch takes longer than this many seconds; 0 disables the warning."""

    def __init_subclass__(cls) -> None:
        if callable(cls.__dict__.get("optimizer")):
            raise UserError(f"{cls.__name__}.optimizer is a setting: define the method as make_optimizer")
        # The method takes the place of the setting: dataclasses leave out what is annotated as a class variable.
        if "make_optimizer" in cls.__dict__:
            cls.__annotations__ = {**inspect.get_annotations(cls), "optimizer": ClassVar[Any]}

    def make_optimizer(self) -> optax.GradientTransformation | None:
        """Make the optimizer of the run, in place of the settings.

        Returns:
          Any optax transformation; None to build the one that the setting `optimizer` names.
        """
        return None

    def task(self) -> Task:
        """Make the data, model and loss of the run.

        Returns:
          The task.

        Raises:
          UserError: The subclass does not define it.
        """
        raise UserError(f"{type(self).__name__} has no task: define `def task(self) -> jaxtrain.Task`")
