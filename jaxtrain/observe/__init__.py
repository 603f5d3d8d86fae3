"""The output of a run: console, metrics.jsonl, TensorBoard, the report, trackers."""

from jaxtrain.observe.console import Console
from jaxtrain.observe.console import format_row as format_row
from jaxtrain.observe.curve_figure import curve_figure as curve_figure
from jaxtrain.observe.dashboards.final_events import log_error_analysis as log_error_analysis
from jaxtrain.observe.dashboards.final_events import log_final as log_final
from jaxtrain.observe.dashboards.trackers import MLflow as MLflow
from jaxtrain.observe.dashboards.trackers import WandB as WandB
from jaxtrain.observe.dashboards.tracking import Tracker as Tracker
from jaxtrain.observe.dashboards.tracking import track_run as track_run
from jaxtrain.observe.error_analysis import ErrorAnalysis as ErrorAnalysis
from jaxtrain.observe.error_analysis import error_summary as error_summary
from jaxtrain.observe.error_analysis import write_error_page as write_error_page
from jaxtrain.observe.formatting import format_count as format_count
from jaxtrain.observe.formatting import format_duration as format_duration
from jaxtrain.observe.gauges import Gauges as Gauges
from jaxtrain.observe.histograms import histograms as histograms
from jaxtrain.observe.log_line import LOSS_SCALES as LOSS_SCALES
from jaxtrain.observe.log_line import LogLine as LogLine
from jaxtrain.observe.log_line import Rollback as Rollback
from jaxtrain.observe.log_line import Throughput as Throughput
from jaxtrain.observe.machine import JsonConsole, QuietConsole
from jaxtrain.observe.media_files import first_rows as first_rows
from jaxtrain.observe.metrics import MetricsLog
from jaxtrain.observe.metrics import NoMetricsLog as NoMetricsLog
from jaxtrain.observe.metrics import metrics_log as metrics_log
from jaxtrain.observe.metrics import read_metrics as read_metrics
from jaxtrain.observe.notebook import console_here as console_here
from jaxtrain.observe.predictions import evaluate_examples as evaluate_examples
from jaxtrain.observe.run_record import Record as Record
from jaxtrain.observe.run_record import read_record, write_result
from jaxtrain.observe.run_record import write_facts as write_facts
from jaxtrain.observe.run_report import render_report as render_report
from jaxtrain.observe.run_report import write_report
from jaxtrain.observe.serve import HOST as HOST
from jaxtrain.observe.serve import report_server as report_server

__all__ = ["Console", "JsonConsole", "MetricsLog", "QuietConsole", "read_record", "write_report", "write_result"]
