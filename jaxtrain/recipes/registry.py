"""The built-in recipes."""

from jaxtrain.recipes.classification import CNNRecipe, MLPRecipe, ResNetRecipe
from jaxtrain.recipes.language import GPTRecipe, LlamaRecipe
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
"""Built-in recipes by name; the first one is the default."""
