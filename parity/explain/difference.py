"""Where and why a case differs in float64: the stage, the first operation, the convention or the setting at fault."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from parity.case import Case
from parity.compare.examination import Examination, program_of
from parity.compare.float64 import compare
from parity.compare.reference import live_reference
from parity.compare.trajectory import JUDGED
from parity.compare.verdict import Verdict, same_meaning
from parity.progress import report
from parity.settings import Settings
from parity.unexercised.coverage import at_kinks, kinks


def explain(candidates: Sequence[Case], examination: Examination, settings: Settings) -> Verdict:
    """Add the stage at fault, the first operation that differs and the convention that explains it.

    Of several `candidates`, versions of a case that mean the same, the one that agrees with JAX for longer is compared.
    """
    from parity.explain.diagnose import diagnose
    from parity.explain.locate import locate
    from parity.explain.stages import at_fault, blame, run_stages

    report("fp64: differs; locating the first operation")
    # Most cases differ in the first steps. In later ones the search takes long and would also find chaos.
    k = settings.accumulate
    located = [(locate(case.of_one_batch(k), seed=settings.seed), case) for case in candidates]
    found, case = max(located, key=lambda at: (0, 0) if at[0] is None else (at[0].step, at[0].position))
    chaotic = len(examination.ours.losses) > 1  # rounding does not grow within one step
    chaos = _chaos(case, examination, settings) if chaotic and not found else None
    if not (found or chaos):
        found = locate(case.of_one_batch(k), seed=settings.seed, steps=min(settings.steps, JUDGED))
    report("fp64: differs; comparing the stages of a step")
    stagewise = run_stages(case, accumulate=settings.accumulate, seed=settings.seed)
    report("fp64: differs; trying the conventions of PyTorch")
    diagnosis, stages = diagnose(stagewise, found), stagewise.stages
    stage, explanation = blame(stages, found.stage if found else None), [] if diagnosis is None else [str(diagnosis)]
    failing = at_fault(stages)
    if failing is not None and failing.name == "gradients":
        met = at_kinks(case, failing.step, accumulate=settings.accumulate, seed=settings.seed)
        if diagnosis is not None:
            met = {name: times for name, times in met.items() if name == diagnosis.subject}
        explanation += [kinks(met)] if met else []
        if met and diagnosis is None:
            explanation += ["jaxtrain.losses.subgradients has PyTorch's slopes"]
    unlocated = None if found else chaos or arises(settings, partial(_holds, case))
    if not (found or unlocated or stage) and settings.steps > JUDGED:
        unlocated = f"no operation differs in {JUDGED} steps: the difference arises later"
    return replace(
        examination.verdict,
        first_divergence=found,
        stage=stage,
        diagnosis="; ".join(explanation) or None,
        unlocated=unlocated,
    )


def _chaos(case: Case, examination: Examination, settings: Settings) -> str | None:
    """A line if the difference is no larger than what one ulp of the weights causes."""
    one_ulp = live_reference(case, "fp64", settings, judged=1).one_ulp
    if not one_ulp or not same_meaning(examination.ours, examination.theirs, one_ulp, judged=1).passed:
        return None
    return (
        "chaos: the difference is no larger than that of one ulp of PyTorch's weights: "
        "use fewer steps or a smaller learning rate"
    )


def _holds(case: Case, settings: Settings) -> bool:
    _, examination = compare(case, program_of(case, "fp64", settings), settings)
    return examination.verdict.passed


def arises(settings: Settings, holds: Callable[[Settings], bool]) -> str | None:
    """Return a line for the setting without which a case holds."""
    for name, plain in {
        "remat": replace(settings, remat="none"),
        "accumulate": replace(settings, accumulate=1),
    }.items():
        if plain != settings and holds(plain):
            asked, instead = getattr(settings, name), getattr(plain, name)
            return f"agrees with {name} {instead}: the difference arises only with {name} {asked}"
    return None
