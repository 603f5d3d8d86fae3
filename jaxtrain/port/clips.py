"""How a script clips gradients before an update, and clamps parameters after it."""

from collections.abc import Sequence

import torch

from jaxtrain.port.clamps import Clamp, bounds
from jaxtrain.port.joint import Joint
from jaxtrain.port.recording import Clip, Update
from jaxtrain.port.refused import refused_at


def clip_of(updates: Sequence[Update], optimizer: torch.optim.Optimizer | Joint) -> Clip | None:
    """Return how the gradients of an optimizer are clipped in all updates; None if they are not."""
    found = [update.clips for update in updates if update.optimizer is not None]
    first = found[0]
    for clips in found:
        if len(clips) > 1:
            raise refused_at("gradients are clipped twice", clips[1].line, "clip once")
        same = [(c.function, c.bound, c.options, c.parameters) for c in clips]
        if same != [(c.function, c.bound, c.options, c.parameters) for c in first]:
            raise refused_at(
                "clipping differs from update to update", (clips or first)[0].line, "clip alike in every update"
            )
    if not first:
        return None
    (clip,) = first
    if clip.options.get("norm_type", 2.0) != 2.0 or clip.options.get("error_if_nonfinite"):
        raise refused_at(f"{clip.function} with {dict(clip.options)}", clip.line, "clip by the norm of order 2")
    trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if not trained <= {*clip.parameters}:
        raise refused_at("some of the trained parameters are clipped", clip.line, "clip all of them")
    return clip


def clamps_of(updates: Sequence[Update], optimizer: torch.optim.Optimizer | Joint) -> dict[int, Clamp]:
    """Return what the parameters of an optimizer are clamped to after each of its updates."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    stepped = [update for update in updates if update.optimizer is not None]
    first = bounds(stepped[0].clamps, own)
    for i, update in enumerate(stepped):
        its = bounds(update.clamps, own)
        if its != first and (its or i < len(stepped) - 1):  # what follows the last one is not recorded
            line = next(iter((update.clamps or stepped[0].clamps).values())).line
            raise refused_at("parameters are clamped after some updates alone", line, "clamp them after every update")
    return {key: clamp for key, clamp in stepped[0].clamps.items() if key in own}
