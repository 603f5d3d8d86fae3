"""What fits in memory, and how a run scales over devices."""

from jaxtrain.planning.plan import Candidate, Plan, in_words, notes, plan, table
from jaxtrain.planning.scaling import MOST, Scaling, Share, check_size, first_axis, grown, virtual_devices, written

__all__ = [
    "MOST",
    "Candidate",
    "Plan",
    "Scaling",
    "Share",
    "check_size",
    "first_axis",
    "grown",
    "in_words",
    "notes",
    "plan",
    "table",
    "virtual_devices",
    "written",
]
