"""Search for settings that fit into memory, and predictions of how a run scales over devices."""

from jaxtrain.cost import GpuProgram
from jaxtrain.planning.candidate import Candidate as Candidate
from jaxtrain.planning.candidate import compile_for_target as compile_for_target
from jaxtrain.planning.candidate import format_settings as format_settings
from jaxtrain.planning.gathered_params import gathered_params_json as gathered_params_json
from jaxtrain.planning.gathered_params import gathered_params_note as gathered_params_note
from jaxtrain.planning.gpu import gpu_program as gpu_program
from jaxtrain.planning.gradient_sums import gradient_sums_note as gradient_sums_note
from jaxtrain.planning.scale.growth import MOST_GPUS as MOST_GPUS
from jaxtrain.planning.scale.growth import Growth as Growth
from jaxtrain.planning.scale.growth import Settings as Settings
from jaxtrain.planning.scale.growth import growths as growths
from jaxtrain.planning.scale.mesh_choice import MeshChoice as MeshChoice
from jaxtrain.planning.scale.mesh_choice import choose_mesh as choose_mesh
from jaxtrain.planning.scale.mesh_choice import fitting_cost as fitting_cost
from jaxtrain.planning.scale.mesh_costs import MeshCost as MeshCost
from jaxtrain.planning.scale.mesh_costs import MeshCosts as MeshCosts
from jaxtrain.planning.scaling import MAX_DEVICES as MAX_DEVICES
from jaxtrain.planning.scaling import Context as Context
from jaxtrain.planning.scaling import DeviceShare as DeviceShare
from jaxtrain.planning.scaling import Scaling as Scaling
from jaxtrain.planning.scaling import check_mesh_size as check_mesh_size
from jaxtrain.planning.scaling import doubled_meshes as doubled_meshes
from jaxtrain.planning.scaling import first_axis as first_axis
from jaxtrain.planning.scaling import format_mesh as format_mesh
from jaxtrain.planning.scaling import virtual_devices as virtual_devices
from jaxtrain.planning.search import Plan as Plan
from jaxtrain.planning.search import candidate_rows as candidate_rows
from jaxtrain.planning.search import choice_notes as choice_notes
from jaxtrain.planning.search import plan as plan
from jaxtrain.planning.state_parts import StatePart as StatePart
from jaxtrain.planning.state_parts import state_parts as state_parts

__all__ = ["GpuProgram", "gpu_program"]
