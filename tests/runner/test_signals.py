"""Signals that ask a run to save and stop."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrain.runner.stops.signals import StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_the_signals_of_terminals_and_schedulers_ask_a_run_to_stop(number):
    # `nohup` ignores SIGHUP.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopSignals() as stop:
            assert not stop.wanted(1)
            signal.raise_signal(number)
            assert stop.wanted(2)
            assert stop.exit_status == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_or_handled_stays_so():
    received = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGUSR1)
            assert not stop.wanted(1)
            assert received == [1]
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGUSR1, before[1])


WORKER = """
import os, pathlib, sys, time
from jaxtrain.distributed import processes
processes.start()
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
time.sleep(120)
"""
LAUNCHER = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
from jaxtrain.cli.child_processes import Processes
environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_PROCESSES"}
environments = [{**environment, "NUMBER": str(i)} for i in range(2)]
raise SystemExit(Processes([sys.executable, "-c", sys.argv[1], sys.argv[2]], environments, 1).run().status)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_the_processes_of_a_launcher_that_ends_stop(number, tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, WORKER, str(tmp_path)])
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(workers) == 2
    launcher.send_signal(number)
    assert launcher.wait(60) in (-number, 128 + signal.SIGTERM)
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    alive = [pid for pid in workers if is_running(pid)]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive


STOPPED = """
import os, signal, time
if os.environ["NUMBER"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1)
os.abort()
"""


def test_a_stopped_process_is_named_and_not_the_one_that_waited_for_it():
    done = subprocess.run([sys.executable, "-c", LAUNCHER, STOPPED, ""], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGABRT
    assert "process 1 of 2 is stopped by a signal, and process 0 waited for it in vain" in done.stderr
