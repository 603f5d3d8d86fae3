"""A PyTorch module as a pure function of its parameters."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam
from jaxtrain.paths import Frozen, none_frozen
from jaxtrain.step import Loss
from jaxtrain.torch_import.graph import Graph, Spec
from jaxtrain.torch_import.interpret import interpret
from jaxtrain.torch_import.masks import with_causal_attention

if TYPE_CHECKING:
    import torch

    from jaxtrain.torch_import.capture import Captured, Structure
    from parity import Case

Params = dict[str, jax.Array]
Call = Callable[[Any, Any], Any]
"""From (module, batch of tensors) to the module's result."""


class ImportedModel:
    """A PyTorch module as a pure function, made by `from_torch`.

    A call with other shapes or dtypes captures the module again, as `jax.jit` traces a function again.

    Attributes:
      params: Parameters by PyTorch's names, in PyTorch's layouts; tied weights once, under their first name.
      state: Buffers that training changes, by name, such as BatchNorm's statistics; None if there are none.
      example: The example batch, as arrays.
      call: From (PyTorch's module, batch of tensors) to the module's result.
    """

    def __init__(
        self,
        structure: "Structure",
        tensors: Mapping[str, Any],
        frozen: frozenset[str],
        example: Any,
        call: Call,
        ops: Mapping[str, Callable[..., Any]],
    ) -> None:
        self._structure, self._ops = structure, dict(ops)
        self.example, self.call = example, call
        self._keys = tuple(example) if isinstance(example, Mapping) else None
        self._captured: dict[Any, Captured] = {}
        self._frozen = frozen
        first_names = {*structure.aliases.values()}
        self.params: Params = {name: x for name, x in tensors.items() if name in first_names}
        self._buffers = {name: x for name, x in tensors.items() if name not in structure.aliases}
        self.state: Params | None = {name: self._buffers[name] for name in self.graph.state} or None

    @property
    def names(self) -> NameTable:
        """The table from `params` to PyTorch's names, which are the same, with the further names of tied weights."""
        tied = {name: first for name, first in self._structure.aliases.items() if name != first}
        return NameTable({name: TorchParam(name) for name in self.params}, tied=tied)

    @property
    def state_names(self) -> NameTable | None:
        """The table from `state` to PyTorch's names; None for a module without state."""
        return None if self.state is None else NameTable({name: TorchParam(name) for name in self.state})

    @property
    def frozen(self) -> Frozen:
        """Predicate on names: whether a parameter has `requires_grad=False`, as `train_step(frozen=…)` takes it."""
        return self._frozen.__contains__ if self._frozen else none_frozen

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
        return filled(self._structure, {**self._buffers, **state, **self.names.to_torch(params)})

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

    def source(self) -> str:
        """Return the model as readable JAX, one function for each class of modules.

        The text defines `model(params, batch, rng=None, state=None)`, which computes what this object computes for the
        shapes and dtypes of the example batch: the jaxprs of both are equal. Tensors that are no parameters and too
        large to be written out are read from `buffers.safetensors` beside the file; `save_source` writes both.

        Returns:
          The text of a Python file, formatted as by `ruff format`.

        Raises:
          UserError: The source would not compute the same.

        Example:
          >>> import torch
          >>> model = from_torch(torch.nn.Linear(3, 2), np.ones((4, 3), np.float32))
          >>> print(model.source().splitlines()[-1])
              return batch @ params["weight"].T + params["bias"], state
        """
        return self._source()[0]

    def save_source(self, path: str | Path) -> list[Path]:
        """Write `source` to a file, and the arrays that go with it to its folder.

        Args:
          path: The file. `params.safetensors` beside it holds `params`, and `buffers.safetensors` the buffers that
            the source reads, if there are any.

        Returns:
          The written files.

        Raises:
          UserError: As `source`, or the weights are on the "meta" device.
        """
        from safetensors.flax import save_file

        if any(isinstance(x, jax.ShapeDtypeStruct) for x in self.params.values()):
            raise UserError('the module has no weights, it was imported from the "meta" device: save source() alone')
        text, buffers = self._source()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        arrays = {"params": self.params, **({"buffers": buffers} if buffers else {})}
        for name, tensors in arrays.items():
            save_file(jax.tree.map(jnp.asarray, dict(tensors)), path.with_name(f"{name}.safetensors"))
        return [path, *(path.with_name(f"{name}.safetensors") for name in arrays)]

    def _source(self) -> tuple[str, dict[str, jax.Array]]:
        """Return the source with the buffers that it reads."""
        from jaxtrain.torch_import.source import Pass, source_of

        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), _as_array(x).dtype), self.example)
        passes = []
        for train in (True, False):
            captured = self._capture(self.params, batch, train=train)
            passes.append(Pass(captured.graph, captured.origins, {**self._buffers, **captured.constants}))
        return source_of(
            type(self._structure.module).__name__,
            *passes,
            model=self,
            params=jax.eval_shape(lambda: self.params),
            state=jax.eval_shape(lambda: self.state),
            batch=batch,
            classes={name: type(part) for name, part in self._structure.module.named_modules()},
            ops=self._ops,
        )

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
        from jaxtrain.torch_import.capture import capture

        chosen = self._chosen(batch)
        leaves, structure = jax.tree.flatten(chosen)
        specs = tuple(Spec(tuple(np.shape(x)), str(x.dtype)) for x in map(_as_array, leaves))
        dtypes = {str(x.dtype) for x in params.values() if jnp.issubdtype(x.dtype, np.floating)}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        key = (train, dtype, specs, structure)
        if key not in self._captured:
            captured = capture(
                self._structure,
                lambda module, tensors: self.call(module, jax.tree.unflatten(structure, tensors)),
                specs,
                train=train,
                dtype=dtype,
                ops=frozenset(self._ops),
            )
            graph = with_causal_attention(captured.graph, {**self._buffers, **captured.constants}, self._ops)
            self._captured[key] = captured._replace(graph=graph)
        return self._captured[key]


def from_torch(
    module: "torch.nn.Module",
    example_batch: Any,
    *,
    call: Call | None = None,
    ops: Mapping[str, Callable[..., Any]] | None = None,
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

    tensors = {name: as_array(x) for name, x in (*module.named_parameters(), *module.named_buffers())}
    frozen = frozenset(name for name, param in module.named_parameters() if not param.requires_grad)
    example = jax.tree.map(as_array, example_batch)
    return ImportedModel(structure_of(module), tensors, frozen, example, call or _call, ops or {})


def _as_array(x: Any) -> Any:
    return x if hasattr(x, "dtype") else np.asarray(x)


def _call(module: Any, batch: Any) -> Any:
    """Call a module as the structure of the batch suggests."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)
