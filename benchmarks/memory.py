"""The most memory that a process has held at once, beyond what it held when it began."""

from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Bytes: of the accelerator where there is one, else of the process, imports left out."""

    def __init__(self) -> None:
        CLEAR.write_text("5")  # man 5 proc: the peak starts again from what is held now
        self.before = _kilobytes("VmRSS")

    def of_process(self) -> int:
        """Beyond what was held when this was made."""
        return (_kilobytes("VmHWM") - self.before) * 1024


def _kilobytes(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])
