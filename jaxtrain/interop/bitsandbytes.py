"""Optimizers of bitsandbytes with moments in 8 bits: their settings, and the order in which their blocks are counted.

A block is 256 consecutive elements of PyTorch's tensor. A layout permutes axes, so that the same blocks are found in
JAX's array by counting its axes in another order; the codes and magnitudes are then those of the file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.interop.names import AS_IS, LINEAR, OUT_IN, Layout, NameTable, leaves
from jaxtrain.optim import BLOCK, MIN_8BIT_SIZE, SIGNED, UNSIGNED, Blockwise, Call, Expression

CLASSES = {
    "AdamW8bit": "adamw8bit",
    "Adam8bit": "adamw8bit",
    "PagedAdamW8bit": "adamw8bit",
    "PagedAdam8bit": "adamw8bit",
    "SGD8bit": "sgd8bit",
}
"""Our function by bitsandbytes' class. Its Adam decays weights as AdamW, and a paged state has the same numbers."""

WRAPPED = "__bnb_optimizer_quant_state__"
"""The entry of a parameter's state that contains the others, hidden from FSDP since bitsandbytes 0.48."""

STATES = {"adamw8bit": {"mu": "state1", "nu": "state2"}, "sgd8bit": {"momentum_buffer": "state1"}}
"""bitsandbytes' names of the moments, by our function."""

TABLES = {"state1": SIGNED, "state2": UNSIGNED}


def class_of_state(group: Mapping[str, Any]) -> str:
    """Return the class of the optimizer of a group. Raises `UserError` if it has no counterpart here."""
    if "t_alpha" in group:
        return "AdamW8bit"
    if group.get("eps") == 0 and group["betas"][1] == 0:
        return "SGD8bit"
    raise UserError(
        f"bitsandbytes' optimizer with one moment, betas={tuple(group['betas'])} and eps={group.get('eps')} is not "
        "supported: only AdamW8bit, Adam8bit and SGD8bit are"
    )


def is_of_bitsandbytes(group: Mapping[str, Any], entries: Iterable[str]) -> bool:
    """Return whether a group and the names of the states of its parameters are those of bitsandbytes."""
    if entries := {*entries}:
        return "state1" in entries
    return "t_alpha" in group or ("betas" in group and not {"maximize", "foreach", "amsgrad"} & set(group))


def settings(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of our function, without the learning rate, for the settings of a group.

    Raises:
      UserError: A setting is of AdEMAMix.
    """
    options = {key: value for key, value in group.items() if key not in ("alpha", "t_alpha", "t_beta3", "betas")}
    first, *others = group["betas"]
    used = {key: group[key] for key in ("alpha", "t_alpha", "t_beta3") if group.get(key)}
    if used or len(others) != 1:
        raise UserError(f"{kind}'s {used or group['betas']} is not supported: it is of AdEMAMix")
    if CLASSES[kind] == "sgd8bit":
        options.pop("eps", None)
        return {"momentum": first, **options}
    return {"b1": first, "b2": others[0], **options}


def live_options(optimizer: Any) -> tuple[str, dict[str, Any], set[int]]:
    """Return the class of a live optimizer, its arguments in 8 bits, and the ids of parameters with float32 moments.

    Raises:
      UserError: It is not supported; the setting is named.
    """
    kind, own = type(optimizer).__name__, optimizer.args
    if own.optim_bits == 8 and not kind.endswith("8bit"):
        kind += "8bit"
    if kind not in CLASSES:
        raise UserError(f"bitsandbytes' {kind} is not supported: use one of {', '.join(CLASSES)}")
    for name in ("max_unorm", "skip_zeros"):
        if getattr(own, name):
            raise UserError(f"{kind}'s {name}={getattr(own, name)} is not supported: leave it out")
    optimizer.check_overrides()
    kept = set()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        override = optimizer.mng.pid2config.get(id(p), {})
        if override and override != {"optim_bits": 32}:
            raise UserError(f"the override {override} of a parameter of {kind} is not supported: use groups")
        kept |= {id(p)} if override else set()
    return kind, {"min_8bit_size": own.min_8bit_size}, kept


def with_stored_blocks(
    expression: Expression, entries: Mapping[str, Mapping[str, Any]], names: NameTable, params_like: Any
) -> Expression:
    """Add what the state of every parameter shows to the functions of an expression: what is in 8 bits, and its blocks.

    Args:
      expression: Optimizer.
      entries: bitsandbytes' state of every parameter, by name.
      names: Name table of the parameters.
      params_like: Parameters, of which only the shapes are used.

    Raises:
      UserError: The blocks of a tensor cannot be counted in JAX's array.
    """

    def complete(call: Call, paths: set[str] | None) -> Call:
        if call.function not in STATES:
            return call
        sizes, shapes, eight = {}, {}, set()
        for path, leaf in leaves(params_like):
            name = next(iter(names.only([path]).torch_order({path: leaf})), "")
            if "state1" not in entries.get(name, {}) or (paths is not None and path not in paths):
                continue
            sizes[path], shapes[path] = int(np.prod(leaf.shape)), tuple(entries[name]["state1"].shape)
            if entries[name]["state1"].dtype == np.uint8:
                eight.add(path)
        smallest = min([MIN_8BIT_SIZE, *(sizes[path] for path in eight)])
        whole = [path for path, size in sizes.items() if path not in eight and size >= smallest]
        orders = block_orders(names, {path: shapes[path] for path in sizes if path in eight})
        added = {"min_8bit_size": smallest, "float32": whole, "block_order": orders}
        return replace(call, arguments={**call.arguments, **{key: value for key, value in added.items() if value}})

    if isinstance(expression, Call):
        return complete(expression, None)
    return {paths: complete(call, set(paths.split())) for paths, call in expression.items()}


def block_orders(names: NameTable, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the `block_order` of parameters by path, from the shapes of their tensors in PyTorch.

    Raises:
      UserError: A layout is not an order of axes, or blocks cross the layers of a stack.
    """
    orders = {}
    for path, shape in shapes.items():
        param = names.params[path]
        order = _axes_of(param.layout, shape)
        if order is None:
            raise UserError(
                f"the blocks of {param.name} cannot be counted in {path}, whose axes are merged: "
                "import the weights only"
            )
        if param.is_stack:
            if np.prod(shape) % BLOCK:
                raise UserError(
                    f"the layers of {param.name}, {tuple(shape)}, are not whole blocks of {BLOCK} elements and cannot "
                    "be stacked: import the weights only"
                )
            order = (0, *(axis + 1 for axis in order))
        if order != tuple(sorted(order)):
            orders[path] = order
    return orders


def _axes_of(layout: Layout, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axes of JAX's array in the order of PyTorch's elements, None if there is none."""
    if layout in (AS_IS, OUT_IN):
        return tuple(range(len(shape)))
    if layout is LINEAR:
        return (1, 0)
    numbers = np.arange(np.prod(shape)).reshape(shape)
    ours = layout.to_jax(numbers)
    strides = [0 if n == 1 else int(np.take(ours, 1, i).flat[0] - ours.flat[0]) for i, n in enumerate(ours.shape)]
    order = tuple(sorted(range(ours.ndim), key=lambda axis: -strides[axis]))
    return order if np.array_equal(ours.transpose(order).ravel(), numbers.ravel()) else None


def magnitudes(entries: Mapping[str, Mapping[str, Any]], tensors: Sequence[str], key: str) -> np.ndarray:
    """Return the magnitudes of the blocks of the tensors of a leaf.

    Raises:
      UserError: They are missing, or the codes are of another table.
    """
    number, found = key[-1], []
    for name in tensors:
        of = entries.get(name, {})
        if f"absmax{number}" not in of or f"qmap{number}" not in of:
            raise UserError(f"absmax{number} and qmap{number} of {name} are missing: save optimizer.state_dict()")
        if not np.array_equal(np.asarray(of[f"qmap{number}"]), TABLES[key].values):
            raise UserError(f"qmap{number} of {name} is not bitsandbytes' dynamic map: save the optimizer again")
        found.append(np.asarray(of[f"absmax{number}"]).reshape(-1))
    return np.concatenate(found)


def to_entries(moment: Blockwise, key: str, path: str, names: NameTable) -> dict[str, dict[str, np.ndarray]]:
    """Return bitsandbytes' state of every tensor of a leaf, by name."""
    codes, number = names.only([path]).to_torch({path: moment.codes}), key[-1]
    parts = np.split(np.asarray(moment.absmax), len(codes))
    return {
        name: {key: of, f"qmap{number}": TABLES[key].values, f"absmax{number}": part}
        for (name, of), part in zip(codes.items(), parts, strict=True)
    }
