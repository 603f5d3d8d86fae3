"""The bytes that a device sends in a window on the mesh axes data, fsdp and expert, computed from the parameters."""

import math

import jax

from jaxtrain.distributed import data_parallel_size, parse_mesh
from tests.gpu_programs.families import EXPERTS, FAMILIES, LAYERS, LENGTH, ROWS, VOCABULARY, WIDTH, Settings

LOW, FLOAT32, INT = 2, 4, 4
CHOSEN = 2
"""The number of experts of a token."""


def reduced(settings: Settings) -> float:
    """Return the bytes of reductions: of a window in float32; of one micro-batch those of products in low precision."""
    matrices, tables, others = _sizes(settings)
    whole = FLOAT32 * (matrices + tables * _table() + others)
    on_data = on_fsdp = whole
    if settings.accumulate == 1:
        head, tied = LOW * _table(), tables == 1
        on_data = LOW * matrices + FLOAT32 * (_table() + others) + head * (not tied)
        # The gradients of the lookup and of the head are reduced separately; positions by an all-reduce.
        on_fsdp = LOW * matrices + FLOAT32 * (_table() * _gathers_lookups(settings) + 2 * others) + head
    sizes = parse_mesh(settings.mesh)
    data, fsdp, expert = sizes["data"], sizes["fsdp"], sizes["expert"]
    over_data, over_expert = (2 * (n - 1) / n / fsdp for n in (data, expert))
    of_experts = FLOAT32 * _experts(settings) / expert
    return (on_fsdp + of_experts) * (fsdp - 1) / fsdp + (on_data + of_experts) * over_data + on_data * over_expert


def gathered(settings: Settings) -> float:
    """Return the bytes of gathers.

    In every micro-batch, or once a window, layers are gathered, forwards and backwards if not for the window, and the
    head's table. Vectors and positions are float32. Of the table that is looked up only rows are exchanged, unless
    there are fewer rows than lookups.
    """
    matrices, _, others = _sizes(settings)
    fsdp = parse_mesh(settings.mesh)["fsdp"]
    once, times = (2, settings.accumulate) if settings.reshard_after == "forward" else (1, 1)
    lookup = FLOAT32 * _table() * _gathers_lookups(settings)
    of_parameters = (fsdp - 1) / fsdp * (LOW * (once * matrices + _table()) + FLOAT32 * once * others + lookup)
    expert = parse_mesh(settings.mesh)["expert"]
    sizes_of_groups = INT * (expert - 1) * EXPERTS * LAYERS
    return times * (of_parameters + sizes_of_groups)


def exchanged(settings: Settings) -> float:
    """Return the bytes of the tokens that devices of expert exchange: twice forwards and twice backwards in a layer."""
    sizes = parse_mesh(settings.mesh)
    tokens, expert = ROWS * LENGTH / data_parallel_size(sizes), sizes["expert"]
    return 4 * LAYERS * LOW * tokens * CHOSEN * WIDTH * (expert - 1) / expert


def _sizes(settings: Settings) -> tuple[int, int, int]:
    """Return the numbers of parameters in matrices of layers, of tables, and of parameters in vectors and positions."""
    shapes = [x.shape for x in jax.tree.leaves(FAMILIES[settings.family]().params)]
    matrices = [shape for shape in shapes if len(shape) == 3]
    tables = [shape for shape in shapes if len(shape) == 2 and VOCABULARY in shape]
    others = [shape for shape in shapes if len(shape) < 4 and shape not in matrices and shape not in tables]
    return sum(map(math.prod, matrices)), len(tables), sum(map(math.prod, others))


def _experts(settings: Settings) -> int:
    """Return the number of parameters of experts."""
    shapes = [x.shape for x in jax.tree.leaves(FAMILIES[settings.family]().params)]
    return sum(math.prod(shape) for shape in shapes if len(shape) == 4)


def _table() -> int:
    return VOCABULARY * WIDTH


def _gathers_lookups(settings: Settings) -> bool:
    rows = ROWS // settings.accumulate // data_parallel_size(parse_mesh(settings.mesh))
    return rows * LENGTH >= VOCABULARY
