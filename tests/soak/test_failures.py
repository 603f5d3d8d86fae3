"""Errors of the operating system end a run with a one-line message and intact checkpoints, in real processes."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from jaxtrain.cli import main
from jaxtrain.runner.checkpoint import saved_steps
from jaxtrain.runner.manifest import verify

from .fork_server import ForkServer
from .test_kills import untimed

TRAIN = "train digits-mlp --hidden 16 --batch-size 8 --log-every 1 --eval-every 50"

# After the fourth step, files are limited to 4000 bytes.
LIMIT = """
import resource
from jaxtrain.runner import interval
add, seen = interval.Interval.add, []
def limited(self, metrics):
    seen.append(metrics)
    if len(seen) == 5:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
    add(self, metrics)
interval.Interval.add = limited
"""

# Without CAP_DAC_OVERRIDE (1), permissions apply to root as well: capset(2), version 3.
NO_PRIVILEGE = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
header, data = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0)), ctypes.create_string_buffer(24)
assert libc.capget(header, data) == 0
words = [w & ~(1 << 1) if i < 3 else w for i, w in enumerate(struct.unpack("6I", data.raw))]
assert libc.capset(header, ctypes.create_string_buffer(struct.pack("6I", *words))) == 0
"""


def error_line(text: str) -> str:
    """Return the only error line of the output."""
    assert "Traceback" not in text, text
    assert "Error:" not in text, text
    (line,) = [line for line in text.splitlines() if line.startswith("jaxtrain:")]
    return line


def whole_steps(folder: Path) -> list[int]:
    found = sorted(saved_steps(folder / "checkpoints"))
    for step in found:
        verify(folder / "checkpoints" / str(step))
    return found


def test_a_failed_background_save_ends_the_run_with_a_one_line_error(server):
    command = f"{TRAIN} --steps 9 --save-every 2 --resume auto --out limited"
    status, text = server.run(command, LIMIT)
    assert status == 1
    # The save of step 4 may still be in progress when the limit is set.
    last = whole_steps(server.folder / "limited")[-1]
    assert last in (2, 4)
    assert (
        f"step {last + 2} could not be saved in limited (File too large): the checkpoint of step {last}"
        in error_line(text)
    )
    # Without the limit, the run resumes.
    status, text = server.run(command)
    assert status == 0
    assert f"at step {last}" in text
    assert [line["step"] for line in untimed(server.folder / "limited")] == list(range(10))


def test_a_full_disk_ends_the_run_with_a_one_line_error_and_the_run_can_be_resumed(server):
    if (server.folder / "refused").exists():
        pytest.skip("needs permission to mount a file system")
    command = f"{TRAIN} --steps 40 --save-every 2 --resume auto"
    status, text = server.run(f"{command} --out small/run --keep-last 100")
    assert status == 1
    assert "could not be saved in small/run (No space left on device): the checkpoint of step" in error_line(text)
    run = Path(f"/proc/{server.pid}/root{server.folder}/small/run")
    saved = whole_steps(run)
    assert saved == list(range(0, saved[-1] + 1, 2))
    assert 2 <= saved[-1] < 40
    for step in saved[:-2]:
        shutil.rmtree(run / "checkpoints" / str(step))
    status, text = server.run(f"{command} --out small/run --keep-last 2")
    assert status == 0, text
    assert f"at step {saved[-1]}" in text
    assert server.run(f"{command} --out large")[0] == 0
    assert untimed(run) == untimed(server.folder / "large")


def test_a_read_only_folder_is_a_one_line_error_with_exit_status_2(server):
    run = server.folder / "read-only"
    assert server.run(f"{TRAIN} --steps 4 --out read-only")[0] == 0
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    folders = [run, *(p for p in run.rglob("*") if p.is_dir())]
    for path in [*folders, *before]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for command in ("--resume --steps 8", "--resume auto --steps 8"):
        status, text = server.run(f"{TRAIN} {command} --out read-only", NO_PRIVILEGE)
        assert status == 2
        assert "read-only cannot be written (Permission denied): choose another --out" in error_line(text)
    status, text = server.run(f"{TRAIN} --out read-only/inside", NO_PRIVILEGE)
    assert status == 2
    assert "read-only cannot be written" in error_line(text)
    for path in folders:
        path.chmod(0o755)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_two_processes_never_share_a_run(server, monkeypatch, capsys):
    command = f"{TRAIN} --steps 100000 --save-every 5 --resume auto --out shared"
    one = server.start(command)
    one.until(lambda: "step 7/" in one.text)
    with monkeypatch.context() as patched:
        patched.chdir(server.folder)
        for other in (command, command.replace("--resume auto", "--resume")):
            assert main(other.split()) == 2
            message = f"shared is in use by pid {one.pid} on {os.uname().nodename}: wait for it"
            assert message in error_line(capsys.readouterr().err)
    one.send(signal.SIGKILL)
    assert one.wait() == -signal.SIGKILL
    # The kernel has released the lock.
    child = server.start(command)
    child.until(lambda: re.search(r"resuming shared at step \d+\n(.*\n)*step \d+/", child.text) is not None)
    child.send(signal.SIGTERM)
    assert child.wait() == 128 + signal.SIGTERM, child.text
    logged = [line["step"] for line in untimed(server.folder / "shared")]
    assert logged == list(range(len(logged)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_current_step(server, number):
    name = f"stopped-{number}"
    child = server.start(f"{TRAIN} --steps 100000 --save-every 100000 --out {name}")
    child.until(lambda: "step 7/" in child.text)
    child.send(number)
    assert child.wait() == 128 + number
    saved = whole_steps(server.folder / name)
    assert f"stopped and saved at step {saved[-1]}" in child.text
    assert saved[-1] >= 7
    assert (server.folder / name / "lock").read_text().startswith(f"pid {child.pid} on ")


SLOW_SAVE = """
import time
from jaxtrain.runner import checkpoint
write = checkpoint.write_manifest
def slow(folder):
    if not folder.name.startswith("0."):
        open("saving", "w").close()
        time.sleep(60)
    write(folder)
checkpoint.write_manifest = slow
"""


def test_a_second_signal_ends_a_run_immediately_even_during_a_save(server):
    command = f"{TRAIN} --steps 100000 --save-every 100000 --out twice"
    child = server.start(command, SLOW_SAVE)
    child.until(lambda: "step 7/" in child.text)
    child.send(signal.SIGINT)
    child.until((server.folder / "saving").exists)
    child.send(signal.SIGINT)
    assert child.wait() == -signal.SIGINT
    assert whole_steps(server.folder / "twice") == [0]
    status, text = server.run("train --resume auto --steps 100000 --out twice", SIGTERM_AT_STEP_9)
    assert status == 128 + signal.SIGTERM
    assert "at step 0" in text
    assert untimed(server.folder / "twice") == untimed_prefix(server, 9)


SIGTERM_AT_STEP_9 = """
import os, signal
from jaxtrain.runner import interval
add, seen = interval.Interval.add, []
def stopping(self, metrics):
    seen.append(metrics)
    if len(seen) == 9:
        os.kill(os.getpid(), signal.SIGTERM)
    add(self, metrics)
interval.Interval.add = stopping
"""


def untimed_prefix(server: ForkServer, step: int) -> list[dict]:
    """Return the first lines of an uninterrupted run."""
    status, _ = server.run(f"{TRAIN} --steps 100000 --save-every 100000 --out uninterrupted", SIGTERM_AT_STEP_9)
    assert status == 128 + signal.SIGTERM
    return untimed(server.folder / "uninterrupted")[: step + 1]
