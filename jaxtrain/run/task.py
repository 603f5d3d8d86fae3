"""The parts of a training run that depend on its data and model."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxtrain.cost import device_memory
from jaxtrain.data import Collate, Example, Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable
from jaxtrain.losses import cross_entropy
from jaxtrain.paths import Frozen, none_frozen, path_name
from jaxtrain.run.initial import Initial, read_initial
from jaxtrain.run.signature import Signature
from jaxtrain.run.task_fields import check_fields
from jaxtrain.step import Loss, LossFn, TrainState


class Predictions(NamedTuple):
    """Predictions for a batch and their targets.

    Attributes:
      logits: Floating [B, classes], or [B, T, classes] if every token is predicted.
      targets: int [B] or [B, T].
      weight: float32, the shape of the targets; 0 where nothing is predicted.
    """

    logits: Any
    targets: Any
    weight: Any

    def loss(self) -> Loss:
        """Return the cross-entropy in nats, with its weight."""
        losses = cross_entropy(self.logits, self.targets)
        wide = losses.astype(np.promote_types(losses.dtype, np.float32))
        return Loss((wide * self.weight).sum(), self.weight.sum())

    def accuracy(self) -> Loss:
        """Return the accuracy, with its weight."""
        right = jnp.where(self.logits.argmax(-1) == self.targets, self.weight, 0)
        return Loss(right.sum(), self.weight.sum())


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data, model and loss of a training run. Only `init`, `loss_fn` and `train` are required."""

    init: Callable[[], Any]
    """Creates the initial params, or `Initial(params, model_state)`. Only shapes matter of params that `load` reads."""
    loss_fn: LossFn
    """The loss, as `jaxtrain.train_step` takes it."""
    train: Any
    """Training data: a mapping of arrays, anything with `__len__` and `__getitem__`, an iterable or a function that
    returns one, or a DataLoader; see `jaxtrain.data.batches.training_batches`."""
    load: Callable[[Any], Any] | None = None
    """`load(like)` reads the initial params that are stored in files, as those of a pretrained model. `like` has their
    shapes, dtypes and shardings, and None for params that are not wanted. The result is the same tree of arrays, with
    None for params, or whole subtrees of them, that `init` creates. None creates all by `init`."""
    digests: Callable[[], Mapping[str, str]] | None = None
    """Returns digests of the files that `load` reads, by path. A run is only restored with those it was saved with."""
    collate: Collate | None = None
    """Makes a batch of a list of examples; None stacks their arrays."""
    batch_keys: Sequence[str] | None = None
    """Names for the values of examples or batches that are tuples."""
    validation: Any = None
    """Validation data, of the same kinds; with None nothing is evaluated, except by `evaluate`."""
    eval_rows: int | None = None
    """Number of validation examples per evaluation; None for all."""
    evaluate: Callable[[TrainState, Iterator[Any]], Mapping[str, Any]] | None = None
    """`evaluate(state, batches)` returns the metrics of an evaluation; None computes the means of loss_fn's. Without
    validation data it is given no batches. It may also return `jaxtrain.Image`, `Audio`, `Text` and `Table`, or lists
    of one of them, by tag; if it returns these alone, the means of loss_fn's are the metrics."""
    evaluate_answers: Callable[[TrainState, bool], Mapping[str, Any]] | None = None
    """`evaluate_answers(state, is_whole)` answers validation prompts, all of them if `is_whole`, and returns metrics
    and media, which an evaluation adds to the others."""
    best_metric: str = "loss"
    """Metric of an evaluation that `keep_best` and `patience` go by, as the evaluation or metrics.jsonl names it."""
    is_highest_best: bool = False
    """Whether higher values of that metric are better."""
    predict: Callable[[Any, Any, Any], Any] | None = None
    """`predict(params, batch, model_state)` returns `Predictions` of classes or tokens, or other arrays with a leading
    batch axis, in evaluation mode."""
    signature: Signature | None = None
    """The model as `export` writes it to ONNX, StableHLO and Hugging Face, for instance for rows of any length; None
    exports `predict`, whose inputs have the shapes of a batch."""
    classes: int | None = None
    """Number of classes: bounds the integers in a batch, and the initial loss is about log(classes)."""
    unit: str = "examples"
    """Unit of throughput, such as "tokens"."""
    units_per_row: int = 1
    """Number of units in an example."""
    texts: Tokenizer | None = None
    """Tokenizer of the targets; None if they are classes."""
    class_names: Sequence[str] = ()
    """Names of the classes, if the targets are classes."""
    input_text: Callable[[Example], str] | None = None
    """Returns an example's input text, if it differs from the predicted text."""
    exported: Callable[[Any], Any] | None = None
    """Returns the parameters of the signature's model from those of the task, as with adapters merged into them; None
    if they are the same."""
    save_pretrained: Callable[[Path, Any], None] | None = None
    """`save_pretrained(folder, params)` writes the exported parameters as a folder that `transformers` reads; None for
    models of `jaxtrain.models`."""
    save_adapters: Callable[[Path, Any], None] | None = None
    """`save_adapters(folder, params)` writes the adapters among the parameters as `peft` reads them; None without."""
    on_stored_base: Callable[[Any], Any] | None = None
    """Returns `exported` parameters as those adapters give them on the weights in the folder `pretrained`, which the
    task may have quantized."""
    pretrained: Path | None = None
    """Folder of the model that is fine-tuned."""
    show_data: Callable[[], None] | None = None
    """Prints training examples as the model reads them, for `jaxtrain train --show-data`."""
    sharding: Mapping[str, PartitionSpec] | None = None
    """Partition spec of each parameter, by path pattern; None lets `jaxtrain.distributed` choose."""
    bounds: Mapping[str, int] = field(default_factory=dict)
    """Exclusive upper bounds of integer arrays in a batch other than the targets, by name."""
    description: Mapping[str, str] = field(default_factory=dict)
    """Description of the data, printed before the first step."""
    baselines: Callable[[], Mapping[str, str]] = dict
    """Computes the results of simple models to compare with; called only when a new run prints them."""
    references: Mapping[str, float] = field(default_factory=dict)
    """Losses in nats that a useful model must beat, by name."""
    sample_prompt: str = ""
    """Text with which what `sample` returns begins, which the report marks."""
    sample: Callable[[TrainState, int], str] | None = None
    """`sample(state, seed)` returns text generated by the model; None if it generates none."""
    continue_text: Callable[..., Iterator[str]] | None = None
    """`continue_text(params, prompt, length=, temperature=, seed=)` yields chunks of text, the prompt first."""
    reply: Callable[..., Iterator[str]] | None = None
    """`reply(params, messages, length=, temperature=, seed=)` yields chunks of the answer to a conversation, a list of
    {"role": "user" or "assistant", "content": text}."""
    frozen: Frozen | None = None
    """Predicate on a parameter's path: whether it is not trained, besides those of the setting `frozen`."""
    unsaved: Frozen | None = None
    """Predicate on a frozen parameter's path: whether checkpoints leave it out, because `load` reads it again, as the
    weights of a pretrained model from its folder, or `init` creates the same. None saves all."""
    no_decay: Callable[[str], bool] | None = None
    """Predicate on a parameter's path: whether it does not decay, if the optimizer has one group; None for
    `jaxtrain.optim.no_decay`: biases, scales and others of less than two axes."""
    names: NameTable | None = None
    """PyTorch's parameter names, in the order of its model; required for importing and exporting checkpoints."""
    buffers: NameTable | None = None
    """PyTorch's names of the arrays in `model_state`."""
    imported: Any = None
    """The model of `from_torch` whose `task` this is: its module is PyTorch's side of `parity run`."""

    def __post_init__(self) -> None:
        check_fields(self)

    def create(self) -> Initial:
        """Call `init`, which creates params and model_state."""
        made = self.init()
        return made if isinstance(made, Initial) else Initial(made)

    def shapes(self) -> Initial:
        """Return the shapes and dtypes of the initial params and model_state; nothing is created or read."""
        shapes: Initial = jax.eval_shape(self.create)
        return shapes

    def initial(self, like: Initial | None = None) -> Initial:
        """Create the initial params and model_state, or read them from files.

        Args:
          like: Shapes with the dtypes and shardings to read into, and with None for params that are not wanted, if the
            task has `load`; None for `shapes()`, on the default device.
        """
        return self.create() if self.load is None else read_initial(self.create, self.load, like or self.shapes())

    @property
    def params(self) -> Any:
        """The initial params, created on one device on first use."""
        return self._initial.params

    @property
    def model_state(self) -> Any:
        """The initial model_state."""
        return self._initial.model_state

    @cached_property
    def _initial(self) -> Initial:
        check_memory(self.create, frozen=self.frozen or none_frozen)
        with jax.ensure_compile_time_eval():  # concrete arrays, even if first used during a trace
            return self.initial()


def check_memory(init: Callable[[], Any], devices: int = 1, frozen: Frozen = none_frozen) -> None:
    """Check that `devices` devices can hold the arrays that `init` creates, and the gradients of those not frozen.

    Args:
      init: Function without arguments that creates arrays, or an `Initial`; only its shapes are computed.
      devices: Number of devices that the arrays are sharded over.
      frozen: Predicate on paths of parameters that are not trained.

    Raises:
      UserError: The devices' memory does not suffice.
    """
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(init))
    sizes = {path_name(path).removeprefix("params/"): math.prod(x.shape) * x.dtype.itemsize for path, x in leaves}
    needed, gradients = sum(sizes.values()), sum(size for path, size in sizes.items() if not frozen(path))
    # CPU devices share the machine's memory.
    memory = device_memory() * (1 if jax.default_backend() == "cpu" else devices)
    # The optimizer's moments come on top.
    if needed + gradients > memory:
        more = "as much again" if gradients == needed else f"{gradients / 2**30:,.1f} GiB"
        raise UserError(
            f"the parameters take {needed / 2**30:,.1f} GiB, and their gradients {more}, but only "
            f"{memory / 2**30:,.1f} GiB are available: reduce the model's size"
        )


def row_weights(batch: Mapping[str, Any], rows: int) -> Any:
    """Return float32 [rows]: 1 for an example, 0 for a padding row of an evaluation's last batch."""
    return batch["weight"] if "weight" in batch else jnp.ones(rows, np.float32)
