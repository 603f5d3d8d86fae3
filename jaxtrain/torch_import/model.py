"""A PyTorch module as a pure function of its parameters."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import cases
from jaxtrain.errors import UserError, user_facing, warn_user
from jaxtrain.torch_import.doubles import refuse_float64, refuse_float64_inputs, refuse_float64_params, with_float64
from jaxtrain.torch_import.graph import COND, Graph, Node, has_gradient_inside, with_gradient, without_gradient
from jaxtrain.torch_import.graph_model import GraphModel, Key, Params, refuse_beyond_int32
from jaxtrain.torch_import.insertion_order import check_leaves, in_order, order_of
from jaxtrain.torch_import.interpret import first_draw
from jaxtrain.torch_import.ops.int64 import FLOAT64, has_64_bits, rounds
from jaxtrain.torch_import.refusals import refusal
from jaxtrain.torch_import.rewrites.channels_last import with_channels_last
from jaxtrain.torch_import.rewrites.grouped_queries import with_grouped_queries
from jaxtrain.torch_import.rewrites.integers import with_int64
from jaxtrain.torch_import.rewrites.kept_roundings import with_kept_roundings
from jaxtrain.torch_import.rewrites.masks import with_causal_attention
from jaxtrain.torch_import.rewrites.recomputed_formulas import with_recomputed_formulas
from jaxtrain.torch_import.rewrites.repeat import Stacks, find_stacks, repeated
from jaxtrain.torch_import.saved import save

if TYPE_CHECKING:
    import torch

    from jaxtrain.torch_import.capture import Beside, Example, Structure
    from jaxtrain.torch_import.graph import Captured
    from jaxtrain.torch_import.source import Pass

Call = Callable[[Any, Any], Any]
"""From (module, batch of tensors) to the module's result."""


class Original(NamedTuple):
    """What a user gave to `from_torch`.

    Attributes:
      module: Returns the user's own module.
      example: The example batch, with its constants, in the user's structure and dtypes.
      call: From (module, batch in that structure) to the module's result.
    """

    module: "Callable[[], torch.nn.Module]"
    example: Any
    call: Call


class ImportedModel(GraphModel):
    """A PyTorch module as a pure function, made by `from_torch`.

    A call with other shapes or dtypes captures the module again, as `jax.jit` traces a function again.

    Attributes:
      params: Parameters by PyTorch's names, in PyTorch's layouts; tied weights once, under their first name. Those of
        repeated layers are stacked along a first axis, as "transformer.h.*.ln_1.weight".
      state: What each call changes, by name: buffers such as BatchNorm's statistics, attributes such as hidden states
        and counters, and parameters of a momentum encoder; None if there is nothing.
      left_out: Attributes that each call changes and that nothing depends on, such as a count of calls.
      example: The example batch, as arrays.
      call: From (PyTorch's module, batch of tensors) to the module's result.
      original: The user's own module, example and call.
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
        original: Original,
    ) -> None:
        from jaxtrain.torch_import.capture import (
            as_array,
            as_arrays,
            as_constant,
            dtype_name,
            persistent_buffers,
            shape_of,
        )

        self.original = original
        self._structure, self._ops = structure, dict(ops)
        self.example, self._fixed, self.call = example, {}, call
        if isinstance(example, Mapping):
            self._fixed = {key: x for key, x in example.items() if type(x) in (bool, int, float, str)}
            self.example = {key: x for key, x in example.items() if key not in self._fixed}
        if fixed := self._fixed:
            self.call = lambda module, batch: call(module, {key: {**batch, **fixed}[key] for key in example})
        self._keys = tuple(self.example) if isinstance(example, Mapping) else None
        self._order = order_of(self.example)
        check_leaves(self.example)
        given = [getattr(x, "dtype", None) for x in jax.tree.leaves(self.example)]
        self.example = in_order(jax.tree.map(as_array, self.example), self._order)
        refuse_beyond_int32(self.example)
        self._frozen_tensors = frozen
        self._tied = {name: first for name, first in structure.aliases.items() if name != first}
        self._persistent = tuple(persistent_buffers(structure))
        self._stacks: Stacks = {}
        self._moved = frozenset[str]()
        self._buffers = {name: as_constant(x) for name, x in tensors.items() if name not in structure.aliases}
        params = {name: tensors[name] for name in structure.aliases.values()}
        integers = {name: as_array(x) for name, x in params.items() if dtype_name(x.dtype) == "int64"}
        refuse_beyond_int32(integers, "the parameter")
        shapes: Any = {name: shape_of(x) for name, x in params.items()}
        key = self._key(shapes, self.example, train=True)
        self._dtype, self._compared = key.dtype, set[bool]()
        plain, carried = self._exported_with_carried(key)
        tensors = {**tensors, **carried}
        self._buffers |= {name: as_constant(x) for name, x in carried.items()}
        self._refuse_float64(key, given)
        self._moved = frozenset(params.keys() & plain.graph.state.keys())
        self._buffers |= {name: as_constant(tensors[name]) for name in self._moved}
        params = {name: x for name, x in params.items() if name not in self._moved}
        self._tied = {name: first for name, first in self._tied.items() if first not in self._moved}
        self._frozen_tensors |= without_gradient(plain.graph) | plain.unused
        _warn_of_paths(plain.graph, self._frozen_tensors)
        self._changed = frozenset(plain.graph.state)
        if not unroll:
            self._stacks = find_stacks(plain.graph, self._frozen_tensors)
        self._captured = {key: self._finished(plain)}
        self._sources: dict[bool, tuple[str, dict[str, jax.Array]]] = {}
        members = {stack: param.names(0) for stack, param in self._stacks.items()}
        self.params: Params = as_arrays(params, members)
        state = as_arrays({name: tensors[name] for name in plain.graph.state}, members)
        self._buffers |= state
        self.state: Params | None = state or None
        self.left_out = plain.left_out
        refuse_float64_params({name: dtype_name(x.dtype) for name, x in params.items()})

    @property
    def graph(self) -> Graph:
        """The graph of a training pass on the example batch."""
        return self._capture(self.params, self.example, train=True).graph

    def save(self, folder: Path | str) -> None:
        """Write the model to a folder, from which `load_imported` reads it without PyTorch.

        The folder contains the weights and the graphs of the example batch, in training and in evaluation, and those of
        the other shapes with which the model was called.

        Args:
          folder: A new folder.

        Raises:
          UserError: The folder exists or cannot be written, or the module was imported without weights.
        """
        self._require_weights()
        for train in (True, False):
            self._capture(self.params, self.example, train=train)
        save(self, Path(folder))

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
        self._require_weights()
        buffers = {} if self.state_names is None else self.state_names.to_torch(state)
        return filled(self._structure, {**self._buffers, **buffers, **self.names.to_torch(params)})

    def case(self, name: str = "imported", *args: Any, **kwargs: Any) -> Any:
        """Return the parity case of this model, beside PyTorch's module.

        Without `torch_loss` and `loss_fn` the loss is the module's own, if it returns a scalar, alone or as "loss".
        Otherwise it is the mean squared distance of its outputs from fixed targets (`parity.cases.default_loss`).

        Args:
          name: Name in reports.
          torch_loss: As `parity.Case.torch_loss`.
          loss_fn: The same loss in JAX, for example from `loss`.
          batch: As `parity.Case.batch`; None draws batches like the example (`parity.cases.example_batches`).
          rows: Rows of a batch; None for those of the example.
          torch_model: As `parity.Case.torch_model`; None for the user's own module, which is used as it is, in its own
            structures and dtypes, and set back after every use.
          optimizer: As `parity.Case.optimizer`; None for AdamW with a learning rate of 1e-3, of which matrices decay.
          clip_norm: As `parity.Case.clip_norm`; 1 by default.

        Returns:
          The `parity.Case`, as `parity.check`, `locate` and the other functions of `parity` take it.

        Raises:
          UserError: parity was not imported, one of the two losses is missing, or `batch` is given without `rows`.

        Example:
          >>> import torch
          >>> from parity import check
          >>> model = from_torch(torch.nn.Linear(3, 2), np.ones((4, 3), np.float32))
          >>> check(model.case(), steps=2).passed
          True
        """
        return cases.case_of(self, name, *args, **kwargs)

    def source(self) -> str:
        """Return the model as readable JAX, one function for each class of modules.

        The text defines `model(params, batch, rng=None, state=None)` for the shapes and dtypes of the example batch,
        with the parameters and the state of this object: those of repeated layers are stacked, and the function
        `stacked` of the text converts PyTorch's. `from_torch(…, unroll=True)` gives each layer its own. The jaxprs of
        outputs and gradients equal those of the captured graph. In low precision the backward pass of this object
        computes elementwise formulas again: results are equal up to rounding.

        Tensors that are no parameters and too large to be written out are read from `buffers.safetensors` beside the
        file; `save_source` writes both.

        Returns:
          The text of a Python file, formatted as by `ruff format`.

        Raises:
          UserError: A buffer that the module reads is on the "meta" device, a function of `ops` cannot be imported, or
            the source would not compute the same.

        Example:
          >>> import torch
          >>> model = from_torch(torch.nn.Linear(3, 2), np.ones((4, 3), np.float32))
          >>> print(model.source().splitlines()[-1])
              return F.linear(batch, params["weight"], params["bias"]), state
        """
        return self.written()[0]

    @property
    def draws_in_evaluation(self) -> bool:
        """Whether the module draws random numbers in evaluation mode."""
        return first_draw(self._capture(self.params, self.example, train=False).graph) is not None

    def save_source(self, path: str | Path, *, evaluation: bool = True) -> list[Path]:
        """Write `source` to a file, and the arrays that go with it to its folder.

        Args:
          path: The file. `params.safetensors` beside it holds the parameters, as in `params`, and
            `buffers.safetensors` the buffers that the source reads, if there are any.
          evaluation: Whether the model has an evaluation mode; without one it needs a key.

        Returns:
          The written files.

        Raises:
          UserError: As `source`, or the module was imported without weights.
        """
        from safetensors.flax import save_file

        self._require_weights()
        text, buffers = self.written(evaluation=evaluation)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        arrays = {"params": self.params, **({"buffers": buffers} if buffers else {})}
        for name, tensors in arrays.items():
            kept = jax.tree.map(lambda x: x if rounds(x) else jnp.asarray(x), tensors)
            save_file(kept, path.with_name(f"{name}.safetensors"))
        return [path, *(path.with_name(f"{name}.safetensors") for name in arrays)]

    def written(self, *, evaluation: bool = True) -> tuple[str, dict[str, jax.Array]]:
        """Return `source`, and the buffers that it reads from a file, by name.

        Args:
          evaluation: As for `save_source`.

        Raises:
          UserError: As `source`.
        """
        if evaluation not in self._sources:
            self._sources[evaluation] = self._source(evaluation)
        return self._sources[evaluation]

    def _source(self, has_evaluation: bool) -> tuple[str, dict[str, jax.Array]]:
        from jaxtrain.torch_import.source import source_of

        keys = [self._key(self.params, self.example, train=train) for train in (True, False)]
        (train, *written), (evaluation, *evaluated) = map(self._pass, keys)

        def model(params: Params, batch: Any, rng: jax.Array | None, state: Params | None) -> Any:
            return self._run(train if rng is not None else evaluation, params, batch, rng, state)

        if has_evaluation and (node := first_draw(evaluation.graph)):
            raise refusal(
                "the module draws random numbers in evaluation, which its source would not",
                "keep the imported model, and pass it a key with train=False",
                node.source,
            )
        return source_of(
            type(self._structure.module).__name__,
            *(*written, *(evaluated if has_evaluation else [None])),
            model=model,
            batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), self.example),
            classes={name: type(part) for name, part in self._structure.module.named_modules()},
            ops=self._ops,
            stacks=self._stacks,
        )

    def _pass(self, key: Key) -> "tuple[Captured, Pass]":
        """Return a pass as it is evaluated and as it is written.

        Formulas that are computed again are those of whole modules: others would be functions without a name.
        """
        from jaxtrain.torch_import.source import Pass, calls_in, without_identities

        exported = self._exported(key)
        looped = self._looped(exported._replace(graph=without_identities(exported.graph)))
        calls, found = calls_in(looped.graph, looped.origins), set[frozenset[str]]()

        def chosen(formula: Sequence[Node]) -> bool:
            names = frozenset(node.name for node in formula)
            found.update({names} & calls)
            return names in calls

        evaluated = looped._replace(graph=with_recomputed_formulas(looped.graph, chosen))
        return evaluated, Pass(looped.graph, looped.origins, {**self._buffers, **looped.constants}, found)

    @property
    def _has_no_weights(self) -> bool:
        return any(isinstance(x, jax.ShapeDtypeStruct) for x in (*self.params.values(), *self._buffers.values()))

    def _require_weights(self) -> None:
        if self._has_no_weights:
            raise UserError('the module has no weights, it is on the "meta" device: import one with weights')

    def _capture(self, params: Params, batch: Any, *, train: bool) -> "Captured":
        key = self._key(params, batch, train=train)
        if key not in self._captured:
            self._captured[key] = self._finished(self._exported(key, batch))
        return self._captured[key]

    def _exported(self, key: Key, batch: Any = None) -> "Captured":
        """Return the graph of a forward pass with the parameters of PyTorch, as JAX evaluates it."""
        captured = self._traced(key, batch)
        captured = captured._replace(graph=self._with_moved_parameters(captured.graph))
        constants = {**self._buffers, **captured.constants}
        graph = captured.graph
        if not has_gradient_inside(graph):
            graph = with_grouped_queries(with_causal_attention(graph, constants, self._ops), self._ops)
        graph = with_float64(with_int64(graph, constants, self._ops), self._ops)
        refuse_float64(graph)
        graph = graph if has_gradient_inside(graph) else with_kept_roundings(graph)
        return captured._replace(graph=graph)

    def _with_moved_parameters(self, graph: Graph) -> Graph:
        """Return a graph that reads the parameters which training passes change from the state."""
        moved = {x.name for x in graph.inputs if x.kind == "param" and x.target in self._moved}
        return replace(graph, inputs=tuple(replace(x, kind="constant") if x.name in moved else x for x in graph.inputs))

    def _exported_with_carried(self, key: Key) -> "tuple[Captured, dict[str, torch.Tensor]]":
        """Return the graph of the first capture, and the values of the attributes that it carries from call to call."""
        from jaxtrain.torch_import.capture import CarriedError, started

        while True:
            try:
                captured = self._exported(key)
            except CarriedError as found:
                known = {x.path for x in self._structure.carried}
                if not known.isdisjoint(x.path for x in found.attributes):
                    raise
                self._structure = self._structure._replace(carried=(*self._structure.carried, *found.attributes))
            else:
                return captured, started(self._structure.module, self._structure.carried)

    def _beside(self, key: Key, batch: Any) -> "Beside | None":
        """Return the module and the example, for the first capture of each mode."""
        from jaxtrain.torch_import.capture import Beside

        if key.train in self._compared or key.dtype != self._dtype:
            return None
        leaves, module = self._leaves_for(key, batch), self._module()
        if leaves is None or module is None:
            return None
        if not has_64_bits() and any(str(x.dtype).endswith("float64") for x in module.parameters()):
            return None  # the import is refused
        return Beside(module, self.call, leaves)

    def _module(self) -> "torch.nn.Module | None":
        """Return the module that was imported, or a copy; None if it has no weights."""
        module = self._structure.own()
        return self.to_torch() if module is None and not self._has_no_weights else module

    def _example_of(self, key: Key, batch: Any) -> "Example | None":
        """Return the values for which questions of a capture are answered: those of a batch, or of the example."""
        from jaxtrain.torch_import.capture import Example

        leaves, module = self._leaves_for(key, batch), self._module()
        if leaves is None or module is None or any(x.is_meta for x in module.parameters()):
            return None
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        return Example({name: x.detach().cpu() for name, x in named}, leaves)

    def _leaves_for(self, key: Key, batch: Any) -> "list[torch.Tensor] | None":
        """Return the tensors of the example, or of a batch with values where that has other shapes."""
        from jaxtrain.torch_import.capture import example_tensors

        example = jax.tree.leaves(self._chosen(self.example))
        leaves = [] if batch is None else jax.tree.leaves(self._chosen(batch))
        has_values = leaves and not any(isinstance(x, jax.core.Tracer) for x in leaves)
        is_like = [np.shape(x) for x in example] == [spec.shape for spec in key.specs]
        return example_tensors(leaves if has_values and not is_like else example, key.specs)

    def _traced(self, key: Key, batch: Any = None) -> "Captured":
        """Return the graph of a forward pass as PyTorch traces it, compared with the module the first time."""
        beside = self._beside(key, batch)
        if beside is not None and (few := _first_rows(key, beside)) is not None:
            # The module computes a few rows as it computes many, in less memory.
            with contextlib.suppress(UserError):  # which may be of the few rows: then all are compared
                self._capture_of(*few)
                beside = None
        captured = self._capture_of(key, beside, batch)
        self._compared |= {key.train} if key.dtype == self._dtype else set()
        return captured

    def _capture_of(self, key: Key, beside: "Beside | None", batch: Any = None) -> "Captured":
        from jaxtrain.torch_import.capture import capture

        return capture(
            self._structure,
            lambda module, tensors: self.call(module, self._batch_of(key, tensors)),
            key.specs,
            train=key.train,
            dtype=key.dtype,
            ops=frozenset(self._ops),
            beside=beside,
            example=functools.cache(partial(self._example_of, key, batch)),
        )

    def _batch_of(self, key: Key, tensors: Sequence[Any]) -> Any:
        """Return tensors as a batch in the order of the example."""
        return in_order(jax.tree.unflatten(key.structure, tensors), self._order)

    def _refuse_float64(self, key: Key, dtypes: Sequence[Any]) -> None:
        """Refuse an example in float64 that PyTorch computes with in float64, which JAX would round.

        Most modules of float32 do not take float64 in PyTorch: arrays of NumPy are then meant as float32.
        """
        wide = [str(dtype).rpartition(".")[2] in FLOAT64 for dtype in dtypes]
        if has_64_bits() or not any(wide):
            return
        wider = {"float32": "float64", "complex64": "complex128"}
        pairs = zip(key.specs, wide, strict=True)
        specs = [replace(x, dtype=wider[x.dtype]) if is_wide else x for x, is_wide in pairs]
        try:
            captured = self._traced(key._replace(specs=tuple(specs)))
        except UserError:
            return
        refuse_float64_inputs(captured.graph)

    def _finished(self, exported: "Captured") -> "Captured":
        """Return a graph that takes the stacked parameters, has channels last and computes cheap formulas again."""
        # After the loops: a formula of a layer has names of its own, by which layers would differ.
        looped = self._looped(exported)
        if has_gradient_inside(looped.graph):
            return looped
        return looped._replace(graph=with_recomputed_formulas(with_channels_last(looped.graph, self._ops)))

    def _looped(self, exported: "Captured") -> "Captured":
        """Return a graph that takes the stacked parameters."""
        tensors = {**self._buffers, **exported.constants}

        def equal(names: Sequence[str]) -> bool:
            first, *others = (tensors[name] for name in names)
            known = self._changed.isdisjoint(names) and not isinstance(first, jax.ShapeDtypeStruct)
            return known and all(np.array_equal(first, x) for x in others)

        return exported._replace(graph=repeated(exported.graph, self._stacks, self._frozen_tensors, equal))


def _first_rows(key: Key, beside: "Beside") -> "tuple[Key, Beside] | None":
    """Return what has two rows of a large example; None of a small one, or of one without a common first axis."""
    rows = {x.shape[:1] for x in beside.leaves}
    if len(rows) != 1 or rows in ({()}, {(1,)}, {(2,)}) or sum(x.numel() for x in beside.leaves) < _MANY:
        return None
    specs = tuple(replace(x, shape=(2, *x.shape[1:])) for x in key.specs)
    return key._replace(specs=specs), beside._replace(leaves=[x[:2].clone() for x in beside.leaves])


_MANY = 4096
"""Elements of an example of which two rows are compared with the module, instead of all."""


@user_facing
def from_torch(
    module: "torch.nn.Module | Path | str",
    example_batch: Any,
    *,
    call: Call | None = None,
    ops: Mapping[str, Callable[..., Any]] | None = None,
    unroll: bool = False,
) -> ImportedModel:
    """Import a PyTorch module as a pure function that can be trained.

    The module is captured by `torch.export`, in training and in evaluation mode, and evaluated by JAX's operations with
    PyTorch's gradients. A capture that computes something else than the module itself, on other parameters and inputs,
    is refused. The weights are copied; the module itself is kept for `ImportedModel.case`. Of a module on the "meta"
    device `params` has shapes and dtypes only. Of a lazy module a copy is imported, whose parameters a call has made.

    Args:
      module: The module, which is not modified, or a folder of a model of `transformers`, which loads it in float32 and
        without code from the folder.
      example_batch: Arrays or tensors that the module takes: a dict of keyword arguments, a tuple of positional ones,
        or one array. Captures depend on its shapes, its dtypes and the order of keys alone; the module must accept it.
        Dicts reach the module in the order of the example, in which a batch may have them in another. Python numbers,
        flags and strings in a dict are constants of the model, which batches leave out.
      call: From (module, batch of tensors) to the result, for a module that takes the batch in another way.
      ops: JAX functions of operations that have none here, by overload, as in `{"mylib::op.default": fn}`.
      unroll: Whether each layer has its own parameters and operations. By default, consecutive layers of a `ModuleList`
        or `Sequential` that differ in their parameters alone are evaluated by a loop over stacked parameters, and each
        is a block for rematerialization.

    Returns:
      The model, with its parameters.

    Raises:
      UserError: The module cannot be imported: its control flow depends on values, an operation has no JAX counterpart,
        its capture computes something else.

    Example:
      >>> import torch
      >>> model = from_torch(torch.nn.Linear(3, 2), np.ones((4, 3), np.float32))
      >>> sorted(model.params)
      ['bias', 'weight']
      >>> outputs, _ = model(model.params, np.ones((4, 3), np.float32))
      >>> outputs.shape
      (4, 2)
    """
    from jaxtrain.torch_import.capture import is_lazy, materialized, pretrained, structure_of

    if isinstance(module, Path | str):
        # A folder is read again, so that its weights are not kept twice.
        own, module = partial(pretrained, module), pretrained(module)
    else:
        own = partial(_itself, module)
    _check_module(module)
    if is_lazy(module):
        module = materialized(module, example_batch, call or _call)
        own = partial(_itself, module)
    original = Original(own, example_batch, call or _call)
    if call is None:
        _check_arguments(module, example_batch)
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    frozen = frozenset(name for name, param in module.named_parameters() if not param.requires_grad)
    return ImportedModel(
        structure_of(module), tensors, frozen, example_batch, call or _call, ops or {}, unroll, original
    )


def _warn_of_paths(graph: Graph, frozen: Collection[str]) -> None:
    """Warn of parameters that have a gradient on some paths of conditions alone, which is 0 here on the others."""
    paths = with_gradient(graph)
    found = sorted(frozenset().union(*paths).difference(frozenset.intersection(*paths), frozen))
    if found:
        names = found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"
        lines = ", ".join(dict.fromkeys(node.source for node in graph.nodes if node.op == COND))
        warn_user(
            f"whether {names} have a gradient depends on a condition ({lines}): where PyTorch has None, and its "
            "optimizers skip the parameter, the gradient is 0, with which weight decay and momentum still change it"
        )


def _itself(module: "torch.nn.Module") -> "torch.nn.Module":
    return module


def _check_module(module: Any) -> None:
    if isinstance(module, type):
        raise UserError(f"module must be a torch.nn.Module, got the class {module.__name__}: use {module.__name__}(…)")
    if not callable(getattr(module, "named_parameters", None)):
        raise UserError(f"module must be a torch.nn.Module, got {type(module).__name__}: give the module first")


def _check_arguments(module: Any, batch: Any) -> None:
    """Raise `UserError` for an example that `forward` cannot be called with."""
    signature = inspect.signature(module.forward)
    keywords = isinstance(batch, Mapping)
    try:
        if keywords:
            signature.bind(**batch)
        else:
            signature.bind(*(batch if isinstance(batch, tuple | list) else [batch]))
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "nothing"
        given = f"the keys {', '.join(map(str, batch))}" if keywords else "positional arguments"
        rule = "the example's keys are the arguments of forward" if keywords else "the arguments of forward are"
        raise UserError(
            f"{type(module).__name__}.forward cannot take {given} of the example ({error}): {rule}: {takes}; rename "
            "them, or say how the module takes a batch with call="
        ) from None


def _call(module: Any, batch: Any) -> Any:
    """Call a module as the structure of the batch suggests."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)
