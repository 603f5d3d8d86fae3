"""The text of a file around the functions of its modules: docstring, imports, constants, and what they call."""

import inspect
import re
from collections.abc import Mapping, Sequence

from jaxtrain.interop import LAYER, TorchParam
from jaxtrain.torch_import.source import runtime
from jaxtrain.torch_import.source.ruff_format import formatted

LOADING = 'BUFFERS = F.load_buffers(Path(__file__).with_name("buffers.safetensors"))'
_MODULES = {"jax": "jax", "jax.numpy as jnp": "jnp", "jaxtrain as jt": "jt", "numpy as np": "np"}
_TYPES = {"Array": "jax.Array", "Tensors": "dict[str, Any]"}


def file_of(
    name: str,
    functions: Sequence[str],
    constants: Mapping[str, str],
    stacks: Mapping[str, TorchParam],
    imports: Mapping[str, str],
    *,
    has_loss: bool,
    has_state: bool,
) -> str:
    """Return the text of a file.

    Args:
      name: Name of the module's class.
      functions: Texts of the functions.
      constants: Expressions of constant tensors by name, of which the unused are left out.
      stacks: Stacked parameters and buffers by name.
      imports: Modules of the user's functions that are called, by name.
      has_loss: Whether the module returns its loss as "loss".
      has_state: Whether a pass changes buffers.
    """
    text = "\n\n\n".join(functions)
    used = {name: value for name, value in constants.items() if re.search(rf"\b{name}\b", text)}
    written = [f"{name} = {value}" for name, value in used.items()]
    text = "\n\n\n".join([*_called(text, stacks), text, *_stacking(text, stacks)])
    whole = "\n".join([*written, text])
    written = [LOADING] * ("BUFFERS" in whole) + written
    types = [f"{name} = {value}" for name, value in _TYPES.items() if re.search(rf"\b{name}\b", whole)]
    parts = [_docstring(name, bool(stacks), has_loss=has_loss, has_state=has_state)]
    parts += ["\n".join(_imports("\n".join([*types, whole]), imports))]
    parts += ["\n".join(lines) for lines in (types, written) if lines]
    return formatted("\n\n".join(parts) + f"\n\n\n{text}\n")


def _called(text: str, stacks: Mapping[str, TorchParam]) -> list[str]:
    """Return the definitions of the functions that a text calls besides operations."""
    found = []
    if "Keys" in text:
        keys = inspect.getsource(runtime.Keys).strip()
        found.append(keys if ".layer(" in text else keys.partition("\n\n    def layer")[0])
    if "joined(" in text:
        found.append(inspect.getsource(runtime.joined).strip())
    if stacks or re.search(r"\bof\(", text):
        found.insert(0, inspect.getsource(runtime.of).strip())
    return found


def _stacking(text: str, stacks: Mapping[str, TorchParam]) -> list[str]:
    """Return the functions that stack the tensors of layers and select them, as a text needs them."""
    needed = [runtime.stacked] * bool(stacks) + [runtime.unstacked] * ("unstacked(" in text)
    return [_layers(stacks), *(inspect.getsource(fn).strip() for fn in needed)] if stacks else []


def _layers(stacks: Mapping[str, TorchParam]) -> str:
    """Return the statement that names the layers of each stack."""
    found = {}
    for name, param in stacks.items():
        layer, _, rest = param.name.partition(f"{LAYER}.")
        numbers = param.layers or range(0)
        step = f", {numbers.step}" if numbers.step > 1 else ""
        start = f"{numbers.start}, " if numbers.start or step else ""
        found[name.removesuffix(f".{rest}")] = f'("{layer}{{}}", range({start}{numbers.stop}{step}))'
    written = ", ".join(f'"{path}": {value}' for path, value in found.items())
    return f"LAYERS = {{{written}}}"


def _docstring(name: str, has_stacks: bool, *, has_loss: bool, has_state: bool) -> str:
    """Return the docstring of a file, with a loss function for `jaxtrain.train_step`."""
    params = "`stacked` converts PyTorch's, by their names" if has_stacks else "their names are PyTorch's"
    loss = 'outputs["loss"]' if has_loss else 'losses.cross_entropy(outputs, batch["label"])'
    more = (", state", ", state") if has_state else ("", "")
    lines = [
        f'"""{name} in JAX, written by `jaxtrain from-torch`.',
        "",
        "`params.safetensors` has the parameters: " + params + ".",
        "Shapes are those of the first call for the example batch. The mode is training with",
        "a key, else evaluation. A loss for `jaxtrain.train_step`:",
        "",
        f"    def loss_fn(params, batch, rng{more[0]}):",
        f"        outputs, state = model(params, batch, rng{more[0]})",
        f"        return jt.Loss.of({loss}), {{}}{more[1]}",
        '"""',
    ]
    return "\n".join(lines)


def _imports(text: str, imports: Mapping[str, str]) -> list[str]:
    """Return the import statements that a text needs."""
    standard = ["from pathlib import Path"] * ("BUFFERS" in text)
    standard += ["from typing import Any"] * (re.search(r"\bAny\b", text) is not None)
    lines = [f"import {full}" for full, name in _MODULES.items() if re.search(rf"(?<![\w.]){name}\.", text)]
    modules: dict[str, list[str]] = {}
    for name in sorted(imports):
        if re.search(rf"(?<![\w.\"]){name}\b(?=[(.\[])", text):
            modules.setdefault(imports[name], []).append(name)
    functions = [f"from {module} import {', '.join(names)}" for module, names in modules.items()]
    functions += ["from jaxtrain.passes import recomputed"] * ("@recomputed" in text)
    calls_ours = "BUFFERS" in text or re.search(r"\bF\.", text) is not None
    functions += ["from jaxtrain.torch_import import functional as F"] * calls_ours
    lines += sorted(functions)
    return [*standard, *[""] * bool(standard and lines), *lines]
