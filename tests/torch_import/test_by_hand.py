"""Modules as people write them are proved or refused by line, never silently wrong."""

import sys
from collections import Counter

import pytest
import torch

from tests.torch_import.by_hand import Factory
from tests.torch_import.by_hand.generative import GENERATIVE
from tests.torch_import.by_hand.language import LANGUAGE
from tests.torch_import.by_hand.learning import LEARNING
from tests.torch_import.by_hand.memory import MEMORY
from tests.torch_import.by_hand.science import SCIENCE
from tests.torch_import.by_hand.sequences import SEQUENCES
from tests.torch_import.by_hand.state import STATE
from tests.torch_import.by_hand.tabular import TABULAR
from tests.torch_import.by_hand.tricks import TRICKS
from tests.torch_import.by_hand.vision import VISION
from tests.torch_import.judge import judged

SUBJECTS = (LANGUAGE, VISION, GENERATIVE, TABULAR, SEQUENCES, SCIENCE, LEARNING, STATE, MEMORY, TRICKS)
STYLES: dict[str, Factory] = {name: factory for subject in SUBJECTS for name, factory in subject.items()}
# Both compute sines, cosines and exponentials of float32 inside float64 modules, each library by its own formula.
FLOAT32_INSIDE = {"diffusion_loss", "soft_argmax"}


def outcome(name: str) -> str:
    torch.manual_seed(1)
    return judged(STYLES[name], bar=1e-6 if name in FLOAT32_INSIDE else None)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning", "ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", STYLES)
def test_modules_as_people_write_them_are_proved_or_refused_by_line(name: str) -> None:
    found = outcome(name)
    assert found == "proved" or (found.startswith("refused") and ".py:" in found), found


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    for chosen in sys.argv[1:] or [*STYLES]:
        try:
            result = outcome(chosen)
        except Exception as error:
            result = f"crash: {type(error).__name__}: {str(error)[:200]}"
        counts[result.split(":")[0]] += 1
        print(f"{chosen:38s} {result[:300]}", flush=True)
    print(dict(counts))
