"""The files of a ported script: `model.py`, `run.py`, and their arrays."""

import ast
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxtrain.port.batch_shapes import save_shapes, shapes
from jaxtrain.port.ported import Ported
from jaxtrain.port.recipe_source import INPUTS, recipe_source, turn_folder
from jaxtrain.torch_import import ImportedModel


def write(result: Ported, script: Path, args: Sequence[str], folder: Path) -> list[Path]:
    """Write the files of a ported script to a folder.

    Args:
      result: The script.
      script: Its file.
      args: Its arguments.
      folder: A folder that exists.

    Returns:
      The files.
    """
    from safetensors.flax import save_file

    training = result.training
    written = _save_models(result, folder)
    for i, turn in enumerate(result.turns[1:], 1):
        _save_models(turn, folder / turn_folder(i))
        (folder / turn_folder(i) / "params.safetensors").unlink()  # those of the first one
    text = recipe_source(result, script, args)
    if state := result.state():
        save_file({name: jnp.asarray(x) for name, x in state.items()}, folder / "state.safetensors")
        written.append(folder / "state.safetensors")
    if training.cut is not None:
        (folder / INPUTS).write_text(training.feed().as_json(), encoding="utf-8")
        written.append(folder / INPUTS)
    (folder / "run.py").write_text(text, encoding="utf-8")
    return [folder / "run.py", *written]


def _save_models(result: Ported, folder: Path) -> list[Path]:
    """Write the models of a program for batches of each shape, one for all that compute the same.

    Returns:
      The files of the first one.
    """
    backward, inputs = result.training.programs[0]
    written = _save_source(result.model, folder)
    if result.any_size is not None:
        text, known = result.any_size
        written[0].write_text(text, encoding="utf-8")
        save_shapes(folder, {"model.py": [known]})
        return written
    files = {"model.py": [shapes(inputs.batch_of(backward))]}
    for i, (shape, model) in enumerate(result.others, 2):
        inner = folder / f"shape_{i}"
        own = _save_source(model, inner)
        if any(_content(file) != _content(folder / file.name) for file in own):
            files[f"{inner.name}/model.py"] = [shape]
            (inner / "params.safetensors").unlink()
        else:
            files["model.py"].append(shape)
            shutil.rmtree(inner)
    save_shapes(folder, files)
    return written


def _save_source(model: ImportedModel, folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files: list[Path] = model.save_source(folder / "model.py", evaluation=not model.draws_in_evaluation)
    return files


def _content(file: Path) -> Any:
    """Return what a file says, of code without docstrings, which name shapes."""
    if file.suffix != ".py" or not file.exists():
        return file.read_bytes() if file.exists() else None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
