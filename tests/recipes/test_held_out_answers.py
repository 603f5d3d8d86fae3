"""Answers to held-out prompts are those of `transformers`, and their scores those of `rouge_score`."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
import transformers
from rouge_score.rouge_scorer import RougeScorer

from jaxtrain.cli import conversation
from jaxtrain.data.finetuning import ModelTokenizer
from jaxtrain.errors import UserError
from jaxtrain.recipes.finetune import FineTuneRecipe
from jaxtrain.recipes.finetuning import answer_scores
from jaxtrain.recipes.finetuning.answers import end_token
from tests.data.finetuning.templates import byte_level, write_folder

NEW = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of a model that writes letters and spaces, and held-out questions of many lengths."""
    root = tmp_path_factory.mktemp("answers")
    made = byte_level()
    write_folder(root / "model", "chatml", made)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=made.get_vocab_size(), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=160, initializer_range=0.5,
        eos_token_id=made.token_to_id("<|im_end|>"), pad_token_id=made.token_to_id("<|endoftext|>"),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    written = [made.token_to_id(token) for token in ("a", "b", "c", "d", "e", "Ġ", "<|im_end|>")]
    with torch.no_grad():
        model.lm_head.weight[[i for i in range(made.get_vocab_size()) if i not in written]] = 0
    model.save_pretrained(root / "model")
    questions = [f"{'what ' * (1 + 5 * (i % 5))}{i}?" for i in range(15)]
    write(root / "questions.jsonl", questions, ["?"] * len(questions))
    return root


def write(path, questions, answers):
    turns = [[("user", q), ("assistant", a)] for q, a in zip(questions, answers, strict=True)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turn]} for turn in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe(root, data="questions.jsonl", **settings):
    settings = {"method": "dora", "lora_dropout": 0.0, "rank": 2, "seq_len": 100, "batch_size": 2, **settings}
    paths = {name: root / file for name, file in (("model", "model"), ("data", data), ("validation", data))}
    return FineTuneRecipe(**paths, answer_tokens=NEW, **settings)


def trained(task):
    draw = np.random.default_rng(0)
    params = task.initial().params
    return {**params, "lora": jax.tree.map(lambda x: x + 0.1 * draw.normal(size=x.shape), params["lora"])}


def test_answers_and_scores_are_those_of_transformers_and_rouge_score(root, tmp_path, monkeypatch):
    task = recipe(root, answers=None).task()
    params = trained(task)
    exported = task.exported(params)
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "model")
    from jaxtrain.models import open_pretrained

    state = open_pretrained(root / "model").names.to_torch(exported)
    model.load_state_dict({name: torch.tensor(np.asarray(x)) for name, x in state.items()}, strict=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "model")
    rows = [json.loads(line)["messages"][0] for line in (root / "questions.jsonl").read_text().splitlines()]
    expected = []
    for row in rows:
        tokens = tokenizer.apply_chat_template([row], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        text = model.generate(**tokens, do_sample=False, max_new_tokens=NEW)[0, tokens["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(text, skip_special_tokens=True))
    assert len(set(expected)) > 5
    # Every third example is answered as the model does, and every third with its words in another order.
    wanted = [[f" {e}", " ".join(e.split()[::-1]) or "x", "a b c"][i % 3] for i, e in enumerate(expected)]
    write(root / "answered.jsonl", [row["content"] for row in rows], wanted)
    task = recipe(root, "answered.jsonl", answers=3).task()
    found = task.evaluate_answers(SimpleNamespace(params=params), True)
    asked, generated, answers = zip(*found["answers"].rows, strict=True)
    assert [*generated] == expected
    assert [*answers] == wanted
    assert all(row["content"] in text for row, text in zip(rows, asked, strict=True))
    scorer = RougeScorer(["rougeL"])
    scores = [scorer.score(w, e)["rougeL"].fmeasure for w, e in zip(wanted, expected, strict=True)]
    np.testing.assert_allclose(found["rouge_l"], np.mean(scores), rtol=1e-12)
    assert 0.2 < found["rouge_l"] < 1
    equal = [w.strip() == e.strip() for w, e in zip(wanted, expected, strict=True)]
    assert found["exact_match"] == np.mean(equal) >= 1 / 3
    some = task.evaluate_answers(SimpleNamespace(params=params), False)
    assert len(some["answers"].rows) == 3
    assert set(some["answers"].rows) < set(found["answers"].rows)
    assert some["rouge_l"] == found["rouge_l"]  # of all 15: fewer than --scored-answers
    said = [{"role": "user", "content": rows[1]["content"]}]
    chunks = [*task.reply(params, said, length=NEW, temperature=0, seed=0)]
    assert len(chunks) > 1
    assert "".join(chunks) == expected[1]


@pytest.mark.parametrize("after", ["<|im_end|>\n", ".\n<|im_end|>", "\n", ""])
def test_an_answer_ends_with_the_first_special_token_after_it(after, tmp_path):
    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}" + after + "{% endfor %}"
    texts = ModelTokenizer(
        write_folder(tmp_path, "chatml", byte_level(), chat_template=template, eos_token="<|endoftext|>")
    )
    (of_turn,), (of_text,) = (texts.encode(token).tolist() for token in ("<|im_end|>", "<|endoftext|>"))
    assert end_token(texts, True) == (of_turn if "<|im_end|>" in after else of_text)
    assert end_token(texts, False) == of_text


def test_scores_without_rouge_score_are_left_out_and_targets_refused(monkeypatch):
    assert answer_scores.answer_scores(["a b ", "c"], ["a b", "c d"]) == {
        "exact_match": 0.5,
        "rouge_l": (1 + 2 / 3) / 2,
    }
    monkeypatch.setattr(answer_scores, "has_rouge", lambda: False)
    assert answer_scores.answer_scores(["a b ", "c"], ["a b", "c d"]) == {"exact_match": 0.5}
    with pytest.raises(UserError, match=r"rouge_l needs rouge-score: pip install 'jaxtrain\[finetune\]'"):
        FineTuneRecipe(best_metric="rouge_l").task()
    with pytest.raises(UserError, match="best_metric exact_match needs scored answers"):
        FineTuneRecipe(best_metric="exact_match", scored_answers=None).task()


def test_a_conversation_keeps_its_turns_until_an_empty_line(monkeypatch, capsys):
    heard, typed = [], iter(["one", "two", " ", "three"])

    def reply(messages, *, seed):
        heard.append(([m["content"] for m in messages], seed))
        yield from ("re: ", messages[-1]["content"])

    def entered(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", entered)
    conversation.talk(reply, 7)
    assert heard == [(["one"], 7), (["one", "re: one", "two"], 8), (["three"], 7)]
    assert capsys.readouterr().out == "re: one\nre: two\nre: three\n\n"
