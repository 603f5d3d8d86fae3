"""The first non-finite value of a program, and what is installed."""

from jaxtrain.debug.doctor import PLUGINS, installed_versions, run_checks
from jaxtrain.debug.first_nonfinite import NonfiniteTracer, NonfiniteValue, TracedValue

__all__ = ["PLUGINS", "NonfiniteTracer", "NonfiniteValue", "TracedValue", "installed_versions", "run_checks"]
