"""Measure how well the device is used: model FLOPs utilization and GPU utilization."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from threading import Event, Thread
from typing import Any

import jax

from jaxtrain.cost import NVIDIA, utilization_note
from jaxtrain.observe.log_line import LogLine

_SAMPLE_EVERY = 1.0  # seconds; NVML averages over the last second or less
_LOW = 0.7  # GPU utilization below which a line counts as idle
_IDLE_LINES = 3  # consecutive idle lines before the warning
_SHORT_STEP = 0.005  # seconds of a step below which the launch overhead dominates
_WAITING = 0.1  # share of a step spent waiting for its batch


class Gauges:
    """Adds device utilization to the lines of a run; nothing on a CPU.

    Model FLOPs utilization counts what forward and backward passes need, without rematerialization (Chowdhery et al.
    2022, arXiv:2204.02311, appendix B).

    Args:
      flops: Returns the FLOPs of one update on all devices; called only if the device's peak is known.
      devices: The devices of the run, those of other processes included.
      precision: Precision of the run, which decides the peak: that of 16-bit products if some are in 8 bits.
    """

    def __init__(self, flops: Callable[[], float], devices: Sequence[jax.Device], precision: str) -> None:
        device = devices[0]
        peak = peak_flops(device, precision)
        self._ideal_step_time_s = flops() / (peak * len(devices)) if peak else None
        self._unknown = device.device_kind if peak is None and device.platform == "gpu" else None
        self._note = None if peak is None else utilization_note(precision)
        self._gpu = GpuUtilization([d for d in devices if d.process_index == jax.process_index()])
        self._idle_lines, self._has_warned = 0, False

    def measure(self, line: LogLine) -> LogLine:
        """Return the line with `mfu` and `gpu_utilization` since the previous call, where they are known."""
        mfu = None
        if self._ideal_step_time_s is not None and line.step_time_s:
            mfu = self._ideal_step_time_s / line.step_time_s
        return replace(line, mfu=mfu, gpu_utilization=self._gpu.mean())

    def warning(self, line: LogLine) -> str | None:
        """Return a warning, once each, of a GPU without a known peak and of one that stays idle, with the cause.

        And a note of what the MFU is over, if products are in 8 bits.
        """
        if self._note is not None:
            note, self._note = self._note, None
            return note
        if self._unknown is not None:
            kind, self._unknown = self._unknown, None
            return f"the peak FLOP/s of {kind} are not known: the MFU of the run is not computed"
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
    rates = NVIDIA.get(device.device_kind)
    return None if rates is None else rates.of_precision(precision)


class GpuUtilization:
    """Samples, in a thread, how busy NVIDIA GPUs are, by NVML.

    Without NVML, its Python package nvidia-ml-py or a GPU, `mean` returns None.

    Args:
      devices: Devices of this process.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._samples: list[float] = []
        self._stop = Event()
        self._nvml, self._handles = _handles([device for device in devices if device.platform == "gpu"])
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


def _handles(gpus: Sequence[jax.Device]) -> tuple[Any, list[Any]]:
    """Return NVML and its handles of the GPUs; none if NVML is missing or numbers the GPUs in another order."""
    if not gpus:
        return None, []
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        handles = [_handle(pynvml, gpu.local_hardware_id) for gpu in gpus]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    except (pynvml.NVMLError, LookupError):
        return None, []
    # Unless CUDA_DEVICE_ORDER is PCI_BUS_ID, CUDA numbers the GPUs of a mixed machine by speed.
    return pynvml, handles if names == [gpu.device_kind for gpu in gpus] else []


def _handle(nvml: Any, ordinal: int) -> Any:
    """Return NVML's handle of CUDA's device `ordinal`, which counts the GPUs in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = str(ordinal) if visible is None else visible.split(",")[ordinal].strip()
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    every = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    # The beginning of a UUID suffices for CUDA.
    matching = [gpu for gpu in every if nvml.nvmlDeviceGetUUID(gpu).startswith(name)]
    if len(matching) != 1:
        raise LookupError(name)
    return matching[0]
