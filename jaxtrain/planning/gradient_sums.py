"""What a device keeps of the gradients between the micro-batches of a window."""

import math
from typing import Any, NamedTuple

import jax

from jaxtrain.cost import format_bytes
from jaxtrain.distributed import FSDP, parse_mesh, replicate_over
from jaxtrain.run import Recipe


class GradientSums(NamedTuple):
    """Bytes of a window's gradients on one device, in float32.

    Attributes:
      whole: Of the sums of the device's own rows, which are added over devices once a window.
      sharded: Of the device's part of the sums over all rows.
    """

    whole: int
    sharded: int

    def kept(self, recipe: Recipe) -> int:
        """Return the bytes that a recipe keeps; of one micro-batch, those of its gradients."""
        return self.whole if recipe.accumulate > 1 and recipe.gradient_sums == "whole" else self.sharded

    def as_json(self, recipe: Recipe) -> dict[str, Any]:
        """Return the recipe's setting and the bytes as JSON values."""
        return {"setting": recipe.gradient_sums, "whole_bytes": self.whole, "sharded_bytes": self.sharded}


def gradient_sums(trained: Any) -> GradientSums:
    """Return the bytes of the gradients of trained parameters, given as shapes with their shardings, if they have any.

    >>> gradient_sums({"w": jax.ShapeDtypeStruct((3, 2), "bfloat16")})
    GradientSums(whole=24, sharded=24)
    """

    def size(x: Any, replicated: tuple[str, ...]) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else replicate_over(sharding, replicated).shard_shape(x.shape)
        return 4 * math.prod(shape)

    leaves = jax.tree.leaves(trained)
    return GradientSums(sum(size(x, (FSDP,)) for x in leaves), sum(size(x, ()) for x in leaves))


def gradient_sums_note(recipe: Recipe, sums: GradientSums) -> str | None:
    """Return a note about the gradients that a recipe keeps within a window; None if fsdp does not divide them."""
    if recipe.accumulate == 1 or recipe.mesh is None or parse_mesh(recipe.mesh)[FSDP] == 1:
        return None
    whole = f"{format_bytes(sums.whole)} of each device, reduced once per update"
    sharded = f"{format_bytes(sums.sharded)}, reduced in each of {recipe.accumulate} micro-batches"
    used, other, setting = (whole, sharded, "sharded") if recipe.gradient_sums == "whole" else (sharded, whole, "whole")
    return f"gradient sums: {used}; with --gradient-sums {setting} {other}"
