"""The case of an imported module, with what its model knows filled in."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxtrain import optim
from jaxtrain.errors import UserError
from jaxtrain.step import Loss, LossFn
from jaxtrain.torch_import import set_tensors, tensors_of
from parity.case import Batch, Case, Outputs
from parity.cases import default_loss
from parity.cases.example_batches import Example
from parity.optimizer import AdamW, Optimizer
from parity.sides.frozen import frozen_too, without_frozen

if TYPE_CHECKING:
    import torch

    from jaxtrain.torch_import import ImportedModel

    TorchModel = Callable[[], torch.nn.Module]
    TorchLoss = Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], tuple[torch.Tensor, int]]


def imported_case(
    model: "ImportedModel",
    name: str,
    torch_loss: "TorchLoss | None" = None,
    loss_fn: LossFn | None = None,
    *,
    batch: Callable[[int, int], Batch] | None = None,
    rows: int | None = None,
    torch_model: "TorchModel | None" = None,
    optimizer: AdamW | Optimizer | None = None,
    clip_norm: float | None = 1.0,
) -> Case:
    """Return the case of an imported module; `ImportedModel.case` describes the arguments."""
    if (torch_loss is None) != (loss_fn is None):
        raise UserError("torch_loss and loss_fn are one loss in both frameworks: pass both, or none for the default")
    if batch is not None and rows is None:
        raise UserError("a function for batches needs rows, the number of rows of a batch: pass rows=")
    example = Example(model.original.example)
    draw = partial(_fulfilling, model, example)
    module = _own_module(model) if torch_model is None else None

    def of_module(seed: int, rows: int) -> Batch:
        """Return a batch that the module takes: the case's own, if that has its arrays."""
        drawn = batch(seed, rows) if batch is not None else {}
        return {name: drawn[name] for name in example.names} if example.names <= {*drawn} else draw(seed, rows)

    return Case.of_import(
        name,
        model,
        torch_model=torch_model or partial(_itself, module),
        torch_loss=torch_loss or _torch_loss(model, example),
        loss_fn=without_frozen(loss_fn or _loss_fn(model, example), model.frozen),
        batch=batch or draw,
        rows=rows or example.rows or 1,
        optimizer=frozen_too(optimizer or _decaying_matrices(AdamW(lr=1e-3), model), model.frozen),
        clip_norm=clip_norm,
        module=module,
        outputs=Outputs(
            in_torch=lambda module, batch: model.original.call(module, example.in_torch(batch)),
            in_jax=lambda params, batch, state: model(params, example.in_jax(batch), None, state)[0],
            batch=of_module,
            rows=rows or example.rows or 1,
            # What the model assumes of a batch may not hold for some of its rows.
            fixed_rows=example.rows is None or bool(model.assumptions),
        ),
    )


def _fulfilling(model: "ImportedModel", example: Example, seed: int, rows: int) -> Batch:
    """Return a random batch; one with the integers of the example if the model assumes another one away."""
    drawn = example.batch(seed, rows)
    if model.failed_assumption(example.in_jax(drawn)) is None:
        return drawn
    return example.batch(seed, rows, same_integers=True)


def _own_module(model: "ImportedModel") -> "torch.nn.Module":
    module = model.original.module()
    if any(x.is_meta for x in (*module.parameters(), *module.buffers())):
        raise UserError('the module has no weights, it is on the "meta" device: import one with weights')
    return module


def _itself(module: Any) -> Any:
    return module


def with_fresh_weights(case: Case, new: "TorchModel") -> Case:
    """Return the case of a user's own module, which gets the parameters and the state of a new one for every seed.

    Everything else, such as a random table in a buffer, is a constant of the imported module.

    Args:
      case: The case.
      new: Makes a new module.
    """

    def torch_model() -> "torch.nn.Module":
        module, other = case.torch_model(), new()
        set_tensors(module, {**dict(other.named_parameters()), **tensors_of(other, case.buffer_names)})
        return module

    return replace(case, torch_model=torch_model)


def _torch_loss(model: "ImportedModel", example: Example) -> "TorchLoss":
    def torch_loss(module: "torch.nn.Module", batch: Mapping[str, "torch.Tensor"]) -> tuple["torch.Tensor", int]:
        outputs = model.original.call(module, example.in_torch(batch))
        return default_loss.in_torch(outputs, example.rows and len(next(iter(batch.values())))), 1

    return torch_loss


def _loss_fn(model: "ImportedModel", example: Example) -> LossFn:
    def loss_fn(params: Any, batch: Any, rng: Any, *model_state: Any) -> Any:
        outputs, new_state = model(params, example.in_jax(batch), rng, *model_state)
        loss = Loss(default_loss.in_jax(outputs, example.rows and len(next(iter(batch.values())))), 1)
        return (loss, {}, new_state) if model_state else (loss, {})

    return loss_fn


def _decaying_matrices(adamw: AdamW, model: "ImportedModel") -> Optimizer:
    """Return an optimizer with two parameter groups, of which only that of the matrices decays, as in runs."""

    def groups(params: Any) -> "torch.optim.Optimizer":
        from torch.optim import AdamW

        named = list(params)
        parts: list[dict[str, Any]] = [
            {"params": [x for x in named if x[1].ndim >= 2]},
            {"params": [x for x in named if x[1].ndim < 2], "weight_decay": 0.0},
        ]
        return AdamW([part for part in parts if part["params"]], **asdict(adamw))

    mask = partial(optim.decay_mask, model.no_decay)
    ours = optim.adamw(adamw.lr, *adamw.betas, adamw.eps, adamw.weight_decay, mask=mask)
    return Optimizer(adamw.name, groups, ours, adamw.moments)
