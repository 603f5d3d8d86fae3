"""Python numbers that depend on tensors, such as a counter in an attribute or `int(self.pointer)`.

While a module is traced such a number has no value. It is a `Number`: a tensor with the arithmetic of Python, of which
`n += 1` is another number. Slices may start at one if their length is known, as in `queue[:, n : n + 4]`.
"""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch

from jaxtrain.torch_import.capture.module.reached import is_library
from jaxtrain.torch_import.capture.replaced import replaced
from jaxtrain.torch_import.capture.values.known_values import known_value
from jaxtrain.torch_import.refusals import refusal, source_line
from jaxtrain.torch_internals import FakeTensor, pytree


class Number:
    """A Python number without a value.

    Attributes:
      tensor: Its tensor without axes, in int64 or float64.
      base: What it is a sum of, with `offset`: two numbers of the same base have a known difference.
      offset: A known integer.
    """

    def __init__(self, tensor: torch.Tensor, base: object = None, offset: int = 0) -> None:
        self.tensor = tensor
        self.base, self.offset = object() if base is None else base, offset

    @classmethod
    def of(cls, tensor: torch.Tensor, kind: type) -> "Number":
        """Return a tensor of one element as an `int` or a `float`."""
        return cls(tensor.detach().reshape(()).to(torch.int64 if kind is int else torch.float64))

    @property
    def kind(self) -> type:
        """`int` or `float`."""
        return float if self.tensor.is_floating_point() else int

    def like(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the number as an operand of tensors, whose dtype it takes as a Python number does."""
        dtypes = [x.dtype for x in tensors]
        for dtype in dtypes:
            if dtype.is_floating_point or dtype.is_complex:
                return self.tensor.to(dtype.to_real() if dtype.is_complex else dtype)
        return self.tensor if self.kind is int else self.tensor.to(torch.get_default_dtype())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch with tensors in the place of numbers."""
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]

        def tensor(x: Any) -> Any:
            return x.like(tensors) if isinstance(x, Number) else x

        return func(*pytree.tree_map(tensor, args), **pytree.tree_map(tensor, kwargs or {}))

    def __add__(self, other: Any) -> Any:
        return _sum(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return _sum(self, other, -1)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __neg__(self) -> "Number":
        return Number(-self.tensor)

    def __pos__(self) -> "Number":
        return self

    def __abs__(self) -> "Number":
        return Number(self.tensor.abs())

    def __round__(self, digits: int | None = None) -> "Number":
        if digits is None:
            return Number(self.tensor.round().to(torch.int64))
        return Number(self.tensor.round(decimals=digits))

    def __floor__(self) -> "Number":
        return Number(self.tensor.floor().to(torch.int64))

    def __ceil__(self) -> "Number":
        return Number(self.tensor.ceil().to(torch.int64))

    def __pow__(self, other: Any) -> Any:
        return _power(self, other)

    def __rpow__(self, other: Any) -> Any:
        return _power(other, self)

    def __bool__(self) -> bool:
        return bool(self.tensor != 0)

    def __index__(self) -> int:
        raise refusal(
            "a number that depends on a tensor's value is an index of a list or a length",
            "index a tensor, or loop a fixed number of times with torch.where(active, new, old)",
            _line(),
        )

    def __int__(self) -> int:
        return int(self.tensor)

    def __float__(self) -> float:
        return float(self.tensor)

    def __hash__(self) -> int:
        return hash(int(self))


def _operands(a: Any, b: Any, in_double: bool) -> Any:
    """Return two numbers as tensors of one dtype, or None if one is no number."""
    if any(not isinstance(x, Number | int | float) for x in (a, b)):
        return None
    floating = in_double or any(x.kind is float if isinstance(x, Number) else isinstance(x, float) for x in (a, b))
    dtype = torch.float64 if floating else torch.int64
    return [x.tensor.to(dtype) if isinstance(x, Number) else torch.full((), x, dtype=dtype) for x in (a, b)]


def arithmetic(fn: Callable[..., Any], *, in_double: bool = False) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a method of two numbers, or of a number and a tensor, and the one of reflected arguments."""

    def called(a: Any, b: Any) -> Any:
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            tensors = [x for x in (a, b) if isinstance(x, torch.Tensor)]
            return fn(*(x.like(tensors) if isinstance(x, Number) else x for x in (a, b)))
        operands = _operands(a, b, in_double)
        if operands is None:
            return NotImplemented
        result = fn(*operands)
        return result if result.dtype is torch.bool else Number(result)

    return called, lambda a, b: called(b, a)


for _name, _fn, _is_double in (
    ("mul", torch.mul, False),
    ("truediv", torch.true_divide, True),
    ("floordiv", torch.floor_divide, False),
    ("mod", torch.remainder, False),
):
    _plain, _reflected = arithmetic(_fn, in_double=_is_double)
    setattr(Number, f"__{_name}__", _plain)
    setattr(Number, f"__r{_name}__", _reflected)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", arithmetic(getattr(torch, _name))[0])


def _sum(a: Number, b: Any, sign: int) -> Any:
    if isinstance(b, torch.Tensor):
        return torch.add(a.like([b]), b, alpha=sign)
    operands = _operands(a, b, False)
    if operands is None:
        return NotImplemented
    result = torch.add(*operands, alpha=sign)
    if type(b) is int and a.kind is int:
        return Number(result, a.base, a.offset + sign * b)
    return Number(result)


def _power(a: Any, b: Any) -> Any:
    """Return a power of two numbers; PyTorch computes that of a number and a tensor, by `__torch_function__`."""
    integers = isinstance(a, Number) and a.kind is int and type(b) is int and b >= 0
    operands = _operands(a, b, not integers)
    return NotImplemented if operands is None else Number(torch.pow(*operands))


def is_unknown(x: Any) -> bool:
    """Return whether a value is a number, or the tensor of one, that is not known while a module is traced."""
    if isinstance(x, torch.Tensor):
        return isinstance(x, FakeTensor) and x.numel() == 1 and known_value(x) is None and not x.is_complex()
    return isinstance(x, Number)


def _converted(x: Any, kind: type) -> Number:
    """Return `int(x)` or `float(x)`."""
    tensor = x.tensor if isinstance(x, Number) else x
    if kind is int and tensor.is_floating_point():
        tensor = tensor.trunc()
    if kind is int and isinstance(x, Number) and x.kind is int:
        return x
    return Number.of(tensor, kind)


class _Kind(type):
    """The class of `int` and `float` in the user's files, which also make and know numbers without a value."""

    python: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and is_unknown(args[0]):
            return _converted(args[0], cls.python)
        return cls.python(*args, **kwargs)

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, cls.python) or (isinstance(x, Number) and x.kind is cls.python)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.python)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.python

    def __hash__(cls) -> int:
        return hash(cls.python)


class _Int(int, metaclass=_Kind):
    python = int


class _Float(float, metaclass=_Kind):
    python = float


_BUILTINS: dict[str, Any] = {"int": _Int, "float": _Float}
"""What the user's files see in the place of Python's own."""


def _of_math(name: str) -> Callable[..., Any]:
    """Return a function of `math` that also takes numbers without a value."""
    plain, of_tensor = getattr(math, name), getattr(torch, name)

    def function(*args: Any) -> Any:
        if not any(map(is_unknown, args)):
            return plain(*args)
        return Number(of_tensor(*map(_in_double, args)))

    return function


def _in_double(x: Any) -> torch.Tensor:
    return _converted(x, float).tensor if is_unknown(x) else torch.full((), float(x), dtype=torch.float64)


_MATH = (
    *("exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "pow", "sin", "cos", "tan", "sinh", "cosh", "tanh"),
    *("asin", "acos", "atan", "atan2", "erf", "erfc"),
)
for _name in ("exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh"):
    # By these names NumPy calls functions of an object.
    setattr(Number, _name, _of_math(_name))

_number = torch.Tensor.item


def _getitem(self: torch.Tensor, index: Any) -> Any:
    """`Tensor.__getitem__` with numbers without a value."""
    found = _first_place(self, index)
    if found is None:
        return self[index]
    axis, places, rest = found
    return _getitem(_rows(self, axis, places), rest)


def _setitem(self: torch.Tensor, index: Any, value: Any) -> None:
    """`Tensor.__setitem__` with numbers without a value."""
    found = _first_place(self, index)
    if found is None:
        self[index] = value.like([self]) if isinstance(value, Number) else value
        return
    axis, places, rest = found
    rows = _rows(self, axis, places)
    _setitem(rows, rest, value)
    self.index_copy_(axis, _inside(places, self.shape[axis])[0], rows)


INDEXING: dict[str, Callable[..., Any]] = {"__getitem__": _getitem, "__setitem__": _setitem}
"""Methods of tensors that take numbers without a value. A mode calls them: the class of tensors stays as it is, because
a method of this name that is set and deleted again makes `torch.tensor([x])` fail for tensors without axes."""


def indexes_by_number(index: Any, *value: Any) -> bool:
    """Return whether an index, or a value that is written there, is a number without a value."""
    items = index if isinstance(index, tuple) else (index,)
    return any(map(_has_number, items)) or isinstance(value[0] if value else None, Number)


def _first_place(x: torch.Tensor, index: Any) -> tuple[int, torch.Tensor, tuple[Any, ...]] | None:
    """Return the first axis that an index reads at a number without a value, the places on it, and the other index."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not any(_has_number(item) for item in items):
        return None
    if any(isinstance(item, torch.Tensor) and item.dtype is torch.bool for item in items):
        raise refusal("an index with a mask and a number that depends on values", "index twice", _line())
    axis = 0
    for i, item in enumerate(items):
        if _has_number(item):
            places, kept = _places(item)
            return axis, places, (*items[:i], kept, *items[i + 1 :])
        if item is Ellipsis:
            axis += x.ndim - sum(y is not None and y is not Ellipsis for y in items)
        elif item is not None:
            axis += 1
    raise AssertionError("an index without a number")


def _has_number(item: Any) -> bool:
    if isinstance(item, slice):
        return any(isinstance(x, Number) for x in (item.start, item.stop, item.step))
    return isinstance(item, Number)


def _places(item: Any) -> tuple[torch.Tensor, Any]:
    """Return the places of a number or a slice, and what is left of it as an index of them."""
    if isinstance(item, Number):
        return item.tensor.reshape(1), 0
    start, stop = item.start, item.stop
    same = isinstance(start, Number) and isinstance(stop, Number) and start.base is stop.base
    if not same or item.step not in (None, 1):
        raise refusal(
            "the length of a slice depends on a tensor's value",
            "use a mask of fixed shape, as torch.where does",
            _line(),
        )
    length = max(stop.offset - start.offset, 0)
    return start.tensor + torch.arange(length), slice(None)


def _inside(places: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return places on an axis of a size, moved into it as a whole, and whether they were in it."""
    n = len(places)
    first = places[:1].clamp(0, size - n)
    return first + torch.arange(n), (places[:1] >= 0) & (places[:1] <= size - n)


def _rows(x: torch.Tensor, axis: int, places: torch.Tensor) -> torch.Tensor:
    """Return the rows at places; NaN if there are none, for which PyTorch's slice has another length."""
    if len(places) > x.shape[axis]:
        raise refusal("a slice is longer than its axis", "slice less", _line())
    inside, is_in = _inside(places, x.shape[axis])
    rows = x.index_select(axis, inside)
    return torch.where(is_in, rows, torch.nan) if x.is_floating_point() else rows


def _item(self: torch.Tensor) -> Any:
    """`Tensor.item` of an integer; that of a floating-point number is a tensor already."""
    is_integer = isinstance(self, FakeTensor) and not self.is_floating_point() and self.dtype is not torch.bool
    return _converted(self, int) if is_integer and is_unknown(self) else _number(self)


_full, _new = torch.full, torch.tensor


def _filled(size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    """`torch.full` of a number without a value."""
    if not isinstance(fill_value, Number):
        return _full(size, fill_value, dtype=dtype, **options)
    return _made(fill_value, dtype=dtype).expand(size).clone()


def _made(data: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    """`torch.tensor` of a number without a value."""
    if not isinstance(data, Number):
        return _new(data, dtype=dtype, **options)
    return data.like([]).clone() if dtype is None else data.tensor.to(dtype, copy=True)


def _line() -> str:
    return source_line("".join(traceback.format_list(traceback.extract_stack()[:-1])))


def names_numbers(functions: Sequence[FunctionType]) -> bool:
    """Return whether functions of the user name what makes Python numbers of tensors."""
    own = (fn.__code__ for fn in functions if not is_library(fn.__code__.co_filename))
    return any(not {"item", *_BUILTINS}.isdisjoint(code.co_names) for code in own)


@contextlib.contextmanager
def numbers(functions: Sequence[FunctionType]) -> Iterator[None]:
    """Let functions of the user compute with numbers without a value while entered.

    Args:
      functions: Functions, whose files see `int` and `float` that take such numbers.
    """
    global _number
    files = {id(fn.__globals__): fn.__globals__ for fn in functions if not is_library(fn.__code__.co_filename)}
    with contextlib.ExitStack() as patches:
        for scope in files.values():
            for name, value in _BUILTINS.items():
                if name not in scope:
                    scope[name] = value
                    patches.callback(scope.pop, name, None)
        for name in _MATH:
            patches.enter_context(replaced(math, name, _of_math(name)))
        before, _number = _number, torch.Tensor.item
        patches.callback(globals().__setitem__, "_number", before)
        patches.enter_context(replaced(torch.Tensor, "item", _item))
        for name, value in {"full": _filled, "tensor": _made}.items():
            patches.enter_context(replaced(torch, name, value))
        yield
