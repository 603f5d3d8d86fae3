"""The decoder in a folder, whichever implements it."""

from pathlib import Path

from jaxtrain.models import CONFIG, FAMILIES, read_json
from jaxtrain.recipes.finetuning.imported_decoder import ImportedDecoder
from jaxtrain.recipes.finetuning.pretrained_decoder import Decoder
from jaxtrain.recipes.finetuning.zoo_decoder import ZooDecoder


def open_decoder(folder: Path, rows: int, length: int, *, packed: bool) -> Decoder:
    """Open the decoder in a folder, without reading its weights: one of `jaxtrain.models`, or an imported one.

    Args:
      folder: Folder of the model.
      rows: Number of texts of a micro-batch.
      length: Number of tokens of a row.
      packed: Whether rows hold several examples.

    Raises:
      UserError: The folder has no decoder for such rows.
    """
    if read_json(folder, CONFIG).get("model_type") in FAMILIES:
        return ZooDecoder.open(folder)
    return ImportedDecoder.open(folder, rows, length, packed=packed)
