"""Device utilization, with a fake NVML."""

import sys
import time
import types

import jax
import pytest

from jaxtrain.observe import LogLine, gauges
from jaxtrain.observe.gauges import Gauges, GpuUtilization, peak_flops


def device(kind: str):
    return types.SimpleNamespace(device_kind=kind, platform="gpu")


@pytest.fixture
def nvml(monkeypatch):
    """A fake NVML with two GPUs that are busy `busy` percent of the time."""
    fake = types.ModuleType("pynvml")
    fake.NVMLError = type("NVMLError", (Exception,), {})
    fake.busy = [30, 50]
    fake.nvmlInit = lambda: None
    fake.nvmlDeviceGetCount = lambda: 2
    fake.nvmlDeviceGetHandleByIndex = int
    fake.nvmlDeviceGetHandleByUUID = {"GPU-b": 1}.__getitem__

    def utilization(gpu):
        if fake.busy[gpu] is None:
            raise fake.NVMLError
        return types.SimpleNamespace(gpu=fake.busy[gpu])

    fake.nvmlDeviceGetUtilizationRates = utilization
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gauges, "_SAMPLE_EVERY", 0.005)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def first_mean(gpu: GpuUtilization) -> float | None:
    for _ in range(200):
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
        ("NVIDIA A100-SXM4-80GB", "fp16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "bf16_params", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA GeForce GTX 9999", "bf16", None),
    ],
)
def test_peak_flops_equal_the_data_sheets(kind, precision, peak):
    assert peak_flops(device(kind), precision) == peak


def test_a_cpu_has_no_gauges_and_counts_no_flops():
    gauges_of_cpu = Gauges(lambda: pytest.fail("counted"), 1, "fp32")
    line = LogLine(step=1, step_time_s=0.1)
    assert gauges_of_cpu.measure(line) == line
    assert gauges_of_cpu.warning(line) is None
    gauges_of_cpu.close()


def test_mfu_counts_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [device("NVIDIA A100-SXM4-80GB")])
    gauges_of_gpu = Gauges(lambda: 312e12, 4, "bf16")
    assert gauges_of_gpu.measure(LogLine(step=1, step_time_s=0.5)).mfu == pytest.approx(0.5)
    gauges_of_gpu.close()


def test_only_visible_gpus_are_sampled(nvml, monkeypatch):
    assert first_mean(GpuUtilization()) == pytest.approx(0.4)
    for visible, share in (("1", 0.5), ("0,1", 0.4), ("GPU-b", 0.5)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert first_mean(GpuUtilization()) == pytest.approx(share)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert GpuUtilization().mean() is None


def test_without_nvml_there_is_no_gpu_utilization(nvml, monkeypatch):
    nvml.busy = [None, None]
    gpu = GpuUtilization()
    time.sleep(0.05)
    assert gpu.mean() is None
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(nvml.NVMLError)
    assert GpuUtilization().mean() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuUtilization().mean() is None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ({"input_wait_s": 0.05, "step_time_s": 0.1}, "each step waits 50.0 ms for its batch"),
        ({"input_wait_s": 0.0, "step_time_s": 0.002}, "a step takes 2.0 ms"),
        ({"input_wait_s": 0.001, "step_time_s": 0.1}, "its operations are too small"),
    ],
)
def test_an_idle_gpu_is_reported_once_with_the_likely_cause(line, cause):
    watched = Gauges(lambda: 0.0, 1, "fp32")
    idle = [0.9, 0.5, 0.5, 0.8, 0.5, 0.6, 0.5, 0.1, 0.1, 0.1]
    warnings = [watched.warning(LogLine(step=i, gpu_utilization=share, **line)) for i, share in enumerate(idle)]
    (warning,) = filter(None, warnings)
    assert warnings.index(warning) == 6
    assert warning.startswith("warning: step 6: the GPU is busy 50% of the time: ")
    assert cause in warning
    watched.close()
