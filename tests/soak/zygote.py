"""A process that has imported everything and forks a life of `jaxtrain` a line it reads: start-up is paid for once.

It may fork because no device has been asked for yet: the threads that JAX computes with are started in the life.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# What `jaxtrain train` imports when it comes to it.
IMPORTED = (
    *("jaxtrain.cli.train", "jaxtrain.tasks.classification", "matplotlib.figure", "sklearn.datasets"),
    *("tensorboardX.proto.event_pb2", "tensorboardX.proto.summary_pb2", "tensorboardX.record_writer"),
)


class Life:
    """One process of `jaxtrain`."""

    def __init__(self, zygote: subprocess.Popen, pid: int, out: Path) -> None:
        self._zygote, self.pid, self._out = zygote, pid, out
        self._status: int | None = None

    @property
    def text(self) -> str:
        """What it has printed."""
        return self._out.read_text()

    def send(self, number: int) -> None:
        if self._status is None:  # else the number may be another process's
            os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit status, negative for a signal."""
        if self._status is None:
            assert self._zygote.stdout.readline() == "ended\n"
            self._zygote.stdin.write("\n")
            self._zygote.stdin.flush()
            self._status = int(self._zygote.stdout.readline())
        return self._status

    def ended(self) -> bool:
        """Whether it has ended, without waiting: it is a zombie then."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def until(self, happened: Callable[[], bool]) -> None:
        """Return when `happened`, or when it has ended."""
        while not happened() and not self.ended():
            time.sleep(0.0005)


class Zygote:
    """Starts lives."""

    def __init__(self, process: subprocess.Popen, folder: Path) -> None:
        self._process, self.folder, self.pid = process, folder, process.pid
        self._lives: list[Life] = []

    def start(self, command: str, prelude: str = "") -> Life:
        """`jaxtrain COMMAND`, in `folder`, after the Python of `prelude`."""
        out = self.folder / f"life-{self.pid}-{len(self._lives)}.txt"
        out.touch()
        order = {"args": command.split(), "folder": str(self.folder), "out": str(out), "prelude": prelude}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._lives.append(Life(self._process, int(self._process.stdout.readline()), out))
        return self._lives[-1]

    def run(self, command: str, prelude: str = "") -> tuple[int, str]:
        """(exit status, what it printed) of a life left to itself."""
        life = self.start(command, prelude)
        return life.wait(), life.text

    def end(self) -> None:
        """Let no life outlast a failed test."""
        for life in self._lives[-1:]:
            life.send(signal.SIGKILL)
            life.wait()
        self._process.stdin.close()


@contextlib.contextmanager
def zygote(folder: Path, prelude: str = "") -> Iterator[Zygote]:
    """A zygote whose lives run in `folder`; it has run the Python of `prelude` there."""
    # As a user runs it: strictness is for tests in the process, warnings would be lines of their own.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUMPY")}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "tests.soak.zygote", prelude]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
    ) as process:
        started = Zygote(process, folder)
        try:
            yield started
        finally:
            started.end()


def main() -> None:
    from jaxtrain.cli import main as jaxtrain_main

    for late in IMPORTED:
        importlib.import_module(late)
    exec(sys.argv[1], {})
    while line := sys.stdin.readline():
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _live(jaxtrain_main, **order)
        print(pid, flush=True)
        # Left a zombie until the next line comes: a late signal to its number meets no other process.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        print("ended", flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _live(run: Callable[[list[str]], int], args: list[str], folder: str, out: str, prelude: str) -> None:
    """The forked process: as if `jaxtrain` had been started in `folder`, its output in the file `out`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 70
    try:
        exec(prelude, {})
        status = run(args)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
