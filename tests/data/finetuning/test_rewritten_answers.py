"""Chat templates that rewrite earlier answers or open a reasoning: the model sees and writes the examples.

`tests/trl` has the same for published templates.
"""

from pathlib import Path

import pytest

from tests.data.finetuning.rewriting import OWN, check_answers, tokenizer

pytest.importorskip("transformers")


@pytest.mark.parametrize("template", OWN)
def test_every_answer_is_learned_once_after_the_prompt_that_the_model_sees(template: str, tmp_path: Path) -> None:
    source, expected = OWN[template]
    check_answers(source, expected, tokenizer(), tmp_path)
