"""Folders of transformers that no family here reads."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import jaxtrain as jt
from jaxtrain.models import from_pretrained


@pytest.mark.slow
def test_a_model_without_a_family_is_imported_from_its_folder(tmp_path) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 2, "ffn_dim": 16, "num_attention_heads": 2}
    torch.manual_seed(0)
    module = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=8, max_position_embeddings=16, dropout=0.0)).eval()
    folder = tmp_path / "opt"
    module.save_pretrained(folder)
    with pytest.raises(jt.UserError, match=r"model_type 'opt' of .* is not supported.*jaxtrain.from_torch"):
        from_pretrained(folder)
    ids = np.random.default_rng(0).integers(3, 31, (2, 6))
    model = jt.from_torch(folder, {"input_ids": ids, "labels": ids})
    outputs, _ = model(model.params, {"input_ids": ids, "labels": ids})
    theirs = module(torch.tensor(ids), labels=torch.tensor(ids))
    np.testing.assert_allclose(outputs["logits"], theirs.logits.detach().numpy(), rtol=1e-5, atol=1e-6)
    grads = jax.grad(lambda p: model(p, {"input_ids": ids, "labels": ids}, jax.random.key(0))[0]["loss"])(model.params)
    theirs.loss.backward()
    for name, grad in model.names.to_torch(grads).items():
        np.testing.assert_allclose(grad, module.get_parameter(name).grad.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_code_in_a_folder_is_not_executed(tmp_path) -> None:
    x = np.ones((1, 2), np.int64)
    with pytest.raises(jt.UserError, match=r"is no folder with a config\.json"):
        jt.from_torch("nowhere", x)
    own = {
        "model_type": "own",
        "architectures": ["Own"],
        "auto_map": {"AutoModel": "own.Own", "AutoConfig": "own.Config"},
    }
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    with pytest.raises(jt.UserError, match="'Own', which transformers does not define"):
        jt.from_torch(tmp_path, x)
    assert not Path(tmp_path / "executed").exists()
