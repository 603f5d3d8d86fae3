"""Prove that a JAX training step equals PyTorch's, on your own model.

The map of the package. No module imports another in a circle (`tests/test_architecture.py`):

    case, optimizer          a model, loss, data and optimizer in both frameworks
    record                   what a run leaves behind: losses, gradients, parameters, moments
    jax_side, torch_side     one training run in each framework
    randomness               JAX's dropout masks, given to PyTorch
    oracle                   both programs in float64
    weights                  which PyTorch tensor each JAX parameter is
    bars, compare            the bars, and the verdict on two runs
    trajectory               rounding and chaos in long runs
    torch_optimizers, frozen a recipe's optimizer, schedule and frozen parameters, for both sides
    validity                 mistakes in a case
    settings, reference, examination   how both sides train; PyTorch's runs; the verdict with its runs
    progress                 what a check is doing, for whoever waits
    float64, low_precision   the comparison in float64, and in a lower precision
    placing                  where and why a case differs in float64
    run                      `check`: a case compared and, where it differs, placed
    coverage, conditions     what a check did not exercise
    stages                   which stage of the step differs
    locate, activations      the first operation, or the first imprecise module, that differs
    torch_trace, jax_trace, fingerprint, divergence   the values and lines that locate compares
    diagnose, conventions    the convention of PyTorch that explains a difference
    mutants, mutate          deliberate bugs, to test the harness
    bundle                   PyTorch's side, recorded for machines without PyTorch
    distributed              meshes against ranks of PyTorch
    selftest                 whether this machine computes correctly, without PyTorch
    cases                    the built-in cases
    report, attestation, source   tables, JSON and HTML; versions and settings; lines of source
    cli, own_errors, pytest_plugin   the commands, errors of a user's file, and the pytest marker
"""

from parity.case import Case
from parity.compare import Verdict
from parity.optimizer import AdamW, Optimizer
from parity.run import assert_matches, check

__all__ = ["AdamW", "Case", "Optimizer", "Verdict", "assert_matches", "check"]
