"""A run says of bad data at least what a step says: the same arrays and the same values, in training and validation."""

import re
import warnings
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.cli import main
from jaxtrain.losses import cross_entropy

ROWS, CLASSES, ROW = 8, 3, 5
LEAVES = ("image", "label", "group", "target")


def good_data():
    rng = np.random.default_rng(0)
    return {
        "image": rng.normal(size=(ROWS, 4)).astype(np.float32),
        "label": (np.arange(ROWS) % CLASSES).astype(np.int32),
        "group": (np.arange(ROWS) % 2).astype(np.int32),
        "target": rng.normal(size=ROWS).astype(np.float32),
    }


def init():
    return {"w": jnp.zeros((4, CLASSES)), "groups": jnp.zeros((2, CLASSES))}


def loss_fn(params, batch, rng):
    logits = batch["image"] @ params["w"] + params["groups"][batch["group"]]
    of_groups = cross_entropy(logits[:, :2], batch["group"])
    error = (logits.sum(-1) - batch["target"]) ** 2
    return jt.Loss.of(cross_entropy(logits, batch["label"]) + of_groups + error), {}


def changed(name, row, value):
    """Return the data with one value changed."""
    data = good_data()
    data[name][(row, *[0] * (data[name].ndim - 1))] = value
    return data


def with_leaf(name, convert):
    data = good_data()
    return {**data, name: convert(data[name])}


def without(name):
    return {key: x for key, x in good_data().items() if key != name}


RNG = np.random.default_rng(7)
BAD = {
    **{
        f"{name} of {value}": (changed, name, int(RNG.integers(ROWS)), value)
        for name in ("label", "group")
        for value in (-1, CLASSES, 7, 2**31 - 1)
    },
    **{
        f"{value} in {name}": (changed, name, int(RNG.integers(ROWS)), value)
        for name in ("image", "target")
        for value in (np.nan, np.inf, -np.inf)
    },
    **{f"{name} as text": (with_leaf, name, lambda x: x.astype(str)) for name in LEAVES},
    **{f"{name} as objects": (with_leaf, name, lambda x: x.astype(object)) for name in LEAVES},
    **{f"{name} in float": (with_leaf, name, lambda x: x.astype(np.float32)) for name in ("label", "group")},
    **{f"no {name}": (without, name) for name in LEAVES},
    **{f"{name} misspelled": (lambda name: {**without(name), f"{name}s": good_data()[name]}, name) for name in LEAVES},
    **{f"{name} of fewer rows": (with_leaf, name, lambda x: x[:-3]) for name in LEAVES},
    "wider images": (with_leaf, "image", lambda x: np.concatenate([x, x], 1)),
    "no arrays": (dict,),
}


def message(error):
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def said_by_the_step(batch):
    """Return what the step says of a batch, as an error or a warning; the empty string if it accepts it."""
    step = jt.train_step(loss_fn, optax.sgd(0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            step(step.init(init()), batch)
        except Exception as error:
            return message(error)
    return "\n".join(str(warning.message) for warning in caught)


def run_of(folder, train, validation=None):
    @dataclass(frozen=True, kw_only=True)
    class Classes(jt.Recipe):
        steps: int = 3
        batch_size: int = ROWS

        def task(self):
            return jt.Task(init=init, loss_fn=loss_fn, train=train, validation=validation)

        def make_optimizer(self):
            return optax.sgd(0.1)

    try:
        jt.fit(Classes(), folder, quiet=True)
    except Exception as error:
        return message(error)
    return ""


def named_in(text):
    """Return the arrays that a message names, and the values that it gives of them."""
    names = {name for name in LEAVES if re.search(rf"\b{name}s?\b", text)}
    return names | set(re.findall(r"from (-?\d+) to (-?\d+)", text))


@pytest.mark.parametrize("place", ["train", "validation"])
@pytest.mark.parametrize("kind", sorted(BAD, key=lambda kind: kind[::-1]))
def test_a_run_says_at_least_what_the_step_says(kind, place, tmp_path):
    make, *arguments = BAD[kind]
    bad = make(*arguments)
    expected = said_by_the_step(bad)
    assert expected, "the step accepts this"
    found = run_of(tmp_path / "run", *([bad] if place == "train" else [good_data(), bad]))
    missing = named_in(expected) - named_in(found)
    # Unequal lengths are found before any loss_fn sees them: the two arrays suffice.
    if "fewer rows" in kind or kind == "no arrays":
        assert "give all arrays of the data the same length" in found or "is an empty mapping" in found
        assert kind == "no arrays" or kind.partition(" ")[0] in found
    else:
        assert not missing, (missing, expected, found)


@pytest.mark.parametrize("place", ["train", "validation"])
def test_a_run_says_that_data_are_empty(place, tmp_path):
    empty = {name: x[:0] for name, x in good_data().items()}
    found = run_of(tmp_path / "run", *([empty] if place == "train" else [good_data(), empty]))
    expected = "the training data have no examples" if place == "train" else "the data to evaluate have no examples"
    assert found.startswith(expected)


def test_names_that_validation_lacks_are_named(tmp_path):
    data = good_data()
    found = run_of(tmp_path / "run", data, {("class" if name == "label" else name): x for name, x in data.items()})
    assert found.startswith("the validation data have no 'label', which the training data have, only ")
    assert "class" in found


def test_a_label_of_a_later_evaluation_is_named(tmp_path, capsys):
    """The first evaluation sees good data, as with a stream."""
    evaluations = []

    def stream():
        evaluations.append(None)
        data = good_data() if len(evaluations) == 1 else changed("label", ROW, 7)
        return ({name: x[i] for name, x in data.items()} for i in range(ROWS))

    @dataclass(frozen=True, kw_only=True)
    class Classes(jt.Recipe):
        def task(self):
            return jt.Task(init=init, loss_fn=loss_fn, train=good_data(), validation=stream)

    jt.fit(Classes(steps=2, batch_size=ROWS), tmp_path / "run", quiet=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: step 2: the validation loss is nan, as a label outside 0..classes - 1 ")
    assert "label from 0 to 7" in line


def test_updates_that_are_all_skipped_name_the_values_of_the_batch(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Classes(jt.Recipe):
        def task(self):
            return jt.Task(init=init, loss_fn=loss_fn, train=changed("image", ROW, np.nan))

    recipe = Classes(steps=9, batch_size=ROWS, precision="fp16", max_skips=3)
    with pytest.raises(
        jt.UserError, match=r"the state is saved: the loss is nan, and so are values .* in image: leave"
    ):
        jt.fit(recipe, tmp_path / "run", quiet=True)


@pytest.mark.parametrize(("label", "is_named"), [(2, False), (7, True)])
def test_labels_that_a_task_bounds_are_named_only_if_they_are_out_of_range(label, is_named, tmp_path):
    """A loss that is NaN for another reason does not make labels suspect that are known to be right."""

    def diverging(params, batch, rng):
        loss, metrics = loss_fn(params, batch, rng)
        return loss._replace(total=loss.total * jnp.where(params["w"].any(), jnp.nan, 1.0)), metrics

    good, bad = good_data(), changed("label", ROW, label)
    train = [{name: x[i] for name, x in data.items()} for data in (good, bad) for i in range(ROWS)]

    @dataclass(frozen=True, kw_only=True)
    class Classes(jt.Recipe):
        def task(self):
            return jt.Task(init=init, loss_fn=diverging, train=lambda: iter(train), classes=CLASSES)

    with pytest.raises(jt.UserError, match="the loss is nan and") as caught:
        jt.fit(Classes(steps=4, batch_size=ROWS), tmp_path / "run", quiet=True)
    assert ("label from 0 to 7" in str(caught.value)) == is_named
    assert "group from" not in str(caught.value)


def test_a_skipped_update_names_the_values_of_its_batch(tmp_path, capsys):
    data = good_data()
    rows = [{name: x[i % ROWS] for name, x in data.items()} for i in range(4 * ROWS)]
    rows[3] = {**rows[3], "target": np.float32(np.inf)}

    @dataclass(frozen=True, kw_only=True)
    class Classes(jt.Recipe):
        def task(self):
            return jt.Task(init=init, loss_fn=loss_fn, train=rows)

    jt.fit(Classes(steps=8, batch_size=ROWS, precision="fp16", log_every=8), tmp_path / "run", quiet=True)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "skipped" in line)
    assert "was skipped: the loss is inf, and so are values of the batch, in target: leave out" in line


FILE = """
from dataclasses import dataclass
import jaxtrain as jt, numpy as np, optax
from tests.runner.test_bad_data import init, loss_fn, good_data, changed

@dataclass(frozen=True, kw_only=True)
class Classes(jt.Recipe):
    steps: int = 3
    batch_size: int = 8
    place: str = "train"
    name: str = "label"
    value: str = "7"

    def task(self):
        bad = changed(self.name, 5, float(self.value))
        train, validation = (bad, None) if self.place == "train" else (good_data(), bad)
        return jt.Task(init=init, loss_fn=loss_fn, train=train, validation=validation)
"""


@pytest.mark.parametrize(
    ("flags", "status", "named"),
    [
        ("--place train", 1, "label from 0 to 7"),
        ("--place validation", 2, "label from 0 to 7"),
        ("--place train --name image --value nan", 1, "values of the batch, in image"),
        ("--place validation --name target --value inf", 2, "values of the batch, in target"),
    ],
)
def test_the_command_says_it_too(flags, status, named, tmp_path, capsys):
    (tmp_path / "classes.py").write_text(FILE)
    assert main(f"train {tmp_path}/classes.py::Classes --out {tmp_path}/run --quiet {flags}".split()) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxtrain: ")
    assert named in line
