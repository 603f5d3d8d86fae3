"""The host side of a run: its folder, its checks, its loop, its checkpoints."""

from jaxtrain.runner.loop import Outcome, fit
from jaxtrain.runner.run_folder import RunFolder

__all__ = ["Outcome", "RunFolder", "fit"]
