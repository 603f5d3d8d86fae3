"""What is learned: data, model and loss of a recipe, put together."""

from jaxtrain.recipes import GPTRecipe, ImageRecipe, Recipe
from jaxtrain.tasks.task import Task

__all__ = ["Task", "build"]


def build(recipe: Recipe) -> Task:
    """The task of `recipe`, its data read and its parameters initialised. Raises `UserError` for bad settings."""
    if isinstance(recipe, GPTRecipe):
        from jaxtrain.tasks.language import language_task

        return language_task(recipe)
    if isinstance(recipe, ImageRecipe):
        from jaxtrain.tasks.classification import classification_task

        return classification_task(recipe)
    raise TypeError(f"no task for {type(recipe).__name__}")
