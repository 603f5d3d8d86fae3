"""A state is restored as it was saved, despite damaged files and on other devices."""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import RunFailed, UserError
from jaxtrain.runner import checkpoint
from jaxtrain.runner.checkpoint import Checkpoints, Retention, restore_params, saved_steps
from jaxtrain.runner.manifest import DamagedCheckpoint, verify
from jaxtrain.step import TrainState


def state(step: int, sharding=None) -> TrainState:
    """Return a state with leaves of every kind: keys, scalars, low precision and None."""
    params = {"w": jnp.arange(48, dtype=jnp.float32).reshape(8, 6) / 7 + step, "b": jnp.full(6, step, jnp.bfloat16)}
    if sharding is not None:
        params = {"w": jax.device_put(params["w"], sharding), "b": params["b"]}
    count = jnp.asarray(step, jnp.int32)
    adam = {"mu": jax.tree.map(lambda x: x * 2, params), "count": count + 1}
    window = {"sums": jax.tree.map(lambda x: x * 3, params), "weight": jnp.asarray(step / 3, jnp.float32)}
    ema = jax.tree.map(lambda x: x / 2, params)
    lost = jax.tree.map(jnp.negative, params)
    return TrainState(count, count * 2, params, None, adam, (), jax.random.key(step), window, ema, compensation=lost)


def same(one: TrainState, other: TrainState) -> bool:
    def bits(x):
        return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return all(
        a.dtype == b.dtype and bits(a).tobytes() == bits(b).tobytes()
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def save(folder: Path, *saved: int, retention: Retention | None = None) -> None:
    with Checkpoints(folder / "checkpoints", retention) as checkpoints:
        for step in saved:
            checkpoints.save(state(step), {"next_batch": step})


def restore(folder: Path, **how) -> tuple[TrainState, dict]:
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return checkpoints.restore(state(0), **how)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    save(folder, 1, 2)
    return folder


def test_the_newest_checkpoint_is_restored_to_the_bit_with_its_data(two):
    restored, data = restore(two)
    assert same(restored, state(2))
    assert not same(restored, state(1))
    assert data == {"next_batch": 2}
    assert same(restore_params(two / "checkpoints", state(0).params), state(2).params)


def test_a_saved_state_may_be_donated_at_once(tmp_path):
    def large():
        return state(3)._replace(params={"w": jnp.arange(2**22, dtype=jnp.float32)})

    overwrite = jax.jit(lambda x: x * 0, donate_argnums=0)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        mine = large()
        checkpoints.save(mine, {})
        assert not overwrite(mine.params["w"]).any()
        assert overwrite(unsaved := large().params["w"]) is not None
        assert unsaved.is_deleted()
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert same(checkpoints.restore(large())[0], large())


# Most of these change the numbers in a file.
KINDS = ("flip a bit", "flip a bit", "flip a byte", "cut short", "empty", "delete", "append", "swap")


def damage(folder: Path, rng: random.Random) -> Path | None:
    """Damage a file of the checkpoint and return its path; None if its bytes are unchanged."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    path, kind = rng.choice(files), rng.choice(KINDS)
    before = bytearray(path.read_bytes())
    after = bytearray(before)
    if kind == "delete":
        path.unlink()
        return path
    if kind == "flip a bit" and after:
        after[rng.randrange(len(after))] ^= 1 << rng.randrange(8)
    elif kind == "flip a byte" and after:
        after[rng.randrange(len(after))] = rng.randrange(256)
    elif kind == "cut short":
        del after[rng.randrange(len(after) + 1) :]
    elif kind == "empty":
        after.clear()
    elif kind == "append":
        after += bytes([rng.randrange(256)])
    elif kind == "swap":
        after = bytearray(rng.choice(files).read_bytes())
    path.write_bytes(after)
    return None if after == before else path


@pytest.mark.parametrize("count", [20, 60, pytest.param(200, marks=pytest.mark.nightly)])
def test_no_damage_to_a_checkpoint_gives_wrong_numbers(count, two, tmp_path):
    found, harmless = 0, 0
    for seed in range(count):
        folder = shutil.copytree(two, tmp_path / "run")
        path = damage(folder / "checkpoints/2", random.Random(seed))
        messages: list[str] = []
        restored, data = restore(folder, on_damaged=messages.append)
        if messages:
            found += 1
            assert same(restored, state(1)), path
            assert data == {"next_batch": 1}
            assert len(messages) == 1
            assert "step 2 is damaged" in messages[0]
            assert "\n" not in messages[0]
            assert saved_steps(folder / "checkpoints") == [1]
            assert (folder / "checkpoints/damaged/2").is_dir()
        else:
            harmless += 1
            # JSON with different whitespace has the same contents.
            assert path is None or path.name == "manifest.json", path
            assert same(restored, state(2)), path
            assert data == {"next_batch": 2}
        shutil.rmtree(folder)
    assert found > 0.75 * count
    assert harmless


@pytest.mark.parametrize("name", ["manifest.json", "run.json", "state/_METADATA", "state/manifest.ocdbt"])
def test_a_damaged_file_is_named(two, tmp_path, name):
    folder = shutil.copytree(two, tmp_path / "run") / "checkpoints/2"
    (folder / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{name} is missing"):
        verify(folder)


def test_reading_a_damaged_checkpoint_moves_no_files(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "run")
    (folder / "checkpoints/2/run.json").write_text("{}")
    for read in (lambda: restore(folder), lambda: restore_params(folder / "checkpoints", state(0).params)):
        with pytest.raises(UserError, match=r"step 2 in .*run is damaged \(run.json has 2 bytes of .*--resume"):
            read()
    assert sorted(saved_steps(folder / "checkpoints")) == [1, 2]


def test_with_no_intact_checkpoint_the_error_names_the_damaged_ones(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "run")
    for step in (1, 2):
        (folder / f"checkpoints/{step}/manifest.json").unlink()
    messages: list[str] = []
    with pytest.raises(UserError, match=r"no intact checkpoint left, see .*damaged"):
        restore(folder, on_damaged=messages.append)
    assert [t.split(" is")[0] for t in messages] == ["the checkpoint of step 2", "the checkpoint of step 1"]
    # A restart gives the same error, and so does a second damaged checkpoint of the same step.
    with pytest.raises(UserError, match="no intact checkpoint left"):
        restore(folder, on_damaged=messages.append)
    save(folder, 2)
    (folder / "checkpoints/2/manifest.json").write_text("[]")
    with pytest.raises(UserError, match="no intact checkpoint left"):
        restore(folder, on_damaged=messages.append)
    assert sorted(p.name for p in (folder / "checkpoints/damaged").iterdir()) == ["1", "2", "2-1"]


def test_a_checkpoint_of_another_model_is_refused_in_one_line(two):
    zeros = {"w": jnp.zeros((8, 6)), "b": jnp.zeros(6, jnp.bfloat16)}
    for other, message in (
        ({"params": {"w": zeros["w"]}}, "has bfloat16[6] at params/b where this recipe's state has nothing:"),
        ({"params": {**zeros, "c": zeros["b"]}}, "has nothing at params/c where this recipe's state has bfloat16[6]:"),
        (
            {"params": {**zeros, "w": jnp.zeros((4, 6))}},
            "has float32[8, 6] at params/w where this recipe's state has float32[4, 6]:",
        ),
        (
            {"params": {**zeros, "b": jnp.zeros(6)}},
            "has bfloat16[6] at params/b where this recipe's state has float32[6]:",
        ),
        ({"ema": None}, "has bfloat16[6] at ema/b where this recipe's state has nothing:"),
        ({"rng": jax.random.key(0, impl="rbg")}, "has uint32[2] at rng where this recipe's state has uint32[4]:"),
    ):
        with Checkpoints(two / "checkpoints") as checkpoints, pytest.raises(UserError) as refused:
            checkpoints.restore(state(0)._replace(**other))
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="has nothing at params/c"):
        restore_params(two / "checkpoints", {**zeros, "c": zeros["b"]})


def test_the_partial_folder_of_a_killed_save_is_ignored_and_removed(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "run") / "checkpoints"
    shutil.copytree(folder / "2", folder / "3.partial")
    assert restore(tmp_path / "run")[1] == {"next_batch": 2}
    save(tmp_path / "run", 4)
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2", "4"]


def without(files, name):
    return {other: file for other, file in files.items() if other != name}


@settings(max_examples=25, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_manifest_that_does_not_describe_its_folder_is_damage(two, data):
    with tempfile.TemporaryDirectory() as place:
        run = shutil.copytree(two, Path(place, "run"))
        manifest = run / "checkpoints" / "2" / "manifest.json"
        files = json.loads(manifest.read_text())["files"]
        name = data.draw(st.sampled_from(sorted(files)))
        changed = data.draw(
            st.sampled_from(
                [
                    {},
                    without(files, name),
                    {**files, "x": files[name]},
                    {**files, "../1/run.json": files[name]},
                    {**files, name: None},
                    {**files, name: {"bytes": "1", "sha256": 5}},
                    {**files, name: {**files[name], "bytes": 10**400}},
                    [],
                    None,
                ]
            )
        )
        manifest.write_text(json.dumps({"files": changed}))
        found = []
        assert restore(run, on_damaged=found.append)[1] == {"next_batch": 1}
        assert "the checkpoint of step 2 is damaged" in found[0]


def test_a_link_in_a_checkpoint_is_damage(two, tmp_path):
    for name in ("run.json", "manifest.json", "state", "state/_METADATA", "state/d", ""):
        run = shutil.copytree(two, tmp_path / "run")
        shutil.move(run / "checkpoints" / "2" / name, tmp_path / "outside")
        Path(run, "checkpoints", "2", name).symlink_to(tmp_path / "outside")
        before = sorted(tmp_path.glob("outside/**/*"))
        found = []
        assert restore(run, on_damaged=found.append)[1] == {"next_batch": 1}
        assert "it is a symbolic link" in found[0]
        assert sorted(tmp_path.glob("outside/**/*")) == before
        shutil.rmtree(run)
        (shutil.rmtree if (tmp_path / "outside").is_dir() else os.unlink)(tmp_path / "outside")


def test_a_checkpoint_is_opened_before_it_counts_as_saved(tmp_path, monkeypatch):
    save(tmp_path, 1)
    begin = Checkpoints._finish

    def without_index(self, step, *rest):
        self._files.wait()
        (self._partial(step) / "state" / "manifest.ocdbt").unlink()
        begin(self, step, *rest)

    monkeypatch.setattr(Checkpoints, "_finish", without_index)
    with pytest.raises(RunFailed, match=r"step 2 could not be saved in .*: the checkpoint of step 1 is intact"):
        save(tmp_path, 2)
    assert saved_steps(tmp_path / "checkpoints") == [1]


@pytest.mark.parametrize("name", ["lr[0.1]", "a*b", "what?", "[", "é\n", "a\udce9b"])
def test_a_folder_may_have_any_name(name, tmp_path):
    save(tmp_path / name, 1, 2)
    assert restore(tmp_path / name)[1] == {"next_batch": 2}
    (tmp_path / name).rename(tmp_path / "plain")
    assert restore(tmp_path / "plain")[1] == {"next_batch": 2}


LOSSES = {0: 2.3, 2: None, 4: 0.7, 6: float("nan"), 8: 0.9, 10: 0.8, 12: None, 14: 0.85}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Retention(last=1, best=0), {14}),
        (Retention(last=3, best=0), {10, 12, 14}),
        (Retention(last=1, best=2), {4, 10, 14}),
        (Retention(last=1, best=1, every=6), {4, 6, 12, 14}),
        (Retention(last=9, best=0), set(LOSSES)),
    ],
)
def test_retention_keeps_the_last_the_best_and_every_nth_checkpoint(keep, kept, tmp_path):
    # In two sessions: the second reads the eval_losses of the first.
    for part in (list(LOSSES)[:5], list(LOSSES)[5:]):
        with Checkpoints(tmp_path / "checkpoints", keep) as checkpoints:
            for step in part:
                checkpoints.save(state(step), {}, LOSSES[step])
    assert set(saved_steps(tmp_path / "checkpoints")) == kept


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"last": 0}, "keep_last must be at least 1, got 0"),
        ({"best": -1}, "keep_best must be at least 0, got -1"),
        ({"every": 0}, "keep_every must be at least 1, got 0"),
    ],
)
def test_invalid_retention_is_an_error(wrong, message):
    with pytest.raises(UserError, match=message):
        Retention(**wrong)


def test_nothing_is_evicted_before_the_next_checkpoint_is_committed(tmp_path, monkeypatch):
    save(tmp_path, 1, retention=Retention(last=1))

    def full(folder):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_manifest", full)
        with Checkpoints(tmp_path / "checkpoints", Retention(last=1)) as checkpoints:
            checkpoints.save(state(2), {})
            with pytest.raises(
                RunFailed, match=r"step 2 .*\(No space left on device\): the checkpoint of step 1 is intact"
            ):
                checkpoints.save(state(3), {})
    assert saved_steps(tmp_path / "checkpoints") == [1]
    assert same(restore(tmp_path)[0], state(1))


def mesh(n: int) -> jax.sharding.Mesh:
    return jax.make_mesh((n,), ("d",), devices=jax.devices()[:n])


ELSEWHERE = """
import sys
from pathlib import Path
from types import SimpleNamespace
import jax
from jax.sharding import NamedSharding, PartitionSpec
from tests.runner.test_checkpoint import mesh, restore, same, state
from jaxtrain.runner.checkpoint import Checkpoints
assert jax.device_count() == 8
with Checkpoints(Path(sys.argv[1]) / "checkpoints") as checkpoints:
    for spec in (PartitionSpec("d"), PartitionSpec()):
        restored, _ = checkpoints.restore(state(0, NamedSharding(mesh(8), spec)))
        assert restored.params["w"].sharding == NamedSharding(mesh(8), spec)
        assert same(restored, state(5))
"""


def test_checkpoints_are_restored_in_the_requested_shardings_on_any_number_of_devices(tmp_path):
    rows, columns = PartitionSpec("d"), PartitionSpec(None, "d")
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state(5, NamedSharding(mesh(4), rows)), {})
        checkpoints.wait()
        for sharding in (
            NamedSharding(mesh(4), rows),
            NamedSharding(mesh(2), columns),
            NamedSharding(mesh(3), columns),
            jax.sharding.SingleDeviceSharding(jax.devices()[3]),
        ):
            restored, _ = checkpoints.restore(state(0, sharding))
            assert restored.params["w"].sharding == sharding
            assert same(restored, state(5))
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=environment)


def test_run_json_is_valid_json_for_any_loss(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state(1), {"next_batch": 1}, float("inf"))
    assert json.loads((tmp_path / "checkpoints/1/run.json").read_text())["eval_loss"] is None


@pytest.fixture
def absl_records():
    """The records that reach the handlers of the absl logger."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("absl")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def test_only_orbaxs_log_is_dropped_and_only_while_checkpoints_are_open(tmp_path, absl_records):
    logger = logging.getLogger("absl")
    assert logger.level < logging.CRITICAL

    def log(pathname):
        logger.handle(logging.LogRecord("absl", logging.ERROR, pathname, 1, "text", (), None))
        return len(absl_records)

    with Checkpoints(tmp_path / "checkpoints"):
        assert log("/site-packages/grain/loader.py") == 1
        assert log("/site-packages/orbax/checkpoint/save.py") == 1
    assert log("/site-packages/orbax/checkpoint/save.py") == 2


def test_errors_of_writes_that_end_after_a_failed_run_are_dropped(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    (tmp_path / "checkpoints").touch()
    with pytest.raises(RunFailed, match="could not be saved"), Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state(2), {})

    def call_soon_threadsafe():
        raise RuntimeError("Event loop is closed")

    with pytest.raises(RuntimeError) as late:
        call_soon_threadsafe()
    sys.unraisablehook(SimpleNamespace(exc_value=late.value, exc_traceback=late.tb.tb_next, object=None, err_msg=None))
    assert not seen


def test_a_hook_installed_while_checkpoints_are_open_remains(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    with Checkpoints(tmp_path / "checkpoints"):
        error = RuntimeError("Event loop is closed")  # raised by the user's program
        sys.unraisablehook(SimpleNamespace(exc_value=error, exc_traceback=None, object=None, err_msg=None))
        assert len(seen) == 1
        monkeypatch.setattr(sys, "unraisablehook", print)
    assert sys.unraisablehook is print


CLASHES = [
    {"a.b": 1.0, "a": {"b": 2.0}},
    {"a": {"": 1.0}, "a.": 2.0},
    {"a": {"0": 1.0}, "a.0": 2.0},
    {"a": [1.0, 2.0], "a.1": 3.0},
    {"a": {"b.c": 1.0}, "a.b": {"c": 2.0}},
    {"e\u0301": 1.0, "\u00e9": 2.0},
]
DISTINCT = {"": 1.0, "a": {"": 2.0, "b": 3.0}, "a%2Eb": 4.0, ".": 5.0, "..": 6.0, " ": 7.0, "value": {"value": 8.0}}


@pytest.mark.parametrize("params", CLASHES, ids=map(str, range(len(CLASHES))))
def test_arrays_of_one_name_are_refused_before_they_are_saved(params, tmp_path):
    params = jax.tree.map(jnp.float32, params)
    one_name = pytest.raises(UserError, match=r"the state has two arrays of one name, \.params\[.*: rename a key")
    with Checkpoints(tmp_path / "checkpoints") as checkpoints, one_name:
        checkpoints.save(state(1)._replace(params=params), {})
    assert saved_steps(tmp_path / "checkpoints") == []


def test_unusual_names_are_restored_each_to_its_place(tmp_path):
    one = state(1)._replace(params={**jax.tree.map(jnp.float32, DISTINCT), "n": {0: jnp.ones(2), 1: jnp.zeros(2)}})
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(one, {})
        checkpoints.wait()
        found, _ = checkpoints.restore(jax.eval_shape(lambda: one))
    assert same(one, found)
