"""The comparison of two runs in a low precision, each with the float64 truth."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from parity.case import Case
from parity.compare.examination import Examination, JaxProgram, train
from parity.compare.reference import Reference
from parity.compare.verdict import by_tensor, median
from parity.settings import Settings

TRAININGS = 5
"""Where the first training in a low precision fails, the verdict is the median of this many, each from another seed."""

BY_TENSOR = ("fp32", "bf16", "fp16")
"""The precisions in which single tensors are judged. In the others the worst one is reported alone: in bf16_params the
gradient of a perceptron's output bias is 2.9 times as far from the truth as PyTorch's, as the median of five trainings.
Few cases are measured in fp8."""


def repeated(
    case: Case, program: JaxProgram, settings: Settings, reference: Callable[[Settings], Reference]
) -> Examination:
    """The examination in a low precision: the first training's if it holds, else the median of several."""

    def training(i: int) -> Examination:
        own = replace(settings, seed=settings.seed + i)
        return train(case, program, own, reference(own))

    first = training(0)
    if program.precision not in BY_TENSOR:
        if first.verdict.passed:
            return first
        return _median([first, *map(training, range(1, TRAININGS))])
    examination = _judged(first, [first])
    if examination.verdict.passed:
        return examination
    # Rounding has discrete consequences: with one ReLU input on the other side of zero, a run may be a hundred times
    # farther from the truth. A lack of precision shows in every training, such a coincidence in few.
    trainings = [first, *map(training, range(1, TRAININGS))]
    return _judged(_median(trainings), trainings)


def _judged(examination: Examination, trainings: Sequence[Examination]) -> Examination:
    """The examination with its single tensors judged over the trainings."""
    verdict = by_tensor(examination.verdict, [training.verdict.tensors for training in trainings])
    return replace(examination, verdict=verdict)


def _median(examinations: Sequence[Examination]) -> Examination:
    middle = median([e.verdict for e in examinations])
    return next(e for e in examinations if e.verdict is middle)
