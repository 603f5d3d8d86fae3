"""How many programs a check compiles: one of JAX's step, for every run that it needs."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from parity.run import examine
from tests.parity.test_proposals import rounded_case


@contextmanager
def compiled() -> Iterator[Counter[str]]:
    """Count the programs compiled inside, by the name of their function."""
    found: Counter[str] = Counter()

    def count(event: str, duration: float, **of: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found[str(of.get("fun_name"))] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def test_a_check_compiles_one_step_for_all_its_runs() -> None:
    """The plain run, those with other constants, other batches and another bound of the gradient."""
    with compiled() as programs:
        examination = examine(rounded_case(), locate=True, steps=3)
    assert examination.verdict.passed
    assert examination.notes[-1].startswith("JAX's constants rounded")
    assert programs["jit(_exact_step)"] == 1
    assert programs.total() <= 15, programs


def test_locating_a_difference_compiles_no_program_for_each_operation() -> None:
    with compiled() as programs:
        assert not examine(rounded_case(1.1), locate=True, steps=3).verdict.passed
    assert programs["jit(_exact_step)"] == 1
    assert programs.total() <= 45, programs
