"""Configurations of the built-in runs, as dataclasses whose fields are flags of `jaxtrain train`."""

from jaxtrain.recipes.classification import CNNRecipe, ImageRecipe, MLPRecipe, ResNetRecipe
from jaxtrain.recipes.command import command
from jaxtrain.recipes.language import GPTRecipe, LanguageRecipe, LlamaRecipe
from jaxtrain.recipes.masked_language import EncoderRecipe, MaskedLanguageRecipe
from jaxtrain.recipes.recipe import Recipe
from jaxtrain.recipes.registry import RECIPES
from jaxtrain.recipes.seq2seq import T5Recipe
from jaxtrain.recipes.text_classification import TextClassificationRecipe

__all__ = [
    "RECIPES",
    "CNNRecipe",
    "EncoderRecipe",
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
    "command",
]
