"""The source of imported models."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.flax import load_file
from torch import nn

import jaxtrain as jt
from jaxtrain.cli import main
from jaxtrain.errors import UserError
from jaxtrain.torch_import.source import templates
from jaxtrain.torch_import.source.compare import fingerprint
from jaxtrain.user_file import import_file


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.fc = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        x = self.drop(torch.tanh(self.fc(self.norm(x))))
        return residual + x


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks() -> tuple[nn.Module, dict[str, np.ndarray]]:
    return Blocks(), {"x": np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)}


@pytest.mark.slow
def test_source_is_formatted_shares_functions_and_computes_the_models_outputs_state_and_gradients(
    tmp_path: Path,
) -> None:
    module, batch = blocks()
    model = jt.from_torch(module, batch, unroll=True)
    written = jt.from_torch(module, batch).save_source(tmp_path / "model.py")
    source = import_file(written[0])
    text = written[0].read_text()
    assert text.count("def block(params, buffers, x, keys, train):") == 1
    assert "    residual = x\n" in text
    _check_style(written[0])

    def run(fn: Any, params: Any, rng: Any) -> Any:
        def loss(params: Any) -> Any:
            outputs, state = fn(params, model.example, rng, model.state)
            return jnp.square(outputs).sum(), (outputs, state)

        with jax.numpy_rank_promotion("allow"):
            return jax.jit(jax.grad(loss, has_aux=True))(params)

    params = load_file(tmp_path / "params.safetensors")
    jax.tree.map(np.testing.assert_array_equal, params, model.params)
    for rng in (jax.random.key(1), None):
        jax.tree.map(np.testing.assert_array_equal, run(source.model, params, rng), run(model, model.params, rng))


@pytest.mark.slow
def test_an_expression_that_computes_something_else_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = templates.TEMPLATES["aten.sinh.default"]
    monkeypatch.setitem(templates.TEMPLATES, "aten.tanh.default", wrong)
    text = jt.from_torch(*blocks()).source()
    assert "sinh" not in text
    assert "tanh" in text


def test_fingerprints_of_programs() -> None:
    def of(fn: Any) -> Any:
        return fingerprint(jax.make_jaxpr(fn)(1.0, 2.0))

    assert of(lambda x, y: x * y) == of(lambda a, b: a * b)
    assert of(lambda x, y: (x + 1) * (y + 2)) == of(lambda x, y: jnp.multiply(*((x + 1), (y + 2))[::1]))
    assert of(lambda x, y: x - y) != of(lambda x, y: y - x)
    assert of(lambda x, y: x * 2) != of(lambda x, y: x * 3)
    assert of(jax.jit(lambda x, y: x * 2)) != of(jax.jit(lambda x, y: x * 3))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Custom(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(super().forward(x))


@pytest.mark.slow
def test_a_buffer_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = jt.from_torch(*llama())
    with pytest.raises(UserError, match=r"'model\.rotary_emb\.inv_freq' has no values.*: import a module with weights"):
        model.source()


@pytest.mark.slow
def test_a_function_with_a_gradient_of_its_own_is_refused_with_its_line() -> None:
    model = jt.from_torch(Custom(3, 2), np.ones((4, 3), np.float32))
    with pytest.raises(UserError, match=r"autograd\.Function cannot .*Doubled\.apply.*: keep the imported model"):
        model.source()


def _text_batch() -> dict[str, np.ndarray]:
    ids = np.arange(16, dtype=np.int32).reshape(2, 8)
    return {"input_ids": ids, "labels": ids}


def gpt2() -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), _text_batch()


def llama() -> tuple[nn.Module, dict[str, np.ndarray]]:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(num_hidden_layers=2, vocab_size=16, use_cache=False, **sizes)
    return transformers.LlamaForCausalLM(config), _text_batch()


def resnet() -> tuple[nn.Module, dict[str, np.ndarray]]:
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], layer_type="basic")
    batch = {"pixel_values": np.ones((2, 3, 16, 16), np.float32), "labels": np.zeros(2, np.int32)}
    return transformers.ResNetForImageClassification(config), batch


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "lines"), [(gpt2, 111), (llama, 120), (resnet, 180)])
def test_published_models_are_written_in_few_lines_with_the_models_gradients(
    factory: Any, lines: int, tmp_path: Path
) -> None:
    with jax.enable_x64(True):
        module, batch = factory()
        batch = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in batch.items()}
        model = jt.from_torch(module.double(), batch)
        path = model.save_source(tmp_path / "model.py")[0]
        source, rng = import_file(path), jax.random.key(0)

        def gradients(fn: Any, params: Any, state: Any) -> Any:
            with jax.numpy_rank_promotion("allow"):
                return jax.jit(jax.grad(lambda params: fn(params, batch, rng, state)[0]["loss"]))(params)

        state = None if model.state_names is None else model.state_names.to_torch(model.state)
        found = gradients(source.model, load_file(tmp_path / "params.safetensors"), state)
        expected = model.names.to_torch(gradients(model, model.params, model.state))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-14), found, expected)
    _check_style(path)
    assert len(path.read_text().splitlines()) <= lines


FILE = """
import numpy as np
from torch import nn


def layer():
    return nn.Linear(3, 2), np.ones((4, 3), np.float32)


def nothing():
    return nn.Linear(3, 2)
"""


def test_the_command_writes_the_source_and_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out" / "model.py"
    file.write_text(FILE)
    assert main(["from-torch", f"{file}::layer", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}, {out.with_name('params.safetensors')}\n"
    assert 'return linear(batch, params["weight"], params["bias"]), state' in out.read_text()
    assert main(["from-torch", f"{file}::nothing"]) == 2
    assert "nothing returned a Linear: return (module, example_batch)" in capsys.readouterr().err
    assert main(["from-torch", f"{file}::other"]) == 2
    assert "has no function 'other'" in capsys.readouterr().err


def _check_style(path: Path) -> None:
    for command in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, "--isolated", path.name], cwd=path.parent, check=True)
