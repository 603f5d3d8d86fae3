"""Validation of zip archives from unknown sources, before anything in them is unpacked."""

import zipfile
from pathlib import Path

from jaxtrain.errors import UserError

ALWAYS_ALLOWED = 256 * 2**20
"""Bytes that may be unpacked whatever their ratio."""
MAX_RATIO = 200
"""Largest ratio of unpacked to compressed bytes beyond that. Deflate reaches 1032 (RFC 1951), arrays of data do not."""

_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = 30  # bytes, without the member's name


def is_zip(path: Path) -> bool:
    """Return whether the file starts with the signature by which torch and numpy recognize zip archives."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def check_zip(path: Path, *, stored: bool = False) -> None:
    """Validate that an archive can be unpacked safely.

    Args:
      path: Zip archive.
      stored: Whether all members must be uncompressed.

    Raises:
      UserError: The file is not a zip archive, or a member overlaps another, repeats a name, is encrypted, uses a
        compression that neither numpy nor torch writes, or unpacks to far more than its compressed size.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = sorted(archive.infolist(), key=lambda member: member.header_offset)
            end = archive.start_dir
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a readable zip archive ({error}): write the file again") from None
    if len({member.filename for member in members}) < len(members):
        raise UserError(f"{path} has two members with the same name: write the file again")
    # Overlapping members evade the bound on the ratio (Fifield 2019, "A better zip bomb").
    ends = [*(member.header_offset for member in members[1:]), end]
    for member, limit in zip(members, ends, strict=bool(members)):
        if member.header_offset + _LOCAL_HEADER + member.compress_size > limit:
            raise UserError(f"{path}: {member.filename!r} overlaps the next member: write the file again")
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(f"{path}: {member.filename!r} is encrypted or compressed unusually: write it again")
        if stored and (member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size):
            raise UserError(f"{path}: {member.filename!r} is compressed, which torch.save never does: save it again")
        check_expansion(f"{path}: {member.filename!r}", member.file_size, member.compress_size)


def check_expansion(what: str, size: int, compressed: int) -> None:
    """Validate the ratio of unpacked to compressed bytes.

    Example:
      >>> check_expansion("x", size=10**9, compressed=10**7)
      >>> check_expansion("x", size=10**9, compressed=10**6)
      Traceback (most recent call last):
          ...
      jaxtrain.errors.UserError: x unpacks 1,000,000 bytes to 1,000,000,000: possible zip bomb; save it uncompressed
    """
    if size > ALWAYS_ALLOWED and size > MAX_RATIO * compressed:
        raise UserError(f"{what} unpacks {compressed:,} bytes to {size:,}: possible zip bomb; save it uncompressed")
