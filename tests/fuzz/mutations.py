"""Hypothesis strategies that mutate valid files."""

import copy
import io
import struct
import zipfile
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

SIZES = [0, 1, 2, 3, 7, 127, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**64 - 1]
NASTY = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 2**31, 2**63, 10**15, 10**30, 0.5, -0.0, 1e308, 1e-320]),
    st.sampled_from(["", "x", "0", "nan", "../x", "/etc/passwd", "\x00", "é\n\x1b[31m", "😀" * 9, "9" * 5000]),
    st.sampled_from([[], {}, [[]], [None], [-1, 8], [0] * 99, {"": {}}, {"x": [1, {"y": None}]}]),
    st.integers(-9, 9),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
"""JSON values that are rarely valid."""


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """Overwrite, remove, duplicate or truncate bytes in a few places."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        # Headers are at the ends of files.
        place = draw(st.sampled_from([place, min(place, 200), max(len(data) - place % 200, 0)]))
        length = draw(st.integers(1, 16))
        match draw(st.sampled_from(["byte", "number", "cut", "twice", "end", "noise"])):
            case "byte":
                data[place : place + 1] = bytes([draw(st.integers(0, 255))])
            case "number":
                number, width = draw(st.sampled_from(SIZES)), draw(st.sampled_from("BHIQ"))
                packed = struct.pack(f"<{width}", number % 2 ** (8 * struct.calcsize(f"<{width}")))
                data[place : place + len(packed)] = packed
            case "cut":
                del data[place : place + length]
            case "twice":
                data[place:place] = data[place : place + length]
            case "end":
                del data[place:]
            case "noise":
                data[place : place + length] = draw(st.binary(min_size=length, max_size=length))
    return bytes(data)


@st.composite
def mutated_tree(draw: st.DrawFn, valid: Any, nasty: st.SearchStrategy[Any] = NASTY) -> Any:
    """Replace, remove, rename or duplicate a few branches of a tree of dictionaries and lists."""
    root = [copy.deepcopy(valid)]
    for _ in range(draw(st.integers(1, 3))):
        branches = list(_branches(root))
        branch, key = draw(st.sampled_from(branches)) if branches else (root, 0)
        match draw(st.sampled_from(["other", "other", "other", "removed", "renamed", "elsewhere"])):
            case "other":
                branch[key] = copy.deepcopy(draw(nasty))
            case "removed" if branch is not root:
                del branch[key]
            case "renamed" if isinstance(branch, dict):
                branch[draw(st.sampled_from(["x", "", "../x", "__metadata__", *map(str, branch)]))] = branch.pop(key)
            case "elsewhere":
                there, other = draw(st.sampled_from(branches))
                branch[key] = copy.deepcopy(there[other])
            case _:
                branch[key] = copy.deepcopy(draw(nasty))
    return root[0]


def _branches(tree: Any) -> Any:
    """Yield (container, key) of every branch."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(entries):
        yield tree, key
        yield from _branches(value)


@st.composite
def mutated_archive(
    draw: st.DrawFn, valid: bytes, inside: Callable[[bytes], st.SearchStrategy[bytes]] = damaged
) -> bytes:
    """Damage, remove, rename, duplicate or compress members of a valid archive."""
    with zipfile.ZipFile(io.BytesIO(valid)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    chosen = draw(st.integers(0, len(members) - 1))
    name, content = members[chosen]
    match draw(st.sampled_from(["damaged", "damaged", "damaged", "removed", "renamed", "twice", "long", "same"])):
        case "damaged":
            members[chosen] = name, draw(inside(content))
        case "removed":
            del members[chosen]
        case "renamed":
            members[chosen] = draw(st.sampled_from(["x", "../x", "/x", name + "x", "\n"])), content
        case "twice":
            members.append((name + "/" + draw(st.sampled_from(["", "x"])), content))
        case "long":
            members[chosen] = name, content + bytes(draw(st.sampled_from([1, 64, 2**20])))
    out = io.BytesIO()
    kind = draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]))
    with zipfile.ZipFile(out, "w", kind) as archive:
        for member, data in members:
            archive.writestr(zipfile.ZipInfo(member) if kind == zipfile.ZIP_STORED else member, data)
    return out.getvalue()
