"""T5 (Raffel et al. 2020), as `transformers.T5ForConditionalGeneration` computes it: v1.1 and FLAN-T5 too."""

from jaxtrain.models.t5.labels import IGNORE_INDEX, shift_right
from jaxtrain.models.t5.t5_config import T5Config, from_hf, to_hf
from jaxtrain.models.t5.t5_model import T5
from jaxtrain.models.t5.t5_parameters import SHARDING, torch_names

__all__ = ["IGNORE_INDEX", "SHARDING", "T5", "T5Config", "from_hf", "shift_right", "to_hf", "torch_names"]
