"""Ready configurations: dataclasses, no logic. A field is a flag of `jaxtrain train`."""

from jaxtrain.recipes.classification import CNNRecipe, ImageRecipe, MLPRecipe
from jaxtrain.recipes.language import GPTRecipe
from jaxtrain.recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    "gpt-stdlib": GPTRecipe(),
    "digits-mlp": MLPRecipe(),
    "digits-cnn": CNNRecipe(),
}
"""The first is the default."""

__all__ = ["RECIPES", "CNNRecipe", "GPTRecipe", "ImageRecipe", "MLPRecipe", "Recipe"]
