"""The order of the passes, as data: what is done to the program of a training step, after what, where, and why.

`jaxtrain explain RECIPE` prints those of a run. A pass decides by the platform that the program is compiled for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

CPU, GPU = "cpu", "gpu"


@dataclass(frozen=True)
class Pass:
    """A pass.

    Attributes:
      name: Its name.
      does: What it does.
      why: Why it exists, or has this place.
      after: Names of passes that it must follow, where a program has them.
      platforms: Platforms whose programs it changes.
      on_mesh: Whether it changes programs of a mesh; None for both, with a mesh and without.
      gain: What it gains, measured with the device and the date, or predicted; "" where it decides what is computed.
    """

    name: str
    does: str
    why: str
    after: tuple[str, ...] = ()
    platforms: tuple[str, ...] = (CPU, GPU)
    on_mesh: bool | None = None
    gain: str = ""


def ordered(*passes: Pass) -> tuple[Pass, ...]:
    """Return passes in the order of their application.

    Raises:
      ValueError: A pass precedes one that it must follow, or two have one name.

    Example:
      >>> ordered(Pass("a", "", "", after=("b",)), Pass("b", "", ""))
      Traceback (most recent call last):
      ValueError: pass 'a' must follow 'b'
    """
    names = [x.name for x in passes]
    for i, x in enumerate(passes):
        if x.name in names[:i]:
            raise ValueError(f"two passes have the name {x.name!r}")
        if missing := [name for name in x.after if name not in names[:i]]:
            raise ValueError(f"pass {x.name!r} must follow {missing[0]!r}")
    return passes


PREDICTED_FOR = "a step of GPT-2 124M, 16 × 1,024 tokens, in bf16 on an H100 (jaxlib 0.10.1), without the pass"
"""What a gain that is called predicted refers to."""

BEFORE_GRAD = ordered(
    Pass("check", "checks what the loss function returned", "an error names what the function itself returned"),
    Pass(
        "constraints",
        "constrains the shardings of parameters, rows and tokens",
        "parameters are recognized before any cast",
        on_mesh=True,
    ),
    Pass(
        "hooks",
        "applies gradient hooks",
        "a parameter's hook receives the float32 gradient, as in PyTorch",
        after=("constraints",),
    ),
    Pass(
        "precision",
        "chooses the dtype of every operation",
        "what follows changes only how operations are computed",
        after=("check", "constraints", "hooks"),
    ),
    Pass("observe", "observes values", "they are rounded as in training", after=("precision",)),
    Pass(
        "copies",
        "uses copies of parameters that are already gathered",
        "each parameter is gathered once a window, in the dtype that the program uses",
        after=("precision",),
        on_mesh=True,
    ),
    Pass(
        "partial_gradients",
        "keeps gradients as sums of each group of rows",
        "devices add them once a window",
        after=("precision", "copies"),
        on_mesh=True,
    ),
    Pass(
        "lookup_gradients",
        "keeps the gradients of tables as sums of each group of rows",
        "devices add those of a lookup and of a tied head once",
        after=("precision", "copies"),
        on_mesh=True,
    ),
    Pass(
        "split_products",
        "computes queries, keys and values as products of their own",
        "attention takes three arrays: one product would be copied",
        after=("precision",),
        platforms=(GPU,),
        on_mesh=False,
        gain="predicted: −2.5%",
    ),
    Pass(
        "overwrite_logits",
        "writes the gradient of the logits over them",
        "they are the largest array of a step",
        after=("precision",),
        platforms=(GPU,),
        on_mesh=False,
        gain="predicted: −1.35 GiB of temporaries",
    ),
    Pass(
        "scale_blocks",
        "scales the gradients inside each block",
        "float16 gradients of each layer keep their range",
        after=("partial_gradients", "lookup_gradients"),
    ),
    Pass(
        "unroll",
        "compiles scanned layers one by one",
        "nothing is copied into arrays for all layers",
        after=("precision", "scale_blocks"),
        gain="predicted: −14%",
    ),
    Pass(
        "cpu_products",
        "computes convolutions over few positions and products of 16 bits as float32 products",
        "XLA:CPU has slow kernels for them",
        after=("precision",),
        platforms=(CPU,),
        gain="measured on two cores: 90 to 1.1 ms, 16 images of 2 × 2 pixels, 512 to 512 channels",
    ),
    Pass(
        "remat",
        "computes values again in the backward pass, by the policy",
        "a policy chooses among the products that really run",
        after=("unroll", "cpu_products", "split_products"),
    ),
    Pass(
        "save_costly",
        "computes cheap operations of scanned layers again in the backward pass",
        "a copy into an array for all layers takes longer",
        after=("unroll", "cpu_products", "split_products"),
        platforms=(GPU,),
        gain="predicted: −4.7%, −2.4 GiB of temporaries",
    ),
    Pass(
        "fuse_slices",
        "slices what a scan has saved where it is used",
        "XLA would copy each slice first",
        after=("remat", "save_costly"),
        platforms=(GPU,),
        on_mesh=False,
        gain="predicted: −2.3%",
    ),
    Pass(
        "stored",
        "converts parameters of 16 bits where they are used",
        "a product in low precision reads frozen parameters as they are stored",
        after=("precision", "remat", "save_costly"),
    ),
    Pass(
        "losses_in_float32",
        "widens the sums of the loss and of the metrics",
        "they are divided, scaled and added afterwards",
        after=("precision",),
    ),
)
"""Passes of the loss function, innermost first."""

AFTER_GRAD = ordered(
    Pass(
        "loop_convolutions",
        "puts the axes of convolutions in the order that XLA:CPU has a library for",
        "XLA does so outside loops only: elsewhere a kernel's gradient is a plain loop",
        platforms=(CPU,),
        gain="measured on two cores: 12 to 0.04 s, 64 images of 16 × 16, 32 to 32 channels, in a loop of four",
    ),
    Pass(
        "fuse_casts",
        "computes again what is converted to 8 bits in the kernel that converts it",
        "XLA would write it in 16 bits and read it twice",
        platforms=(GPU,),
        gain="predicted: −7.2%, in fp8",
    ),
    Pass(
        "unfilled_stacks",
        "allocates what scans save without filling it with zeros",
        "each element is written before it is read",
        after=("fuse_casts",),
        platforms=(GPU,),
        on_mesh=False,
        gain="predicted: −3.4%",
    ),
)
"""Passes of the gradient of a micro-batch."""

AT_UPDATE = ordered(
    Pass(
        "as_vectors",
        "updates arrays with short rows as vectors",
        "XLA:CPU vectorizes the last axis, which has three elements in a convolution's kernel",
        platforms=(CPU,),
        on_mesh=False,
        gain="measured on two cores: 8 to 2.4 ms, AdamW of [512, 512, 3, 3]",
    ),
)
"""Passes of the update of parameters."""

Rewrite = Callable[[Any], Any]
"""Returns a function with a changed program."""


def applied(passes: tuple[Pass, ...], rewrites: Mapping[str, Rewrite], fn: Any) -> Any:
    """Return a function after the passes that have a rewrite, in their order.

    Args:
      passes: The passes, one of the tuples of this module.
      rewrites: What the program's passes do, by name.
      fn: The function.
    """
    if unknown := rewrites.keys() - {x.name for x in passes}:
        raise ValueError(f"{', '.join(sorted(unknown))} have no place in the order of the passes")
    return reduce(lambda fn, x: rewrites[x.name](fn) if x.name in rewrites else fn, passes, fn)
