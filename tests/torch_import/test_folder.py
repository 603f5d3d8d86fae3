"""Folders of transformers that no family here reads."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import jaxtrain as jt
from jaxtrain.cli import main
from jaxtrain.models import from_pretrained


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


FILE = """
from dataclasses import dataclass

import numpy as np

import jaxtrain as jt
from jaxtrain import losses


def rows(seed, count):
    return {"input_ids": np.random.default_rng(seed).integers(3, 31, (count, 6))}


@dataclass(frozen=True, kw_only=True)
class FineTuning(jt.Recipe):
    folder: str = "electra"
    batch_size: int = 4
    steps: int = 2

    def task(self):
        model = jt.from_torch(self.folder, rows(0, self.batch_size))

        def loss(outputs, batch):
            logits = outputs["logits"]
            return jt.Loss.of(losses.cross_entropy(logits, batch["input_ids"]), batch.get("weight"))

        return model.task(loss, train=rows(1, 16))
"""


@pytest.mark.nightly
def test_a_run_file_trains_a_folder_and_transformers_reads_the_result(tmp_path, monkeypatch) -> None:
    from transformers import ElectraConfig, ElectraForMaskedLM

    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 31, "hidden_size": 8, "embedding_size": 4, "num_hidden_layers": 2, "intermediate_size": 12}
    torch.manual_seed(0)
    config = ElectraConfig(**sizes, num_attention_heads=2, max_position_embeddings=8)
    ElectraForMaskedLM(config).save_pretrained("electra")
    Path("tuning.py").write_text(FILE)
    assert main(["train", "tuning.py::FineTuning", "--out", "run", "--quiet"]) == 0
    assert main(["export", "run", "--format", "torch", "--out", "tuned.pt"]) == 0
    before, module = (ElectraForMaskedLM.from_pretrained("electra") for _ in range(2))
    module.load_state_dict(torch.load("tuned.pt", weights_only=True)["model"], strict=True)
    module.save_pretrained("tuned")
    ids = {"input_ids": np.random.default_rng(0).integers(3, 31, (4, 6))}
    model = jt.from_torch("tuned", ids)
    theirs = [x.eval()(torch.tensor(ids["input_ids"])).logits.detach().numpy() for x in (module, before)]
    np.testing.assert_allclose(model(model.params, ids)[0]["logits"], theirs[0], rtol=1e-5, atol=1e-6)
    assert np.abs(theirs[0] - theirs[1]).max() > 1e-4
