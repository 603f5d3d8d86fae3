"""A user's Python file, imported as `python FILE.py` would find its imports."""

import hashlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from jaxtrain.errors import UserError

_SOURCES: dict[Path, bytes] = {}  # file -> its content when it was last imported


def import_file(path: Path) -> ModuleType:
    """Import a file as a separate module, with its folder importable, as `python FILE.py` does; once per content."""
    resolved = path.resolve()
    source = resolved.read_bytes()
    name = f"jaxtrain_run_{hashlib.sha256(bytes(resolved) + source).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a class's module up by its name.
    sys.modules[name] = module
    _SOURCES[resolved] = source
    folder = str(resolved.parent)
    is_new = folder not in sys.path
    if is_new:
        sys.path.insert(0, folder)
    try:
        # Not by the loader, whose cached bytecode may be that of another content of the same size and second.
        exec(compile(source, str(resolved), "exec", dont_inherit=True), vars(module))
    except ImportError as error:
        del sys.modules[name]
        raise _import_error(error, resolved) from error
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if is_new:  # last from now on: another file of that folder must not replace a module that is imported later
            sys.path.remove(folder)
            sys.path.append(folder)
    return module


def _import_error(error: ImportError, file: Path) -> Exception:
    """Return the error of an import in the file itself in one line; that of another file as it is."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "<frozen" not in frame.filename]
    if not frames or frames[-1].filename != str(file):
        return error
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    remedy = f"install {package}, or correct the name" if package else "correct the import"
    return UserError(f"{file}:{frames[-1].lineno}: {error}: {remedy}")


def imported_source(path: Path) -> bytes:
    """Return the content of a file, as it was imported if it was."""
    return _SOURCES.get(path.resolve()) or path.read_bytes()


def own_folders() -> set[Path]:
    """Return the folders of the files that were imported, which hold the modules that those import."""
    return {path.parent for path in _SOURCES}


def with_hash_seed() -> dict[str, str]:
    """Return the environment of a process in which strings have the same hashes, and sets an order, in every run."""
    return {"PYTHONHASHSEED": "0", **os.environ}


def script_file(script: Path) -> Path:
    """Return the file of a script, which is itself, or that of a module.

    Args:
      script: The script, or `FOLDER/package.module`, which runs as by `python -m package.module` in the folder.

    Raises:
      UserError: There is none.
    """
    script = script.resolve()
    base = script.parent.joinpath(*script.name.split("."))
    for file in (script, base.with_name(f"{base.name}.py"), base / "__main__.py"):
        if file.is_file():
            return file
    raise UserError(
        f"{script.name} does not exist in {script.parent}: name a script, or -m and a module of this folder"
    )
