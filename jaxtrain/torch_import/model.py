"""A PyTorch module as a pure function of its parameters."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam
from jaxtrain.paths import Frozen, none_frozen
from jaxtrain.step import Loss
from jaxtrain.torch_import.elementwise import with_recomputed_formulas
from jaxtrain.torch_import.graph import Graph, Spec, without_gradient
from jaxtrain.torch_import.grouped_queries import with_grouped_queries
from jaxtrain.torch_import.interpret import interpret
from jaxtrain.torch_import.masks import with_causal_attention
from jaxtrain.torch_import.repeat import Stacks, find_stacks, repeated

if TYPE_CHECKING:
    import torch

    from jaxtrain.run import Task
    from jaxtrain.torch_import.capture import Captured, Structure
    from parity import Case

Params = dict[str, jax.Array]
Call = Callable[[Any, Any], Any]
"""From (module, batch of tensors) to the module's result."""


class _Key(NamedTuple):
    """What a captured graph depends on: mode, dtype of the parameters, and shapes and structure of the batch."""

    train: bool
    dtype: str | None
    specs: tuple[Spec, ...]
    structure: Any


class ImportedModel:
    """A PyTorch module as a pure function, made by `from_torch`.

    A call with other shapes or dtypes captures the module again, as `jax.jit` traces a function again.

    Attributes:
      params: Parameters by PyTorch's names, in PyTorch's layouts; tied weights once, under their first name. Those of
        repeated layers are stacked along a first axis, as "transformer.h.*.ln_1.weight".
      state: Buffers that training changes, by name, such as BatchNorm's statistics; None if there are none.
      example: The example batch, as arrays.
      call: From (PyTorch's module, batch of tensors) to the module's result.
    """

    def __init__(
        self,
        structure: "Structure",
        tensors: "Mapping[str, torch.Tensor]",
        frozen: frozenset[str],
        example: Any,
        call: Call,
        ops: Mapping[str, Callable[..., Any]],
        unroll: bool,
    ) -> None:
        from jaxtrain.torch_import.capture import as_array, as_arrays, shape_of

        self._structure, self._ops = structure, dict(ops)
        self.example, self.call = example, call
        self._keys = tuple(example) if isinstance(example, Mapping) else None
        self._frozen_tensors = frozen
        self._stacks: Stacks = {}
        self._buffers = {name: as_array(x) for name, x in tensors.items() if name not in structure.aliases}
        params = {name: tensors[name] for name in structure.aliases.values()}
        shapes: Any = {name: shape_of(x) for name, x in params.items()}
        key = self._key(shapes, self.example, train=True)
        plain = self._exported(key)
        self._frozen_tensors |= without_gradient(plain.graph)
        self._changed = frozenset(plain.graph.state)
        if not unroll:
            self._stacks = find_stacks(plain.graph, self._frozen_tensors)
        self._captured = {key: self._finished(plain)}
        members = {stack: param.names(0) for stack, param in self._stacks.items()}
        self.params: Params = as_arrays(params, members)
        state = as_arrays({name: tensors[name] for name in plain.graph.state}, members)
        self._buffers |= state
        self.state: Params | None = state or None

    @property
    def names(self) -> NameTable:
        """The table from `params` to PyTorch's names, which are the same but for stacks, with those of tied weights."""
        tied = {name: first for name, first in self._structure.aliases.items() if name != first}
        return NameTable({name: self._torch_param(name) for name in self.params}, tied=tied)

    @property
    def state_names(self) -> NameTable | None:
        """The table from `state` to PyTorch's names; None for a module without state."""
        return None if self.state is None else NameTable({name: self._torch_param(name) for name in self.state})

    @property
    def saved_constants(self) -> Params:
        """The buffers of PyTorch's `state_dict()` that do not change, by name."""
        from jaxtrain.torch_import.capture import persistent_buffers

        names = persistent_buffers(self._structure)
        return {name: self._buffers[name] for name in names if name not in self._changed}

    @property
    def frozen(self) -> Frozen:
        """Predicate on names: whether a parameter has no gradient, as `train_step(frozen=…)` takes it.

        These are parameters with `requires_grad=False`, and those that no output depends on: PyTorch's optimizers
        leave both as they are, without weight decay.
        """
        found = {x for x in self.params if not self._frozen_tensors.isdisjoint(self._torch_param(x).names(0))}
        return found.__contains__ if found else none_frozen

    @property
    def graph(self) -> Graph:
        """The graph of a training pass on the example batch."""
        return self._capture(self.params, self.example, train=True).graph

    def __call__(
        self, params: Params, batch: Any, rng: jax.Array | None = None, state: Params | None = None
    ) -> tuple[Any, Params | None]:
        """Run the module.

        Args:
          params: Parameters by name.
          batch: Arrays in the structure of the example batch. A dict may have further entries, for the loss.
          rng: Key of dropout and other random numbers; None runs the module in evaluation mode.
          state: Buffers, as in `self.state`.

        Returns:
          A tuple (outputs, new state): dicts, tuples and arrays as the module returns them.

        Raises:
          UserError: The batch or the parameters do not fit the module.
        """
        captured = self._capture(params, batch, train=rng is not None)
        given = dict(state or {})
        outputs, changed = interpret(
            captured.graph,
            params=params,
            state={**self._buffers, **given},
            constants={**self._buffers, **given, **captured.constants},
            inputs=self._leaves(batch),
            rng=rng,
            ops=self._ops,
        )
        if state is None:
            return outputs, None
        return outputs, {name: changed[name].astype(x.dtype) if name in changed else x for name, x in given.items()}

    def loss(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a loss function for `train_step`.

        Args:
          fn: From (outputs, batch) to a `Loss`, or to (Loss, metrics).

        Returns:
          `loss_fn(params, batch, rng)`, with a fourth argument for a module with state.
        """

        def with_metrics(outputs: Any, batch: Any) -> tuple[Loss, dict[str, Any]]:
            result = fn(outputs, batch)
            return (result, {}) if isinstance(result, Loss) else result

        if self.state is None:

            def loss_fn(params: Params, batch: Any, rng: Any) -> Any:
                return with_metrics(self(params, batch, rng)[0], batch)

            return loss_fn

        def loss_fn_with_state(params: Params, batch: Any, rng: Any, model_state: Params) -> Any:
            outputs, new_state = self(params, batch, rng, model_state)
            return (*with_metrics(outputs, batch), new_state)

        return loss_fn_with_state

    def to_torch(self, params: Params | None = None, state: Params | None = None) -> "torch.nn.Module":
        """Return a copy of PyTorch's module, in the mode in which it was imported.

        Args:
          params: Its parameters, for example trained ones; None for those that were imported.
          state: Its buffers that training changes; None for those that were imported.

        Returns:
          The module, on the CPU.

        Raises:
          UserError: The module was imported from the "meta" device, without weights.
        """
        from jaxtrain.torch_import.capture import filled

        params, state = params or self.params, state or self.state or {}
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in (*params.values(), *self._buffers.values())):
            raise UserError('the module has no weights, it was imported from the "meta" device: pass torch_model=')
        buffers = {} if self.state_names is None else self.state_names.to_torch(state)
        return filled(self._structure, {**self._buffers, **buffers, **self.names.to_torch(params)})

    def task(self, loss: Callable[..., Any], **fields: Any) -> "Task":
        """Return the task of a training run, for a `jaxtrain.Recipe`.

        Its checkpoints are converted from and to PyTorch by `jaxtrain import-torch` and `export --format torch`: the
        state contains all buffers of PyTorch's `state_dict()`, also those that do not change.

        Args:
          loss: As in `loss`.
          **fields: Further fields of `jaxtrain.Task`, such as `train`, `validation` and `predict`.

        Returns:
          The task, whose runs start from the imported weights.

        Example:
          >>> import torch
          >>> from jaxtrain.step import Loss
          >>> model = from_torch(torch.nn.Linear(3, 2), {"input": np.ones((4, 3), np.float32)})
          >>> task = model.task(lambda y, batch: Loss.of(y**2), train={"input": np.ones((8, 3), np.float32)})
          >>> task.initial().params["bias"].shape
          (2,)
        """
        from jaxtrain.torch_import.task import task_of

        return task_of(
            self.loss(loss),
            self.params,
            self.state,
            self.saved_constants,
            names=self.names,
            state_names=self.state_names,
            frozen=self.frozen,
            fields=fields,
        )

    def case(self, name: str = "imported", *args: Any, **kwargs: Any) -> "Case":
        """Return the parity case of this model, beside PyTorch's module.

        Without `torch_loss` and `loss_fn` the loss is the module's own, if it returns a scalar, alone or as "loss".
        Otherwise it is the mean squared distance of its outputs from fixed targets (`parity.default_loss`).

        Args:
          name: Name in reports.
          torch_loss: As `parity.Case.torch_loss`.
          loss_fn: The same loss in JAX, for example from `loss`.
          batch: As `parity.Case.batch`; None draws batches like the example (`parity.example_batches`).
          rows: Rows of a batch; None for those of the example.
          torch_model: As `parity.Case.torch_model`; None for copies with the imported weights.
          optimizer: As `parity.Case.optimizer`; None for AdamW with a learning rate of 1e-3.
          clip_norm: As `parity.Case.clip_norm`; 1 by default.

        Returns:
          The case, as `parity.check`, `locate` and the other functions of `parity` take it.

        Raises:
          UserError: One of the two losses is missing, or `batch` is given without `rows`.

        Example:
          >>> import torch
          >>> from parity import check
          >>> model = from_torch(torch.nn.Linear(3, 2), np.ones((4, 3), np.float32))
          >>> check(model.case(), steps=2).passed
          True
        """
        from parity.imported import imported_case  # parity is above jaxtrain and needs PyTorch

        return imported_case(self, name, *args, **kwargs)

    def _leaves(self, batch: Any) -> list[jax.Array]:
        return jax.tree.leaves(self._chosen(batch))

    def _chosen(self, batch: Any) -> Any:
        """Return the part of a batch that the module takes."""
        if self._keys is None:
            return batch
        if missing := [key for key in self._keys if key not in batch]:
            raise UserError(
                f"the batch has no {missing[0]!r}: the example batch had {', '.join(map(repr, self._keys))}"
            )
        return {key: batch[key] for key in self._keys}

    def _capture(self, params: Params, batch: Any, *, train: bool) -> "Captured":
        key = self._key(params, batch, train=train)
        if key not in self._captured:
            self._captured[key] = self._finished(self._exported(key))
        return self._captured[key]

    def _key(self, params: Params, batch: Any, *, train: bool) -> _Key:
        """Return what a captured graph depends on."""
        leaves, structure = jax.tree.flatten(self._chosen(batch))
        specs = tuple(Spec(tuple(np.shape(x)), _input_dtype(x.dtype)) for x in map(_as_array, leaves))
        dtypes = {str(x.dtype) for x in params.values() if jnp.issubdtype(x.dtype, np.floating)}
        return _Key(train, dtypes.pop() if len(dtypes) == 1 else None, specs, structure)

    def _exported(self, key: _Key) -> "Captured":
        """Return the graph of a forward pass with the parameters of PyTorch."""
        from jaxtrain.torch_import.capture import capture

        captured = capture(
            self._structure,
            lambda module, tensors: self.call(module, jax.tree.unflatten(key.structure, tensors)),
            key.specs,
            train=key.train,
            dtype=key.dtype,
            ops=frozenset(self._ops),
        )
        graph = with_causal_attention(captured.graph, {**self._buffers, **captured.constants}, self._ops)
        return captured._replace(graph=with_grouped_queries(graph, self._ops))

    def _finished(self, exported: "Captured") -> "Captured":
        """Return a graph that takes the stacked parameters, and computes cheap formulas again."""
        tensors = {**self._buffers, **exported.constants}

        def equal(names: Sequence[str]) -> bool:
            first, *others = (tensors[name] for name in names)
            known = self._changed.isdisjoint(names) and not isinstance(first, jax.ShapeDtypeStruct)
            return known and all(np.array_equal(first, x) for x in others)

        # After the loops: a formula of a layer has names of its own, by which layers would differ.
        looped = repeated(exported.graph, self._stacks, self._frozen_tensors, equal)
        return exported._replace(graph=with_recomputed_formulas(looped))

    def _torch_param(self, name: str) -> TorchParam:
        return self._stacks.get(name, TorchParam(name))


def from_torch(
    module: "torch.nn.Module",
    example_batch: Any,
    *,
    call: Call | None = None,
    ops: Mapping[str, Callable[..., Any]] | None = None,
    unroll: bool = False,
) -> ImportedModel:
    """Import a PyTorch module as a pure function that can be trained.

    The module is captured by `torch.export`, in training and in evaluation mode, and evaluated by JAX's operations with
    PyTorch's gradients. Its weights are copied. Of a module on the "meta" device `params` has shapes and dtypes only.

    Args:
      module: The module. It is not modified.
      example_batch: Arrays or tensors that the module takes: a dict of keyword arguments, a tuple of positional ones,
        or one array. Only shapes and dtypes matter.
      call: From (module, batch of tensors) to the result, for a module that takes the batch in another way.
      ops: JAX functions of operations that have none here, by overload, as in `{"mylib::op.default": fn}`.
      unroll: Whether each layer has its own parameters and operations. By default, consecutive layers of a `ModuleList`
        or `Sequential` that differ in their parameters alone are evaluated by a loop over stacked parameters, and each
        is a block for rematerialization.

    Returns:
      The model, with its parameters.

    Raises:
      UserError: The module cannot be imported: its control flow depends on values, an operation has no JAX counterpart.

    Example:
      >>> import torch
      >>> model = from_torch(torch.nn.Linear(3, 2), np.ones((4, 3), np.float32))
      >>> sorted(model.params)
      ['bias', 'weight']
      >>> outputs, _ = model(model.params, np.ones((4, 3), np.float32))
      >>> outputs.shape
      (4, 2)
    """
    from jaxtrain.torch_import.capture import as_array, structure_of

    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    frozen = frozenset(name for name, param in module.named_parameters() if not param.requires_grad)
    example = jax.tree.map(as_array, example_batch)
    return ImportedModel(structure_of(module), tensors, frozen, example, call or _call, ops or {}, unroll)


def _as_array(x: Any) -> Any:
    return x if hasattr(x, "dtype") else np.asarray(x)


def _input_dtype(dtype: Any) -> str:
    """Return the dtype in which an input is captured: integers in PyTorch's default, whatever width JAX gives them."""
    name = str(jax.dtypes.canonicalize_dtype(dtype))
    return "int64" if name in ("int32", "uint32") else name


def _call(module: Any, batch: Any) -> Any:
    """Call a module as the structure of the batch suggests."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)
