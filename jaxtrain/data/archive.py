"""Zip archives of unknown origin, looked at before anything in them is unpacked."""

import zipfile
from pathlib import Path

from jaxtrain.errors import UserError

HARMLESS = 256 * 2**20
"""Bytes that may be unpacked from anything."""
EXPANSION = 200
"""How many bytes one compressed byte may become beyond that. Deflate reaches 1032 (RFC 1951); arrays of data do not."""

_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = 30  # bytes, without the member's name


def is_zip(path: Path) -> bool:
    """Whether the file begins as torch and numpy tell a zip archive by."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def check_zip(path: Path, *, stored: bool = False) -> None:
    """Nothing, if the archive at `path` can be unpacked without harm; `stored`: it is to be compressed nowhere.

    Raises UserError for what is no zip archive, for members that share bytes or a name, that are encrypted, that are
    compressed as neither numpy nor torch does, and for those that unpack to far more than they take.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = sorted(archive.infolist(), key=lambda member: member.header_offset)
            end = archive.start_dir
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no zip archive that can be read ({error}): write the file again") from None
    if len({member.filename for member in members}) < len(members):
        raise UserError(f"{path} has two members of one name: write the file again")
    # Members that overlap unpack to more than any ratio says (Fifield 2019, "A better zip bomb").
    ends = [*(member.header_offset for member in members[1:]), end]
    for member, limit in zip(members, ends, strict=bool(members)):
        if member.header_offset + _LOCAL_HEADER + member.compress_size > limit:
            raise UserError(f"{path}: {member.filename!r} and what follows share bytes: write the file again")
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(f"{path}: {member.filename!r} is encrypted, or compressed unusually: write the file again")
        if stored and (member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size):
            raise UserError(f"{path}: {member.filename!r} is compressed, which torch.save never does: save it anew")
        check_expansion(f"{path}: {member.filename!r}", member.file_size, member.compress_size)


def check_expansion(what: str, size: int, compressed: int) -> None:
    """Nothing, if `size` bytes out of `compressed` ones are what data may be.

    >>> check_expansion("x", size=10**9, compressed=10**7)
    >>> check_expansion("x", size=10**9, compressed=10**6)
    Traceback (most recent call last):
        ...
    jaxtrain.errors.UserError: x unpacks to 1,000,000,000 bytes from 1,000,000: a trap, or to be saved uncompressed
    """
    if size > HARMLESS and size > EXPANSION * compressed:
        raise UserError(f"{what} unpacks to {size:,} bytes from {compressed:,}: a trap, or to be saved uncompressed")
