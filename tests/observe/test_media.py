"""Images, audio, texts and tables: their files, their checks, TensorBoard and the report."""

import base64
import io
import json
import re
import signal
import subprocess
import sys
import wave

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxtrain as jt
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.observe import MetricsLog, read_metrics, read_record, shown_media
from jaxtrain.observe.run_report import render_report
from jaxtrain.run import encode_media, split_media

from .runs import line, write_run

GRAY = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
COLOR = np.random.default_rng(0).integers(0, 256, (3, 4, 3), np.uint8)
TONE = np.sin(np.arange(200) / 5)
EVIL = "</script><script>alert(1)</script><img src=x>"
TABLE = jt.Table(
    ["word", "a|b *c*"], [["<i>", 1 / 3], [EVIL, None], ["_x_\n# y", np.float32("nan")], ["z", np.int64(4)]]
)


def log_media(run, steps, first=0, **media):
    run.path.mkdir(exist_ok=True)
    with MetricsLog(run.metrics, run.tensorboard, from_step=first) as log:
        for step in steps:
            log.write({"step": step, "loss": 1.0}, {tag: value(step) for tag, value in media.items()})


def shape_of(data):
    with wave.open(io.BytesIO(data)) as file:
        return file.getnframes(), file.getnchannels()


def decoded(data):
    return np.asarray(Image.open(io.BytesIO(data)))


def test_the_files_hold_the_values_that_were_logged():
    fraction = GRAY.astype(np.float32) / 255
    images = [GRAY, GRAY[..., None], fraction, jnp.asarray(fraction), COLOR, np.dstack([COLOR, GRAY])]
    files = encode_media({"x": [jt.Image(x) for x in images], "half": jt.Image(jnp.full((2, 2), 0.5, jnp.bfloat16))})
    for given, file in zip([GRAY, GRAY, GRAY, GRAY, *images[4:]], files["x"], strict=True):
        np.testing.assert_array_equal(decoded(file.data), given)
    assert np.unique(decoded(files["half"][0].data)) == [128]
    # Values that round to one of the 256 levels are valid: sigmoids and means overshoot by rounding.
    assert decoded(encode_media({"x": jt.Image(np.array([[-1e-4, 1 + 1e-4]]))})["x"][0].data).tolist() == [[0, 255]]
    whole = np.round(TONE * 32767).astype(np.int16)
    stereo = np.stack([whole, whole[::-1]], 1)
    for samples, stored in ((TONE, whole), (whole, whole), (stereo, stereo)):
        with wave.open(io.BytesIO(encode_media({"x": jt.Audio(samples, 8000)})["x"][0].data)) as file:
            assert (file.getframerate(), file.getsampwidth(), file.getnframes()) == (8000, 2, 200)
            read = np.frombuffer(file.readframes(200), "<i2").reshape(200, file.getnchannels())
        np.testing.assert_array_equal(read.reshape(stored.shape), stored)
    assert encode_media({"x": jt.Text("ä\n b")})["x"][0].data.decode() == "ä\n b"
    assert json.loads(encode_media({"x": TABLE})["x"][0].data)["data"][2:] == [["_x_\n# y", None], ["z", 4]]
    assert encode_media({"none": []}) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (jt.Image(np.zeros((3, 8, 8))), r"an image has shape \[H, W\] or .*, got \[3, 8, 8\]: transpose it"),
        (jt.Image(np.zeros((0, 8))), r"got \[0, 8\]"),
        (jt.Image(np.zeros((2, 2), np.int32)), r"uint8, or floating in \[0, 1\], got int32: convert it"),
        (jt.Image(np.array([[0, 1], [np.nan, 0]])), r"holds nan at \[1, 0\]"),
        (jt.Image(np.array([[0.0, 255.0]])), "got values from 0 to 255: scale or clip it"),
        (jt.Image([[0.0], [0.0, 1.0]]), "not an array"),
        (jt.Audio(np.zeros((2, 800)), 8000), r"up to 8 channels, got \[2, 800\]: transpose it"),
        (jt.Audio(np.array([0.0, -1.5]), 8000), r"floating in \[-1, 1\], got values from -1.5 to 0"),
        (jt.Audio(TONE, 0), "rate must be a positive integer, the samples per second, got 0"),
        (jt.Audio(TONE, 44.1), "got 44.1"),
        (jt.Text(b"yes"), r"Text takes a string, got bytes b'yes': convert it by str\(\)"),
        (jt.Table(["a", "b"], [[1, 2], [3]]), r"row 1 has 1 values for 2 columns: \[3\]"),
        (jt.Table(["a", 2], []), r"the columns of a table are strings, got \['a', 2\]"),
        (jt.Table("ab", []), "columns of a table must be a sequence, got str 'ab'"),
        (jt.Table(["a"], [[np.zeros(2)]]), r"row 0 holds an array of float64 \[2\]"),
        (np.zeros((8, 8)), r"is an array of float64 \[8, 8\]: wrap it in jaxtrain.Image"),
        ([jt.Text("a"), jt.Image(GRAY)], "mixes png, txt: log each kind under a tag of its own"),
    ],
)
def test_invalid_media_are_errors_of_one_line_that_name_the_tag(value, message):
    with pytest.raises(UserError, match=rf"media 'mine'.*{message}") as raised:
        encode_media({"fine": jt.Text(""), "mine": value})
    assert "\n" not in str(raised.value)


def test_an_evaluation_is_split_into_numbers_and_media():
    metrics, media = split_media({"f1": jnp.float32(0.5), "texts": [jt.Text("a")], "n": 3, "image": jt.Image(GRAY)})
    assert metrics == {"f1": 0.5, "n": 3.0}
    assert [*media] == ["texts", "image"]
    with pytest.raises(
        UserError, match=r"the evaluation's 'grid' is an array of float64 \[2, 2\]: return a number, jax"
    ):
        split_media({"grid": np.zeros((2, 2))})
    with pytest.raises(UserError, match=r"media 'losses'\[0\] is float 1.0: wrap it"):
        split_media({"losses": [1.0, 2.0]})
    with pytest.raises(UserError, match="a non-empty string as tag, got 3"):
        encode_media({3: jt.Text("")})


def test_a_resume_drops_later_media_and_replaces_no_file(tmp_path):
    run = jt.run_folder.RunFolder(tmp_path / "run")
    log_media(run, range(4), text=lambda step: jt.Text(f"first {step}"))
    before = [one.media["text"] for one in read_metrics(run.metrics)]
    log_media(run, range(2, 4), first=2, text=lambda step: jt.Text(f"first {step}" if step == 2 else "other"))
    after = [one.media["text"] for one in read_metrics(run.metrics)]
    assert after[:3] == before[:3]
    assert [(run.media / names[0]).read_text() for names in after] == ["first 0", "first 1", "first 2", "other"]
    superseded = [
        json.loads(text) for text in run.metrics.with_name("metrics.superseded.jsonl").read_text().splitlines()
    ]
    assert [(run.media / one["media"]["text"][0]).read_text() for one in superseded] == ["first 2", "first 3"]


def test_a_file_that_cannot_be_written_ends_the_run_with_one_line(tmp_path):
    run = jt.run_folder.RunFolder(tmp_path / "run")
    log_media(run, [0], text=lambda step: jt.Text("a"))
    with MetricsLog(run.metrics, run.tensorboard, from_step=1) as log:
        run.media.rename(tmp_path / "moved")
        run.media.touch()
        with pytest.raises(RunFailed, match=r"step 1 could not be logged in .*\(File exists\)"):
            log.write({"step": 1}, {"text": jt.Text("b")})
    assert [one.step for one in read_metrics(run.metrics)] == [0]


KILLED = """
import sys
from pathlib import Path
import numpy as np
import jaxtrain as jt
from jaxtrain.observe import MetricsLog
folder = Path(sys.argv[1])
with MetricsLog(folder / "metrics.jsonl", folder / "tensorboard", from_step=0) as log:
    for step in range(100_000):
        log.write({"step": step}, {"x": [jt.Image(np.full((9, 9), step % 256, np.uint8)), jt.Image(np.ones((9, 9)))]})
        print(step, flush=True)
"""


def test_after_sigkill_every_line_has_its_files(tmp_path):
    run = jt.run_folder.RunFolder(tmp_path)
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        while child.stdout.readline() != "30\n":
            assert child.poll() is None
        child.send_signal(signal.SIGKILL)
    lines = read_metrics(run.metrics)
    assert len(lines) > 30
    for one in lines:
        first, _ = [decoded((run.media / name).read_bytes()) for name in one.media["x"]]
        assert np.unique(first) == [one.step % 256]
    log_media(run, [one.step for one in lines[-5:]], first=lines[-5].step, x=lambda step: jt.Image(GRAY))
    assert [one.step for one in read_metrics(run.metrics)] == [one.step for one in lines]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's own packages
def test_tensorboard_reads_images_audio_texts_and_tables(tmp_path):
    from tensorboard.plugin_util import markdown_to_safe_html

    run = jt.run_folder.RunFolder(tmp_path / "run")
    media = {
        "gray": lambda step: jt.Image(GRAY),
        "colors": lambda step: [jt.Image(COLOR), jt.Image(np.dstack([COLOR, GRAY]))],
        "tone": lambda step: jt.Audio(np.stack([TONE, TONE], 1), 8000),
        "text": lambda step: jt.Text("*a*\n"),
        "table": lambda step: TABLE,
    }
    log_media(run, [0, 5, 6], **media)
    log_media(run, [5], first=5, **media)
    events = EventAccumulator(str(run.tensorboard), size_guidance={"images": 0, "audio": 0, "tensors": 0})
    events.Reload()
    assert set(events.Tags()["images"]) == {"gray", "colors/0", "colors/1"}
    assert [event.step for event in events.Images("gray")] == [0, 5]
    np.testing.assert_array_equal(decoded(events.Images("colors/1")[0].encoded_image_string)[..., :3], COLOR)
    assert (events.Images("gray")[0].width, events.Images("gray")[0].height) == (4, 3)
    (_, tone) = events.Audio("tone")
    assert (tone.step, tone.sample_rate, tone.length_frames, tone.content_type) == (5, 8000, 200, "audio/wav")
    assert shape_of(tone.encoded_audio_string) == (200, 2)
    text, table = (events.Tensors(f"{tag}/text_summary")[1].tensor_proto.string_val[0] for tag in ("text", "table"))
    assert "<pre><code>*a*\n</code></pre>" in markdown_to_safe_html(text)
    shown = markdown_to_safe_html(table)
    assert re.findall(r"<th>(.*?)</th>", shown) == ["word", "a|b *c*"]
    cells = re.findall(r"<td>(.*?)</td>", shown)
    assert cells[:2] == ["&lt;i&gt;", "0.333333"]
    assert cells[2:] == [EVIL.replace("<", "&lt;").replace(">", "&gt;"), "", "_x_ # y", "", "z", "4"]


def test_the_report_shows_the_media_of_the_steps_and_escapes_texts(tmp_path):
    run = write_run(tmp_path / "run", steps=20)
    log_media(
        run,
        [30, 40],
        first=30,
        gray=lambda step: jt.Image(GRAY),
        wide=lambda step: jt.Image(np.zeros((2, 500), np.uint8)),
        tone=lambda step: jt.Audio(TONE, 8000),
        text=lambda step: jt.Text(f"{EVIL} {step}"),
        table=lambda step: TABLE,
        **{EVIL: lambda step: jt.Text("tag")},
    )
    html = render_report([read_record(run)])
    assert "alert(1)</script>" not in html
    assert html.count("</script>") == 2
    first, second = re.findall(r'src="data:image/png;base64,([^"]*)" width="128" class="enlarged"', html)
    np.testing.assert_array_equal(decoded(base64.b64decode(first)), GRAY)
    assert first == second
    assert len(re.findall(r'src="data:image/png[^"]*" width="500">', html)) == 2
    sound = re.findall(r'<audio [^>]*src="data:audio/wav;base64,([^"]*)"', html)
    assert len(sound) == 2
    assert shape_of(base64.b64decode(sound[0])) == (200, 1)
    assert html.count("<pre") == 4
    assert re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td></tr>', html)[0] == ("&lt;i&gt;", "0.333333")
    assert len(re.findall(r'data-step="30" hidden', html)) == 6
    assert len(re.findall(r'data-step="40">', html)) == 6
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    run.media.rename(tmp_path / "moved")
    assert "0 of 1 are shown: all are in" in render_report([read_record(run)])
    assert 'data-tag="' not in render_report([read_record(write_run(tmp_path / "other"))])


def test_the_page_is_bounded_and_reports_what_it_omits(tmp_path, monkeypatch):
    monkeypatch.setattr(shown_media, "_PAGE_BYTES", 4000)
    run = write_run(tmp_path / "run", steps=0)
    noise = np.random.default_rng(0).integers(0, 256, (90, 20, 20), np.uint8)  # about 460 bytes as PNG
    log_media(
        run,
        range(1, 61),
        first=1,
        many=lambda step: [jt.Text(str(i)) for i in range(30)],
        noise=lambda step: jt.Image(noise[step]),
    )
    many, noisy = shown_media.shown_media([read_record(run)])
    assert (many.tag, noisy.tag) == ("many", "noise")
    assert [len(one.items) for one in many.steps] == [24] * 50
    assert many.left_out == f"50 of 60 steps are shown: all are in {run.media}"
    assert many.steps[0].left_out == f"24 of 30 are shown: all are in {run.media}"
    assert [one.step for one in noisy.steps] == [1, 21, 40, 60]
    assert noisy.left_out.startswith("4 of 60 steps")
    log_media(run, [61], first=61, big=lambda step: [jt.Image(noise[0]), jt.Image(noise.reshape(-1, 100))])
    (big,) = [one for one in shown_media.shown_media([read_record(run)]) if one.tag == "big"]
    assert (len(big.steps[0].items), big.steps[0].left_out[:14]) == (1, "1 of 2 are sho")
    monkeypatch.setattr(shown_media, "_PAGE_BYTES", 200_000)
    table = jt.Table([str(i) for i in range(40)], [[0] * 40] * 200)
    log_media(run, [62], first=62, table=lambda step: table, long=lambda step: jt.Text("é" * 30_000))
    *_, table, long = (
        one.steps[0].items[0] for one in shown_media.shown_media([read_record(run)]) if one.steps[0].items
    )
    assert (len(table.rows), len(table.rows[0]), len(long.text)) == (100, 30, 20_000)
    assert table.left_out == "the first 100 of 200 rows, the first 30 of 40 columns"
    assert long.left_out == "the first 20,000 of 30,000 characters"
    monkeypatch.setattr(shown_media, "_PAGE_BYTES", 2**20)
    for step, rows, shown in ((63, 2, 2000), (64, 200, 200)):
        log_media(run, [step], step, cells=lambda _, rows=rows: jt.Table(["x"], [["é" * 3000]] * rows))
        cells = shown_media.shown_media([read_record(run)])[-1].steps[-1].items[0].rows
        assert cells[0] == ["é" * shown + "…"]


def test_a_log_line_keeps_its_media(tmp_path):
    run = jt.run_folder.RunFolder(tmp_path / "run")
    log_media(run, [3], text=lambda step: jt.Text("a"))
    (one,) = read_metrics(run.metrics)
    assert one.to_json() == json.loads(run.metrics.read_text())
    assert "media" not in one.values()
    assert one.other == {}
    assert line(10) == jt.observe.LogLine.from_json(line(10)).to_json()
