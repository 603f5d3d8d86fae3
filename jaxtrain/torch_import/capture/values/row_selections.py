"""Tensors whose number of rows depends on values, as `x[mask]` and `torch.where(mask)`.

`torch.export` calls such a number a symbol. Of a program with symbols one without them is made: each number becomes a
prime number, and no other size is a multiple of it, so that an axis of selected rows is known by its size, whatever an
operation or a decomposition does with it. `jaxtrain.torch_import.selected_rows` gives these axes their true lengths.
Where `forward` uses the number itself, as in `y.sum() / len(y)`, the program counts.
"""

import builtins
import contextlib
import copy
import itertools
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, free_unbacked_symbols

from jaxtrain.errors import UserError
from jaxtrain.torch_import.capture.values.counted import PLACES, READING, WRITING
from jaxtrain.torch_import.capture.values.known_values import is_mask
from jaxtrain.torch_import.capture.values.questions import need_counts, user_condition
from jaxtrain.torch_import.refusals import is_internal, refusal, source_line
from jaxtrain.torch_import.selected_rows import prime

_ATEN = torch.ops.aten
_LIBRARY = torch.library.Library("jaxtrain", "FRAGMENT")
_LIBRARY.define("places(Tensor mask, int size) -> Tensor")


@torch.library.register_fake("jaxtrain::places")
def _shape_of_places(mask: torch.Tensor, size: int) -> torch.Tensor:
    return mask.new_empty((size, mask.ndim), dtype=torch.int64)


# Places that nothing reads stay in the graph: a question may be about their number.
torch.fx.node.has_side_effect(torch.ops.jaxtrain.places.default)

_SIZES = (_ATEN.sym_size.int, _ATEN.sym_numel.default)
_CHECKS = (_ATEN._assert_scalar.default, _ATEN.sym_constrain_range.default, _ATEN.sym_constrain_range_for_size.default)
Primes = dict[Any, sympy.Integer]
"""Prime numbers, by the symbols that they are in place of."""
_BINDINGS = "unbacked_bindings"
"""PyTorch's note of the symbols that a node defines."""
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def with_sizes(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program whose numbers of selected rows are prime numbers; the same one, if it selects none."""
    graphs = _graphs(exported.graph_module)
    symbols = set().union(*(_selected(node) for graph in graphs for node in graph.nodes))
    if not symbols:
        return exported
    module, primes = copy.deepcopy(exported.graph_module), _primes_of_equal(symbols, graphs)
    _row_questions[-1].numbers = {int(number): int(primes[x]) for x, number in _primes(symbols).items()}
    for graph in _graphs(module):
        _Sizes(primes, graph).fix()
        cast(torch.fx.GraphModule, graph.owning_module).recompile()
    return exported._update(module, exported.graph_signature)


def _graphs(module: torch.fx.GraphModule) -> list[torch.fx.Graph]:
    return [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


def _primes_of_equal(symbols: AbstractSet[sympy.Symbol], graphs: Sequence[torch.fx.Graph]) -> Primes:
    """Return a prime number for each symbol, the same one for those that PyTorch takes to be equal.

    They are of masks that are computed twice, as in `x[y > 0] - z[y > 0]`.
    """
    primes = _primes(symbols)
    for graph in graphs:
        for node in graph.find_nodes(op="call_function", target=_ATEN._assert_scalar.default):
            check = node.args[0].meta.get("val") if isinstance(node.args[0], torch.fx.Node) else None
            expression = check.node.expr if isinstance(check, torch.SymBool) else sympy.true
            if isinstance(expression, sympy.Eq) and {*expression.args} <= symbols:
                first, second = (primes[x] for x in expression.args)
                primes = {x: min(first, second) if n in (first, second) else n for x, n in primes.items()}
    return primes


def _selected(node: torch.fx.Node) -> set[sympy.Symbol]:
    """Return the symbol of the number of rows that a node selects, if it does."""
    if node.target in PLACES and len(node.args) == 1:
        return _symbols(node)
    if node.target in READING and any(map(_is_mask_node, cast(Any, node.args[1]))):
        x, indices = cast(Any, node.args)
        return _symbols(node).difference(*map(_symbols, [x, *(i for i in indices if not _is_mask_node(i) and i)]))
    return set()


def _symbols(node: torch.fx.Node) -> set[sympy.Symbol]:
    """Return the symbols in the shape of a node's result; of several results, of the first."""
    value = node.meta.get("val")
    value = value[0] if isinstance(value, list | tuple) and value else value
    return set(free_unbacked_symbols(value.shape)) if isinstance(value, torch.Tensor) else set()


def _is_mask_node(index: Any) -> bool:
    return isinstance(index, torch.fx.Node) and is_mask(index.meta["val"])


class _Sizes:
    """The sizes in a graph that are numbers of selected rows, by PyTorch's symbols."""

    def __init__(self, primes: Primes, graph: torch.fx.Graph) -> None:
        self._primes = primes
        self._graph = graph
        self._counts: dict[sympy.Symbol, torch.fx.Node] = {}

    def fix(self) -> None:
        """Replace symbols by prime numbers where they are sizes, and by counts of true elements elsewhere."""
        nodes = [node for node in self._graph.nodes if node.op == "call_function"]
        for node in nodes:
            self._fix_arguments(node)
            if node.target is not _ATEN.item.default:
                node.meta.pop(_BINDINGS, None)
        for node in nodes:
            with self._graph.inserting_before(node):
                if node.target in PLACES:
                    self._replace_places(node)
                elif node.target in (*READING, *WRITING):
                    self._replace_mask(node)
        for node in reversed(nodes):
            is_unused = isinstance(node.meta.get("val"), _NUMBERS) and not node.users
            if (is_unused and node.target is not _ATEN.item.default) or node.target in _CHECKS:
                self._graph.erase_node(node)
            elif node.target in _SIZES and self._size(node) is not node:
                with self._graph.inserting_before(node):
                    node.replace_all_uses_with(self._number(node))
                self._graph.erase_node(node)

    def _fix_arguments(self, node: torch.fx.Node) -> None:
        schema = getattr(node.target, "_schema", None)
        if schema is None or node.target in _CHECKS:
            return
        counting = getattr(node.target, "overloadpacket", None) is _ATEN.arange
        kinds = {x.name: "int" if counting and str(x.type) == "number" else str(x.type) for x in schema.arguments}
        args = zip(node.args, kinds.values(), strict=False)
        node.args = tuple(self._size(x) if _takes_sizes(kind) else x for x, kind in args)
        node.kwargs = {name: self._size(x) if _takes_sizes(kinds[name]) else x for name, x in node.kwargs.items()}

    def _size(self, value: Any) -> Any:
        """Return a size as a number; what is no number of selected rows as it is."""
        if isinstance(value, list | tuple):
            return [self._size(x) for x in value]
        number = value.meta.get("val") if isinstance(value, torch.fx.Node) else value
        if not isinstance(number, torch.SymInt):
            return value
        size = number.node.expr.xreplace(self._primes)
        return int(size) if size.is_Integer else value

    def _replace_places(self, node: torch.fx.Node) -> None:
        symbols = _selected(node)
        if not symbols:
            return
        (symbol,) = symbols
        places = self._places(node.args[0], symbol, node)
        if node.target is _ATEN.nonzero.default:
            node.replace_all_uses_with(places)
        for user in [*node.users]:
            user.replace_all_uses_with(self._column(places, user.args[1], user))
            self._graph.erase_node(user)
        self._graph.erase_node(node)

    def _replace_mask(self, node: torch.fx.Node) -> None:
        """Replace the mask of an index that selects rows, or of an assignment of selected rows."""
        indices = cast(Any, node.args[1])
        masks = [x for x in indices if _is_mask_node(x)]
        symbols = _selected(node) if node.target in READING else _symbols(cast(torch.fx.Node, node.args[2]))
        if not masks or not symbols:
            return
        if len(masks) > 1 or len(symbols) > 1:
            raise refusal("a mask beside another mask of unknown size in one index", "index twice", _source(node))
        (symbol,) = symbols
        places = self._places(masks[0], symbol, node)
        columns = [self._column(places, i, node) for i in range(masks[0].meta["val"].ndim)]
        replaced = [y for x in indices for y in (columns if x is masks[0] else [x])]
        node.args = (node.args[0], replaced, *node.args[2:])

    def _places(self, mask: Any, symbol: sympy.Symbol, at: torch.fx.Node) -> torch.fx.Node:
        """Return the places of the true elements of a mask, [prime number, axes of the mask]."""
        if mask.meta["val"].dtype is not torch.bool:
            mask = self._call(_ATEN.ne.Scalar, (mask, 0), at)
        count = self._call(_ATEN.sum.default, (mask,), at)
        self._counts.setdefault(symbol, count)
        return self._call(torch.ops.jaxtrain.places.default, (mask, int(self._primes[symbol])), at)

    def _column(self, places: torch.fx.Node, axis: Any, at: torch.fx.Node) -> torch.fx.Node:
        return self._call(_ATEN.select.int, (places, 1, axis), at)

    def _number(self, size: torch.fx.Node) -> torch.fx.Node:
        """Return the value of a size while the program runs."""
        factor, rest = size.meta["val"].node.expr.as_coeff_Mul()
        if rest not in self._counts:
            raise refusal("the number of selected rows is used as a number here", "use mask.sum()", _source(size))
        number = self._call(_ATEN.item.default, (self._counts[rest],), size)
        return number if factor == 1 else self._call(operator.mul, (number, int(factor)), size)

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], at: torch.fx.Node) -> torch.fx.Node:
        """Return a new node on the line of another one."""
        node = self._graph.call_function(target, args)
        # Decomposition computes values again.
        node.meta = {name: x for name, x in at.meta.items() if name != _BINDINGS}
        return node


def _takes_sizes(kind: str) -> bool:
    return kind.removeprefix("Optional[").removeprefix("List[").rstrip("]") in ("int", "SymInt")


def _source(node: torch.fx.Node) -> str:
    return source_line(node.meta.get("stack_trace"))


def names_rows(message: str) -> bool:
    """Return whether a message of PyTorch has a size that is a number of selected rows."""
    sizes = [int(x) for x in re.findall(r"\d{8,}", message)]
    return any(size % prime(i) == 0 for size in sizes for i in range(_MANY))


_MANY = 64
"""How many numbers of rows a message is searched for."""


class RowQuestions:
    """What `forward` asks about numbers of selected rows while it is traced.

    Attributes:
      empty: The questions, by their order, that are answered as for no rows; None for all.
      count: How many questions there were.
      numbers: The prime number of rows in the program, by that of their symbol.
    """

    def __init__(self, empty: AbstractSet[int] | None = frozenset()) -> None:
        self.empty = empty
        self.count = 0
        self.numbers: dict[int, int] = {}
        self._places: dict[sympy.Symbol, int] = {}
        self._asked: dict[int, set[int]] = {}
        self._source = ""

    def others(self) -> "list[RowQuestions]":
        """Return questions to be answered otherwise: all as for no rows, and each two of them differently."""
        if not self.count:
            return []
        bits = range((self.count - 1).bit_length())
        groups = [{i for i in range(self.count) if (i >> bit & 1) == value} for bit in bits for value in (0, 1)]
        return [RowQuestions(None), *map(RowQuestions, groups)]

    def skipped(self, empty: AbstractSet[int] | None) -> set[int]:
        """Return the prime numbers of rows that questions are about."""
        found = (numbers for i, numbers in self._asked.items() if empty is None or i in empty)
        return {self.numbers.get(number, number) for numbers in found for number in numbers}

    def ask(self) -> int:
        """Return the place of a new question."""
        self.count += 1
        self._source = self._source or _line()
        return self.count - 1

    def is_empty(self, place: int) -> bool:
        """Return whether a question is answered as for no rows."""
        return self.empty is None or place in self.empty

    def add(self, place: int, symbols: AbstractSet[sympy.Symbol]) -> None:
        """Note that a question is about the rows that symbols count."""
        self._asked.setdefault(place, set()).update(map(int, _primes(symbols).values()))

    def answer(self, question: sympy.Basic) -> bool | None:
        """Return the answer for some rows or for none; None if it is another one for several numbers of rows."""
        symbols, constants = question.free_symbols, question.atoms(sympy.Integer)
        if len(symbols) != 1 or any(abs(x) > _FEW for x in constants):
            return None
        (symbol,) = symbols
        (number,) = _primes(symbols).values()
        empty = question.xreplace({symbol: sympy.Integer(0)})
        (some, *others) = {question.xreplace({symbol: sympy.Integer(n)}) for n in (*range(1, 3 * _FEW), number)}
        if others or not {empty, some} <= {sympy.true, sympy.false}:
            return None
        if empty == some:
            return bool(some)
        if symbol not in self._places:
            self._places[symbol] = self.ask()
            self.add(self._places[symbol], symbols)
        return bool(empty if self.is_empty(self._places[symbol]) else some)

    def refusal(self) -> UserError:
        """Return the error of a question whose answer for no rows changes the result."""
        return refusal(
            "forward does something else where a mask selects no rows than to skip them",
            "leave the branch out: a sum of no rows is 0; divide by max(n, 1)",
            self._source,
        )


_FEW = 8
_row_questions = [RowQuestions()]


@contextlib.contextmanager
def answering(questions: RowQuestions) -> Iterator[None]:
    """Answer the questions of `forward` while entered."""
    _row_questions.append(questions)
    try:
        yield
    finally:
        _row_questions.pop()


def _primes(symbols: AbstractSet[Any]) -> Primes:
    return {x: sympy.Integer(prime(int(x.name.lstrip("u")))) for x in symbols}


def _evaluated(self: ShapeEnv, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
    """`ShapeEnv.evaluate_expr`, which answers PyTorch's own questions as for a large number of rows.

    They are about special cases of sizes, of which broadcasting and strides need none.
    """
    try:
        return _evaluate(self, orig_expr, *args, **kwargs)
    except GuardOnDataDependentSymNode:
        if not orig_expr.free_symbols <= self.size_like:
            raise
        answer = orig_expr.xreplace(_primes(orig_expr.free_symbols))
        if answer not in (sympy.true, sympy.false):
            raise
        return answer


_evaluate = ShapeEnv.evaluate_expr


def _decided(read: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return `__bool__` of a symbolic number, which tells the questions of `forward` from PyTorch's."""

    def decide(self: Any) -> bool:
        question = (self if isinstance(self, torch.SymBool) else self != 0).node
        expression = question.expr
        if (
            not _is_asked()
            or not expression.free_symbols
            or not expression.free_symbols <= question.shape_env.size_like
        ):
            return read(self)
        answer = _row_questions[-1].answer(expression)
        if answer is None:
            if isinstance(expression, sympy.Eq | sympy.Ne):
                need_counts()
            raise refusal(
                "forward decides by the number of rows that a mask selects",
                "compare it with 0 alone, or use torch.where",
                _line(),
            )
        return answer

    return decide


def _line() -> str:
    """Return the line of the user's code that is being executed."""
    return source_line("".join(traceback.format_list(traceback.extract_stack())))


def _is_asked() -> bool:
    """Return whether the user's code asks, and not PyTorch's."""
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(2)))
    return not is_internal(next(file for file in frames if "/jaxtrain/torch_import/" not in file))


def _nonzero(input: torch.Tensor, *, as_tuple: bool = False) -> Any:
    """`torch.nonzero`, whose rows may be iterated over."""
    mask = _with_conditions(input)
    found = _nonzero_of(mask, as_tuple=as_tuple)
    _mark(found[0] if as_tuple else found, mask)
    return found


def _where(condition: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.where`; of a condition alone as `_nonzero`."""
    return _where_of(condition, *args, **kwargs) if args or kwargs else _nonzero(condition, as_tuple=True)


_nonzero_of: Callable[..., Any] = torch.nonzero
_where_of, _iter_of = torch.where, torch.Tensor.__iter__
_conditions: list[tuple[int, torch.Tensor]] = []
"""Whether there is each of the rows that loops of `forward` are at, with the place of the loop among the questions."""


def _with_conditions(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask that is false where a loop over selected rows has no such row."""
    for _, condition in _conditions:
        mask = mask.bool() & condition
    return mask


def _mark(found: torch.Tensor, mask: torch.Tensor) -> None:
    """Note the mask of places, and their number where a loop may have no row."""
    if found.ndim and isinstance(found.shape[0], torch.SymInt):
        found._mask = (mask, mask._version, found._version)
        for place, _ in _conditions:
            _row_questions[-1].add(place, free_unbacked_symbols(found.shape))


def _iterated(self: torch.Tensor) -> Iterator[torch.Tensor]:
    """`Tensor.__iter__`; over the places of a mask, of which each may be one or not."""
    mask, *versions = getattr(self, "_mask", (None,))
    if mask is None and self.ndim and isinstance(self.shape[0], torch.SymInt):
        need_counts()
    if mask is None or self.ndim != 2 or versions != [mask._version, self._version]:
        return _iter_of(self)
    return _each_place(mask)


def _each_place(mask: torch.Tensor) -> Iterator[torch.Tensor]:
    loop = _row_questions[-1].ask()
    if _row_questions[-1].is_empty(loop):
        return
    for place in itertools.product(*map(range, mask.shape)):
        _conditions.append((loop, mask[place].bool()))
        try:
            yield torch.tensor(place)
        finally:
            _conditions.pop()


def _len(x: Any, /) -> Any:
    """`len`, of selected rows as a symbol."""
    if isinstance(x, torch.Tensor) and x.ndim and isinstance(x.shape[0], torch.SymInt):
        return x.shape[0]
    return _builtin_len(x)


_builtin_len = builtins.len
SELECTIONS: tuple[tuple[Any, str, Any], ...] = (
    (ShapeEnv, "evaluate_expr", _evaluated),
    (torch.SymBool, "__bool__", _decided(user_condition)),
    (torch.SymInt, "__bool__", _decided(torch.SymInt.__bool__)),
    (torch, "nonzero", _nonzero),
    (torch.Tensor, "nonzero", _nonzero),
    (torch, "argwhere", _nonzero),
    (torch.Tensor, "argwhere", _nonzero),
    (torch, "where", _where),
    (torch.Tensor, "__iter__", _iterated),
    (builtins, "len", _len),
)
"""Replacements while a module is traced: owner, name and value."""
