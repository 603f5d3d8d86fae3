"""TensorBoard events, read back by TensorBoard's own reader."""

import io
import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxtrain.data import ByteTokenizer
from jaxtrain.observe import MetricsLog, read_record, write_result
from jaxtrain.observe.dashboards.final_events import log_error_analysis, log_final
from jaxtrain.observe.dashboards.tensorboard import Events
from jaxtrain.observe.error_analysis import ErrorAnalysis
from jaxtrain.observe.histograms import BINS, histograms
from jaxtrain.observe.pictures import confusion_picture, image_of
from jaxtrain.observe.predictions import Predictions
from jaxtrain.recipes import RECIPES

from .runs import line, write_run


def read(folder) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0})
    events.Reload()
    return events


def test_the_end_of_a_run_adds_settings_and_sample_and_keeps_all_scalars(tmp_path):
    run = write_run(tmp_path / "run")
    write_result(run, step=40, references={}, sample="def f():\n    return 1\n")
    with MetricsLog(tmp_path / "metrics.jsonl", run.tensorboard, from_step=0) as log:
        for step in (10, 20):
            log.write({k: v for k, v in line(step).items() if v is not None})
    log_final(run.tensorboard, read_record(run))
    events = read(run.tensorboard)
    assert [e.step for e in events.Scalars("loss")] == [10, 20]
    (text,) = events.Tensors("sample/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (40, b"    def f():\n        return 1\n")

    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    def hparams(tag):
        return HParamsPluginData.FromString(events.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content)

    settings = hparams("session_start_info").session_start_info.hparams
    assert {name: settings[name].number_value for name in ("steps", "lr")} == {"steps": 40.0, "lr": 0.01}
    assert {name: settings[name].string_value for name in ("recipe", "data")} == {
        "recipe": "digits-mlp",
        "data": "None",
    }
    metrics = [info.name.tag for info in hparams("experiment").experiment.metric_infos]
    assert metrics == ["eval/loss", "eval/accuracy"]


def evaluated(predictions, **task) -> ErrorAnalysis:
    digits = RECIPES["digits-mlp"].task()
    return ErrorAnalysis("digits-mlp", 12, "validation", replace(digits, **task), digits.validation, {}, predictions)


def test_the_worst_examples_are_written_as_text_and_images(tmp_path):
    source = RECIPES["digits-mlp"].task().validation
    n, target = len(source), np.array([int(source[i]["label"]) for i in range(len(source))], np.int32)
    predicted, loss = target.copy(), np.zeros(n, np.float32)
    wrong = np.flatnonzero(target == 3)[:4]
    predicted[wrong], loss[wrong] = 8, [5, 7, 4, 6]
    found = Predictions(loss, np.ones(n, np.float32), target, predicted, np.full(n, 0.75, np.float32))
    log_error_analysis(tmp_path / "tb", evaluated(found), worst=3)
    events = read(tmp_path / "tb")
    worst = wrong[[1, 3, 0]]
    tags = {f"validation/worst/image/{place}" for place in range(3)}
    assert set(events.Tags()["images"]) == tags | {"validation/confusion"}
    for place, i in enumerate(worst):
        (event,) = events.Images(f"validation/worst/image/{place}")
        shown = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
        assert (event.step, event.width, event.height) == (12, *shown.shape[::-1])
        np.testing.assert_allclose(shown / 255, source[int(i)]["image"][..., 0], atol=0.5 / 255)
    (text,) = events.Tensors("validation/worst/text_summary")
    first, *_ = text.tensor_proto.string_val[0].decode().splitlines()
    assert first == f"    {worst[0]}: loss 7.000, 3 predicted as 8, confidence 75%"
    (event,) = events.Images("validation/confusion")
    assert np.asarray(Image.open(io.BytesIO(event.encoded_image_string))).shape == (event.height, event.width, 3)


def test_the_confusion_image_is_darkest_for_the_largest_shares():
    picture = confusion_picture(np.array([[90, 10, 0], [0, 0, 0], [0, 50, 50]]), ["a", "b", "c"]).astype(int)
    # The corners of the cells, where no number is written.
    left = picture.shape[1] - 3 * 28 - 6
    light = np.array(
        [[picture[28 + 28 * row + 2, left + 28 * column + 2].sum() for column in range(3)] for row in range(3)]
    )
    assert light[0, 0] < light[2, 1] == light[2, 2] < light[0, 1] < light[0, 2] == light[1, 1] == 3 * 255


@pytest.mark.parametrize(
    ("values", "pixels"),
    [([-1.0, 0.0, 3.0], [0, 64, 255]), ([0.0, 0.25, 0.5], [0, 64, 128]), ([1.0, 2.0, 4.0], [64, 128, 255])],
)
def test_images_are_shown_from_the_lowest_to_the_highest_value_or_from_0_to_1(values, pixels):
    image = np.array(values)[None, :, None]
    assert image_of({"image": image}).tolist() == [pixels]
    assert image_of({"image": image.repeat(3, -1)}).tolist() == [[[x] * 3 for x in pixels]]
    assert image_of({"image": np.array(pixels, np.uint8)[None, :, None]}).tolist() == [pixels]
    assert image_of({"image": image.repeat(2, -1)}) is None


def test_the_worst_examples_of_a_language_model_are_texts(tmp_path):
    source = RECIPES["digits-mlp"].task().validation
    tokens = np.tile(np.frombuffer(b"def f", np.uint8).astype(np.int32), (len(source), 1))
    ones = np.ones(tokens.shape, np.float32)
    weight = ones * [1, 0, 1, 1, 1]
    found = Predictions(ones * np.arange(len(source))[:, None], weight, tokens, tokens, ones / 2)
    analysis = evaluated(found, texts=ByteTokenizer(), class_names=())
    mean = (len(source) - 1) / 2
    assert analysis.kinds() == {"letters": (3 * len(source), mean), "whitespace": (len(source), mean)}
    assert [(x.text, x.loss) for x in analysis.tokens(3)] == [("d", 3), ("e", None), ("f", 3), (" ", 3), ("f", 3)]
    log_error_analysis(tmp_path / "tb", analysis, worst=1)
    events = read(tmp_path / "tb")
    (text,) = events.Tensors("validation/worst/text_summary")
    last = len(source) - 1
    assert text.tensor_proto.string_val[0].decode() == f"    {last}: loss {last:.3f}, 'def f'"
    assert "validation/confusion" not in events.Tags()["images"]


def test_histograms_equal_numpys_and_count_only_finite_elements(tmp_path):
    draws = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    nonfinite = np.concatenate([draws.ravel(), [np.inf, np.nan, -np.inf]]).astype(np.float32)
    tree = {
        "w": jnp.array(draws),
        "nonfinite": jnp.array(nonfinite),
        "flat": jnp.full((3, 2), 2.0, jnp.bfloat16),
        "none": jnp.full(2, jnp.nan),
        "count": jnp.arange(3),
    }
    found = histograms({"layer": tree})
    assert set(found) == {"layer/w", "layer/nonfinite", "layer/flat", "layer/none"}
    counts, edges = np.histogram(draws, BINS)
    # A draw at an edge may round to either side.
    assert np.abs(found["layer/w"].counts - counts).sum() <= 2
    np.testing.assert_allclose(found["layer/w"].edges(), edges, atol=1e-6)
    np.testing.assert_array_equal(found["layer/w"].counts, found["layer/nonfinite"].counts)
    assert float(found["layer/nonfinite"].sum_squares) == pytest.approx(
        float((draws.astype(np.float64) ** 2).sum()), rel=1e-5
    )

    with Events(tmp_path / "tb", from_step=0) as events:
        events.histograms(7, found)
    events = read(tmp_path / "tb")
    assert set(events.Tags()["histograms"]) == {"layer/w", "layer/nonfinite", "layer/flat"}
    (event,) = events.Histograms("layer/w")
    assert (event.step, event.histogram_value.num, sum(event.histogram_value.bucket)) == (7, 200, 200)
    assert events.Histograms("layer/flat")[0].histogram_value.max == 2.0


def test_pytorch_is_not_imported(tmp_path):
    written = "import sys; from pathlib import Path; from jaxtrain.observe.dashboards.tensorboard import Events; "
    written += f"Events(Path({str(tmp_path / 'events')!r})); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", written], check=True)


def test_other_threads_can_import_pytorch_meanwhile(tmp_path):
    """A fake tensorboardX waits during its import until another thread has imported a fake torch."""
    (tmp_path / "torch.py").write_text("")
    package = tmp_path / "tensorboardX"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import sys, threading\n"
        "found = []\n"
        "def load():\n"
        "    try:\n"
        "        import torch\n"
        "    except ImportError as error:\n"
        "        found.append(error)\n"
        "thread = threading.Thread(target=load)\n"
        "try:\n"
        "    import torch\n"
        "    has_torch = True\n"
        "except ImportError:\n"
        "    has_torch = False\n"
        "thread.start(); thread.join()\n"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from jaxtrain.observe.dashboards.tensorboard import _import_tensorboardx\n"
        "_import_tensorboardx()\n"
        "import tensorboardX\n"
        "assert (tensorboardX.has_torch, tensorboardX.found) == (False, []), tensorboardX.found\n"
        "import torch\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
