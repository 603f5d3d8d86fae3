"""Objects in JSON Lines files, or in one JSON file: sources of dicts."""

import json
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.files.model_folder import json_value
from jaxtrain.data.sources import Example
from jaxtrain.errors import UserError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_REMEDY = "write one JSON object per line"
_PACKED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"BZh": "bunzip2", b"\xfd7zX": "unxz", b"PK": "unzip"}
_MOST_OF_LINE, _MOST_OF_ARRAY = 2**26, 2**31  # bytes


class JsonLines:
    """Objects of JSON Lines files, in order: item `i` is the object on the `i`-th line that is not blank.

    A line is read and parsed on access; only the offsets and numbers of the lines are in memory.

    Args:
      files: JSON Lines files, UTF-8.

    Raises:
      UserError: A file cannot be read; on access, if a line is not a JSON object.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = Path(folder, "a.jsonl")
      ...     _ = file.write_text('{"text": "one"}\\n\\n{"text": "two"}\\n')
      ...     rows = JsonLines([file])
      ...     len(rows), rows[1]
      (2, {'text': 'two'})
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._lines = [_lines(file) for file in self.files]
        self._ends = list(accumulate(map(len, self._lines)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        file, start, _ = self._place(index)
        with file.open("rb") as stream:
            stream.seek(start)
            line = stream.readline()
        try:
            row = json_value(line.rstrip().decode("utf-8-sig" if start == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{self.location(index)} {_not_utf8(error)}") from None
        except json.JSONDecodeError as error:
            why = f"{error.msg}: column {error.colno}"
            raise UserError(f"{self.location(index)} is not valid JSON ({why}): {_REMEDY}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.location(index)} is not valid JSON ({error}): {_REMEDY}") from None
        if not isinstance(row, dict):
            raise UserError(f"{self.location(index)} is a {type(row).__name__}, not an object: {_REMEDY}")
        return row

    def __reduce__(self) -> Any:
        return JsonLines, (self.files,)

    def location(self, index: int) -> str:
        """Return the file and the number of the line of an item, for messages."""
        file, _, line = self._place(index)
        return f"{file}, line {line}"

    def _place(self, index: int) -> tuple[Path, int, int]:
        """Return (file, offset, number of the line) of an item."""
        number = bisect_right(self._ends, index)
        first = self._ends[number - 1] if number else 0
        start, line = self._lines[number][index - first].tolist()
        return self.files[number], start, line


class JsonArray:
    """Objects of a JSON file that contains an array of them, in memory.

    Args:
      file: JSON file, UTF-8.

    Raises:
      UserError: The file is not a JSON array; on access, if an item is not an object.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        if (size := file.stat().st_size) > _MOST_OF_ARRAY:
            raise UserError(f"{file} has {size:,} bytes, and an array is read whole: {_REMEDY}")
        try:
            rows = json_value(file.read_text("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UserError(f"{file} {_not_utf8(error)}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{file} is not valid JSON ({error}): write an array of objects") from None
        if not isinstance(rows, list):
            raise UserError(f"{file} is a {type(rows).__name__}, not an array: write an array of objects")
        self._rows: list[Any] = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        row = self._rows[index]
        if not isinstance(row, dict):
            raise UserError(f"{self.location(index)} is a {type(row).__name__}: write an array of objects")
        return row

    def __reduce__(self) -> Any:
        return JsonArray, (self.file,)

    def location(self, index: int) -> str:
        """Return the file and the number of an item, for messages."""
        return f"{self.file}, item {index + 1}"


def json_rows(files: Sequence[Path]) -> JsonLines | JsonArray:
    """Open JSON Lines files, or one JSON file with an array of objects.

    Args:
      files: The files; a file that starts with `[` is an array.

    Returns:
      The objects, a source.

    Raises:
      UserError: A file cannot be read, or one of several is an array.
    """
    arrays = [file for file in files if _is_array(file)]
    if arrays and len(files) > 1:
        raise UserError(f"{arrays[0]} is an array, one of {len(files)} files: write JSON Lines, one object per line")
    return JsonArray(arrays[0]) if arrays else JsonLines(files)


def _is_array(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): use another file") from None


def _not_utf8(error: UnicodeDecodeError) -> str:
    start, byte = error.object[:4], error.object[error.start]
    if packed := next((how for magic, how in _PACKED.items() if start.startswith(magic)), None):
        return f"is compressed: unpack it, as by {packed}"
    encoding = "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
    return f"is not UTF-8 (byte 0x{byte:02x} at {error.start}): convert it, as by iconv -f {encoding} -t utf-8"


def _lines(file: Path) -> NDArray[np.int64]:
    """Return the offset and the number of every line that is not blank, [N, 2]."""
    lines, offset = array("q"), 0
    with file.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_MOST_OF_LINE), b""), 1):
            if len(line) == _MOST_OF_LINE:
                raise UserError(f"{file}, line {number} has {_MOST_OF_LINE:,} bytes or more: {_REMEDY}")
            if line.strip(b" \t\r\n\xef\xbb\xbf"):
                lines.extend((offset, number))
            offset += len(line)
    return np.array(lines, np.int64).reshape(-1, 2)
