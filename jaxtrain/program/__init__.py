"""A JAX program as a value: what its equations say, and functions that rewrite them; unaware of training.

operations  the names of operations
equations   what an equation says; the only reader of their parameters
primitive   primitives of this project
rewrite     a function rewritten equation by equation, through its control flow
recorded_values  the values of a program, and the lines of its equations
follow      values carried through a program to where it uses them
hlo         the text of a compiled program
loops       the most steps of a loop whose length is known at run time only
part_specs  how the sharding of an array follows changes of its layout
platform    the platform that a program is compiled for
internals   the internals of JAX that the project depends on, each with a probe
"""

from jaxtrain.program.loops import at_most as at_most
from jaxtrain.program.loops import most_times as most_times
from jaxtrain.program.platform import is_gpu as is_gpu

__all__ = [
    "equations",
    "follow",
    "hlo",
    "internals",
    "loops",
    "operations",
    "part_specs",
    "platform",
    "primitive",
    "recorded_values",
    "rewrite",
]
