"""Settings of products in 8-bit floating-point numbers."""

from dataclasses import dataclass

from jaxtrain.errors import UserError

SCALINGS = ("tensor", "delayed", "row", "block")
ALGORITHMS = ("max", "most_recent")
OUTPUT_HEADS = (
    *("head", "head[/.]*", "*[/.]head[/.]*", "lm_head", "lm_head[/.]*", "*[/.]lm_head[/.]*"),
    *("output", "output[/.]*", "classifier[/.]*", "score", "score[/.]*"),
)
"""Patterns of the paths of output heads, whose products stay in the compute dtype by default.

Parameters of imported modules have PyTorch's names, such as "lm_head.weight".
"""


@dataclass(frozen=True)
class Fp8:
    """How a policy computes the products with a parameter in 8-bit floating-point numbers.

    Every operand is multiplied by a scale, such that its largest magnitude becomes the largest number of the format,
    and is then rounded. A product has three such products: its own, and those of the gradients of its operands. They
    are summed in float32.

    Attributes:
      scaling: What has a scale of its own: "tensor", each operand; "delayed", each operand, from its largest magnitudes
        in earlier updates (TransformerEngine's `DelayedScaling`); "row", each of its rows along the axis that is
        summed over (torchao's recipe "rowwise"); "block", tiles of 1×128 elements along the axis that is summed over,
        and blocks of 128×128 elements of a parameter (DeepSeek-V3, section 3.3.2; torchao's `blockwise_fp8_training`).
        Gradients are in e5m2 with "tensor" and "delayed" and in e4m3 otherwise; activations and parameters are in e4m3.
      exclude: Patterns of the paths of parameters whose products stay in the policy's `compute_dtype`; by default those
        of output heads, as in torchtitan and DeepSeek-V3. `*` also matches "/".
      power_of_two_scales: Whether scales are rounded down to powers of two, as torchao's `round_scales_to_power_of_2`.
      history: With "delayed", the number of updates whose largest magnitudes are remembered, as `amax_history_len`.
      algorithm: With "delayed", "max" for scales from the largest one of the history, "most_recent" for scales from
        that of the last update, as `amax_compute_algo`.
      margin: With "delayed", the power of two by which scales are smaller than the largest that do not saturate.

    Raises:
      UserError: `scaling` or `algorithm` is unknown, a pattern is empty, `history` or `margin` out of range, or an
        option not one of this scaling.

    Example:
      >>> Fp8("block", exclude=("head/*",)).scaling
      'block'

    References:
      Micikevicius et al., "FP8 Formats for Deep Learning" (2022), https://arxiv.org/abs/2209.05433; DeepSeek-AI,
      "DeepSeek-V3 Technical Report" (2024), https://arxiv.org/abs/2412.19437.
    """

    scaling: str = "tensor"
    exclude: tuple[str, ...] = OUTPUT_HEADS
    power_of_two_scales: bool = False
    history: int = 1024
    algorithm: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise UserError(f"fp8 scaling {self.scaling!r} is unknown: choose one of {', '.join(SCALINGS)}")
        if isinstance(self.exclude, str) or not all(self.exclude):
            raise UserError(
                f"exclude must be a tuple of patterns of parameter paths, got {self.exclude!r}: use ('head/*',)"
            )
        self._check_delayed()

    def _check_delayed(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise UserError(f"fp8 algorithm {self.algorithm!r} is unknown: choose one of {', '.join(ALGORITHMS)}")
        if not isinstance(self.history, int) or self.history < 1:
            raise UserError(f"fp8 history must be an integer of at least 1, got {self.history!r}: use 1024")
        if not isinstance(self.margin, int) or not 0 <= self.margin < 64:
            raise UserError(f"fp8 margin must be an integer in [0, 64), got {self.margin!r}: use 0")
        if self.scaling == "delayed" and self.power_of_two_scales:
            raise UserError("fp8 scaling 'delayed' has no power_of_two_scales: leave the option out")
        if self.scaling != "delayed" and (self.history, self.algorithm, self.margin) != (1024, "max", 0):
            raise UserError(
                f"history, algorithm and margin are options of scaling 'delayed', got {self.scaling!r}: leave them out"
            )

    @property
    def is_delayed(self) -> bool:
        """Whether scales follow from earlier updates."""
        return self.scaling == "delayed"

    @property
    def is_per_tensor(self) -> bool:
        """Whether all elements of an operand have the same scale."""
        return self.scaling in ("tensor", "delayed")
