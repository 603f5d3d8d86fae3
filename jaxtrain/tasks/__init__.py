"""Tasks: the data, model and loss of a recipe."""

from jaxtrain.recipes import (
    ImageRecipe,
    LanguageRecipe,
    MaskedLanguageRecipe,
    Recipe,
    T5Recipe,
    TextClassificationRecipe,
)
from jaxtrain.tasks.evaluation import evaluation_batches as evaluation_batches
from jaxtrain.tasks.evaluation import means as means
from jaxtrain.tasks.task import Task as Task
from jaxtrain.tasks.task import check_memory as check_memory

__all__ = ["classification", "language", "masked_language", "seq2seq", "text_stream"]


def build(recipe: Recipe) -> Task:
    """Build the task of a recipe and read its data.

    Args:
      recipe: Settings of the run.

    Returns:
      The task.

    Raises:
      UserError: The data cannot be read, or the settings are invalid for the task.
    """
    if isinstance(recipe, LanguageRecipe):
        from jaxtrain.tasks.language import language_task

        return language_task(recipe)
    if isinstance(recipe, ImageRecipe):
        from jaxtrain.tasks.classification import classification_task

        return classification_task(recipe)
    if isinstance(recipe, MaskedLanguageRecipe):
        from jaxtrain.tasks.masked_language import masked_language_task

        return masked_language_task(recipe)
    if isinstance(recipe, TextClassificationRecipe):
        from jaxtrain.tasks.text_classification import text_classification_task

        return text_classification_task(recipe)
    if isinstance(recipe, T5Recipe):
        from jaxtrain.tasks.seq2seq import seq2seq_task

        return seq2seq_task(recipe)
    raise TypeError(f"no task for {type(recipe).__name__}")
