"""The step of an imported module, compiled for an H100, beside that of the model written in JAX."""

import numpy as np
import pytest

import jaxtrain as jt
from benchmarks.predicted import case_program
from benchmarks.workloads import WORKLOADS
from jaxtrain.planning import gpu_program
from tests.gpu_programs.test_contract import attention_calls

pytest.importorskip("jax_plugins.xla_cuda12", reason="compiling for GPUs requires the extra gpu-programs")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def _gpt2(sizes):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=sizes["vocab_size"],
            n_positions=sizes["length"],
            n_embd=sizes["width"],
            n_layer=sizes["depth"],
            n_head=sizes["heads"],
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
            use_cache=False,
        )
    )


def _llama(sizes):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=sizes["vocab_size"],
            hidden_size=sizes["width"],
            intermediate_size=sizes["hidden"],
            num_hidden_layers=sizes["depth"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["keys"],
            max_position_embeddings=sizes["length"],
            use_cache=False,
        )
    )


def _vit(sizes):
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=sizes["side"],
            patch_size=sizes["patch"],
            hidden_size=sizes["width"],
            num_hidden_layers=sizes["depth"],
            num_attention_heads=sizes["heads"],
            intermediate_size=4 * sizes["width"],
            num_labels=1000,
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        )
    )


def _resnet18(sizes):
    del sizes
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            depths=[2, 2, 2, 2], layer_type="basic", hidden_sizes=[64, 128, 256, 512], num_labels=1000
        )
    )


@pytest.mark.parametrize(
    ("workload", "own_sizes", "module", "calls"),
    [
        ("gpt2-124m", {"depth": 2}, _gpt2, (2, 2)),
        pytest.param("resnet18", {"side": 224, "rows": 64}, _resnet18, (0, 0), marks=pytest.mark.nightly),
        pytest.param("llama-160m", {"depth": 2}, _llama, (2, 2), marks=pytest.mark.nightly),
        pytest.param("vit-s", {"depth": 2}, _vit, (2, 2), marks=pytest.mark.nightly),
    ],
)
def test_an_imported_module_moves_as_many_bytes_as_the_model_in_jax(workload, own_sizes, module, calls):
    """Within 5%, with as many calls of cuDNN's attention, and no product or convolution of float32 arrays."""
    case = WORKLOADS[workload].case(own_sizes)
    sizes = {**WORKLOADS[workload].sizes, **own_sizes}
    if "length" in sizes:
        tokens = np.zeros((sizes["rows"], sizes["length"]), np.int32)
        batch = {"input_ids": tokens, "labels": tokens}
    else:
        images = np.zeros((sizes["rows"], 3, sizes["side"], sizes["side"]), np.float32)
        batch = {"pixel_values": images, "labels": np.zeros(sizes["rows"], np.int32)}
    model = jt.from_torch(module(sizes), batch)
    loss_fn = model.loss(lambda outputs, batch: jt.Loss.of(outputs["loss"][None]))
    step = jt.train_step(
        loss_fn, case.optimizer.jax, precision="bf16", clip_norm=case.clip_norm, unroll=True, frozen=model.frozen
    )
    imported = gpu_program(step, model.params, batch, "h100", model_state=model.state)
    written = case_program(case, "h100", unroll=True)
    assert attention_calls(imported) == attention_calls(written) == calls
    assert [product.dtypes for product in imported.products if "f32" in product.operands] == []
    assert imported.moved_bytes <= 1.05 * written.moved_bytes
