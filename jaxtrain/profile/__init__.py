"""Profiler traces and time tables."""

from jaxtrain.profile.estimate import estimated_table
from jaxtrain.profile.trace import INPUT, LoopTrace, Row, StepTrace, lines_of_now, newest_trace, time_table

__all__ = ["INPUT", "LoopTrace", "Row", "StepTrace", "estimated_table", "lines_of_now", "newest_trace", "time_table"]
