"""`jaxtrain eval` reproduces the run's evaluation bit for bit and lists its examples."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxtrain.cli import main
from jaxtrain.data import digits

SMALL = "--batch-size 8 --steps 4 --log-every 2 --eval-every 4 --save-every 4"
ENCODER = "--num-hidden-layers 1 --hidden-size 8 --num-attention-heads 2"
RUNS = {
    "digits-mlp": "--hidden 8 --precision bf16",
    "gpt-stdlib": "--data texts --seq-len 16 --n-layer 1 --n-embd 8 --n-head 2 --eval-sequences 5",
    "digits-resnet": "--width 4",
    "llama-stdlib": "--data texts --packing --num-hidden-layers 1 --hidden-size 8 --intermediate-size 8"
    " --num-attention-heads 2 --num-key-value-heads 1 --seq-len 16",
    "bert-stdlib": f"--data texts --seq-len 16 --masked 0.05 {ENCODER}",
    "bert-keywords": f"--data table.parquet --seq-len 12 {ENCODER}",
    "t5-dates": "--num-layers 1 --d-model 8 --num-heads 2 --eval-pairs 20",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A working folder with a folder of texts."""
    root = tmp_path_factory.mktemp("eval")
    (root / "texts").mkdir()
    for i in range(4):
        (root / "texts" / f"{i}.txt").write_text(f"<b>qüi</b> fox {i}\n" * 30)
    return root


def write_table(path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    words = [("bad", "<i>good</i>")[i % 2] * (1 + i % 3) for i in range(80)]
    parquet.write_table(pyarrow.table({"text": words, "label": ["no", "yes & no"] * 40}), path)


LONG = {"digits-resnet", "llama-stdlib", "bert-keywords"}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.nightly] * (name in LONG)) for name in RUNS]
)
def run(request, root):
    """The folder of a recipe trained and evaluated."""
    folder = trained(root, request.param)
    assert main(["eval", str(folder), "--worst", "3", "--json", f"{folder}.json"]) == 0
    return folder


def trained(root, name):
    folder = root / name
    if "table.parquet" in RUNS[name]:
        write_table(root / "table.parquet")
    if not folder.exists():
        flags = [str(root / flag) if flag in ("texts", "table.parquet") else flag for flag in RUNS[name].split()]
        assert main(["train", name, *flags, *SMALL.split(), "--out", str(folder)]) == 0
    return folder


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_metrics_equal_those_of_the_run_and_the_means_over_examples(run):
    result = json.loads(run.with_suffix(".json").read_text())
    logged = lines(run / "metrics.jsonl")[-1]
    assert result["step"] == logged["step"] == 4
    for metric in [key for key in logged if key.startswith("eval_")]:
        assert result[metric.removeprefix("eval_")] == logged[metric]
    examples = lines(run / "eval" / "step-4-validation.jsonl")
    assert len(examples) == result["examples"]
    weights = [example.get("tokens", 1) for example in examples]
    losses = [example["loss"] or 0.0 for example in examples]
    # Each loss is rounded once to float32; the run sums batches.
    assert np.average(losses, weights=weights) == pytest.approx(result["loss"], rel=1e-6)
    for example in examples:
        if "losses" in example:
            mean = np.mean(example["losses"]) if example["tokens"] else None
            assert example["loss"] == (None if mean is None else pytest.approx(mean, rel=1e-6))
            assert len(example["target"]) == example["tokens"]
    finite = [example["loss"] for example in examples if example["loss"] is not None]
    assert [worst["loss"] for worst in result["worst"]] == sorted(finite, reverse=True)[:3]
    if "confusion" in result:
        matrix = np.array(result["confusion"])
        assert matrix.sum() == len(examples)
        assert np.trace(matrix) / matrix.sum() == pytest.approx(result["accuracy"], rel=1e-6)
        hits = [example["target"] == example["predicted"] for example in examples]
        assert np.mean(hits) == pytest.approx(result["accuracy"], rel=1e-6)
    if "loss_by_kind" in result:
        kinds = result["loss_by_kind"].values()
        assert sum(kind["tokens"] for kind in kinds) == sum(weights)
        overall = sum(kind["tokens"] * kind["loss"] for kind in kinds) / sum(weights)
        assert overall == pytest.approx(result["loss"], rel=1e-6)
    assert sum(bin["predictions"] for bin in result["calibration"]) == sum(weights)


class Page(HTMLParser):
    """Text and elements of a page, and the URLs it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text, self.titles, self.images = [], [], "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self.links += [value for key, value in found.items() if key in ("src", "href") and value[:5] != "data:"]
        self.titles += [found["title"]] if "title" in found else []
        self.images += [found["src"]] if tag == "img" else []

    def handle_data(self, data):
        self.text += data


def test_the_page_is_self_contained_and_shows_the_worst_examples(run):
    page = Page((run / "eval" / "step-4-validation.html").read_text())
    result = json.loads(run.with_suffix(".json").read_text())
    assert not page.links
    assert "script" not in page.tags
    assert "i" not in page.tags
    for worst in result["worst"]:
        assert f"example {worst['index']} · loss {worst['loss']:.3f}" in page.text
    tokens = "loss_by_kind" in result
    assert bool(page.titles) == tokens
    assert ("predicted as" in page.text) != tokens
    assert len(page.images) == (3 if run.name.startswith("digits") else 0)
    if run.name in ("gpt-stdlib", "llama-stdlib"):
        assert re.search("</?b>", page.text)  # as text, not as an element
    if run.name == "bert-keywords":
        assert "yes & no" in page.text


@pytest.mark.parametrize("run", ["digits-mlp"], indirect=True)
def test_an_image_on_the_page_equals_that_of_the_example(run):
    page = Page((run / "eval" / "step-4-validation.html").read_text())
    worst = json.loads(run.with_suffix(".json").read_text())["worst"][0]["index"]
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(page.images[0].partition(",")[2]))))
    np.testing.assert_array_equal(shown, np.round(digits()[1][worst]["image"][..., 0] * 255))


def test_eval_of_the_training_split_prints_a_summary(root, capsys):
    folder = trained(root, "digits-mlp")
    capsys.readouterr()
    assert main(["eval", str(folder), "--worst", "2", "--split", "train", "--out", "page.html"]) == 0
    out = capsys.readouterr().out
    assert "step 4 · train, 179 examples" in out
    assert len(re.findall(r"loss +\d+\.\d{3}  \d", out)) == 2
    assert Path("page.html").exists()
    assert len(lines(folder / "eval" / "step-4-train.jsonl")) == 179


BAD = {
    "eval": "the following arguments are required: DIR; see jaxtrain eval --help",
    "eval nowhere": "nowhere holds no run",
    "eval digits-mlp --worst 0": "--worst must be positive, got 0",
    "eval digits-mlp --split test": "test",
    "eval digits-mlp --out no/where.html": "no/where.html",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_a_one_line_error_with_exit_status_2(command, root, capsys):
    folder = trained(root, "digits-mlp")
    capsys.readouterr()
    assert main(command.replace("digits-mlp", str(folder)).split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert BAD[command] in err


def test_tensorboard_shows_the_worst_examples_and_the_confusion_matrix(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    assert "validation/worst/text_summary" in events.Tags()["tensors"]
    pictures = {f"validation/worst/image/{i}" for i in range(3)} if "digits" in run.name else set()
    classes = {"validation/confusion"} if run.name in ("digits-mlp", "digits-resnet", "bert-keywords") else set()
    assert pictures | classes <= set(events.Tags()["images"])
    assert bool(events.Tags()["images"]) == bool(pictures | classes)
