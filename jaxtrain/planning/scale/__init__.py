"""How a run scales to thousands of GPUs, predicted: no figure of it has been measured on more than one.

growth        how a step scales along an axis of a mesh
closed_forms  the bytes that a device sends as a function of the size of an axis
mesh_costs    the cost of a step on meshes of absent GPUs
mesh_choice   the mesh for a number of GPUs

A run on two nodes whose measured step is within a tenth of its prediction would make these figures more than that.
"""
