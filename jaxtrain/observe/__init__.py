"""What a run shows: the console, metrics.jsonl, TensorBoard, the report."""

from jaxtrain.observe.console import Console
from jaxtrain.observe.follow import Tracker, followed
from jaxtrain.observe.gauges import Gauges
from jaxtrain.observe.histograms import histograms
from jaxtrain.observe.machine import JsonConsole, QuietConsole
from jaxtrain.observe.metrics import MetricsLog, NoMetricsLog, metrics_log, read_metrics
from jaxtrain.observe.mistakes import Evaluated, summary, write_page
from jaxtrain.observe.record import read_record, write_result
from jaxtrain.observe.report import page, write_report
from jaxtrain.observe.serve import HOST, report_server
from jaxtrain.observe.tensorboard import write_end, write_mistakes
from jaxtrain.observe.trackers import MLflow, WandB
from jaxtrain.observe.verdicts import judged
from jaxtrain.observe.words import amount

__all__ = [
    "HOST",
    "Console",
    "Evaluated",
    "Gauges",
    "JsonConsole",
    "MLflow",
    "MetricsLog",
    "NoMetricsLog",
    "QuietConsole",
    "Tracker",
    "WandB",
    "amount",
    "followed",
    "histograms",
    "judged",
    "metrics_log",
    "page",
    "read_metrics",
    "read_record",
    "report_server",
    "summary",
    "write_end",
    "write_mistakes",
    "write_page",
    "write_report",
    "write_result",
]
