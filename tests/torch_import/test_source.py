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
from tests.torch_import.families import FAMILIES


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


def test_source_is_formatted_shares_functions_and_computes_the_models_outputs_state_and_gradients(
    tmp_path: Path,
) -> None:
    model = jt.from_torch(*blocks())
    path = model.save_source(tmp_path / "model.py")[0]
    source, text = import_file(path), path.read_text()
    assert text.count("def block(") == text.count("= jax.lax.scan(") == 1
    assert "    residual = x\n" in text
    _check_style(path)

    def run(fn: Any, params: Any, rng: Any) -> Any:
        def loss(params: Any) -> Any:
            outputs, state = fn(params, model.example, rng, model.state)
            return jnp.square(outputs).sum(), (outputs, state)

        with jax.numpy_rank_promotion("allow"):
            return jax.jit(jax.grad(loss, has_aux=True))(params)

    params = load_file(tmp_path / "params.safetensors")
    assert model.state is not None
    assert model.state_names is not None
    unstacked = model.names.to_torch(model.params), model.state_names.to_torch(model.state)
    jax.tree.map(np.testing.assert_array_equal, params, model.params)
    jax.tree.map(np.testing.assert_array_equal, source.stacked(unstacked[0]), model.params)
    jax.tree.map(np.testing.assert_array_equal, source.stacked(unstacked[1]), model.state)
    for rng in (jax.random.key(1), None):
        jax.tree.map(np.testing.assert_array_equal, run(source.model, params, rng), run(model, model.params, rng))


def test_the_source_of_layers_that_are_not_a_loop_has_pytorchs_parameters() -> None:
    model = jt.from_torch(*blocks(), unroll=True)
    text = model.source()
    assert "scan" not in text
    assert text.count("x, new_state[") == 3
    assert text.count("block(") == 3
    assert "stacked" not in text


class Towers(nn.Module):
    """One network for several inputs, as a siamese one: each call goes on with the statistics of the one before."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls, self.net = calls, Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.net(x * (i + 1) + i) for i in range(self.calls)]).square().mean()


@pytest.mark.parametrize("calls", [2, 3])
def test_the_source_of_a_module_that_is_called_several_times_has_the_statistics_of_all(
    calls: int, tmp_path: Path
) -> None:
    module = Towers(calls)
    model = jt.from_torch(module, blocks()[1])
    source = import_file(model.save_source(tmp_path / "model.py")[0])
    rng = jax.random.key(0)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        source.model(model.params, model.example, rng, model.state),
        model(model.params, model.example, rng, model.state),
    )
    module(torch.from_numpy(blocks()[1]["x"]))
    _, state = source.model(model.params, model.example, rng, model.state)
    assert int(state["net.norm.num_batches_tracked"]) == calls
    np.testing.assert_allclose(state["net.norm.running_var"], module.net.norm.running_var, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_a_module_whose_outputs_are_no_floating_point_numbers_has_a_source(dtype: torch.dtype, tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.arange(3).to(dtype), requires_grad=dtype.is_complex)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x + 1

    batch = np.arange(6).reshape(2, 3)
    model = jt.from_torch(Scaled(), batch)
    path = tmp_path / "scaled.py"
    path.write_text(model.source())
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found, _ = import_file(path).model(model.params, batch)
    np.testing.assert_array_equal(found, model(model.params, batch)[0])


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
    assert of(lambda x, y: jnp.arange(3)) == of(lambda x, y: jnp.asarray(np.arange(3)))
    assert of(lambda x, y: x - y) != of(lambda x, y: y - x)
    assert of(lambda x, y: x * 2) != of(lambda x, y: x * 3)
    assert of(jax.jit(lambda x, y: x * 2)) != of(jax.jit(lambda x, y: x * 3))


def test_fingerprints_of_loops_and_calls_depend_on_what_they_compute_alone() -> None:
    def of(fn: Any) -> Any:
        return fingerprint(jax.make_jaxpr(jax.grad(fn, (0, 1)))(1.0, jnp.ones(3)))

    def loop(step: Any, first: Any = 0.0) -> Any:
        def run(x: Any, slices: Any) -> Any:
            (a, b, *_), _ = jax.lax.scan(step, (x, x, first), {"z": slices, "a": slices * 2})
            return a - 2 * b

        return run

    plain = of(loop(lambda c, s: ((c[0] * s["z"], jnp.sin(c[1]) + s["a"], c[2]), None)))
    assert plain == of(loop(lambda c, s: ((c[0] * s["z"], jnp.sin(c[1]) + s["a"], c[2]), c[2])))
    assert plain == of(loop(lambda c, s: ((c[0] * s["z"], jnp.sin(c[1]) + s["a"], c[2] + 1), None), 1.0))
    assert plain != of(loop(lambda c, s: ((c[0] * s["a"], jnp.sin(c[1]) + s["z"], c[2]), None)))
    assert plain != of(loop(lambda c, s: ((c[1] * s["z"], jnp.sin(c[0]) + s["a"], c[2]), None)))
    marked = of(loop(jt.block(lambda c, s: ((c[0] * s["z"], jnp.sin(c[1]) + s["a"], c[2]), None))))
    assert plain != marked
    swapped = jt.block(lambda s, c: ((c[0] * s["z"], jnp.sin(c[1]) + s["a"], c[2]), None))
    assert marked == of(loop(lambda c, s: swapped(s, c)))


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        cube = x**3
        return cube * scale * cube / cube

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, scale = ctx.saved_tensors
        return grad_output * scale * x.square() / 5, None


class Custom(nn.Linear):
    def __init__(self, features: int, outputs: int) -> None:
        super().__init__(features, outputs)
        self.scale = nn.Parameter(torch.ones(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Cubed.apply(super().forward(x), self.scale)
        return y


def test_a_buffer_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = jt.from_torch(*llama())
    with pytest.raises(UserError, match=r"'model\.rotary_emb\.inv_freq' has no values.*: import a module with weights"):
        model.source()


def test_a_function_with_a_gradient_of_its_own_is_a_custom_vjp(tmp_path: Path) -> None:
    module = Custom(3, 2)
    path = jt.from_torch(module, np.ones((4, 3), np.float32)).save_source(tmp_path / "model.py")[0]
    source = import_file(path)
    _check_style(path)
    text = path.read_text()
    assert "@jax.custom_vjp\ndef cubed(x: Array, scale: Array) -> Array:" in text
    assert "    cube = x**3\n    return cube * scale * cube / cube, (x, scale)\n" in text
    params = load_file(tmp_path / "params.safetensors")
    with jax.numpy_rank_promotion("allow"):
        grads = jax.grad(lambda params: source.model(params, jnp.ones((4, 3)))[0].sum())(params)
    module(torch.ones(4, 3)).sum().backward()
    for name, param in module.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        np.testing.assert_allclose(grads[name], expected.numpy(), rtol=1e-5)


class Bessel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x) * self.scale


def bessel_j0(x: jax.Array) -> jax.Array:
    return 1 - x**2 / 4


def test_the_users_function_of_an_operation_is_imported_or_refused(tmp_path: Path) -> None:
    x = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
    name = "aten.special_bessel_j0.default"
    model = jt.from_torch(Bessel(), x, ops={name: bessel_j0})
    path = model.save_source(tmp_path / "model.py")[0]
    assert f"from {__name__} import bessel_j0" in path.read_text()
    with jax.numpy_rank_promotion("allow"):
        found = import_file(path).model(load_file(tmp_path / "params.safetensors"), x)
    np.testing.assert_allclose(jax.tree.leaves(found)[0], (1 - x**2 / 4) * [1, 2, 3], rtol=1e-6)
    with pytest.raises(UserError, match=r"cannot be imported by the emitted file.*: define it at the top level"):
        jt.from_torch(Bessel(), x, ops={name: lambda x: bessel_j0(x)}).source()


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


@pytest.mark.parametrize(
    ("factory", "lines"),
    [(gpt2, 175), *(pytest.param(*x, marks=pytest.mark.nightly) for x in [(llama, 195), (resnet, 260)])],
)
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

        found = gradients(source.model, load_file(tmp_path / "params.safetensors"), model.state)
        expected = gradients(model, model.params, model.state)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-14), found, expected)
    _check_style(path)
    assert len(path.read_text().splitlines()) <= lines


@pytest.mark.parametrize(
    "name",
    [
        x
        for x in FAMILIES
        if x != "rwkv"  # its evaluation mode divides weights in place
    ],
)
def test_the_source_of_a_family_is_its_model_and_formatted(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = jt.from_torch(family.module(), family.inputs(0))
    text = model.source()
    path = tmp_path / "model.py"
    path.write_text(text)
    _check_style(path)


FILE = """
import numpy as np
from torch import nn


def layer():
    return nn.Linear(3, 2), np.ones((4, 3), np.float32)


def nothing():
    return nn.Linear(3, 2)


class Own(nn.Module):
    def forward(self, x):
        return x.sin() * x


def own():
    return nn.Sequential(Own(), Own()), np.ones((4, 3), np.float32)
"""


def test_the_command_writes_the_source_and_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out" / "model.py"
    file.write_text(FILE)
    assert main(["from-torch", f"{file}::layer", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}, {out.with_name('params.safetensors')}\n"
    assert 'return F.linear(batch, params["weight"], params["bias"]), state' in out.read_text()
    assert main(["from-torch", f"{file}::own", "--out", str(out)]) == 0
    assert '"""Own of mine:' in out.read_text()
    assert main(["from-torch", f"{file}::nothing"]) == 2
    assert "nothing returned a Linear: return (module, example_batch)" in capsys.readouterr().err
    assert main(["from-torch", f"{file}::other"]) == 2
    assert "has no function 'other'" in capsys.readouterr().err


def _check_style(path: Path) -> None:
    for command in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, "--isolated", path.name], cwd=path.parent, check=True)


def test_classes_may_have_the_names_of_a_files_own(tmp_path: Path) -> None:
    """As `Model`, which is the name of a file's function, and keywords and builtins of Python."""

    def layer(name: str) -> nn.Module:
        def init(self: Any) -> None:
            nn.Module.__init__(self)
            self.linear = nn.Linear(3, 3)

        forward = lambda self, x: torch.tanh(self.linear(x))  # noqa: E731
        return type(name, (nn.Module,), {"__init__": init, "forward": forward})()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("Model", "Lambda", "Sum", "State", "Keys", "Batch", "Params", "Rng", "Stacked", "Class", "Jnp")
            self.layers = nn.Sequential(*map(layer, names))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    x = np.ones((4, 3), np.float32)
    model = jt.from_torch(Model(), x)
    path = model.save_source(tmp_path / "model.py")[0]
    found = import_file(path).model(model.params, x)[0]
    np.testing.assert_allclose(found, model(model.params, x)[0], rtol=1e-6)
