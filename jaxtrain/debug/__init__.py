"""The first non-finite value of a program, and what is installed."""

from jaxtrain.debug.doctor import PLUGINS, examine, installed
from jaxtrain.debug.first_nonfinite import Place, Watch, Watched

__all__ = ["PLUGINS", "Place", "Watch", "Watched", "examine", "installed"]
