"""Exported Hugging Face folders, as `transformers` loads them: model, class names, tokenizer."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from jaxtrain.data import ByteTokenizer, tokenizer
from jaxtrain.data.finetuning import ModelTokenizer
from jaxtrain.errors import UserError
from jaxtrain.export.byte_tokenizer import write_byte_tokenizer
from jaxtrain.export.huggingface import write_huggingface
from jaxtrain.models import GPT2, MLP, GPT2Config, functional
from jaxtrain.models.bert import Bert, BertConfig
from jaxtrain.models.sequence_classifier import SequenceClassifierConfig, to_hf

TEXT = "to be or not to be"


@pytest.fixture
def words(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "to": 1, "be": 2, "or": 3, "not": 4}))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trained.save(str(tmp_path / "words.json"))
    return tokenizer(tmp_path / "words.json")


def test_a_language_model_is_exported_with_its_tokenizer(words, tmp_path):
    model = GPT2(GPT2Config(vocab_size=words.size, n_positions=8, n_embd=4, n_layer=1, n_head=2), rngs=nnx.Rngs(0))
    apply, params = functional(model)
    folder = tmp_path / "model"
    write_huggingface(folder, nnx.eval_shape(lambda: model), params, texts=words)
    theirs = AutoTokenizer.from_pretrained(folder)
    tokens = words.encode(TEXT)
    assert theirs(TEXT).input_ids == tokens.tolist()
    assert theirs.pad_token == "[PAD]"
    assert theirs.mask_token is None
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = loaded(torch.from_numpy(tokens[None].astype(np.int64))).logits.numpy()
    with jax.enable_x64(True):
        ours = apply(jax.tree.map(lambda x: x.astype(np.float64), params), tokens[None])
    np.testing.assert_allclose(logits, ours, rtol=1e-10, atol=1e-10)


def test_a_decoder_of_bytes_is_exported_with_a_tokenizer_for_conversations(tmp_path):
    write_byte_tokenizer(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), ModelTokenizer(tmp_path)
    text = "".join(map(chr, range(0x300))) + "  €\t\n𝄞 don't  "
    assert theirs(text).input_ids == ours.encode(text).tolist() == ByteTokenizer().encode(text).tolist()
    assert theirs.decode(list(text.encode())) == ours.decode(list(text.encode())) == text
    assert len(theirs) == ours.size == 256
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.special("end"), ours.special("pad")) == (255, 251)
    chat = [{"role": "user", "content": "é?\n"}, {"role": "assistant", "content": " \n"}]
    expected = [253, *"é?\n".encode(), 255, 254, *b" \n", 255]
    assert theirs.apply_chat_template(chat)["input_ids"] == ours.encode_chat(chat).tolist() == expected
    prompt = ours.encode_chat(chat[:1], add_generation_prompt=True).tolist()
    assert theirs.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"] == prompt == expected[:-3]


def test_classes_keep_their_names(tmp_path):
    config = BertConfig(
        vocab_size=7, hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8, num_labels=2,
    )  # fmt: skip
    model = Bert(config, rngs=nnx.Rngs(0))
    write_huggingface(tmp_path / "model", model, functional(model)[1], class_names=["no", "yes & no"])
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert loaded.config.id2label == {0: "no", 1: "yes & no"}
    assert loaded.config.label2id == {"no": 0, "yes & no": 1}


@pytest.mark.parametrize(
    ("labels", "problem"), [(("no", "yes & no"), "single_label_classification"), (("reward",), "regression")]
)
def test_heads_keep_their_labels(labels, problem):
    values = to_hf(SequenceClassifierConfig(GPT2Config(n_layer=1), labels, pad_token_id=5))
    config = AutoConfig.for_model(**values)
    assert config.label2id == {name: i for i, name in enumerate(labels)}
    assert (config.num_labels, config.problem_type, config.pad_token_id) == (len(labels), problem, 5)


def test_a_model_without_a_counterpart_in_transformers_raises_an_error(tmp_path):
    model = MLP((4, 2), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="transformers has no MLP: export it as onnx, stablehlo or torch"):
        write_huggingface(tmp_path / "model", model, functional(model)[1])
    assert not (tmp_path / "model").exists()
