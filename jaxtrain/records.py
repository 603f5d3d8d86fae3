"""Records that other programs wrote, and their fields that nobody read.

A file may have fields that its reader does not know. A reader looks its fields up in a `Record`, and names those that
are left: nothing is dropped without a word, and no list of known fields has to follow the code.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxtrain.errors import UserError, warn_user

_LISTED = 20
_MAX_DEPTH = 100  # Python's stack holds several frames for a level


class Record(dict[str, Any]):
    """An object of JSON that notes which of its fields are looked up; the objects in it are records too.

    A membership test, a comparison and a copy by `|` look no field up. An iteration looks up all of them, as does
    formatting as text or JSON.

    Args:
      values: The fields.
      reads: Paths of the fields that were looked up, which records of one file may share; a new set by default.
      path: Path of the record itself.
      nested: Whether the objects in it become records.

    Raises:
      UserError: It is nested too deeply.

    Example:
      >>> record = Record({"a": 1, "b": {"c": 2, "d": 3}, "rows": [{"e": 4}, {"f": 5}], "g": 6})
      >>> record["b"]["c"], record.get("a"), [row.get("e") for row in record["rows"]]
      (2, 1, [4, None])
      >>> unread_fields(record)
      ['b.d', 'rows.f', 'g']
    """

    __slots__ = ("_path", "_reads")

    def __init__(
        self,
        values: Mapping[str, Any],
        reads: set[tuple[Any, ...]] | None = None,
        path: tuple[Any, ...] = (),
        *,
        nested: bool = True,
    ) -> None:
        self._reads: set[tuple[Any, ...]] = set() if reads is None else reads
        self._path = path
        super().__init__(
            {key: _recorded(value, self._reads, (*path, key)) if nested else value for key, value in values.items()}
        )

    def __getitem__(self, key: str, /) -> Any:
        self._reads.add((*self._path, key))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None, /) -> Any:
        """Return the value of a field."""
        self._reads.add((*self._path, key))
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        mark_read(self, *super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        """Return the names of the fields."""
        mark_read(self, *super().keys())
        return super().keys()

    def values(self) -> Any:
        """Return the values of the fields."""
        mark_read(self, *super().keys())
        return super().values()

    def items(self) -> Any:
        """Return the fields."""
        mark_read(self, *super().keys())
        return super().items()

    def __repr__(self) -> str:
        mark_all_read(self)
        return super().__repr__()

    __str__ = __repr__

    def __or__(self, other: Any, /) -> "Record":  # type: ignore[override]
        """Return the record with other values, which notes what is looked up in the same place."""
        return Record({**_plain(self), **_plain(other)}, self._reads, self._path)

    def __ror__(self, other: Any, /) -> "Record":  # type: ignore[override]
        """Return the record over other values, its defaults."""
        return Record({**_plain(other), **_plain(self)}, self._reads, self._path)

    def __reduce__(self) -> Any:
        return Record, (_plain(self), self._reads, self._path)


# Functions, because a chat template reaches the methods of an object as it does its fields.
def mark_read(record: Record, *names: str) -> None:
    """Note that fields of a record were read."""
    record._reads.update((*record._path, name) for name in names)


def disregard(record: Record, *names: str) -> None:
    """Note that fields of a record need not be read, nor what is in them."""
    mark_read(record, *names)
    for name in names:
        for part in _records_in(dict.get(record, name)):
            mark_all_read(part)


def mark_all_read(record: Record) -> None:
    """Note that every field of a record was read, also those of the records in it."""
    for value in record.values():
        for part in _records_in(value):
            mark_all_read(part)


def is_unread(record: Mapping[str, Any], name: str) -> bool:
    """Return whether a record has a field that was not looked up; no field of another mapping counts as such."""
    return isinstance(record, Record) and name in record and (*record._path, name) not in record._reads


def unread_fields(record: Record) -> list[str]:
    """Return the paths of the fields of a record that were not looked up, without the numbers of items.

    A field that is None counts as missing.
    """
    found: dict[str, None] = {}
    for name, value in _plain(record).items():
        if value is None:
            continue
        if is_unread(record, name):
            found[name] = None
        else:
            found |= dict.fromkeys(f"{name}.{inner}" for part in _records_in(value) for inner in unread_fields(part))
    return list(found)


def report_unread(where: Any, names: Iterable[str], what: str = "fields") -> None:
    """Warn in one line of what was not read of a file or folder; not at all if everything was.

    Args:
      where: The file or folder.
      names: Names of what was not read.
      what: What they are, in the plural.

    Example:
      >>> import warnings
      >>> with warnings.catch_warnings(record=True) as caught:
      ...     warnings.simplefilter("always")
      ...     report_unread("config.json", ["b", "a", "b"])
      ...     print(caught[0].message)
      config.json has fields that are not read: a, b
    """
    listed = sorted({name if name.isprintable() else ascii(name) for name in names})
    if listed:
        more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
        warn_user(f"{where} has {what} that are not read: {', '.join(listed[:_LISTED])}{more}")


def _recorded(value: Any, reads: set[tuple[Any, ...]], path: tuple[Any, ...]) -> Any:
    if len(path) > _MAX_DEPTH:
        raise UserError(f"the field {path[0]} is nested more than {_MAX_DEPTH} deep: write it flatter")
    if isinstance(value, dict):
        return Record(_plain(value), reads, path)
    if isinstance(value, list):
        return [_recorded(item, reads, (*path, i)) for i, item in enumerate(value)]
    return value


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a shallow copy that looks no field up."""
    return {name: dict.__getitem__(value, name) for name in dict.keys(value)} if isinstance(value, dict) else {**value}


def _records_in(value: Any) -> Iterator[Record]:
    if isinstance(value, Record):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _records_in(item)
