"""What a run shows: the console, metrics.jsonl, TensorBoard, the report."""

from jaxtrain.observe.console import Console
from jaxtrain.observe.machine import JsonConsole, QuietConsole
from jaxtrain.observe.memory import peak_memory_bytes
from jaxtrain.observe.metrics import MetricsLog
from jaxtrain.observe.record import read_record, write_result
from jaxtrain.observe.report import write_report

__all__ = [
    "Console",
    "JsonConsole",
    "MetricsLog",
    "QuietConsole",
    "peak_memory_bytes",
    "read_record",
    "write_report",
    "write_result",
]
