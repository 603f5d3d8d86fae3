"""Measure how well the device is used: model FLOPs utilization and GPU utilization."""

import os
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from threading import Event, Thread
from typing import Any

import jax

from jaxtrain.cost import NVIDIA
from jaxtrain.observe.log_line import LogLine

_SAMPLE_EVERY = 1.0  # seconds; NVML averages over the last second or less
_LOW = 0.7  # GPU utilization below which a line counts as idle
_IDLE_LINES = 3  # consecutive idle lines before the warning
_SHORT_STEP = 0.005  # seconds of a step below which the launch overhead dominates
_WAITING = 0.1  # share of a step spent waiting for its batch


class Gauges:
    """Adds device utilization to the lines of a run; nothing on a CPU or an unknown GPU.

    Model FLOPs utilization counts what forward and backward passes need, without rematerialization (Chowdhery et al.
    2022, arXiv:2204.02311, appendix B).

    Args:
      flops: Returns the FLOPs of one update on all devices; called only if the device's peak is known.
      devices: Number of devices.
      precision: Precision of the run, which decides the peak.
    """

    def __init__(self, flops: Callable[[], float], devices: int, precision: str) -> None:
        peak = peak_flops(jax.local_devices()[0], precision)
        self._ideal_step_time_s = flops() / (peak * devices) if peak else None
        self._gpu = GpuUtilization()
        self._idle_lines, self._has_warned = 0, False

    def measure(self, line: LogLine) -> LogLine:
        """Return the line with `mfu` and `gpu_utilization` since the previous call, where they are known."""
        mfu = None
        if self._ideal_step_time_s is not None and line.step_time_s:
            mfu = self._ideal_step_time_s / line.step_time_s
        return replace(line, mfu=mfu, gpu_utilization=self._gpu.mean())

    def warning(self, line: LogLine) -> str | None:
        """Return a warning, once, if the GPU stays idle, with the likely cause."""
        utilization = 1.0 if line.gpu_utilization is None else line.gpu_utilization
        self._idle_lines = self._idle_lines + 1 if utilization < _LOW else 0
        if self._has_warned or self._idle_lines < _IDLE_LINES:
            return None
        self._has_warned = True
        return f"warning: step {line.step}: the GPU is busy {utilization:.0%} of the time: {_cause(line)}"

    def close(self) -> None:
        """Stop the sampling thread."""
        self._gpu.close()


def _cause(line: LogLine) -> str:
    wait_s, step_time_s = line.input_wait_s or 0.0, line.step_time_s or 0.0
    if wait_s > _WAITING * step_time_s:
        return f"each step waits {wait_s * 1e3:.1f} ms for its batch: check the speed of the disk or network"
    if step_time_s < _SHORT_STEP:
        return f"a step takes {step_time_s * 1e3:.1f} ms, so that launch overhead dominates: raise --batch-size"
    return "its operations are too small to fill it: raise --batch-size or lower --accumulate"


def peak_flops(device: jax.Device, precision: str) -> float | None:
    """Return the peak FLOP/s of a device's matrix products, from NVIDIA's data sheets; None if it is not listed."""
    listed = [rates for name, rates in NVIDIA.items() if device.device_kind.startswith(name)]
    if not listed:
        return None
    (rates,) = listed
    return {"fp32": rates.fp32, "tf32": rates.tf32}.get(precision, rates.half)


class GpuUtilization:
    """Samples, in a thread, how busy this process's NVIDIA GPUs are, by NVML.

    Without NVML, its Python package nvidia-ml-py or a GPU, `mean` returns None.
    """

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._stop = Event()
        self._nvml, self._handles = _visible_gpus()
        self._thread = Thread(target=self._sample, name="gpu", daemon=True)
        if self._handles:
            self._thread.start()

    def mean(self) -> float | None:
        """Return the mean utilization since the previous call, in [0, 1]."""
        samples, self._samples = self._samples, []
        return fmean(samples) if samples else None

    def close(self) -> None:
        """Stop the sampling thread."""
        self._stop.set()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_EVERY):
            try:
                shares = [self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100 for gpu in self._handles]
            except self._nvml.NVMLError:
                return  # a MIG slice of a GPU does not report it
            self._samples.append(fmean(shares))


def _visible_gpus() -> tuple[Any, list[Any]]:
    """(NVML, handles of the GPUs in CUDA_VISIBLE_DEVICES; of all GPUs if it is unset)."""
    try:
        import pynvml
    except ImportError:
        return None, []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        every = range(pynvml.nvmlDeviceGetCount())
        chosen = list(every) if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
        return pynvml, [_handle(pynvml, name) for name in chosen]
    except pynvml.NVMLError:
        return None, []


def _handle(nvml: Any, name: int | str) -> Any:
    is_index = str(name).isdecimal()
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if is_index else nvml.nvmlDeviceGetHandleByUUID(name)
