"""The output of a run: console, metrics.jsonl, TensorBoard, the report, trackers."""

from jaxtrain.observe.console import Console
from jaxtrain.observe.error_analysis import ErrorAnalysis, error_summary, write_error_page
from jaxtrain.observe.formatting import format_count
from jaxtrain.observe.gauges import Gauges
from jaxtrain.observe.histograms import histograms
from jaxtrain.observe.log_line import LogLine, Rollback, Throughput
from jaxtrain.observe.machine import JsonConsole, QuietConsole
from jaxtrain.observe.metrics import MetricsLog, NoMetricsLog, metrics_log, read_metrics
from jaxtrain.observe.predictions import evaluate_examples
from jaxtrain.observe.record import read_record, write_result
from jaxtrain.observe.report import render_report, write_report
from jaxtrain.observe.serve import HOST, report_server
from jaxtrain.observe.tensorboard import log_error_analysis, log_final
from jaxtrain.observe.trackers import MLflow, WandB
from jaxtrain.observe.tracking import Tracker, track_run

__all__ = [
    "HOST",
    "Console",
    "ErrorAnalysis",
    "Gauges",
    "JsonConsole",
    "LogLine",
    "MLflow",
    "MetricsLog",
    "NoMetricsLog",
    "QuietConsole",
    "Rollback",
    "Throughput",
    "Tracker",
    "WandB",
    "error_summary",
    "evaluate_examples",
    "format_count",
    "histograms",
    "log_error_analysis",
    "log_final",
    "metrics_log",
    "read_metrics",
    "read_record",
    "render_report",
    "report_server",
    "track_run",
    "write_error_page",
    "write_report",
    "write_result",
]
