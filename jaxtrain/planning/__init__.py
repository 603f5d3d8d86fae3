"""Search for settings that fit into memory, and predictions of how a run scales over devices."""

from jaxtrain.planning.plan import Candidate, Plan, candidate_rows, choice_notes, format_settings, plan
from jaxtrain.planning.scaling import (
    MAX_DEVICES,
    DeviceShare,
    Scaling,
    check_mesh_size,
    doubled_meshes,
    first_axis,
    format_mesh,
    virtual_devices,
)

__all__ = [
    "MAX_DEVICES",
    "Candidate",
    "DeviceShare",
    "Plan",
    "Scaling",
    "candidate_rows",
    "check_mesh_size",
    "choice_notes",
    "doubled_meshes",
    "first_axis",
    "format_mesh",
    "format_settings",
    "plan",
    "virtual_devices",
]
