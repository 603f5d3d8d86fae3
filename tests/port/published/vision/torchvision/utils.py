"""Pictures, which nobody looks at."""

from typing import Any

import torch


def save_image(*args: Any, **kwargs: Any) -> None:
    """Save nothing."""


def make_grid(x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the images."""
    return x if isinstance(x, torch.Tensor) else torch.stack([*x])
