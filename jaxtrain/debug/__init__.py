"""The first non-finite value of a program, and what is installed."""

from jaxtrain.debug.doctor import PLUGINS, examine, installed
from jaxtrain.debug.first_nonfinite import NonfiniteTracer, NonfiniteValue, TracedValue

__all__ = ["PLUGINS", "NonfiniteTracer", "NonfiniteValue", "TracedValue", "examine", "installed"]
