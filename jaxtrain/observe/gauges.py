"""How well the device is used: the share of its peak arithmetic, and of the time that it is busy at all."""

import os
from collections.abc import Callable, Mapping
from statistics import fmean
from threading import Event, Thread
from typing import Any

import jax

from jaxtrain.cost import NVIDIA

_BUSY_EVERY = 1.0  # seconds between two looks: NVML's own figure is of the last second or less
_IDLE = 0.7  # busy for less than this share of the time is worth a word,
_LINES = 3  # if so many logged lines in a row say it
_SHORT_STEP = 0.005  # seconds of a step below which launching it counts
_WAITING = 0.1  # share of a step waited for its batch


class Gauges:
    """What a line of metrics tells of the device's use. Nothing on a CPU, or of a GPU that is not known.

    `flops()`: the model's, of one update on all `devices`: what its forward and backward passes need, without what is
    computed again (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Counted only where the device's peak is known.
    """

    def __init__(self, flops: Callable[[], float], devices: int, precision: str) -> None:
        peak = peak_flops(jax.local_devices()[0], precision)
        self._share_of_a_second = flops() / (peak * devices) if peak else None
        self._busy = Busy()
        self._idle_lines, self._warned = 0, False

    def read(self, step_time_s: float) -> dict[str, float]:
        """`mfu` and `gpu_utilisation`, shares of 1, since the last call: those that are known."""
        of = {} if self._share_of_a_second is None else {"mfu": self._share_of_a_second / step_time_s}
        busy = self._busy.take()
        return of if busy is None else {**of, "gpu_utilisation": busy}

    def warning(self, line: Mapping[str, Any]) -> str | None:
        """A word on a GPU that idles, and why it likely does: once."""
        idle = line.get("gpu_utilisation", 1.0) < _IDLE
        self._idle_lines = self._idle_lines + 1 if idle else 0
        if self._warned or self._idle_lines < _LINES:
            return None
        self._warned = True
        return (
            f"warning: step {line['step']}: the GPU is busy {line['gpu_utilisation']:.0%} of the time: {_cause(line)}"
        )

    def close(self) -> None:
        """Look no more."""
        self._busy.close()


def _cause(line: Mapping[str, Any]) -> str:
    if line["input_wait_s"] > _WAITING * line["step_time_s"]:
        return (
            f"it waits {line['input_wait_s'] * 1e3:.1f} ms of each step for its batch: is the disk or the network slow?"
        )
    if line["step_time_s"] < _SHORT_STEP:
        return f"a step takes {line['step_time_s'] * 1e3:.1f} ms, so that starting it counts: raise --batch-size"
    return "its operations are too small to fill it: raise --batch-size or lower --accumulate"


def peak_flops(device: jax.Device, precision: str) -> float | None:
    """FLOP/s of its matrix products at most, from NVIDIA's data sheets; None of a device that is not known."""
    known = [of for name, of in NVIDIA.items() if device.device_kind.startswith(name)]
    if not known:
        return None
    (of,) = known
    return {"fp32": of.fp32, "tf32": of.tf32}.get(precision, of.half)


class Busy:
    """The share of the time that this machine's visible NVIDIA GPUs run something, by NVML, watched by a thread.

    None where NVML, its Python package (nvidia-ml-py) or a GPU is missing.
    """

    def __init__(self) -> None:
        self._shares: list[float] = []
        self._ended = Event()
        self._nvml, self._handles = _gpus()
        self._thread = Thread(target=self._watch, name="gpu", daemon=True)
        if self._handles:
            self._thread.start()

    def take(self) -> float | None:
        """The mean since the last call."""
        shares, self._shares = self._shares, []
        return fmean(shares) if shares else None

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_BUSY_EVERY):
            try:
                shares = [self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100 for gpu in self._handles]
            except self._nvml.NVMLError:
                return  # a part of a GPU (MIG) has no such figure
            self._shares.append(fmean(shares))


def _gpus() -> tuple[Any, list[Any]]:
    """(NVML, the GPUs that CUDA_VISIBLE_DEVICES names, all without it)."""
    try:
        import pynvml
    except ImportError:
        return None, []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        every = range(pynvml.nvmlDeviceGetCount())
        chosen = list(every) if named is None else [name.strip() for name in named.split(",") if name.strip()]
        return pynvml, [_handle(pynvml, name) for name in chosen]
    except pynvml.NVMLError:
        return None, []


def _handle(nvml: Any, name: int | str) -> Any:
    number = str(name).isdecimal()
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if number else nvml.nvmlDeviceGetHandleByUUID(name)
