"""The protocol of sources: a length, and examples `source[i]` as dicts of numpy arrays."""

from typing import Any, Protocol

Example = dict[str, Any]  # name -> numpy array or numpy scalar, without a batch axis


class Source(Protocol):
    """Anything with a length whose items are examples of equal shapes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...
