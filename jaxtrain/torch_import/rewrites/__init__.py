"""Rewrites of a captured graph: the same values, in a form that XLA computes faster or in less memory.

layers              finds layers that differ in their parameters alone
repeat              loops over such layers and their stacked parameters
channels_last       keeps values between convolutions with the channels on the last axis
masks               recognizes causal masks
grouped_queries     recognizes keys and values that are repeated for groups of queries
recomputed_formulas computes cheap formulas again in the backward pass
integers            integers beyond int32
kept_roundings      roundings that XLA would remove
"""
