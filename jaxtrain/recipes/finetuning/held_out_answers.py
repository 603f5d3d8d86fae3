"""The held-out prompts of fine-tuning, which the model answers at evaluations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jaxtrain as jt
from jaxtrain.data.finetuning import ModelTokenizer
from jaxtrain.recipes.finetuning.answer_scores import INSTALL, answer_scores, has_rouge
from jaxtrain.recipes.finetuning.answers import Question, answer, end_token, questions
from jaxtrain.recipes.finetuning.example_rows import FineTuningRows
from jaxtrain.recipes.finetuning.trained_decoder import FineTunedModel


@dataclass(frozen=True, eq=False, kw_only=True)
class HeldOutAnswers:
    """Answers to held-out prompts: some are shown, more are scored.

    Args:
      model: The model.
      rows: The held-out examples.
      texts: Tokenizer.
      shown: Number of answers to show.
      scored: Number of answers to score.
      new_tokens: Number of tokens of the longest answer.
      batch_tokens: Number of tokens that are computed together, at most.
    """

    model: FineTunedModel
    rows: FineTuningRows
    texts: ModelTokenizer
    shown: int
    scored: int
    new_tokens: int
    batch_tokens: int

    @cached_property
    def asked(self) -> list[Question]:
        """The questions of an evaluation."""
        return self._questions(max(self.shown, self.scored))

    def describe(self) -> Mapping[str, str]:
        """Return what an evaluation does with the answers; nothing if there are none."""
        if not (self.scored and self.asked):
            return {}
        scores = "exact match and ROUGE-L" if has_rouge() else f"exact match (ROUGE-L needs rouge-score: {INSTALL})"
        long = sum(len(question.answer) > self.new_tokens for question in self.asked[: self.scored])
        cut = f"; {long:,} expected ones are longer than --answer-tokens {self.new_tokens}" if long else ""
        return {"answers": f"{min(self.scored, len(self.asked)):,} at every evaluation, scored by {scores}{cut}"}

    def evaluate(self, state: jt.TrainState, is_whole: bool) -> dict[str, Any]:
        """Return the scores of answers, and some of them beside the expected ones.

        Args:
          state: The state.
          is_whole: Whether to answer, score and show all held-out prompts.
        """
        asked = self._questions(None) if is_whole else self.asked
        if not asked:
            return {}
        shown, scored = (len(asked), len(asked)) if is_whole else (self.shown, self.scored)
        written, expected = self.answers(state.params, asked), [self.texts.decode(q.answer) for q in asked]
        found: dict[str, Any] = answer_scores(written[:scored], expected[:scored]) if scored else {}
        if shown:
            prompts = [self.texts.decode_all(question.prompt) for question in asked[:shown]]
            rows = [*zip(prompts, written, expected, strict=False)]
            found["answers"] = jt.Table(columns=["prompt", "generated", "expected"], rows=rows)
        return found

    def sample(self, state: jt.TrainState, seed: int) -> str:
        """Return a held-out prompt and its answer."""
        del seed
        written = self.answers(state.params, self.asked)
        return f"{self.texts.decode_all(self.asked[0].prompt)}{written[0]}"

    def answers(self, params: Any, asked: Sequence[Question]) -> list[str]:
        """Return the most likely answers."""
        return answer(
            self.model.decoder,
            self.model.adapted(params),
            [question.prompt for question in asked],
            self.texts,
            self.new_tokens,
            end=self._end,
            batch_tokens=self.batch_tokens,
        )

    @cached_property
    def _end(self) -> int | None:
        return end_token(self.texts, self.rows.has_messages)

    def _questions(self, count: int | None) -> list[Question]:
        longest = self.model.decoder.context_length
        return questions(self.rows.examples, count, longest - self.new_tokens, self._end)
