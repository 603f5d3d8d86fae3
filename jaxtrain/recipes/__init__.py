"""Ready configurations: dataclasses, no logic. A field is a flag of `jaxtrain train`."""

from jaxtrain.recipes.classification import CNNRecipe, ImageRecipe, MLPRecipe, ResNetRecipe
from jaxtrain.recipes.language import GPTRecipe, LanguageRecipe, LlamaRecipe
from jaxtrain.recipes.masked_language import MaskedLanguageRecipe
from jaxtrain.recipes.recipe import Recipe
from jaxtrain.recipes.seq2seq import T5Recipe
from jaxtrain.recipes.text_classification import TextClassificationRecipe

RECIPES: dict[str, Recipe] = {
    "gpt-stdlib": GPTRecipe(),
    "digits-mlp": MLPRecipe(),
    "digits-cnn": CNNRecipe(),
    "digits-resnet": ResNetRecipe(),
    "llama-stdlib": LlamaRecipe(),
    "bert-stdlib": MaskedLanguageRecipe(),
    "bert-keywords": TextClassificationRecipe(),
    "t5-dates": T5Recipe(),
}
"""The first is the default."""

__all__ = [
    "RECIPES",
    "CNNRecipe",
    "GPTRecipe",
    "ImageRecipe",
    "LanguageRecipe",
    "LlamaRecipe",
    "MLPRecipe",
    "MaskedLanguageRecipe",
    "Recipe",
    "ResNetRecipe",
    "T5Recipe",
    "TextClassificationRecipe",
]
