"""A captured module as a function of its parameters, whose graphs come from a capture or from a file."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxtrain.errors import UserError, user_facing
from jaxtrain.interop import AS_IS, OUT_IN, Layout, NameTable, TorchParam
from jaxtrain.paths import Frozen, none_frozen
from jaxtrain.step import Loss
from jaxtrain.torch_import.assumptions import assumptions_of, checks_of
from jaxtrain.torch_import.doubles import refuse_float64, refuse_rounded
from jaxtrain.torch_import.graph import Captured, Graph, Spec, without_unused
from jaxtrain.torch_import.interpret import first_draw, interpret
from jaxtrain.torch_import.linear_weights import linear_weights
from jaxtrain.torch_import.ops.int64 import has_64_bits
from jaxtrain.torch_import.refusals import refusal
from jaxtrain.torch_import.rewrites.repeat import Stacks
from jaxtrain.torch_import.sharding_rules import sharding_rules

if TYPE_CHECKING:
    from jaxtrain.models import LoraConfig
    from jaxtrain.run import Task

Params = dict[str, jax.Array]


class Key(NamedTuple):
    """What a captured graph depends on: mode, dtype of the parameters, and shapes and structure of the batch."""

    train: bool
    dtype: str | None
    specs: tuple[Spec, ...]
    structure: Any


class GraphModel:
    """A captured module as a pure function.

    Attributes:
      params: Parameters by PyTorch's names; those of repeated layers are stacked.
      state: Buffers that training changes, by name; None if there are none.
      example: The example batch.
    """

    params: Params
    state: Params | None
    example: Any
    _buffers: dict[str, Any]
    _changed: frozenset[str]
    _captured: dict[Any, Captured]
    _fixed: dict[str, Any]
    _frozen_tensors: frozenset[str]
    _keys: tuple[str, ...] | None
    _ops: dict[str, Callable[..., Any]]
    _persistent: tuple[str, ...]
    _stacks: Stacks
    _tied: Mapping[str, str]

    def __repr__(self) -> str:
        count = sum(int(np.prod(x.shape)) for x in self.params.values())
        lines = [f"{type(self).__name__}: {len(self.params)} parameters, {count:,} numbers", *self.assumptions]
        return "\n  assumes that ".join(lines)

    @property
    def names(self) -> NameTable:
        """The table from `params` to PyTorch's names, which are the same but for stacks, with those of tied weights."""
        return NameTable({name: self._torch_param(name) for name in self.params}, tied=self._tied)

    @property
    def state_names(self) -> NameTable | None:
        """The table from `state` to PyTorch's names; None for a module without state."""
        return None if self.state is None else NameTable({name: self._torch_param(name) for name in self.state})

    @property
    def saved_constants(self) -> Params:
        """The buffers of PyTorch's `state_dict()` that do not change, by name."""
        return {name: self._buffers[name] for name in self._persistent if name not in self._changed}

    @property
    def frozen(self) -> Frozen:
        """Predicate on names: whether a parameter has no gradient, as `train_step(frozen=…)` takes it.

        These are parameters with `requires_grad=False`, and those that no output depends on: PyTorch's optimizers
        leave both as they are, without weight decay.
        """
        found = {x for x in self.params if not self._frozen_tensors.isdisjoint(self._torch_param(x).names(0))}
        return found.__contains__ if found else none_frozen

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the graphs assume about a batch: each line of `forward` that reads a value, with that of the example.

        A batch for which one does not hold is an error outside `jax.jit`, and has NaN in every floating-point output,
        and in every gradient, inside.
        """
        graphs = [captured.graph for captured in self._captured.values()]
        return tuple(dict.fromkeys(str(x) for graph in graphs for x in assumptions_of(graph)))

    def failed_assumption(self, batch: Any, params: Params | None = None, state: Params | None = None) -> str | None:
        """Return which assumption a batch does not fulfil, as a sentence with its line; None if all hold.

        Args:
          batch: Arrays in the structure of the example batch, with any number of its rows, and further axes before.
          params: Parameters by name; None for those that were imported.
          state: Buffers by name; None for those that were imported.

        Example:
          >>> import torch
          >>> from jaxtrain.torch_import import from_torch
          >>> model = from_torch(torch.nn.Linear(3, 2), np.ones((4, 3), np.float32))
          >>> model.failed_assumption(np.ones((4, 3), np.float32))
        """
        try:
            leaves, structure = jax.tree.flatten(self._chosen(batch))
            if any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in leaves):
                return None
            arrays = [np.asarray(x) for x in leaves]
        except UserError:
            return None
        given = {**self._buffers, **(self.state or {}), **(state or {})}
        for key, captured in [*self._captured.items()]:
            checks = checks_of(captured.graph)
            if checks is None or key.structure != structure:
                continue
            evaluate = functools.partial(
                interpret,
                without_unused(checks, ()),
                params=params or self.params,
                state=given,
                constants={**given, **captured.constants},
                rng=jax.random.key(0),
                ops=self._ops,
            )
            for part in _parts_of(arrays, key.specs):
                try:
                    evaluate(inputs=part)
                except UserError as error:
                    return str(error)
        return None

    def no_decay(self, name: str) -> bool:
        """Return whether a parameter usually does not decay, for `optim.all_but`.

        These are parameters with less than two axes in PyTorch: biases, and scales of norms.

        Example:
          >>> import torch
          >>> from jaxtrain.torch_import import from_torch
          >>> model = from_torch(torch.nn.Linear(3, 2), np.ones((4, 3), np.float32))
          >>> [name for name in model.params if model.no_decay(name)]
          ['bias']
        """
        return self.params[name].ndim - self._torch_param(name).is_stack < 2

    @property
    def sharding(self) -> dict[str, PartitionSpec]:
        """Sharding rules of the parameters for `jaxtrain.distributed.shard`, with names as regular expressions.

        `fsdp` shards the longest axis of each parameter, `tensor` the linear layers as Megatron-LM does, the first of
        two along its outputs and the second along its inputs, and the vocabulary of embeddings.
        """
        graph = next(iter(self._captured.values())).graph
        return sharding_rules(graph, self.params, self._stacks, self._linear)

    def lora_config(self, targets: str, **settings: Any) -> "LoraConfig":
        """Return the configuration of low-rank adapters of this model, for `jaxtrain.models.lora`.

        Args:
          targets: Regular expression that matches the whole names of weights of linear layers, such as
            ".*(q_proj|v_proj).weight". They are stored [out, in] in `torch.nn.Linear`, [in, out] in `Conv1D` of
            transformers.
          **settings: `r`, `alpha`, `dropout`, `rslora` and `dora`, as of `LoraConfig`.

        Returns:
          The configuration.

        Raises:
          UserError: `targets` match nothing, or a parameter that is not the weight of linear layers alone.
        """
        from jaxtrain.models import LoraConfig

        found = [name for name in self.params if re.fullmatch(targets, name)]
        if wrong := [name for name in found if name not in self._linear]:
            raise UserError(
                f"LoRA targets {targets!r} match {wrong[0]} {list(self.params[wrong[0]].shape)}, which is not the "
                "weight of a linear layer alone: exclude it"
            )
        if not found:
            raise UserError(f"LoRA targets {targets!r} match no whole name: the model has {', '.join(self._linear)}")
        out_in = "|".join(re.escape(name) for name in found if self._linear[name] is OUT_IN)
        return LoraConfig(targets, **settings, out_in=out_in)

    @user_facing
    def __call__(
        self,
        params: Params,
        batch: Any,
        rng: jax.Array | None = None,
        state: Params | None = None,
        *,
        train: bool | None = None,
    ) -> tuple[Any, Params | None]:
        """Run the module.

        Args:
          params: Parameters by name.
          batch: Arrays in the structure of the example batch. A dict may have further entries, for the loss.
          rng: Key of dropout and other random numbers; with None the module is in evaluation mode.
          state: Buffers, as in `self.state`.
          train: Whether the module is in training mode, whatever `rng` is: `train=False` with a key is evaluation of a
            module that draws random numbers there, such as Monte Carlo dropout.

        Returns:
          A tuple (outputs, new state): dicts, tuples and arrays as the module returns them.

        Raises:
          UserError: The batch or the parameters do not fit the module, or it draws random numbers and has no key.
        """
        train = rng is not None if train is None else train
        captured = self._capture(params, batch, train=train)
        if rng is None and (node := first_draw(captured.graph)):
            mode, argument = ("training", "True") if train else ("evaluation", "False")
            remedy = f"pass a key, as in model(params, batch, jax.random.key(0), state, train={argument})"
            raise refusal(f"the module draws random numbers in {mode}", remedy, node.source)
        if rng is None:
            captured = captured._replace(graph=without_unused(captured.graph, ()))
        return self._run(captured, params, batch, rng, state)

    def _run(
        self, captured: Captured, params: Params, batch: Any, rng: jax.Array | None, state: Params | None
    ) -> tuple[Any, Params | None]:
        """Evaluate a graph with the model's buffers."""
        given = dict(state or {})
        refuse_float64(captured.graph)
        buffers = {**self._buffers, **given}
        _check_values(captured.graph, buffers)
        outputs, changed = interpret(
            captured.graph,
            params=params,
            state=buffers,
            constants={**buffers, **captured.constants},
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
                refuse_rounded(params, self.params)
                return with_metrics(self(params, batch, rng)[0], batch)

            loss_fn.failed_assumption = self.failed_assumption  # type: ignore[attr-defined]
            return loss_fn

        def loss_fn_with_state(params: Params, batch: Any, rng: Any, model_state: Params) -> Any:
            refuse_rounded(params, self.params)
            outputs, new_state = self(params, batch, rng, model_state)
            return (*with_metrics(outputs, batch), new_state)

        loss_fn_with_state.failed_assumption = self.failed_assumption  # type: ignore[attr-defined]
        return loss_fn_with_state

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
          >>> from jaxtrain.torch_import import from_torch
          >>> model = from_torch(torch.nn.Linear(3, 2), {"input": np.ones((4, 3), np.float32)})
          >>> task = model.task(lambda y, batch: Loss.of(y**2), train={"input": np.ones((8, 3), np.float32)})
          >>> task.initial().params["bias"].shape
          (2,)
        """
        from jaxtrain.torch_import.imported_task import task_of

        return task_of(
            self.loss(loss),
            self.params,
            self.state,
            self.saved_constants,
            names=self.names,
            state_names=self.state_names,
            frozen=self.frozen,
            no_decay=self.no_decay,
            fields={"sharding": self.sharding, "imported": self, **fields},
        )

    def _leaves(self, batch: Any) -> list[jax.Array]:
        chosen = self._chosen(batch)
        refuse_beyond_int32(chosen)
        return jax.tree.leaves(chosen)

    def _chosen(self, batch: Any) -> Any:
        """Return the part of a batch that the module takes."""
        if self._keys is None:
            return batch
        if missing := [key for key in self._keys if key not in batch]:
            raise UserError(
                f"the batch has no {missing[0]!r}: the example batch had {', '.join(map(repr, self._keys))}"
            )
        for key, value in self._fixed.items():
            given = batch.get(key, value)
            if isinstance(given, jax.core.Tracer) or not np.array_equal(given, value):
                raise UserError(
                    f"{key!r} is the constant {value!r} of the imported module, of its example batch: leave it out of "
                    "batches, or import the module again for another value"
                )
        return {key: batch[key] for key in self._keys}

    def _capture(self, params: Params, batch: Any, *, train: bool) -> Captured:
        raise NotImplementedError

    def _key(self, params: Params, batch: Any, *, train: bool) -> Key:
        """Return what a captured graph depends on."""
        leaves, structure = jax.tree.flatten(self._chosen(batch))
        specs = tuple(Spec(tuple(np.shape(x)), _input_dtype(x.dtype)) for x in map(_as_array, leaves))
        dtypes = {str(x.dtype) for x in params.values() if jnp.issubdtype(x.dtype, np.floating)}
        return Key(train, dtypes.pop() if len(dtypes) == 1 else None, specs, structure)

    def _torch_param(self, name: str) -> TorchParam:
        return replace(self._stacks.get(name, TorchParam(name)), layout=self._linear.get(name, AS_IS))

    @functools.cached_property
    def _linear(self) -> Mapping[str, Layout]:
        """The layouts of the weights of linear layers, by name."""
        return linear_weights(next(iter(self._captured.values())).graph, self._stacks)


def _parts_of(arrays: Sequence[np.ndarray], specs: Sequence[Spec]) -> list[list[Any]]:
    """Return the parts of a batch that have the shapes of a graph's inputs: the micro-batches of a window."""
    if len(arrays) != len(specs):
        return []
    pairs = [*zip(arrays, [spec.shape for spec in specs], strict=True)]
    if all(x.shape == shape for x, shape in pairs):
        return [[*arrays]]
    if any(not shape or not shape[0] or x.ndim < len(shape) for x, shape in pairs):
        return []
    merged = [(x.reshape(-1, *x.shape[x.ndim - len(shape) + 1 :]), shape) for x, shape in pairs]
    counts = {divmod(len(x), shape[0]) for x, shape in merged}
    if len(counts) > 1 or any(x.shape[1:] != shape[1:] for x, shape in merged):
        return []
    ((count, rest),) = counts
    return [] if rest else [[x[i * shape[0] : (i + 1) * shape[0]] for x, shape in merged] for i in range(count)]


def _check_values(graph: Graph, buffers: Mapping[str, Any]) -> None:
    """Check that the buffers which a graph reads have values."""
    for x in graph.inputs:
        if isinstance(buffers.get(x.target), jax.ShapeDtypeStruct) and x.kind in ("constant", "state"):
            raise UserError(
                f"the buffer {x.target!r} is on PyTorch's meta device, without values: create the module with its "
                "buffers on the CPU, as `accelerate.init_empty_weights()` does"
            )


def refuse_beyond_int32(tree: Any, what: str = "the batch") -> None:
    """Raise an error if a batch, or another tree, has integers that JAX would wrap."""
    if has_64_bits():
        return
    limits = np.iinfo(np.int32)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        integers = isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.size
        if integers and (x.min() < limits.min or x.max() > limits.max):
            largest = x.flat[np.abs(x.astype(float)).argmax()]
            raise UserError(
                f"{what}{jax.tree_util.keystr(path)} has the integer {largest}, beyond int32, JAX's widest by "
                "default: take a remainder or a difference in NumPy first"
            )


def _as_array(x: Any) -> Any:
    return x if hasattr(x, "dtype") else np.asarray(x)


def _input_dtype(dtype: Any) -> str:
    """Return the dtype in which an input is captured: integers in PyTorch's default, whatever width JAX gives them."""
    name = str(jax.dtypes.canonicalize_dtype(dtype))
    return "int64" if name in ("int32", "uint32") else name
