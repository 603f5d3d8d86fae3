"""Tied parameters: tensors of PyTorch with several names, and leaves of JAX that one tensor fills."""

import copy
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import torch

from jaxtrain.interop import LAYER, NameTable, leaves, unflatten
from jaxtrain.paths import path_name
from parity.case import Case


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return {alias: name} of the parameters with several names."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: own for name, p in every if (own := first.setdefault(id(p), name)) != name}


def ways_to_untie(model: torch.nn.Module) -> list[Sequence[Sequence[str]]]:
    """Return every division of the names of tied parameters into those that stay tied, the fewest parameters first."""
    of = defaultdict(list)
    for alias, name in tied_names(model).items():
        of[name].append(alias)
    divisions = [list(_partitions([name, *aliases])) for name, aliases in of.items()]
    ways = [[group for division in chosen for group in division] for chosen in product(*divisions)]
    return sorted((way for way in ways if len(way) > len(of)), key=len)


def _partitions(names: Sequence[str]) -> Iterator[list[list[str]]]:
    if not names:
        yield []
        return
    for groups in _partitions(names[1:]):
        yield [[names[0]], *groups]
        yield from ([*groups[:i], [names[0], *group], *groups[i + 1 :]] for i, group in enumerate(groups))


def untied(case: Case, groups: Sequence[Sequence[str]]) -> Case:
    """Return the case with one PyTorch parameter for each of these groups of names, which leaves are matched to."""

    def torch_model() -> torch.nn.Module:
        model = case.torch_model()
        for group in groups:
            p = model.get_parameter(group[0])
            own = torch.nn.Parameter(p.detach().clone(), p.requires_grad)
            for name in group:
                _set(model, name, own)
        return model

    return replace(case, torch_model=torch_model)


def _set(model: torch.nn.Module, name: str, p: torch.nn.Parameter) -> None:
    """Replace a parameter under this name alone; modules that have other names as well are copied."""
    times = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    *path, own = name.split(".")
    module = model
    for part in path:
        child = module.get_submodule(part)
        if times[id(child)] > 1:
            child = copy.copy(child)
            child._parameters, child._modules = dict(child._parameters), dict(child._modules)
            module._modules[part] = child
        module = child
    module._parameters[own] = p


def tie_leaves(case: Case, aliases: Mapping[str, str]) -> tuple[Case, tuple[str, ...]]:
    """Return the case with one parameter for all leaves that one tensor fills, and notes on them.

    The gradient of that parameter is the sum of the leaves' gradients, as PyTorch's is, and an update changes all of
    them alike. Trained as separate leaves they would drift apart.

    Args:
      case: The case, with its names.
      aliases: PyTorch's names of tied parameters (`tied_names`).
    """
    names = case.names
    same = {**aliases, **names.tied}
    paths = defaultdict(list)
    for path, param in names.params.items():
        # Stacks of different layers have one name.
        paths[same.get(param.name, param.name), param.layers].append(path)
    kept_of = {path: kept for kept, *others in paths.values() for path in others}
    if not kept_of:
        return case, ()

    def fill(params: Any) -> Any:
        filled = dict(leaves(params))
        for path, kept in kept_of.items():
            param, own = names.params[path], names.params[kept]

            def laid_out(x: Any, to_jax: Any = param.layout.to_jax, to_torch: Any = own.layout.to_torch) -> Any:
                return to_jax(to_torch(x))

            filled[path] = (jax.vmap(laid_out) if LAYER in param.name else laid_out)(filled[kept])
        return unflatten(filled, case.params_like)

    def without_state(params: Any, batch: Any, rng: Any) -> Any:
        return case.loss_fn(fill(params), batch, rng)

    def with_state(params: Any, batch: Any, rng: Any, model_state: Any) -> Any:
        return case.loss_fn(fill(params), batch, rng, model_state)

    table = {path: param for path, param in names.params.items() if path not in kept_of}
    table |= {kept: replace(names.params[kept], name=name) for (name, _), (kept, *_) in paths.items()}
    tied = replace(
        case,
        loss_fn=without_state if case.state_like is None else with_state,
        params_like=jax.tree_util.tree_map_with_path(
            lambda path, x: None if path_name(path) in kept_of else x, case.params_like
        ),
        names=NameTable({path: table[path] for path in names.params if path in table}, same),
    )
    notes = (f"{path} and {kept} are one tensor of PyTorch: trained as one leaf" for path, kept in kept_of.items())
    return tied, tuple(notes)
