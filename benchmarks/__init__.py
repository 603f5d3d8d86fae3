"""Benchmarks: the training steps of JAX and PyTorch timed on the same work, interleaved, in one run.

job         one row: a workload, an engine and its settings
workloads   the models and sizes that are timed
suites      which jobs a command times
budget      the time limit and its division
engines     the training steps; features, ceiling, updates, host and run hold the other kinds of work
ported_engines  the same for a script that `jaxtrain port` has ported
equality    float64 check that the engines do the same work
worker      the process that runs one engine
timing      interleaved timing of the worker processes
measure     a suite: equality, ceilings, timings
ported      the line on the speed of a ported script
figures     rows, ratios and exponents of the JSON document
rows        rows and ratios formatted for people
page        a page of all figures, with bars
picture     bar chart as PNG
cli         `python -m benchmarks`
"""
