"""What a run shows: the console, metrics.jsonl, TensorBoard, the report."""

from jaxtrain.observe.console import Console
from jaxtrain.observe.memory import peak_memory_bytes
from jaxtrain.observe.metrics import MetricsLog
from jaxtrain.observe.report import write_report

__all__ = ["Console", "MetricsLog", "peak_memory_bytes", "write_report"]
