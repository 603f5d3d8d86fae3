"""Peak memory of this process above its memory at the start."""

from pathlib import Path

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak resident memory since construction, so that imports before it do not count."""

    def __init__(self) -> None:
        reset_peak()
        self.start_kib = status_kib("VmRSS")

    def bytes_above_start(self) -> int:
        """Return the peak resident memory minus the resident memory at construction, in bytes."""
        return (status_kib("VmHWM") - self.start_kib) * 1024


def reset_peak() -> None:
    """Reset the kernel's peak resident memory (VmHWM) to the current value (see `man 5 proc`)."""
    CLEAR_REFS.write_text("5")


def status_kib(name: str) -> int:
    """Return a field of /proc/self/status, such as "VmRSS", in KiB."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])
