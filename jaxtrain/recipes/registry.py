"""The built-in recipes by name; each file is imported when its recipe is used."""

import importlib
from collections.abc import Iterator, Mapping

from jaxtrain.run import Recipe, is_reference, load_recipe, reference_to

_CLASSES = {
    "gpt-stdlib": "gpt:GPTRecipe",
    "digits-mlp": "image:MLPRecipe",
    "digits-cnn": "image:CNNRecipe",
    "digits-resnet": "resnet:ResNetRecipe",
    "llama-stdlib": "llama:LlamaRecipe",
    "bert-stdlib": "masked_language:MaskedLanguageRecipe",
    "bert-keywords": "text_classification:TextClassificationRecipe",
    "t5-dates": "t5:T5Recipe",
    "finetune": "finetune:FineTuneRecipe",
}


class _BuiltIn(Mapping[str, Recipe]):
    """Name -> recipe with its default settings."""

    def __getitem__(self, name: str) -> Recipe:
        module, _, kind = _CLASSES[name].partition(":")
        recipe: Recipe = getattr(importlib.import_module(f"jaxtrain.recipes.{module}"), kind)()
        return recipe

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)

    def __contains__(self, name: object) -> bool:
        return name in _CLASSES


RECIPES: Mapping[str, Recipe] = _BuiltIn()
"""Built-in recipes by name; the first one is the default."""


def registered_name(recipe: Recipe) -> str:
    """Return the name under which `named_recipe` finds the class of a recipe: that of a built-in one, or a reference.

    That of a recipe defined in a notebook is the name of its class, which leads nowhere.
    """
    kind = type(recipe)
    spec = f"{kind.__module__.removeprefix('jaxtrain.recipes.')}:{kind.__qualname__}"
    built_in = {value: name for name, value in _CLASSES.items()}
    return built_in[spec] if spec in built_in else reference_to(kind)


def named_recipe(name: str) -> Recipe:
    """Return the recipe of a name with its default settings.

    Args:
      name: Name of a built-in recipe, or FILE.py::NAME.

    Raises:
      UserError: The file of a reference defines no such recipe.
      KeyError: No built-in recipe has this name.
    """
    return load_recipe(name)[1] if is_reference(name) else RECIPES[name]
