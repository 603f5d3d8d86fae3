"""What fine-tuning a model of 7 and of 70 billion parameters takes of an H100, from folders of their sizes."""

import pytest
import transformers

from jaxtrain.cost import find_target
from jaxtrain.planning import compile_for_target
from jaxtrain.recipes.finetune import FineTuneRecipe
from tests.recipes.sparse_model import LLAMA_7B, LLAMA_70B, write_conversations, write_sparse_llama

LENGTH, GIB = 4096, 2**30


@pytest.mark.parametrize(
    ("sizes", "settings", "most"),
    [
        (LLAMA_7B, {"quantize": "nf4"}, 8),
        pytest.param(LLAMA_7B, {}, 17, marks=pytest.mark.nightly),
        pytest.param(LLAMA_70B, {"quantize": "nf4", "mesh": "fsdp=8", "accumulate": 2}, 24, marks=pytest.mark.nightly),
    ],
)
def test_the_kernels_of_one_layer_at_a_time_are_dequantized(tmp_path, monkeypatch, sizes, settings, most):
    """Neither all kernels in 16 bits nor a kernel in float32 are ever in memory, with 16 packed rows an update."""
    pytest.importorskip("jax_plugins.xla_cuda12", reason="compiling for GPUs requires the extra gpu-programs")
    monkeypatch.setenv("JAXTRAIN_TOKEN_CACHE", "off")
    folder, data = write_sparse_llama(tmp_path / "model", sizes), write_conversations(tmp_path / "chats.jsonl", 16)
    recipe = FineTuneRecipe(
        model=folder, data=data, seq_len=LENGTH, batch_size=16, precision="bf16", remat="full",
        **{"accumulate": 16, **settings},
    )  # fmt: skip
    candidate = compile_for_target(recipe, recipe.task(), find_target("h100"))
    config = transformers.LlamaConfig(**sizes)
    kernel = config.hidden_size * config.intermediate_size
    results = [x for launch in candidate.program.launches for x in launch.instruction.results]
    assert not [x for x in results if x.dtype == "f32" and x.size == kernel]
    assert not [x for x in results if x.dtype == "bf16" and x.size > 4 * kernel]
    assert candidate.peak_bytes < most * GIB
