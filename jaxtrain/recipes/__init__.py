"""Configurations of the built-in runs, as dataclasses whose fields are flags of `jaxtrain train`."""

from jaxtrain.recipes.classification import CNNRecipe as CNNRecipe
from jaxtrain.recipes.classification import ImageRecipe as ImageRecipe
from jaxtrain.recipes.classification import MLPRecipe as MLPRecipe
from jaxtrain.recipes.classification import ResNetRecipe as ResNetRecipe
from jaxtrain.recipes.command import command as command
from jaxtrain.recipes.language import GPTRecipe as GPTRecipe
from jaxtrain.recipes.language import LanguageRecipe as LanguageRecipe
from jaxtrain.recipes.language import LlamaRecipe as LlamaRecipe
from jaxtrain.recipes.masked_language import EncoderRecipe as EncoderRecipe
from jaxtrain.recipes.masked_language import MaskedLanguageRecipe as MaskedLanguageRecipe
from jaxtrain.recipes.recipe import Recipe as Recipe
from jaxtrain.recipes.registry import RECIPES as RECIPES
from jaxtrain.recipes.seq2seq import T5Recipe as T5Recipe
from jaxtrain.recipes.text_classification import TextClassificationRecipe as TextClassificationRecipe
