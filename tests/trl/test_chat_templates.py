"""Published chat templates that rewrite earlier answers or open a reasoning, as TRL ships them.

They are those of Qwen3, Qwen3.5, DeepSeek-R1 and V3, gpt-oss and GLM-4.5.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.data.finetuning.rewriting import CALL_REWRITTEN, TEXT_ALONE, Rewriting, check_answers, tokenizer

SPEC = importlib.util.find_spec("trl")
pytestmark = [
    pytest.mark.skipif(SPEC is None, reason="needs tests/trl/requirements.txt"),
]
DEEPSEEK_EOS = "<｜end▁of▁sentence｜>"
PUBLISHED = {
    "qwen3": Rewriting((2, 2, 2, 3, 1)),
    "qwen3_5_think": Rewriting((2, 2, 2, 3, 1)),
    # It takes arguments that are text.
    "deepseekv3": Rewriting(
        (2, 2, 2, 0, 0), DEEPSEEK_EOS, {"tools": TEXT_ALONE, "reasoned call": TEXT_ALONE}, is_unwritten=True
    ),
    # It removes the reasoning of a call when the answer follows.
    "gptoss": Rewriting((2, 2, 2, 2, 0), "<|return|>", {"reasoned call": CALL_REWRITTEN}),
    "glm4moe": Rewriting((1, 2, 2, 1, 1)),
}


@pytest.mark.parametrize("template", PUBLISHED)
def test_every_answer_is_learned_once_after_the_prompt_that_the_model_sees(template: str, tmp_path: Path) -> None:
    assert SPEC is not None
    assert SPEC.origin is not None
    source = (Path(SPEC.origin).parent / "chat_templates" / f"{template}.jinja").read_text("utf-8")
    check_answers(source, PUBLISHED[template], tokenizer(DEEPSEEK_EOS), tmp_path)
