"""Names of functions, arguments and tensors."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from jaxtrain.torch_import.source.body import Item

RESERVED = frozenset(
    {
        *("params", "buffers", "state", "keys", "train", "new_state", "batch", "rng", "model", "evaluate"),
        *("jax", "jnp", "np", "jt", "F", "of", "joined", "stacked", "Array", "Tensors", "Keys", "Any"),
    }
)
"""Names that the text of a file has for something else."""


def input_names(
    inputs: Sequence[str],
    items: Sequence[Item],
    parameters: Sequence[str],
    hint_of: Callable[[str], str],
    reserved: Collection[str],
) -> dict[str, str]:
    """Name the arguments of a function as the parameters of `forward` that the statements using them read.

    Args:
      inputs: The values.
      items: The function's items.
      parameters: Names of the parameters of `forward`.
      hint_of: From a value to its name where it is made.
      reserved: Names that no value may have.
    """
    names: dict[str, str] = {}
    users = {value: next(item for item in items if value in item.operands) for value in inputs}
    likely = {value: _read(users[value], parameters) for value in inputs}
    several = Counter(name for found in likely.values() if len(found) == 1 for name in found)
    for value in inputs:
        hint, callees, found = hint_of(value), users[value].parameters.get(value), likely[value]
        free = [name for name in found if name not in names.values()]
        is_one_of_several = len(found) == 1 and several[found[0]] > 1
        if callees in free or hint in free:
            name = callees if callees in free else hint
        elif not is_one_of_several and (len(free) == 1 or (free and not callees)):
            name = free[0]
        else:
            name = callees or hint
        while name in names.values() or name in reserved:
            name += "_"
        names[value] = name
    return names


def _read(item: Item, parameters: Sequence[str]) -> list[str]:
    """Return the parameters of `forward` that an item's statement reads."""
    return [name for name in parameters if item.statements and name in item.statements[0].reads]


def relative_to(name: str, base: str | None) -> str | None:
    """Return the name of a tensor or module within another module; None if it is not within it."""
    if base is None:
        return None
    if base == "" or name == base:
        return name if base == "" else ""
    return name[len(base) + 1 :] if name.startswith(f"{base}.") else None


def snake_case(name: str) -> str:
    """Return a class's name as a function's.

    >>> snake_case("GPT2LMHeadModel")
    'gpt2_lm_head_model'
    """
    words = ""
    for known in ("SiLU", "ReLU", "GELU", "ResNet", "ViT"):
        name = name.replace(known, known.capitalize())
    for i, char in enumerate(name):
        after, before = name[i + 1 : i + 2], name[i - 1 : i]
        starts = before.islower() or (before.isdigit() and after) or (after.islower() and before not in ("", "_"))
        words += f"_{char}" if char.isupper() and starts else char
    return words.lower().strip("_")


def identifier(name: str) -> str:
    """Return a text as an identifier."""
    name = "".join(char if char.isalnum() else "_" for char in name).strip("_")
    return name if name.isidentifier() else "x"


def place_of(name: str, parameters: Sequence[str]) -> int:
    """Return the place of a name among parameters; the last for another."""
    return parameters.index(name) if name in parameters else len(parameters)


def mentions(text: str, name: str) -> bool:
    """Return whether a text reads a name."""
    return any(mark + name + end in text for mark in " ([*" for end in ",)[.\n")
