"""The arrays of a state on disk: each process writes and reads the parts that its devices hold, by orbax.

Host memory is bounded besides the copy off the devices that a save needs. Arrays are stored in chunks, and a restore
reads parts of few arrays at a time. By default orbax reads all at once, in chunks as large as the parts that were
saved, and needs up to 2.4 times the memory of the parts that it restores.
"""

import contextlib
import glob
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore

from jaxtrain.errors import UserError, is_out_of_memory
from jaxtrain.folder_files import read_json

_CHUNK_BYTES = 2**26
"""Largest chunk of an array: what a part of another mesh reads beyond its own bytes is less than this at each end."""
_CONCURRENT = 32
"""A restore reads at most 1 / 32 of a process's parts at a time, unless a single part is larger."""


class StateFiles:
    """Writes trees of arrays in the background, and reads them with any shardings."""

    def __init__(self) -> None:
        # Compressing nearly random numbers would take the cores from the steps, for a fifth of the size.
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        self._links = contextlib.ExitStack()

    def save(self, folder: Path, tree: Any) -> None:
        """Begin to write a tree; return when its arrays may be donated."""
        args = jax.tree.map(lambda x: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
        self._orbax.save(self._plain_path(folder), args=ocp.args.PyTreeSave(tree, args))

    def wait(self) -> None:
        """Wait until all processes have written the last tree."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        """Wait, and end orbax's threads."""
        with self._links:
            self._orbax.close()

    def check(self, folder: Path) -> None:
        """Check that a folder that was written can be opened, before it counts as saved.

        Raises:
          ValueError: It has no metadata, or no array in it can be read.
        """
        read_json(folder / "_METADATA")
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{self._plain_path(folder)}/"}}
        keys = tensorstore.KvStore.open(store).result().list().result()
        names = sorted(key.decode().removesuffix(".zarray") for key in keys if key.endswith(b"/.zarray"))
        if not names:
            raise ValueError("it has no arrays")
        name = "step/" if "step/" in names else names[0]
        array = tensorstore.open({"driver": "zarr", "kvstore": {**store, "path": name}}).result()
        array[tuple(slice(0, 1) for _ in array.shape)].read().result()  # a chunk of it

    def _plain_path(self, folder: Path) -> Path:
        """Return a path of a folder without characters of shell patterns and without bytes that are not UTF-8.

        orbax finds its own files by patterns, and TensorStore's paths are UTF-8. A link in a temporary folder leads to
        the parent of such a folder, which is created.
        """
        if glob.escape(str(folder)) == str(folder) and str(folder).isprintable():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = self._links.enter_context(tempfile.TemporaryDirectory(prefix="jaxtrain-"))
        link = Path(place, "checkpoint")
        link.symlink_to(folder.parent.absolute())
        return link / folder.name

    def read(self, folder: Path, like: Any, *, partial_restore: bool = False) -> Any:
        """Read a tree with the shapes, dtypes and shardings of `like`.

        Args:
          folder: The folder that `save` wrote.
          like: A tree of arrays or their shapes.
          partial_restore: Whether the folder holds other arrays besides.

        Raises:
          UserError: Another tree was saved, which orbax would convert silently, or the folder cannot be read.
        """
        try:
            return self._read(folder, like, partial_restore)
        except Exception as error:  # orbax and TensorStore raise many types
            if isinstance(error, UserError) or is_out_of_memory(error):
                raise
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(
                f"{folder.parent} cannot be read ({why}): remove it, and the checkpoint before it is used"
            ) from error

    def _read(self, folder: Path, like: Any, partial_restore: bool) -> Any:
        parent, folder = folder.parent, self._plain_path(folder)
        saved = self._orbax.metadata(folder).item_metadata.tree
        _check_kinds(parent, saved, like, partial_restore)
        item = _abstract(like)
        shardings = ocp.checkpoint_utils.construct_restore_args(item)
        # All arrays have been compared. A field that holds none may have been added since the tree was saved.
        args = ocp.args.PyTreeRestore(item, shardings, partial_restore=True)
        limit = _read_limit(saved, item) / 10**9
        handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)
        with contextlib.closing(ocp.Checkpointer(handler)) as orbax:
            return orbax.restore(folder, args=args)


def _check_kinds(folder: Path, saved: Any, like: Any, partial_restore: bool) -> None:
    found, expected = _kinds(saved), _kinds(like)
    if partial_restore:
        found = {name: found[name] for name in found.keys() & expected.keys()}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise UserError(
                f"{folder} has {found.get(name, 'nothing')} at {name} where this recipe's state has "
                f"{expected.get(name, 'nothing')}: the recipe, config.json or jaxtrain has changed since: undo "
                "that, or start a new run with another --out"
            )


def _kinds(tree: Any) -> dict[str, str]:
    """Return dtype and shape by name, as saved; of a random key those of its data."""

    def key_data(x: Any) -> Any:
        return jax.eval_shape(jax.random.key_data, x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    leaves = {name: key_data(x) for name, x in ocp.tree.to_flat_dict(tree, sep="/").items()}
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in leaves.items()}


def _abstract(tree: Any) -> Any:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here), tree)


def _read_limit(saved: Any, item: Any) -> int:
    """Return the bytes that may be read at a time: those of the largest part, or a fraction of all parts.

    orbax counts the whole chunks that a part overlaps, and refuses a part that is as large as the limit.
    """
    chunks = {name: x.storage.chunk_shape for name, x in ocp.tree.to_flat_dict(saved, sep="/").items()}
    parts = [
        _overlapped_bytes(index, x, chunks[name])
        for name, x in ocp.tree.to_flat_dict(item, sep="/").items()
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        for index in {
            str(index): index for index in x.sharding.addressable_devices_indices_map(x.shape).values()
        }.values()
    ]
    return max(*parts, sum(parts) // _CONCURRENT, _CHUNK_BYTES // _CONCURRENT) + 1


def _overlapped_bytes(index: tuple[slice, ...], x: jax.ShapeDtypeStruct, chunk: tuple[int, ...]) -> int:
    """Return the bytes of the chunks of an array that a part overlaps."""
    bounds = [part.indices(size) for part, size in zip(index, x.shape, strict=True)]
    lengths = [-(-stop // n) * n - start // n * n for (start, stop, _), n in zip(bounds, chunk, strict=True)]
    return math.prod(lengths) * x.dtype.itemsize
