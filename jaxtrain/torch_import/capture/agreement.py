"""A captured program beside the user's own module, both run by PyTorch on values that the capture did not see.

What `forward` reads or decides while it is captured is a constant of the program: random numbers of Python and NumPy,
the time, whether a package's code is compiled, the fallback after an error that only tracing raises, a tensor that the
capture did not follow. The module itself reads it again, untraced. So the two agree on other parameters, inputs and
seeds, or the import is refused.
"""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from jaxtrain.torch_import.capture.convert import Leaf
from jaxtrain.torch_import.capture.eager import evaluated
from jaxtrain.torch_import.capture.gradients.custom_gradients import Call
from jaxtrain.torch_import.capture.module.carried import CARRYING, Attribute, started
from jaxtrain.torch_import.capture.module.reached import (
    GLOBAL,
    Generator,
    GlobalGenerator,
    generators_in,
    is_library,
    reached_by,
    same_state,
)
from jaxtrain.torch_import.capture.module.restored import memory_of, restored
from jaxtrain.torch_import.capture.module.structure import captured_dtype
from jaxtrain.torch_import.capture.replaced import replaced
from jaxtrain.torch_import.capture.tracing import hidden, quiet
from jaxtrain.torch_import.capture.values.questions import Question
from jaxtrain.torch_import.graph import GRADIENT, Spec
from jaxtrain.torch_import.refusals import first_line, refusal, source_line
from jaxtrain.torch_internals import TorchDispatchMode

Run = Callable[[torch.nn.Module, Sequence[torch.Tensor]], tuple[Any, list[torch.Tensor]]]
"""From (module, tensors of a batch) to the structure of the result and its tensors."""

_SEED = 6_180_339
_LATER = 618_033.9887
"""Seconds that clocks are moved, for which float32 has another time as well."""
_VALUES = ((True, True), (True, False), (False, False))
"""Whether parameters and inputs have other values. A module may reject some, and must take those of the example."""
_LARGEST_BACKWARD = 1e10
"""Products of a forward pass up to which gradients are compared as well, which takes seconds of a CPU."""
_LARGEST_ON_ONE_THREAD = 1e8
"""Products of a forward pass up to which threads would wait for each other longer than they compute."""
_PART = 1 << 17
"""Elements that are compared at a time, so that a processor's cache holds what is computed of them."""
_ROUNDING = 32
"""How far the two may differ, in effects of one rounding of each operand: attention has other kernels while traced."""


class Beside(NamedTuple):
    """What a program is compared with.

    Attributes:
      module: The user's module.
      call: The user's function that calls it.
      leaves: Tensors of a batch that it can be called with.
    """

    module: torch.nn.Module
    call: Any
    leaves: Sequence[torch.Tensor]


class Program(NamedTuple):
    """A captured pass.

    Attributes:
      exported: PyTorch's program.
      result: Structure of its results.
      calls: The calls of `torch.autograd.Function` in it.
      draws: Whether the capture drew from the global random numbers of Python and NumPy.
      asked: The questions that were answered as for the example. Their values are its last results.
      carried: The attributes that the module carries from call to call.
      changed: Names of what a call changes, parameters among them.
    """

    exported: torch.export.ExportedProgram
    result: Any
    calls: Sequence[Call]
    draws: bool
    asked: Sequence[Question]
    carried: Sequence[Attribute]
    changed: Collection[str]

    def without_asked(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the results of the module.

        Raises:
          AnotherPath: A question has another answer than for the example.
        """
        count = len(outputs) - len(self.asked)
        for question, value in zip(self.asked, outputs[count:], strict=True):
            if question.is_another(value):
                raise AnotherPath(question, value)
        return outputs[:count]


class AnotherPath(Exception):  # noqa: N818
    """The module takes another path than for the example, which the program does not have."""

    def __init__(self, question: Question, value: Any) -> None:
        super().__init__()
        self.question, self.number = question, question.number(value)


class Results(NamedTuple):
    """What a pass computes: the structure of its result, and tensors by their names in messages."""

    structure: Any
    tensors: dict[str, torch.Tensor]


class Comparison(NamedTuple):
    """A program and the module that it was captured from.

    Attributes:
      programs: The programs of its paths.
      module: The user's module.
      run: Calls it.
      leaves: Tensors of a batch that the module can be called with.
      train: Whether the program is that of the training mode.
      reached: What the module reaches, which is left as it was.
      device: Where the module is.
      products: About how many products with parameters a pass computes.
      constants: Tensors that each program reads besides parameters and buffers, with their values at the capture.
    """

    programs: Sequence[Program]
    module: torch.nn.Module
    run: Run
    leaves: Sequence[torch.Tensor]
    train: bool
    reached: Sequence[Any]
    device: torch.device
    products: float
    constants: Sequence[Mapping[str | None, Any]]

    @contextlib.contextmanager
    def on(self, weights: bool, inputs: bool, first: bool = False) -> Iterator[Sequence[torch.Tensor]]:
        """Give the module other weights and seeds, and return the batch or another one, while entered.

        The module has been called once before, or it is as it was given.
        """
        with restored(self.reached):
            if not self.train:
                self.module.eval()
            elif not self.module.training:
                self.module.train()
            for generator in self.generators:
                generator.skip()
            random = torch.Generator().manual_seed(_SEED)
            if weights:
                _change_weights(self.module, random)
            # The second call is compared: a first one may start a state that no buffer has.
            with contextlib.suppress(Exception):
                if not first:
                    self._called(self.leaves, _SEED + 1)
            # Again: it may have seeded them.
            for generator in generators_in(self.reached):
                generator.skip()
            yield _other_inputs(self.leaves, random) if inputs else self.leaves

    @property
    def generators(self) -> list[Generator]:
        """The random numbers that the module may draw from besides PyTorch's, its own first."""
        return [*generators_in(self.reached), *GLOBAL]

    def theirs(self, leaves: Sequence[torch.Tensor], seconds: float = _LATER) -> Results:
        """Return what the module computes, seconds later."""
        params = _params(self.module)
        structure, outputs = _with_numbers(self.programs[0].result, *self._called(leaves, _SEED, seconds))
        buffers = self._buffers()
        return _results(structure, outputs, buffers, self._trained(params))

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return what the module carries from call to call: buffers, parameters that it changes, and attributes."""
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        changed = {name for program in self.programs for name in program.changed}
        params = {name: x for name, x in _params(self.module).items() if name in changed}
        return {**buffers, **params, **started(self.module, self.programs[0].carried)}

    def _called(
        self, leaves: Sequence[torch.Tensor], seed: int, seconds: float = _LATER
    ) -> tuple[Any, list[torch.Tensor]]:
        torch.manual_seed(seed)
        with GlobalGenerator(), _later(seconds):
            return self.run(self.module, [x.clone() for x in leaves])

    def ours(
        self, leaves: Sequence[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
    ) -> Results:
        """Return what the program of the path that these leaves take computes, of changed operands."""
        errors = []
        for program, constants in zip(self.programs, self.constants, strict=True):
            try:
                return self._computed(program, constants, leaves, change)
            except Exception as error:  # also of an operation that values of another path do not fit
                errors.append(error)
        raise next((error for error in errors if isinstance(error, AnotherPath)), errors[0])

    def _computed(
        self,
        program: Program,
        constants: Mapping[str | None, Any],
        leaves: Sequence[torch.Tensor],
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> Results:
        exported, own = program.exported, _params(self.module)
        by_id = {id(x): change(x.detach()).requires_grad_(x.requires_grad) for x in own.values()}
        params = {name: by_id[id(x)] for name, x in own.items()}
        own = self._buffers()
        by_id = {id(x): change(x.detach()).clone() for x in own.values()}
        inputs, given = (change(x).clone() for x in leaves), []
        names = [leaf.name for attribute in program.carried for leaf in attribute.leaves]
        leaves_of = {f"{CARRYING}.{i}": name for i, name in enumerate(names)}
        nodes = exported.graph_module.graph.find_nodes(op="placeholder")
        for spec, node in zip(exported.graph_signature.input_specs, nodes, strict=True):
            name, kind = (spec.target or "").removeprefix("module."), spec.kind.name
            name = leaves_of.get(name, name)
            if kind == "PARAMETER" and name not in own:
                value = params[name].to(node.meta["val"].dtype)
            elif kind in ("PARAMETER", "BUFFER"):
                value = by_id[id(own[name])] = by_id[id(own[name])].to(node.meta["val"].dtype)
            elif kind == "USER_INPUT":
                value = next(inputs)
            else:
                value = constants[spec.target]
                value = value.clone() if isinstance(value, torch.Tensor) else value
            given.append(value)
        torch.manual_seed(_SEED)
        outputs = program.without_asked(evaluated(exported, given, program.calls, self.device))
        buffers = {name: by_id[id(x)] for name, x in own.items()}
        return _results(program.result, outputs, buffers, self._trained(params))

    @property
    def has_gradients(self) -> bool:
        """Whether gradients are compared."""
        return self.train and self.products <= _LARGEST_BACKWARD

    def _trained(self, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters whose gradients are compared."""
        return {name: x for name, x in params.items() if x.requires_grad} if self.has_gradients else {}


def refuse_disagreement(programs: Sequence[Program], beside: Beside, run: Run, *, train: bool) -> None:
    """Refuse programs that compute something else than the module which they were captured from.

    Args:
      programs: The programs of the paths of `forward`.
      beside: The module, which is left as it was, with a batch.
      run: Calls it with tensors in their order.
      train: Whether the program is that of the training mode.

    Raises:
      UserError: Results, gradients or buffers differ, or the module raises an error that the program does not.
    """
    module = beside.module
    if any(x.is_meta for x in (*module.parameters(), *module.buffers())):
        return
    device = next((x.device for x in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    leaves = [x.to(device) for x in beside.leaves]
    products = _products(programs[0].exported)
    constants = [_values_of(program.exported.constants) for program in programs]
    found = reached_by(module, beside.call)
    sides = Comparison(programs, module, run, leaves, train, found, device, products, constants)
    threads = 1 if products <= _LARGEST_ON_ONE_THREAD else torch.get_num_threads()
    with quiet(), torch.compiler.set_stance("force_eager"), torch.enable_grad(), _threads(threads), _saved(sides):
        for values in _VALUES:
            if _is_compared(sides, values) and (not programs[0].carried or _is_compared(sides, values, first=True)):
                return


def _values_of(constants: Mapping[str | None, Any]) -> dict[str | None, Any]:
    return {name: x.detach().clone() if isinstance(x, torch.Tensor) else x for name, x in constants.items()}


def _saved(sides: Comparison) -> contextlib.AbstractContextManager[Any]:
    """Drop what operations save for a backward pass that is not computed."""
    nodes = [node for program in sides.programs for node in program.exported.graph_module.graph.nodes]
    has_gradients = any(str(node.target) == GRADIENT for node in nodes)
    if has_gradients or sides.has_gradients:
        return contextlib.nullcontext()

    def dropped(_: Any) -> Any:
        raise RuntimeError("no backward pass is computed")

    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, dropped)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute on this many threads while entered."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_compared(sides: Comparison, values: tuple[bool, bool], first: bool = False) -> bool:
    """Compare the two sides; return False if the module rejects values that are not the example's."""
    # A rate of 0 draws from the global ones without effect.
    generators = sides.generators if any(x.draws for x in sides.programs) else sides.generators[: -len(GLOBAL)]
    with sides.on(*values, first) as leaves:
        ours = _result_or_error(lambda: sides.ours(leaves))
        before = [x.state for x in generators]
        theirs = _result_or_error(lambda: sides.theirs(leaves))
        drawn = [x for x, state in zip(generators, before, strict=True) if not same_state(x.state, state)]
    if isinstance(ours, AnotherPath):
        _refuse_certain(ours, values)
        return False
    if isinstance(theirs, Exception):
        if any(values) or isinstance(ours, Exception):
            return not any(values)  # PyTorch has no kernel, or the example is not one.
        raise refusal(
            f"{type(sides.module).__name__} raises {type(theirs).__name__}: {first_line(theirs)} on the example, which "
            "its capture does not",
            "give an example that it takes, and catch no errors around tensors",
            _source(theirs.__traceback__),
        ) from theirs
    if drawn:
        source = _line_that_draws(sides, values, drawn)
        raise refusal(
            "forward draws from a generator of its own, of Python or of NumPy, which would be drawn from once",
            "use torch.rand or dropout",
            source,
        )
    if isinstance(ours, Exception):
        raise refusal(
            f"{type(sides.module).__name__} cannot be captured: {first_line(ours)}",
            "import a part of the module without it",
            _source(ours.__traceback__),
        ) from ours

    def rounded() -> Results:
        with sides.on(*values, first) as leaves:
            return sides.ours(leaves, _rounded)

    def again() -> Results:
        with sides.on(*values, first) as leaves:
            return sides.theirs(leaves, 2.1 * _LATER)

    if different := _different(ours, theirs, rounded, again):
        raise _disagreement(sides, values, ours, different)
    return True


def _refuse_certain(found: AnotherPath, values: tuple[bool, bool]) -> None:
    """Refuse a program that assumes what cannot hold for other batches.

    These are numbers of floating-point values, which differ from batch to batch, and what a second call with the same
    weights and inputs reads otherwise than the first.
    """
    question, number = found.question, found.number
    if not any(values):
        raise refusal(
            f"forward reads {question.answer} in its first call and {number} in the next one",
            "decide it without state that a call changes",
            question.source,
        )
    if type(question.answer) is not bool and question.is_of_floats:
        raise refusal(
            f"a Python number depends on floating-point values: forward reads {question.answer}, then {number}",
            "use tensors, or pass the number by itself",
            question.source,
        )


def _disagreement(sides: Comparison, values: tuple[bool, bool], ours: Results, different: str) -> Exception:
    with sides.on(*values) as leaves, hidden():
        traced = _result_or_error(lambda: sides.theirs(leaves))
    source = _first_other_line(sides, values)
    if isinstance(traced, Results) and not _different(ours, traced, lambda: ours, lambda: traced):
        remedy = "decide without is_compiling and is_exporting"
        return refusal(f"{different} is another one while forward is traced", remedy, source)
    if different.startswith("the gradient"):
        return refusal(
            f"{different} is another one than PyTorch's",
            "change gradients by an autograd.Function, without hooks",
            source,
        )
    return refusal(
        f"{different} is another one than PyTorch's: forward reads what would be a constant",
        "make it an input, a parameter or a buffer, or draw it by torch.rand",
        source,
    )


def example_tensors(arrays: Sequence[Any], specs: Sequence[Spec]) -> list[torch.Tensor] | None:
    """Return the leaves of a batch as tensors of a capture's shapes and dtypes, repeated where it has more rows."""
    if len(arrays) != len(specs) or any(np.ndim(x) != len(spec.shape) for x, spec in zip(arrays, specs, strict=True)):
        return None
    found = []
    for array, spec in zip(map(np.asarray, arrays), specs, strict=True):
        if any(have == 0 < wanted for have, wanted in zip(array.shape, spec.shape, strict=True)):
            return None
        for axis, (have, wanted) in enumerate(zip(array.shape, spec.shape, strict=True)):
            array = array if have == wanted else np.take(array, np.arange(wanted) % have, axis)
        # NumPy has no bfloat16; float32 holds all its values.
        low = array.dtype.kind not in "biufc" or array.dtype == np.float16
        found.append(torch.tensor(array.astype(np.float32) if low else array).to(captured_dtype(spec.dtype)))
    return found


def _params(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters(remove_duplicate=False))


def _with_numbers(result: Any, own: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Return a result with tensors in the place of Python numbers of which a program computes tensors.

    Args:
      result: Structure of the program's results.
      own: That of the module's.
      tensors: Its tensors.
    """
    found: list[torch.Tensor] = []

    def aligned(result: Any, own: Any) -> Any:
        if isinstance(own, Leaf) or (isinstance(result, Leaf) and type(own) in (int, float)):
            found.append(tensors[own.place] if isinstance(own, Leaf) else torch.tensor(own))
            return Leaf(len(found) - 1)
        if isinstance(own, dict):
            items = result if isinstance(result, dict) else {}
            return {key: aligned(items.get(key), x) for key, x in own.items()}
        if isinstance(own, tuple):
            places = result if isinstance(result, tuple) and len(result) == len(own) else (None,) * len(own)
            return tuple(map(aligned, places, own))
        return own

    return aligned(result, own), found


def _results(
    structure: Any,
    outputs: Sequence[torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    trained: Mapping[str, torch.Tensor],
) -> Results:
    tensors = {f"output {i}" if len(outputs) > 1 else "the output": x for i, x in enumerate(outputs)}
    tensors |= {f"the state {name!r}": x for name, x in buffers.items()}
    tensors |= {f"the gradient of {name!r}": x for name, x in _gradients(outputs, trained).items()}
    return Results(structure, {name: x.detach().clone() for name, x in tensors.items()})


def _gradients(outputs: Sequence[torch.Tensor], trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of a sum of the outputs with a weight for each element, where PyTorch has them."""
    terms = [_weighted(y) for y in outputs if y.requires_grad]
    if not terms or not trained:
        return {name: torch.zeros_like(x) for name, x in trained.items()}
    unique = {id(x): x for x in trained.values()}
    before = [x.grad for x in unique.values()]
    for x in unique.values():
        x.grad = None
    try:
        found = torch.autograd.grad(sum(terms), [*unique.values()], allow_unused=True)  # type: ignore[arg-type]
        # A backward pass of the user's may call `backward`, as that of a reversible layer does.
        added = [x.grad for x in unique.values()]
    except RuntimeError:  # PyTorch has none: an operation in place changed what it needs
        return {}
    finally:
        for x, grad in zip(unique.values(), before, strict=True):
            x.grad = grad
    grads = dict(zip(unique, zip(found, added, strict=True), strict=True))
    return {name: _total([grad for grad in grads[id(x)] if grad is not None], x) for name, x in trained.items()}


def _weighted(y: torch.Tensor) -> torch.Tensor:
    parts = torch.view_as_real(y) if y.is_complex() else y
    weights = torch.arange(1.0, 1.0 + parts.numel(), device=parts.device).cos().to(parts.dtype)
    return (parts.reshape(-1) * weights).sum()


def _total(grads: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the sum of gradients, any of which may be sparse; without one, zeros."""
    dense = [grad.to_dense() for grad in grads]
    return sum(dense[1:], dense[0]) if dense else torch.zeros_like(like)


def _different(ours: Results, theirs: Results, rounded: Callable[[], Results], again: Callable[[], Results]) -> str:
    """Return the name of a tensor that differs beyond rounding; "" if none does.

    Args:
      ours: What the program computes.
      theirs: What the module computes.
      rounded: Computes what the program computes of operands that are changed by one rounding.
      again: Computes once more what the module computes.
    """
    if ours.structure != theirs.structure:
        return "the structure of the result"
    if missing := [name for name in theirs.tensors if name not in ours.tensors]:
        return missing[0]
    pairs = {name: (ours.tensors[name], y) for name, y in theirs.tensors.items()}
    if other := [name for name, (x, y) in pairs.items() if x.shape != y.shape]:
        return f"the shape of {other[0]}"
    close = {name: _distance(x, y) for name, (x, y) in pairs.items()}
    if not (inexact := [name for name, distance in close.items() if distance > 0]):
        return ""
    amplified = [name for name in inexact if not close[name] <= _ROUNDING * _smallest(ours.tensors[name])]
    if not amplified:
        return ""
    reference, repeated = rounded(), again()
    for name in amplified:
        rounding = _distance(ours.tensors[name], reference.tensors[name])
        # Where rounding is amplified, a module that reads the time may be as close: it differs from itself.
        if not close[name] <= _ROUNDING * rounding or _distance(theirs.tensors[name], repeated.tensors[name]) > 0:
            return name
    return ""


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest distance of two elements; inf if only one of them is NaN."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        a, b = a.to(wide), b.to(wide)
        return float(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs().nan_to_num(torch.inf)).max())

    return max(map(distance, _parts(a), _parts(b)), default=0.0)


def _parts(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the elements of a tensor as short vectors."""
    return x.reshape(-1).split(_PART) if x.numel() else ()


def _smallest(x: torch.Tensor) -> float:
    """Return one rounding of the largest number of a tensor."""
    if not (x.is_floating_point() or x.is_complex()):
        return 0.0
    largest = (float(part.abs().nan_to_num(nan=0.0, posinf=0.0).max()) for part in _parts(x))
    return torch.finfo(x.dtype).eps * max(largest, default=0.0)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with each number changed by one rounding, up or down."""
    if not (x.is_floating_point() or x.is_complex()):
        return x
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(x.numel())) * 2 - 1
    return (x * (1 + torch.finfo(x.dtype).eps * signs.to(x.device))).to(x.dtype)


def _change_weights(module: torch.nn.Module, random: torch.Generator) -> None:
    """Change parameters and floating-point buffers in their memory, which others may share, in sign and zeros alike."""
    params = memory_of(module.parameters())
    known = {x.data_ptr() for x in params}
    for memory in (*params, *memory_of(module.buffers())):
        is_param = memory.data_ptr() in known
        for x in _parts(memory) if memory.is_floating_point() or memory.is_complex() else ():
            drawn = torch.rand(x.shape, generator=random).to(x.device)
            changed = x * (1 - 0.25 * drawn)
            # A parameter of 0, as of a new bias or adapter, would hide what it is multiplied by.
            x.copy_(torch.where(x == 0, 0.1 * drawn, changed) if is_param else changed)


def _other_inputs(leaves: Sequence[torch.Tensor], random: torch.Generator) -> list[torch.Tensor]:
    """Return inputs like others: their rows in another order, floating-point numbers up to a tenth smaller."""
    lengths = {x.shape[0] if x.ndim else 0 for x in leaves}
    rows = [x.roll(1, 0) for x in leaves] if len(lengths) == 1 and 0 not in lengths else leaves
    return [
        x * (1 - 0.1 * torch.rand(x.shape, generator=random).to(x.device)).to(x.dtype) if x.is_floating_point() else x
        for x in rows
    ]


def _products(exported: torch.export.ExportedProgram) -> float:
    """Return about how many products with parameters a pass computes."""
    names = {x.arg.name for x in exported.graph_signature.input_specs if x.kind.name == "PARAMETER"}
    total = 0.0
    for node in exported.graph_module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            weights = [x.meta["val"] for x in node.all_input_nodes if x.name in names]
            # A number of rows that depends on values is left out.
            size = prod(n for n in value.shape if isinstance(n, int))
            total += size * sum(x.numel() / x.shape[0] for x in weights if x.ndim > 1 and x.numel())
    return total


def _result_or_error(run: Callable[[], Results]) -> Results | Exception:
    try:
        return run()
    except Exception as error:  # any: of the user's code
        return error


def _source(frames: Any) -> str:
    return source_line("".join(traceback.format_tb(frames)))


def _stack() -> str:
    """Return the lines of the user's code that are being executed for a side."""
    frames = traceback.extract_stack()[:-2]
    start = max((i for i, frame in enumerate(frames) if frame.filename == __file__), default=-1)
    return source_line("".join(traceback.format_list(frames[start + 1 :])))


@contextlib.contextmanager
def _later(seconds: float) -> Iterator[None]:
    """Have the clocks of Python show this thread a later time while entered."""
    thread = threading.get_ident()

    def moved(read: Callable[[], Any], by: float) -> Callable[[], Any]:
        return lambda: read() + by * (threading.get_ident() == thread)

    with contextlib.ExitStack() as patches:
        for name in ("time", "perf_counter", "monotonic", "process_time"):
            patches.enter_context(replaced(time, name, moved(getattr(time, name), seconds)))
            clock = f"{name}_ns"
            patches.enter_context(replaced(time, clock, moved(getattr(time, clock), int(1e9 * seconds))))
        yield


def _line_that_draws(sides: Comparison, values: tuple[bool, bool], generators: Sequence[Generator]) -> str:
    """Return the line of the user's code that changes the state of random numbers."""
    found: list[traceback.FrameSummary] = []
    previous: Any = None

    def observe(frame: Any, event: str, _: Any) -> Any:
        nonlocal previous
        if is_library(frame.f_code.co_filename) or found:
            return None
        if previous is not None and not all(map(same_state, (x.state for x in generators), states)):
            found.append(traceback.FrameSummary(*previous))
            return None
        code = frame.f_back if event == "return" else frame
        previous = (code.f_code.co_filename, code.f_lineno, code.f_code.co_name)
        return observe

    with sides.on(*values) as leaves:
        states, before = [x.state for x in generators], sys.gettrace()
        sys.settrace(observe)
        try:
            _result_or_error(lambda: sides.theirs(leaves))
        finally:
            sys.settrace(before)
    return source_line("".join(traceback.format_list(found)))


class _Operation(NamedTuple):
    """The result of an operation: its shape, two sums of its elements, and the line of the user's code."""

    shape: tuple[int, ...]
    total: float
    size: float
    source: str

    def equals(self, other: "_Operation", tolerance: float) -> bool:
        """Return whether two results are the same up to a relative tolerance."""
        bound = tolerance * max(self.size, other.size)
        return self.shape == other.shape and not (
            abs(self.size - other.size) > bound or abs(self.total - other.total) > bound
        )


class _Recorded(TorchDispatchMode):
    """Lists the results of operations while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.numel():
                wide = x.detach() if x.is_complex() else x.detach().double()  # booleans have no magnitude
                size, total = (float(part.nan_to_num(0, 0, 0).sum()) for part in (wide.abs(), wide.real))
                self.operations.append(_Operation(tuple(x.shape), total, size, _stack()))
        return result


def _first_other_line(sides: Comparison, values: tuple[bool, bool]) -> str:
    """Return the line of the module's first operation whose result the program does not compute."""
    with sides.on(*values) as leaves:
        with _Recorded() as ours:
            _result_or_error(lambda: sides.ours(leaves))
        with _Recorded() as theirs:
            _result_or_error(lambda: sides.theirs(leaves))
    # The time differs by little from one call to the next.
    for tolerance in (1e-4, 1e-6, 1e-9):
        for x in theirs.operations:
            if x.source and not any(x.equals(other, tolerance) for other in ours.operations):
                return x.source
    return ""
