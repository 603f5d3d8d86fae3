"""Runs of several processes: they equal a run of one process with as many devices; data, errors, signals, exits."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers

from jaxtrain.cli import main
from jaxtrain.runner.checkpoint import saved_steps
from tests.data.finetuning.templates import byte_level, write_folder
from tests.soak.fork_server import fork_server
from tests.soak.test_kills import assert_same_run, state, untimed

RECIPE = (
    "digits-mlp --hidden 8 --batch-size 16 --accumulate 2 --precision fp16 --warmup-steps 4 "
    "--log-every 3 --eval-every 4 --save-every 2 --keep-last 2"
)
TIMEOUT = 600  # seconds; guaranteed times are asserted separately
JAXTRAIN = [sys.executable, "-m", "jaxtrain.cli"]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a user: without the strict settings of the tests, devices set by the launcher."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUMPY")}
    flags = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
    return {**kept, "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "300", **more}


def run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=TIMEOUT)


def launched(args: str, folder: Path, n: int = 2, options: str = "") -> subprocess.CompletedProcess[str]:
    return run([*JAXTRAIN, "launch", "-n", str(n), *options.split(), "--", "train", *args.split()], folder)


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


class Unsupervised:
    """Processes of one run started by another launcher, which does not terminate the others when one fails."""

    def __init__(self, command: list[str], folder: Path, n: int) -> None:
        address = free_address()
        self.outputs = [folder / f"output-{i}.txt" for i in range(n)]
        self.processes = []
        for i, path in enumerate(self.outputs):
            place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(n), "JAX_PROCESS_ID": str(i)}
            with path.open("w") as out:
                started = subprocess.Popen(command, cwd=folder, env=environment(**place), stdout=out, stderr=out)
            self.processes.append(started)

    def until(self, condition: Callable[[], bool]) -> None:
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() < begin + TIMEOUT, [path.read_text() for path in self.outputs]
            assert all(process.poll() is None for process in self.processes), [p.read_text() for p in self.outputs]
            time.sleep(0.02)

    def end(self, but: int | None = None) -> tuple[list[int], float]:
        """Wait for all processes except `but`; return their exit statuses and the elapsed seconds."""
        begin = time.monotonic()
        waited = [process.wait(TIMEOUT) for i, process in enumerate(self.processes) if i != but]
        return waited, time.monotonic() - begin


@contextlib.contextmanager
def unsupervised(command: list[str], folder: Path, n: int = 2) -> Iterator[Unsupervised]:
    started = Unsupervised(command, folder, n)
    try:
        yield started
    finally:
        for process in started.processes:
            process.kill()
            process.wait()


# As `jaxtrain launch -n 2`, whose processes would import everything again.
TWO = """
import os
os.environ |= {"JAX_COORDINATOR_ADDRESS": ADDRESS, "JAX_NUM_PROCESSES": "2", "COLUMNS": "300"}
pids = []
while len(pids) < 2 and all(pids):
    os.environ["JAX_PROCESS_ID"] = str(len(pids))
    pids.append(os.fork())
if pids[-1]:
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os._exit(max(map(abs, statuses)))
if len(pids) == 2:
    os.dup2(os.open("second.txt", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
"""


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process with two devices."""
    folder, devices = tmp_path_factory.mktemp("one"), jax.devices()[:2]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax, "devices", lambda: devices)
        assert main(f"train {RECIPE} --steps 6 --out {folder}/run --mesh data=2 --quiet".split()) == 0
    return folder / "run"


def test_two_processes_equal_one_process_with_two_devices(one_process: Path, tmp_path: Path) -> None:
    """Bit-identical state, metrics, TensorBoard and retained checkpoints; only the first process prints."""
    with fork_server(tmp_path) as server:
        status, text = server.run(f"train {RECIPE} --steps 6 --out two", f"ADDRESS = {free_address()!r}\n{TWO}")
    assert status == 0, text
    assert "effective batch  16 = 4 × 2 micro-batches × 2 devices" in text
    assert (tmp_path / "second.txt").read_text() == ""
    assert_same_run(one_process, tmp_path / "two")
    assert json.loads((tmp_path / "two" / "config.json").read_text())["devices"] == ["cpu"] * 2
    assert (tmp_path / "two" / "report.html").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["data=1,tensor=4", "data=2,tensor=2", "dcn=2,tensor=2"])
def test_any_mesh_over_two_processes_equals_one_process(
    mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit-identical, with `tensor` within a process or across both, which then read the same rows; `dcn` across."""
    two = launched(f"{RECIPE} --steps 6 --mesh {mesh} --out two", tmp_path, options="--devices-per-process 2")
    assert (two.returncode, two.stderr) == (0, "")
    monkeypatch.chdir(tmp_path)
    assert main(f"train {RECIPE} --steps 6 --out one --mesh {mesh}".split()) == 0
    assert capsys.readouterr().out.count("effective batch  16 = ") == 1
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.nightly
def test_a_mesh_whose_nodes_would_be_parts_of_a_process_is_refused(tmp_path: Path) -> None:
    done = launched(f"{RECIPE} --steps 6 --mesh dcn=4 --out two", tmp_path, options="--devices-per-process 2")
    assert done.returncode == 2
    message = "jaxtrain: mesh axis dcn=4 would divide a node: use a divisor of 2, the number of processes"
    assert message in done.stderr.splitlines()[0]


@pytest.mark.nightly
def test_sequence_parallel_over_two_processes_equals_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(4):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog\n" * 40)
    recipe = (
        "gpt-stdlib --data texts --n-layer 1 --n-embd 16 --n-head 2 --seq-len 16 --dropout 0.1 --batch-size 8 "
        "--eval-sequences 16 --log-every 3 --eval-every 3 --save-every 3 --steps 6 --mesh sequence=2"
    )
    output = assert_two_equal_one(recipe, tmp_path, monkeypatch)
    assert "effective batch  8 = 8 × 1 micro-batches × 1 devices" in output


@pytest.mark.nightly
def test_experts_over_two_processes_equal_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    write_folder(tmp_path / "model", "chatml", tokenizer)
    config = transformers.MixtralConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, num_local_experts=4,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    chats = [[{"role": role, "content": f"{i}"} for role in ("user", "assistant")] for i in range(24)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    recipe = (
        "finetune --model model --data chats.jsonl --method full --seq-len 60 --batch-size 8 --accumulate 2 "
        "--answer-tokens 4 --log-every 1 --eval-every 2 --save-every 2 --steps 4 --mesh expert=2"
    )
    output = assert_two_equal_one(recipe, tmp_path, monkeypatch)
    assert "effective batch  8 = 2 × 2 micro-batches × 2 devices" in output


def assert_two_equal_one(recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Check that two processes have the bits of one process with two devices; return what they print."""
    two = launched(f"{recipe} --out two", folder)
    assert (two.returncode, two.stderr) == (0, "")
    monkeypatch.chdir(folder)
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert main(f"train {recipe} --out one --quiet".split()) == 0
    states = [jax.tree.leaves(state(folder / name)._replace(rng=None)) for name in ("one", "two")]
    assert [x.tobytes() for x in jax.device_get(states[0])] == [x.tobytes() for x in jax.device_get(states[1])]
    lines, others = ([{**line, "tokens_per_s": 0} for line in untimed(folder / name)] for name in ("one", "two"))
    assert lines == others
    return two.stdout


# A minimal run with everything that all processes of a run do.
PROGRAM = """
import os, signal, sys, time
import jax, numpy as np
from jaxtrain.cli import main
from jaxtrain.distributed import make_mesh, processes
from jaxtrain.errors import RunFailed, UserError
from jax.sharding import NamedSharding, PartitionSpec as P

def train(args):
    with processes.process_group():
        me = jax.process_index()
        print("stdout of", me)
        assert processes.once(lambda: {"done by": [me]}) == {"done by": [0]}
        try:
            processes.once(lambda: refuse("the first's disk"))
            raise AssertionError
        except RunFailed as error:
            assert str(error) == "the first's disk"
        rows, whole = (NamedSharding(make_mesh(), spec) for spec in (P("data"), P()))
        total = jax.jit(lambda x: x.sum(), out_shardings=whole)
        x = jax.make_array_from_process_local_data(rows, np.full(1, me + 1.0, np.float32))
        for i in range(5 if "fine" in args else 10**9):
            assert total(x) == 3
            if i == 5:
                print("running", file=sys.stderr, flush=True)
            if i == 20:
                exec(PART)
            time.sleep(0.01)
    return 0

def refuse(why):
    raise RunFailed(why)

sys.modules["jaxtrain.cli.train"] = sys
sys.main = train
sys.exit(main(["train", *sys.argv[1:]]))
"""


def program(part: str, *args: str) -> list[str]:
    return [sys.executable, "-c", f"PART = {part!r}\n{PROGRAM}", *args]


@pytest.mark.nightly
def test_once_runs_in_the_first_process_only(tmp_path: Path) -> None:
    with unsupervised(program("", "fine"), tmp_path) as both:
        assert both.end()[0] == [0, 0]
        assert "stdout of 0\n" in both.outputs[0].read_text()
        assert both.outputs[1].read_text() == ""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("part", "statuses", "first", "second"),
    [
        ("raise UserError('fix it')", [2, 2], "jaxtrain: fix it", ""),
        ("raise KeyboardInterrupt", [130, 130], "jaxtrain: interrupted", ""),
        ("raise KeyError('a bug')", [1, 1], "KeyError: 'a bug'", ""),
        ("raise UserError(f'no file on {me}')", [2, 2], "jaxtrain: no file on 0",
             "jaxtrain: process 1 of 2: no file on 1"),
        ("if me: raise UserError('no disk')", [1, 2],
         "jaxtrain: process 1 of 2 has failed (UserError: no disk): checkpoints are intact: "
         "continue with --resume auto",
         "jaxtrain: process 1 of 2: no disk"),
        ("if me: os.kill(os.getpid(), 9)", [1, -9],
         "jaxtrain: process 1 of 2 no longer responds: checkpoints are intact: continue with --resume auto", ""),
        # Without the coordinator the runtime ends the other processes.
        ("if not me: os.kill(os.getpid(), 9)", [-9, -6], "", "leader"),
    ],
)  # fmt: skip
def test_an_error_ends_all_processes_and_is_reported_once(
    part: str, statuses: list[int], first: str, second: str, tmp_path: Path
) -> None:
    with unsupervised(program(part), tmp_path) as both:
        both.until(lambda: "running" in both.outputs[0].read_text())
        ended, seconds = both.end()
        texts = [path.read_text() for path in both.outputs]
        assert ended == statuses, texts
        assert seconds < 30
        for text, expected in zip(texts, (first, second), strict=True):
            lines = [line for line in text.splitlines() if line.startswith("jaxtrain:")]
            assert len(lines) == expected.startswith("jaxtrain:"), text
            assert expected in text


@pytest.mark.nightly
def test_a_hanging_process_ends_the_others(tmp_path: Path) -> None:
    """The connections of a stopped process stay open; only its heartbeat is missing."""
    with unsupervised(program("if me: os.kill(os.getpid(), signal.SIGSTOP)"), tmp_path) as both:
        both.until(lambda: "running" in both.outputs[0].read_text())
        ended, seconds = both.end(but=1)
        assert (ended, seconds < 40) == ([-signal.SIGABRT], True)
        assert re.search(r"unhealthy \(stopped sending heartbeats\):\n1", both.outputs[0].read_text())


# A run whose process `VICTIM` executes `PART` before it reads the batch of a step.
LATE = """
import os, signal, sys, time
from jaxtrain.cli import main
from jaxtrain.runner.fetched_batches import Batches

read, steps = Batches.__next__, []

def late(self):
    steps.append(None)
    if os.environ["JAX_PROCESS_ID"] == VICTIM:
        exec(PART)
    return read(self)

Batches.__next__ = late
sys.exit(main(["train", *sys.argv[1:]]))
"""


def late(victim: int, part: str, args: str) -> list[str]:
    return [sys.executable, "-c", f"VICTIM, PART = {str(victim)!r}, {part!r}\n{LATE}", *args.split()]


@pytest.mark.nightly
def test_a_process_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    """Process 2 of 3 reads a batch for 15 s, then every batch slowly: a line for each, and a metric."""
    args = "digits-mlp --hidden 8 --batch-size 12 --log-every 10 --eval-every 100 --steps 120 --out run"
    part = "time.sleep(15 if len(steps) == 5 else 0.2 if len(steps) > 5 else 0)"
    with unsupervised(late(2, part, args), tmp_path, n=3) as run:
        assert run.end()[0] == [0, 0, 0]
        text = run.outputs[0].read_text()
    (behind,) = re.findall(r"warning: process \d is (\d+) s behind .*", text)
    assert f"warning: process 2 is {behind} s behind at step 5 (reading data)" in text
    assert 10 <= int(behind) <= 14
    assert re.search(r"warning: process 2 is slow: its host takes 0\.2\d* s a step, mostly reading data", text)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["straggler"] for line in lines if "straggler" in line} == {2}


@pytest.mark.nightly
def test_a_stopped_process_is_named_before_the_run_ends(tmp_path: Path) -> None:
    args = "digits-mlp --hidden 8 --batch-size 12 --steps 1000000 --out run"
    part = "len(steps) == 50 and os.kill(os.getpid(), signal.SIGSTOP)"
    with unsupervised(late(1, part, args), tmp_path, n=3) as run:
        ended, seconds = run.end(but=1)
        text = run.outputs[0].read_text()
    assert (ended, seconds < 90) == ([-signal.SIGABRT] * 2, True), text
    assert re.search(r"warning: process 1 has not reported for [67] s, since step \d+ \(", text), text


@pytest.mark.nightly
def test_a_process_that_compiles_for_long_keeps_its_heartbeat(tmp_path: Path) -> None:
    """Also while it holds Python's interpreter lock, and for several times the seconds without a heartbeat."""
    part = "import ctypes; me and ctypes.PyDLL(None).sleep(16); processes.wait_for_all(); raise UserError('awake')"
    command = program(part)
    command[-1] = f"from jaxtrain.distributed import processes\nprocesses.HEARTBEAT_SECONDS = 4\n{command[-1]}"
    with unsupervised(command, tmp_path) as both:
        ended, seconds = both.end()
        texts = [path.read_text() for path in both.outputs]
    assert ended == [2, 2], texts
    assert seconds > 16
    assert "jaxtrain: awake" in texts[0]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert launched(f"{RECIPE} --steps 120 --out run", folder).returncode == 0
    return folder / "run"


@contextlib.contextmanager
def killed(args: str, folder: Path, options: str, at: list[tuple[int, int]]) -> Iterator[str]:
    """Launch a run, kill its process `victim` once `step` is saved, for each (step, victim); yield its messages."""
    command = [*JAXTRAIN, "launch", *options.split(), "--", "train", *args.split()]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        dead: list[int] = []
        for step, victim in at:
            running: list[int] = []
            while not running or max(saved_steps(folder / "run" / "checkpoints"), default=-1) < step:
                assert process.poll() is None, process.communicate()
                running = [pid for pid in children(process.pid) if pid not in dead]
                time.sleep(0.02)
            dead += running
            os.kill(running[victim], signal.SIGKILL)
        assert process.stderr
        text = process.stderr.read()
        assert process.wait(TIMEOUT) == 0, text
        yield text


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_restarts_after_a_killed_process_and_is_bit_identical(
    victim: int, uninterrupted: Path, tmp_path: Path
) -> None:
    kills = [(2, victim), (30, victim), (80, victim)]
    with killed(f"{RECIPE} --steps 120 --out run", tmp_path, "-n 2 --max-restarts 3", kills) as text:
        assert text.count(f"process {victim} of 2 was terminated by SIGKILL: terminating the others") == 3
        assert "jaxtrain: restart 3 of 3, with 2 processes" in text
    assert_same_run(uninterrupted, tmp_path / "run")


@pytest.mark.nightly
def test_a_run_continues_on_the_processes_that_are_left(tmp_path: Path) -> None:
    """Of 3 processes one is killed; 2 continue, with the batches of one process that nothing interrupted."""
    recipe = f"{RECIPE} --batch-size 12 --precision fp32 --schedule constant --warmup-steps 0 --steps 60"
    assert run([*JAXTRAIN, "train", *f"{recipe} --out one".split()], tmp_path).returncode == 0
    with killed(f"{recipe} --out run", tmp_path, "-n 2:3 --max-restarts 1", [(20, 1)]) as text:
        assert "jaxtrain: restart 1 of 1, with 2 processes" in text
    assert len(json.loads((tmp_path / "run" / "config.json").read_text())["devices"]) == 2
    one, other = ({line["step"]: line for line in untimed(tmp_path / name)} for name in ("one", "run"))
    assert one.keys() == other.keys()
    for step in range(3, 61, 3):
        assert other[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-5)
    states = [jax.tree.leaves(state(tmp_path / name)._replace(rng=None)) for name in ("one", "run")]
    for a, b in zip(*jax.device_get(states), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def children(pid: int) -> list[int]:
    """Return the child processes in the order of their start."""
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_saves_and_resuming_is_bit_identical(
    number: signal.Signals, uninterrupted: Path, tmp_path: Path
) -> None:
    command = [*JAXTRAIN, "launch", "-n", "2", "--", "train", *f"{RECIPE} --steps 120 --out run".split()]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        while "step 3/120" not in (line := process.stdout.readline()):
            assert line
        process.send_signal(number)
        out = process.stdout.read()
        assert process.wait(TIMEOUT) == 128 + number, process.stderr.read()
        assert "jaxtrain:" not in process.stderr.read()
    stopped = re.search(r"stopped and saved at step (\d+)", out)
    assert stopped
    assert max(saved_steps(tmp_path / "run" / "checkpoints")) == int(stopped[1]) < 120
    assert launched(f"{RECIPE} --steps 120 --out run --resume", tmp_path).returncode == 0
    assert untimed(uninterrupted) == untimed(tmp_path / "run")
    assert_same_state(uninterrupted, tmp_path / "run")


@pytest.mark.nightly
def test_a_signal_to_one_process_stops_all_after_the_same_step(uninterrupted: Path, tmp_path: Path) -> None:
    command = [*JAXTRAIN, "train", *f"{RECIPE} --steps 120 --out run --resume auto".split()]
    with unsupervised(command, tmp_path) as both:
        both.until(lambda: "step 3/120" in both.outputs[0].read_text())
        both.processes[1].send_signal(signal.SIGTERM)
        assert both.end()[0] == [143, 143], [path.read_text() for path in both.outputs]
        assert "stopped and saved at step" in both.outputs[0].read_text()
    with unsupervised(command, tmp_path) as both:
        assert both.end()[0] == [0, 0]
    assert untimed(uninterrupted) == untimed(tmp_path / "run")
    assert_same_state(uninterrupted, tmp_path / "run")


def assert_same_state(one: Path, other: Path) -> None:
    """Compare runs except for older checkpoints, because a stop adds one."""
    newest = max(saved_steps(one / "checkpoints"))
    copies = [Path(shutil.copytree(folder, other.parent / f"copy-{i}")) for i, folder in enumerate((one, other))]
    for folder in copies:
        for step in set(saved_steps(folder / "checkpoints")) - {newest}:
            shutil.rmtree(folder / "checkpoints" / str(step))
    assert_same_run(*copies)


@pytest.mark.nightly
def test_another_number_of_processes_continues_with_the_same_data(tmp_path: Path) -> None:
    """With 1, 2, 4 and 1 processes, the losses equal those of one process up to the order of sums."""
    # The schedule does not depend on the number of steps.
    recipe = f"{RECIPE} --precision fp32 --schedule constant --warmup-steps 0"
    assert run([*JAXTRAIN, "train", *f"{recipe} --steps 12 --out one".split()], tmp_path).returncode == 0
    for n, count in ((1, 3), (2, 6), (4, 9), (1, 12)):
        done = launched(f"{recipe} --steps {count} --out other --resume auto", tmp_path, n=n)
        assert done.returncode == 0, done.stderr
    one, other = ({line["step"]: line for line in untimed(tmp_path / name)} for name in ("one", "other"))
    for step in (3, 6, 9, 12):
        assert other[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-5)
        assert other[step]["grad_norm"] == pytest.approx(one[step]["grad_norm"], rel=1e-4)


@pytest.mark.nightly
def test_an_error_of_all_processes_is_one_line(tmp_path: Path) -> None:
    for args, message in {
        "digits-mlp --batch-size 7 --out run": r"7 rows is not divisible by the 2 devices",
        "digits-mlp --lr -1 --out run": "lr must be positive and representable in float32, got -1.0",
        "digits-mlp --resume --out none": "none holds no run",
        "digits-mlp --mesh data=4 --out run": "mesh 'data=4' has 4 devices, got 2: make its sizes multiply to 2",
    }.items():
        done = launched(args, tmp_path)
        lines = done.stderr.splitlines()
        assert done.returncode == 2, done.stderr
        assert re.search(message, lines[0]), done.stderr
        assert lines[0].startswith("[0] jaxtrain: ")
        assert lines[1:] == [line for line in lines[1:] if "exited with 2: terminating the others" in line]
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_a_nan_ends_all_processes_and_stores_the_whole_batch(tmp_path: Path) -> None:
    """The stored batch of two processes and two micro-batches has the order of one process."""
    args = f"{RECIPE} --precision fp32 --optimizer sgd --schedule constant --lr 1e30 --clip-norm None --steps 9"
    done = launched(f"{args} --out two", tmp_path)
    assert done.returncode == 1
    assert "stopped, the checkpoint of step" in done.stderr
    assert run([*JAXTRAIN, "train", *f"{args} --out one".split()], tmp_path).returncode == 1
    (one,), (two,) = (list((tmp_path / name / "replay").glob("*.npz")) for name in ("one", "two"))
    assert one.name == two.name
    with np.load(one) as a, np.load(two) as b:
        for name in a.files:
            if name.startswith("batch/"):
                np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs Open MPI: apt-get install openmpi-bin")
def test_open_mpi_starts_a_run(one_process: Path, tmp_path: Path) -> None:
    # By default mpirun refuses to run as root, or with more processes than cores.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpirun", "-n", "2", "--oversubscribe", *JAXTRAIN, "train", *f"{RECIPE} --steps 6 --out run".split()]
    done = run(command, tmp_path, **allowed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("best evaluation") == 1
    assert_same_run(one_process, tmp_path / "run")
