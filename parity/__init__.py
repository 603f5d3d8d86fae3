"""Prove that a JAX training step equals PyTorch's, on your own model.

The map of the package, in its order: a file or folder imports only those above it (`tests/test_architecture.py`).

    optimizer, case, settings  a model, loss, data and optimizer in both frameworks; how both sides train
    record, bars               what a run leaves behind; how far apart two runs may be
    divergence, source         a difference between programs, and a line of source, as values
    progress, attestation      what a check is doing; the machine and its versions
    oracle/                    both programs in float64
    sides/                     one training run in each framework, with the same dropout masks
    cases/                     the built-in cases; those of users' modules and recipes
    weights/                   which PyTorch tensor each JAX parameter is
    unexercised/               what a check did not exercise
    compare/                   the verdict on two runs, in float64 and in lower precisions
    explain/                   where and why a case differs: stage, first operation, convention
    run                        `check`: a case compared and, where it differs, explained
    mutate/                    deliberate bugs in a module's operations, to test the harness
    bundle                     PyTorch's side, recorded for machines without PyTorch
    distributed/               meshes against ranks of PyTorch
    selftest/                  whether this machine computes correctly, without PyTorch
    report/                    tables, JSON and HTML
    ported                     the proof of `jaxtrain port`
    verify/                    the verdict on a port that somebody else wrote
    long_runs                  long runs of a ported script beside the script's own
    own_errors, cli            errors of a user's file in one line; the commands
    pytest_plugin              the pytest marker
"""

from typing import Any

from jaxtrain import cases
from parity.case import Case
from parity.compare.verdict import Verdict
from parity.explain.locate import locate
from parity.optimizer import AdamW, Optimizer
from parity.run import assert_matches, check


def _imported_case(*args: Any, **kwargs: Any) -> Case:
    """Call `parity.cases.imported.imported_case`, whose import needs JAX."""
    from parity.cases.imported import imported_case

    return imported_case(*args, **kwargs)


cases.provide(_imported_case)

__all__ = ["AdamW", "Case", "Optimizer", "Verdict", "assert_matches", "check", "locate"]
