"""What every training step compiled for an H100 holds, and the figures of its program.

Each test compiles one program. After a change that is meant to alter the figures, `python -m tests.gpu_programs`
records them again, and the difference of the files shows what it did.
"""

import json
from collections import Counter
from importlib.metadata import version

import pytest

from jaxtrain.cost import GpuProgram
from tests.gpu_programs import closed_form
from tests.gpu_programs.families import FAMILIES, Settings, program
from tests.gpu_programs.golden import GOLDEN, summary

pytest.importorskip("jax_plugins.xla_cuda12", reason="compiling for GPUs requires the extra gpu-programs")

PROGRAMS = [
    *(Settings(family) for family in ("gpt2", "bert", "llama", "t5", "vit", "resnet", "lora")),
    *(Settings("gpt2", precision) for precision in ("fp16", "fp32", "tf32")),
    Settings("gpt2", accumulate=4),
    *(Settings("gpt2", remat=policy) for policy in ("full", "dots")),
    *(Settings(family, unroll=True) for family in ("gpt2", "bert")),
    *(Settings("gpt2", mesh=mesh) for mesh in ("data=8", "tensor=8")),
    *(Settings(family, mesh="fsdp=8") for family in ("gpt2", "llama")),
    *(Settings("gpt2", mesh=mesh, accumulate=4) for mesh in ("data=8", "fsdp=8")),
    Settings("gpt2", mesh="fsdp=8", accumulate=4, reshard_after="window"),
    *(Settings("llama", mesh="data=2,fsdp=4", accumulate=accumulate) for accumulate in (1, 4)),
    Settings("mixtral", mesh="data=2,expert=4", accumulate=4),
]


@pytest.mark.parametrize("settings", PROGRAMS, ids=lambda settings: settings.name)
def test_a_compiled_step_keeps_the_contract(settings):
    compiled = program(settings)
    assert compiled.host_waits == 0, "the host waits for the GPU inside a step"
    # Everything but the metrics is donated.
    assert compiled.output_bytes - compiled.alias_bytes < 4096
    assert not wrong_products(compiled, settings)
    assert attention_calls(compiled) == expected_attention_calls(settings)
    if settings.mesh is not None and "tensor" not in settings.mesh:
        assert_collectives_of_closed_form(compiled, settings)
    assert ("xla_gpu_enable_latency_hiding_scheduler" in compiled.compiler_options) == (settings.mesh is not None)
    recorded = json.loads((GOLDEN / f"{settings.name}.json").read_text())
    if recorded["jaxlib"] == version("jaxlib"):
        assert summary(compiled) == recorded


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [(mesh, k) for mesh in ("data=8", "fsdp=8", "data=2,fsdp=4") for k in (1, 2, 4)],
)
@pytest.mark.parametrize("reshard_after", ["forward", "window"])
def test_the_bytes_of_collectives_are_those_of_the_closed_form(family, mesh, accumulate, reshard_after):
    settings = Settings(family, mesh=mesh, accumulate=accumulate, reshard_after=reshard_after)
    assert_collectives_of_closed_form(program(settings), settings)


def assert_collectives_of_closed_form(compiled: GpuProgram, settings: Settings) -> None:
    """Check the bytes that a device sends in a window."""
    sent: Counter[str] = Counter()
    for traffic in compiled.communication.traffic:
        sent[traffic.kind] += traffic.sent
    assert 0.98 <= (sent["reduce-scatter"] + sent["all-reduce"]) / closed_form.reduced(settings) <= 1.02
    assert sent["all-gather"] <= 1.02 * closed_form.gathered(settings)
    if "expert" in settings.mesh:
        assert sent["all-to-all"] == closed_form.exchanged(settings)


def wrong_products(compiled: GpuProgram, settings: Settings) -> list[str]:
    """Return the products in other dtypes than the precision promises."""
    low = {"bf16": "bf16", "fp16": "f16"}.get(settings.precision)
    wrong = []
    for product in compiled.products:
        if low is None:
            right = set(product.operands) == {"f32"} and product.full_precision == (settings.precision == "fp32")
        else:
            right = set(product.operands) == {low}
        if not right:
            wrong.append(f"{product.by} {product.dtypes} in {product.instruction.op_name}")
    return wrong


def test_more_devices_than_key_heads_compute_all_heads():
    """Mixtral's experts too: no axis but tensor has several devices."""
    settings = Settings("mixtral", mesh="tensor=8")
    compiled = program(settings)
    assert attention_calls(compiled) == expected_attention_calls(settings)
    assert not wrong_products(compiled, settings)


def attention_calls(compiled: GpuProgram) -> tuple[int, int]:
    """Return how often cuDNN's attention runs forwards and backwards."""
    calls = [product for product in compiled.products if product.by == "cuDNN attention"]
    backward = [product for product in calls if "Backward" in product.instruction.target]
    return sum(p.times for p in calls) - sum(p.times for p in backward), sum(p.times for p in backward)


def expected_attention_calls(settings: Settings) -> tuple[int, int]:
    if settings.precision in ("fp32", "tf32"):
        return 0, 0  # cuDNN computes it in 16 bits only
    backward = FAMILIES[settings.family]().attentions * settings.accumulate
    return backward * (2 if settings.remat == "full" else 1), backward
