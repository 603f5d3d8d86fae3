"""Profiler traces, and tables of the time that training steps spend on each kind of operation."""

from jaxtrain.profile.estimate import estimate_table
from jaxtrain.profile.trace import INPUT, LoopTrace, Row, StepTrace, current_source_lines, newest_trace, time_table

__all__ = [
    "INPUT",
    "LoopTrace",
    "Row",
    "StepTrace",
    "current_source_lines",
    "estimate_table",
    "newest_trace",
    "time_table",
]
