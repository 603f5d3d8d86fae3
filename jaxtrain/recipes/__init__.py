"""The built-in runs, each written on the interface that users have: `jaxtrain.Recipe` and `jaxtrain.Task`."""

from jaxtrain.recipes.command import command as command
from jaxtrain.recipes.registry import RECIPES as RECIPES
from jaxtrain.recipes.registry import named_recipe as named_recipe
from jaxtrain.recipes.registry import registered_name as registered_name

__all__ = [
    "encoder",
    "finetune",
    "finetuning",
    "gpt",
    "image",
    "language",
    "llama",
    "masked_language",
    "resnet",
    "seq2seq",
    "starter",
    "t5",
    "text_classification",
]
