"""Profiler traces, and tables of the time that training steps spend on each kind of operation."""

from jaxtrain.profile.estimate import estimate_table as estimate_table
from jaxtrain.profile.trace import INPUT as INPUT
from jaxtrain.profile.trace import LoopTrace as LoopTrace
from jaxtrain.profile.trace import Row as Row
from jaxtrain.profile.trace import StepTrace as StepTrace
from jaxtrain.profile.trace import current_source_lines as current_source_lines
from jaxtrain.profile.trace import newest_trace as newest_trace
from jaxtrain.profile.trace import time_table as time_table
