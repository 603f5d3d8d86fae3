"""The first non-finite value of a program, and what is installed."""

from jaxtrain.debug.first_nonfinite import NonfiniteTracer as NonfiniteTracer
from jaxtrain.debug.first_nonfinite import NonfiniteValue as NonfiniteValue
from jaxtrain.debug.first_nonfinite import TracedValue as TracedValue
from jaxtrain.debug.installation import PLUGINS as PLUGINS
from jaxtrain.debug.installation import TESTED_JAX as TESTED_JAX
from jaxtrain.debug.installation import installed_versions as installed_versions
from jaxtrain.debug.installation import run_checks as run_checks
from jaxtrain.debug.miscompiled import BOUND as BOUND
from jaxtrain.debug.miscompiled import PROGRAMS as PROGRAMS
from jaxtrain.debug.miscompiled import error as error
from jaxtrain.debug.miscompiled import miscompiled_once as miscompiled_once
