"""What a source of examples is: it has a length and answers `source[i]` with one example, a dict of numpy arrays."""

from typing import Any, Protocol

Example = dict[str, Any]  # name -> numpy array or numpy scalar, without a batch axis


class Source(Protocol):
    """Anything with a length whose items are examples of one shape."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...
