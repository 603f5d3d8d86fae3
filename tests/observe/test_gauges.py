"""Device utilization, with a fake NVML."""

import sys
import time
import types

import jax
import pytest

from jaxtrain.observe import LogLine, gauges
from jaxtrain.observe.gauges import Gauges, GpuUtilization, peak_flops

A100 = "NVIDIA A100-SXM4-80GB"


def device(kind: str, ordinal: int = 0, process: int = 0):
    return types.SimpleNamespace(
        device_kind=kind, platform="gpu", local_hardware_id=ordinal, process_index=process, id=ordinal
    )


@pytest.fixture
def nvml(monkeypatch):
    """A fake NVML with two GPUs that are busy `busy` percent of the time."""
    fake = types.ModuleType("pynvml")
    fake.NVMLError = type("NVMLError", (Exception,), {})
    fake.busy = [30, 50]
    fake.is_initialized = False
    fake.nvmlDeviceGetCount = lambda: 2
    fake.nvmlDeviceGetUUID = ["GPU-a1b2", "GPU-b1c2"].__getitem__
    fake.nvmlDeviceGetName = lambda gpu: A100

    def init():
        fake.is_initialized = True

    def handle(number):
        if not fake.is_initialized:
            raise fake.NVMLError
        return number

    def utilization(gpu):
        if fake.busy[gpu] is None:
            raise fake.NVMLError
        return types.SimpleNamespace(gpu=fake.busy[gpu])

    fake.nvmlInit, fake.nvmlDeviceGetHandleByIndex, fake.nvmlDeviceGetUtilizationRates = init, handle, utilization
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gauges, "_SAMPLE_EVERY", 0.005)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def first_mean(gpu: GpuUtilization) -> float | None:
    for _ in range(12_000):
        if (share := gpu.mean()) is not None:
            break
        time.sleep(0.005)
    gpu.close()
    return share


@pytest.mark.parametrize(
    ("kind", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40", "bf16", 181e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA A10G", "bf16", 70e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "bf16_params", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "fp8_row", 989e12),
        ("NVIDIA GeForce GTX 9999", "bf16", None),
    ],
)
def test_peak_flops_equal_the_data_sheets(kind, precision, peak):
    assert peak_flops(device(kind), precision) == peak


def test_a_cpu_has_no_gauges_and_counts_no_flops():
    gauges_of_cpu = Gauges(lambda: pytest.fail("counted"), jax.devices("cpu")[:1], "fp32")
    line = LogLine(step=1, step_time_s=0.1)
    assert gauges_of_cpu.measure(line) == line
    assert gauges_of_cpu.warning(line) is None
    gauges_of_cpu.close()


def test_mfu_counts_all_devices_of_the_run():
    gauges_of_gpu = Gauges(lambda: 312e12, [device(A100, i % 2, process=i // 2) for i in range(4)], "bf16")
    line = gauges_of_gpu.measure(LogLine(step=1, step_time_s=0.5))
    assert line.mfu == pytest.approx(0.5)
    assert gauges_of_gpu.warning(line) is None
    gauges_of_gpu.close()


def test_in_8_bits_the_peak_is_named_once():
    watched = Gauges(lambda: 989e12, [device("NVIDIA H100 80GB HBM3")], "fp8")
    line = watched.measure(LogLine(step=1, step_time_s=2.0))
    assert line.mfu == pytest.approx(0.5)
    notes = [watched.warning(line) for _ in range(2)]
    assert notes == ["MFU is over the peak rate of 16-bit products; those in 8 bits have up to twice that rate", None]
    watched.close()


def test_an_unknown_gpu_is_named_once():
    watched = Gauges(lambda: pytest.fail("counted"), [device("NVIDIA GeForce GTX 9999")], "fp32")
    lines = [watched.measure(LogLine(step=i, step_time_s=0.1)) for i in range(3)]
    assert {line.mfu for line in lines} == {None}
    warnings = [watched.warning(line) for line in lines]
    assert warnings[0].startswith("the peak FLOP/s of NVIDIA GeForce GTX 9999 are not known")
    assert warnings[1:] == [None, None]
    watched.close()


def test_only_gpus_of_the_run_are_sampled(nvml, monkeypatch):
    first, second = device(A100, 0), device(A100, 1)
    assert first_mean(GpuUtilization([first, second])) == pytest.approx(0.4)
    for visible, gpu, share in (
        (None, first, 0.3),
        (None, second, 0.5),
        ("1", first, 0.5),
        ("1,0", second, 0.3),
        ("GPU-b1", first, 0.5),
        ("GPU-b1c2, 0", second, 0.3),
    ):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert first_mean(GpuUtilization([gpu])) == pytest.approx(share)
    assert GpuUtilization([device("NVIDIA L4", 1)]).mean() is None  # CUDA numbers the GPUs in another order
    for visible in ("0", "GPU-", "MIG-b1c2,MIG-b1c3"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert GpuUtilization([second]).mean() is None


def test_gauges_sample_the_gpus_of_this_process(nvml):
    gauges_of_gpu = Gauges(lambda: 1.0, [device(A100, 1), device(A100, 0, process=1)], "bf16")
    for _ in range(12_000):
        if (share := gauges_of_gpu.measure(LogLine(step=1)).gpu_utilization) is not None:
            break
        time.sleep(0.005)
    gauges_of_gpu.close()
    assert share == pytest.approx(0.5)


def test_without_nvml_there_is_no_gpu_utilization(nvml, monkeypatch):
    nvml.busy = [None, None]
    gpu = GpuUtilization([device(A100)])
    time.sleep(0.05)
    assert gpu.mean() is None
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(nvml.NVMLError)
    assert GpuUtilization([device(A100)]).mean() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuUtilization([device(A100)]).mean() is None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ({"input_wait_s": 0.05, "step_time_s": 0.1}, "each step waits 50.0 ms for its batch"),
        ({"input_wait_s": 0.0, "step_time_s": 0.002}, "a step takes 2.0 ms"),
        ({"input_wait_s": 0.001, "step_time_s": 0.1}, "its operations are too small"),
    ],
)
def test_an_idle_gpu_is_reported_once_with_the_likely_cause(line, cause):
    watched = Gauges(lambda: 0.0, jax.devices("cpu")[:1], "fp32")
    idle = [0.9, 0.5, 0.5, 0.8, 0.5, 0.6, 0.5, 0.1, 0.1, 0.1]
    warnings = [watched.warning(LogLine(step=i, gpu_utilization=share, **line)) for i, share in enumerate(idle)]
    (warning,) = filter(None, warnings)
    assert warnings.index(warning) == 6
    assert warning.startswith("warning: step 6: the GPU is busy 50% of the time: ")
    assert cause in warning
    watched.close()
