"""The model of the runs that train a BERT."""

from flax import nnx

from jaxtrain.data import ByteTokenizer
from jaxtrain.models import functional
from jaxtrain.recipes.encoder import EncoderRecipe

SMALL = EncoderRecipe(num_hidden_layers=1, hidden_size=8, num_attention_heads=2)


def test_the_model_has_the_sizes_of_the_recipe() -> None:
    model = nnx.eval_shape(lambda: SMALL.bert(ByteTokenizer(), 16, num_labels=3))
    assert (model.config.vocab_size, model.config.hidden_size, model.config.max_position_embeddings) == (260, 8, 16)
    _, params = functional(model)
    assert params["head"]["classifier"]["kernel"].shape == (8, 3)
