"""Recipe and Task: what a user's own run and a built-in one both are."""

from jaxtrain.run.initial import Initial
from jaxtrain.run.media import Audio, Image, Table, Text
from jaxtrain.run.media import Media as Media
from jaxtrain.run.media import MediaFile as MediaFile
from jaxtrain.run.media import encode_media as encode_media
from jaxtrain.run.media import png as png
from jaxtrain.run.media import split_media as split_media
from jaxtrain.run.precision import run_policy as run_policy
from jaxtrain.run.recipe import Precision as Precision
from jaxtrain.run.recipe import Recipe
from jaxtrain.run.recipe_reference import file_of as file_of
from jaxtrain.run.recipe_reference import is_reference as is_reference
from jaxtrain.run.recipe_reference import load_recipe as load_recipe
from jaxtrain.run.recipe_reference import locate as locate
from jaxtrain.run.recipe_reference import name_of as name_of
from jaxtrain.run.recipe_reference import reference_to as reference_to
from jaxtrain.run.recipe_reference import source_of as source_of
from jaxtrain.run.run_batches import EvaluationSums as EvaluationSums
from jaxtrain.run.run_batches import abstract_batch as abstract_batch
from jaxtrain.run.run_batches import evaluation_batches as evaluation_batches
from jaxtrain.run.run_batches import means as means
from jaxtrain.run.run_batches import task_batches as task_batches
from jaxtrain.run.signature import Input, Signature
from jaxtrain.run.task import Predictions, Task, row_weights
from jaxtrain.run.task import check_memory as check_memory

__all__ = [
    "Audio",
    "Image",
    "Initial",
    "Input",
    "Predictions",
    "Recipe",
    "Signature",
    "Table",
    "Task",
    "Text",
    "row_weights",
]
