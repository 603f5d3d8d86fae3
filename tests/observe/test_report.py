"""The report shows the contents of a run's folder and loads no external resources."""

import base64
import hashlib
import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from jaxtrain.errors import UserError
from jaxtrain.observe import read_record, write_facts, write_report, write_result
from jaxtrain.observe.charts import chart_data
from jaxtrain.observe.error_analysis import ErrorAnalysis, write_error_page
from jaxtrain.observe.predictions import Predictions
from jaxtrain.observe.run_report import render_report

from .runs import write_run


def text_of(html: str) -> str:
    """Return the visible text without the curves."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"<(style|script).*?</\1>", "", html, flags=re.DOTALL)))


def test_a_page_shows_the_metrics_and_the_changed_settings(tmp_path):
    run = write_run(tmp_path / "run")
    write_result(run, step=40, references={"class entropy": 2.302}, sample=None)
    write_facts(run, {"training_data": "1,437 rows"})
    seen = text_of(render_report([read_record(run)]))
    for fact in (
        *(
            "training data 1,437 rows",
            "digits-mlp",
            "step 40 of 40",
            "best validation loss 0.07317 step 40",
            "validation accuracy 1.000 step 40",
        ),
        *(
            "class entropy 2.302 to be beaten",
            "examples per second 400 median",
            "training time 0:01 320 examples, steps alone",
        ),
        *("peak memory 256 MiB", "updates skipped 1 inf or NaN", "precision fp16 fp32", "jax 0.10.1", "All "),
    ):
        assert fact in seen


def test_the_page_holds_the_exact_curves_and_loads_nothing(tmp_path):
    record = read_record(write_run(tmp_path / "run"))
    html = render_report([record])
    (data,) = re.findall(r'<script type="application/json" id="data"[^>]*>(.*?)</script>', html, re.DOTALL)
    assert json.loads(data) == json.loads(json.dumps(chart_data([record])))
    assert html.count('<svg class="chart plot"') == len(chart_data([record])["charts"])
    assert "default-src 'none'" in html
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'; " in html
    assert "connect-src 'none'" in html
    assert "connect-src 'self'" in render_report([record], live=True)
    assert not re.findall(r"(?:src|href)\s*=", html)
    assert not re.findall(r"url\((?!#)", html)


def test_compared_runs_show_which_settings_differ(tmp_path):
    records = [read_record(write_run(tmp_path / name, lr=lr)) for name, lr in (("a", 0.01), ("b", 0.1))]
    html = render_report(records)
    seen = text_of(html)
    assert "2 runs compared" in seen
    (differing,) = re.findall(r"What differs</h2>(.*?)<details>", html, re.DOTALL)
    assert re.findall(r'scope="row">([^<]*)', differing) == ["lr"]
    assert "Nothing: the runs have equal settings." in render_report([records[0], records[0]])


def test_generated_text_is_escaped(tmp_path):
    run = write_run(tmp_path / "run")
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    write_result(run, step=40, references={evil: 1.0}, sample=evil)
    html = render_report([read_record(run)])
    assert "alert(1)</script>" not in html
    assert "<img" not in html
    assert html.count("</script>") == 2
    assert "Sample" in html


def test_the_worst_examples_of_the_newest_evaluation_are_shown(tmp_path):
    run = write_run(tmp_path / "run")
    (run.path / "eval").mkdir()
    for step, split in ((20, "validation"), (40, "train"), (40, "validation")):
        example = {"index": step, "loss": 4.0, "description": f"{split} at {step}", "picture": None}
        (run.path / f"eval/step-{step}-{split}.worst.json").write_text(
            json.dumps({"step": step, "split": split, "examples": [example]})
        )
    seen = text_of(render_report([read_record(run)]))
    assert "Worst examples step 40, validation split" in seen
    assert "validation at 40" in seen
    assert "train at 40" not in seen


@pytest.mark.parametrize(
    "lines", ["", '{"step": 0, "eval_loss": null}\n', '{"step": 1, "loss": null, "lr": 0.1}\n{"ste']
)
def test_a_run_with_few_metrics_has_a_page(lines, tmp_path):
    run = write_run(tmp_path / "run")
    run.metrics.write_text(lines)
    write_report(run.report, [read_record(run)])
    assert "digits-mlp" in run.report.read_text()
    run.metrics.unlink()
    assert "digits-mlp" in render_report([read_record(run)])


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"recipe": "digits-mlp", "settings": 3}'])
def test_a_damaged_folder_raises_an_error_of_one_line(config, tmp_path):
    run = write_run(tmp_path / "run")
    run.config.write_text(config)
    with pytest.raises(UserError, match=r"config.json cannot be read \(.*\): restore it"):
        read_record(run)


def test_the_images_of_an_evaluation_are_in_the_page(tmp_path):
    names, images = ["zero", "one"], np.linspace(0, 1, 2 * 3 * 3, dtype=np.float32).reshape(2, 3, 3, 1)
    task = SimpleNamespace(
        class_names=names,
        classes=2,
        input_text=None,
        texts=None,
        references={},
        validation=[{"image": x} for x in images],
    )
    ones = np.ones(2, np.float32)
    predictions = Predictions(np.array([0.5, 2.0], np.float32), ones, np.array([0, 1]), np.array([0, 0]), 0.75 * ones)
    evaluated = ErrorAnalysis("digits-mlp", 40, "validation", task, task.validation, {"loss": 1.25}, predictions)
    run = write_run(tmp_path / "run")
    (run.path / "eval").mkdir()
    write_error_page(run.path / "eval/step-40-validation.html", evaluated, worst=2)
    html = render_report([read_record(run)])
    assert "one predicted as zero, confidence 75%" in html
    first, _ = re.findall(r'src="data:image/png;base64,([^"]*)"', html)
    with Image.open(io.BytesIO(base64.b64decode(first))) as picture:
        np.testing.assert_array_equal(np.asarray(picture), np.round(images[1, ..., 0] * 255).astype(np.uint8))


def test_a_folder_with_only_metrics_has_a_page(tmp_path):
    run = write_run(tmp_path / "mine")
    run.config.unlink()
    seen = text_of(render_report([read_record(run)]))
    assert "mine · step 40" in seen
    assert "best validation loss 0.07317 step 40" in seen
    run.metrics.unlink()
    with pytest.raises(UserError, match="mine holds no run: give the folder of one"):
        read_record(run)
