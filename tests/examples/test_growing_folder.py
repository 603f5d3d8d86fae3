"""The folder that grows: each file is read once in an epoch, also over a resume."""

import json
import os
import signal
from itertools import islice

import pytest

import jaxtrain as jt
from jaxtrain.data.batches import training_batches
from tests.examples.test_examples import load

ROWS, CHUNK = 2, 5


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "texts"
    path.mkdir()
    # The order of arrival is not the order of the names.
    arrive(path, "b", 40, 1)
    arrive(path, "a", 40, 2)
    return path


def arrive(folder, letter, length, second):
    path = folder / f"{letter}.part"
    path.write_text(letter * length)
    os.utime(path, (second, second))
    path.rename(folder / f"{letter}.txt")


def recipe_of(folder, **settings):
    tiny = {"seq_len": CHUNK - 1, "width": 8, "layers": 1, "batch_size": ROWS, "log_every": 1}
    return load("growing_folder.py", folder=folder, pattern="*.txt", **tiny, **settings)


def batches_of(folder):
    # Without reading ahead, which would look for new files earlier.
    return training_batches(recipe_of(folder).task().train, ROWS, 0, prefetch=0)


def letters(batches, count):
    """Return the letters of the next batches."""
    return "".join(
        bytes(row.tolist()).rstrip(b"\0").decode() for batch in islice(batches, count) for row in batch["bytes"]
    )


def test_a_file_that_arrives_is_read_in_the_same_epoch(folder):
    batches = batches_of(folder)
    assert letters(batches, 5) == 40 * "b" + 10 * "a"
    arrive(folder, "0", 13, 3)  # not a multiple of a chunk
    assert letters(batches, 3) == 30 * "a"
    assert letters(batches, 1) == 10 * "0"
    arrive(folder, "c", 5, 4)
    assert letters(batches, 1) == 3 * "0" + 5 * "c"
    assert letters(batches, 2) == 20 * "b"


@pytest.mark.parametrize("stop", [1, 5, 8, 9])
def test_a_resume_reads_no_byte_twice(folder, stop):
    batches = batches_of(folder)
    before = letters(batches, stop)
    arrive(folder, "c", 30, 3)
    resumed = batches_of(folder)
    resumed.restore(json.loads(json.dumps(batches.state())))
    after = letters(resumed, 11 - stop)
    if stop == 9:  # the second epoch had begun
        assert before + after == 40 * "b" + 40 * "a" + 30 * "b"
    else:
        assert before + after == 40 * "b" + 40 * "a" + 30 * "c"


def test_a_run_reads_a_file_that_is_added_while_it_trains_and_resumes_in_it(folder, tmp_path):
    recipe = recipe_of(folder, steps=60, save_every=60)
    add = {3: ("c", 200, 3), 20: ("d", 200, 4)}

    def on_step(step, metrics, state):
        if step in add:
            arrive(folder, *add[step])
        if step == 30:
            signal.raise_signal(signal.SIGINT)

    def position(step):
        saved = json.loads((tmp_path / "run" / "checkpoints" / str(step) / "run.json").read_text())
        return saved["data"]["place"]["epoch"], saved["data"]["place"]["state"]

    jt.fit(recipe, tmp_path / "run", quiet=True, on_step=on_step)
    # 30 batches of 10 bytes: all of b, a and c, and 20 of d.
    assert position(30) == (0, {"files": ["b.txt", "a.txt", "c.txt", "d.txt"], "offset": 20})
    jt.fit(recipe, tmp_path / "run", quiet=True, resume=True)
    # 48 batches are an epoch; then 40 bytes of b, 40 of a, and 40 of c.
    assert position(60) == (1, {"files": ["b.txt", "a.txt", "c.txt"], "offset": 40})
