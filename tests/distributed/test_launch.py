"""`jaxtrain launch`: forwarded output and signals, and how a failing process ends the others."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxtrain.cli import launch, main
from jaxtrain.cli.child_processes import Ended, Processes
from jaxtrain.cli.launch import _gpus, _places, _settings
from jaxtrain.errors import UserError

LONG = 30
"""Seconds, longer than any process of these tests takes."""


def launcher(program: str, n: int = 2, grace: float = LONG) -> list[str]:
    """Return a command that launches a Python program `n` times, with the number of the process in `me`."""
    inner = f"import os, signal, sys, time; me = int(os.environ['ME']); {program}"
    outer = (
        # A shell that runs the tests in the background lets them ignore it.
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from jaxtrain.cli.child_processes import Processes; "
        f"environments = [{{**os.environ, 'ME': str(i), 'PYTHONUNBUFFERED': '1'}} for i in range({n})]; "
        f"sys.exit(Processes([sys.executable, '-c', {inner!r}], environments, {grace}).run().status)"
    )
    return [sys.executable, "-c", outer]


def launched(program: str, n: int = 2, grace: float = LONG) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr."""
    done = subprocess.run(launcher(program, n, grace), capture_output=True, text=True, timeout=2 * LONG)
    return done.returncode, done.stdout, done.stderr


def test_each_line_is_forwarded_with_the_number_of_its_process() -> None:
    text = "x" * 5000
    status, out, err = launched(f"[print(i, '{text}') for i in range(20)]; print('to err', file=sys.stderr)", n=3)
    assert status == 0
    lines = out.splitlines()
    for i in range(3):
        assert [line for line in lines if line.startswith(f"[{i}] ")] == [f"[{i}] {j} {text}" for j in range(20)]
    assert len(lines) == 60
    assert sorted(err.splitlines()) == [f"[{i}] to err" for i in range(3)]


@pytest.mark.parametrize(
    ("ends", "status", "message"),
    [
        ("sys.exit(7)", 7, "process 1 of 3 exited with 7: terminating the others"),
        ("os.kill(os.getpid(), 9)", 137, "process 1 of 3 was terminated by SIGKILL: terminating the others"),
    ],
)
def test_the_first_failure_ends_all_processes_with_its_status(ends: str, status: int, message: str) -> None:
    others = f"[time.sleep({LONG}), print('slept')]"
    found = launched(f"time.sleep(0.2); {ends} if me == 1 else {others}", n=3)
    assert found == (status, "", f"jaxtrain: {message}\n")


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    ignore = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep({LONG}); print('slept')"
    status, out, _ = launched(f"sys.exit(time.sleep(1) or 3) if me else exec({ignore!r})", grace=0.5)
    assert (status, out) == (3, "[0] deaf\n")


def test_a_consequential_abort_is_not_reported_as_the_failure() -> None:
    processes = Processes([], [], 0)
    for number in (6, 9, 6):
        processes._started.append(
            subprocess.Popen([sys.executable, "-c", f"import os; os.kill(os.getpid(), {number})"])
        )
        processes._started[-1].wait()
    assert processes._failed() is processes._started[1]


SAVES = "\n".join(
    [
        "got = []",
        "signal.signal(signal.SIGINT, lambda n, f: got.append(n))",
        "signal.signal(signal.SIGTERM, lambda n, f: got.append(n))",
        "print('ready')",
        "while not got: time.sleep(0.01)",
        "time.sleep(0.5 + me / 2)",  # saves take time, and one process finishes before the other
        "print('saved', got)",
        "sys.exit(128 + got[0])",
    ]
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_forwarded_once_and_all_processes_may_finish(number: signal.Signals) -> None:
    with subprocess.Popen(launcher(f"exec({SAVES!r})"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        process.send_signal(number)
        assert process.stdout.read().splitlines() == [f"[0] saved [{number}]", f"[1] saved [{number}]"]
    assert process.returncode == 128 + number


@pytest.mark.parametrize(
    ("sent", "received"),
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGTERM)],
)
def test_a_signal_is_passed_on_and_that_of_a_closed_terminal_asks_to_save(
    sent: signal.Signals, received: signal.Signals, tmp_path: Path
) -> None:
    waits = "got = {1, 2, 15}; signal.pthread_sigmask(signal.SIG_BLOCK, got); pathlib.Path(sys.argv[1]).touch()"
    program = f"import pathlib, signal, sys; {waits}; sys.exit(128 + signal.sigwait(got))"

    def send() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), sent)

    before = signal.signal(sent, signal.default_int_handler)  # `nohup` ignores SIGHUP
    try:
        threading.Thread(target=send, daemon=True).start()
        command = [sys.executable, "-c", program, str(tmp_path / "ready")]
        ended = Processes(command, [{**os.environ}], LONG).run()
    finally:
        signal.signal(sent, before)
    assert ended == Ended(128 + received, is_requested=True)


def test_a_second_signal_ends_all_processes_at_once() -> None:
    ready = "signal.signal(signal.SIGINT, lambda n, f: print('first')); print('ready')"
    program = f"{ready}; [time.sleep({LONG}), print(me)]"
    with subprocess.Popen(launcher(program), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in ("ready", "first"):
            assert sorted(process.stdout.readline() for _ in range(2)) == [f"[0] {line}\n", f"[1] {line}\n"]
            process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")
    assert process.returncode == 130


def test_a_closed_output_ends_the_run() -> None:
    program = f"[print('line', i) or time.sleep(0.05) for i in range({20 * LONG})]"
    with subprocess.Popen(launcher(program), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        process.stdout.close()
        assert process.wait() == 143


def test_each_process_has_its_number_and_devices_in_the_environment() -> None:
    on_cpu = _settings(_places(2, None, gpus=0))
    assert [s["JAX_PROCESS_ID"] for s in on_cpu] == ["0", "1"]
    assert {s["JAX_NUM_PROCESSES"] for s in on_cpu} == {"2"}
    assert {s["JAX_NUM_CPU_DEVICES"] for s in on_cpu} == {"1"}
    assert len({s["JAX_COORDINATOR_ADDRESS"] for s in on_cpu}) == 1
    assert re.fullmatch(r"127\.0\.0\.1:\d+", on_cpu[0]["JAX_COORDINATOR_ADDRESS"])
    assert _places(1, 4, gpus=0) == [{"JAX_NUM_CPU_DEVICES": "4"}]
    assert _places(2, None, gpus=8) == [{"JAX_LOCAL_DEVICE_IDS": ids} for ids in ("0,1,2,3", "4,5,6,7")]
    assert _places(3, 2, gpus=8) == [{"JAX_LOCAL_DEVICE_IDS": ids} for ids in ("0,1", "2,3", "4,5")]
    for n, each, message in (
        (3, None, "8 GPUs are not divisible by 3 processes"),
        (9, None, "8 GPUs are not divisible by 9 processes"),
        (3, 3, "3 processes of 3 GPUs need 9, but 8 are visible"),
    ):
        with pytest.raises(UserError, match=message):
            _places(n, each, gpus=8)


@pytest.mark.parametrize(
    ("flags", "ends", "sizes", "status"),
    [
        ("-n 3", [Ended(137, killed=1)], [3], 137),
        ("-n 3 --max-restarts 2", [Ended(137, killed=1), Ended(0)], [3, 3], 0),
        ("-n 2:3 --max-restarts 3", [Ended(137, killed=1), Ended(139, killed=0), Ended(0)], [3, 2, 2], 0),
        ("-n 1:3 --max-restarts 1", [Ended(1), Ended(1)], [3, 3], 1),
        ("-n 2 --max-restarts 3", [Ended(1), Ended(2)], [2, 2], 2),
        ("-n 2 --max-restarts 3", [Ended(143, is_requested=True)], [2], 143),
    ],
)
def test_a_failed_run_is_restarted_without_the_processes_that_were_killed(
    flags: str,
    ends: list[Ended],
    sizes: list[int],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs: list[tuple[list[str], list[dict[str, str]]]] = []

    class Recorded:
        def __init__(self, command: list[str], environments: list[dict[str, str]], grace_seconds: float) -> None:
            runs.append((command, environments))

        def run(self) -> Ended:
            return ends[len(runs) - 1]

    monkeypatch.setattr(launch, "Processes", Recorded)
    monkeypatch.setattr(launch, "_gpus", lambda environment: 6)
    assert main(["launch", *flags.split(), "--", "train", "digits-mlp"]) == status
    assert [len(environments) for _, environments in runs] == sizes
    for attempt, (command, environments) in enumerate(runs):
        assert ("--resume auto" in " ".join(command)) == (attempt > 0)
        assert [e["JAX_PROCESS_ID"] for e in environments] == [*map(str, range(len(environments)))]
    if sizes == [3, 2, 2]:  # the GPUs of the first process that was killed are not used again
        assert [e["JAX_LOCAL_DEVICE_IDS"] for e in runs[1][1]] == ["0,1", "4,5"]
    assert capsys.readouterr().err.count("jaxtrain: restart") == len(runs) - 1


def test_gpus_are_counted_only_if_jax_would_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtrain.cli.launch.installed_versions", lambda names: {"jax-cuda13-plugin": "0"})
    assert _gpus({"CUDA_VISIBLE_DEVICES": "3,5"}) == 2
    assert _gpus({"CUDA_VISIBLE_DEVICES": "MIG-1/2/0", "JAX_PLATFORMS": "cuda,cpu"}) == 1
    assert _gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert _gpus({"CUDA_VISIBLE_DEVICES": "3,5", "JAX_PLATFORMS": "cpu"}) == 0
    monkeypatch.setattr("jaxtrain.cli.launch.installed_versions", lambda names: {})
    assert _gpus({"CUDA_VISIBLE_DEVICES": "3,5"}) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("-- train", "--processes must be a positive number or MIN:MAX, got 0: use -n 2"),
        ("-n 3:2 -- train", "--processes must be a positive number or MIN:MAX, got 3:2"),
        ("-n 2 --max-restarts -1 -- train", "--max-restarts must not be negative, got -1"),
        ("-n two -- train", "two"),
        ("-n 2 train", "the command is not separated by --: use jaxtrain launch -n 2 -- train"),
        ("-n 2", "the command after -- must be train, got nothing: use jaxtrain launch -n 2 -- train"),
        ("-n 2 -- eval runs/x", "the command after -- must be train, got eval"),
        ("-n 2 --devices-per-process 0 -- train", "--devices-per-process must be positive, got 0"),
        ("-n 2 --grace-seconds nan -- train", "--grace-seconds must not be negative, got nan"),
    ],
)
def test_invalid_arguments_of_launch_are_a_one_line_error(
    args: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *args.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err, re.IGNORECASE)
    assert err.count("\n") == 1
