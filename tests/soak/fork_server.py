"""A process that has imported everything and forks a `jaxtrain` process per input line, so start-up happens once.

It may fork because no device has been used yet: JAX starts its threads in the child.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Modules that `jaxtrain train` imports lazily.
IMPORTED = (
    *(
        "jaxtrain.cli.train",
        "jaxtrain.recipes.image",
        "jaxtrain.recipes.finetune",
        "matplotlib.figure",
        "sklearn.datasets",
    ),
    *("tensorboardX.proto.event_pb2", "tensorboardX.proto.summary_pb2", "tensorboardX.record_writer"),
    *("PIL.ImageDraw", "PIL.ImageFont", "PIL.JpegImagePlugin"),
)


class Child:
    """A forked `jaxtrain` process."""

    def __init__(self, server: subprocess.Popen, pid: int, out: Path) -> None:
        self._server, self.pid, self._out = server, pid, out
        self._status: int | None = None

    @property
    def text(self) -> str:
        """The output so far."""
        return self._out.read_text()

    def send(self, number: int) -> None:
        if self._status is None:  # otherwise the pid may belong to another process
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Return the exit status, negative for a signal."""
        if self._status is None:
            assert self._server.stdout.readline() == "ended\n"
            self._server.stdin.write("\n")
            self._server.stdin.flush()
            self._status = int(self._server.stdout.readline())
        return self._status

    def ended(self) -> bool:
        """Return whether the process has ended, without waiting: it is then a zombie."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait until `happened()` is true or the process has ended."""
        while not happened() and not self.ended():
            time.sleep(0.0005)


class ForkServer:
    """Starts children."""

    def __init__(self, process: subprocess.Popen, folder: Path) -> None:
        self._process, self.folder, self.pid = process, folder, process.pid
        self._children: list[Child] = []

    def start(self, command: str, prelude: str = "") -> Child:
        """Start `jaxtrain COMMAND` in `folder`, after executing the Python code `prelude`."""
        out = self.folder / f"child-{self.pid}-{len(self._children)}.txt"
        out.touch()
        request = {"args": command.split(), "folder": str(self.folder), "out": str(out), "prelude": prelude}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self._children.append(Child(self._process, int(self._process.stdout.readline()), out))
        return self._children[-1]

    def run(self, command: str, prelude: str = "") -> tuple[int, str]:
        """Run a command to its end; return (exit status, output)."""
        child = self.start(command, prelude)
        return child.wait(), child.text

    def end(self) -> None:
        """Kill the last child, which may still run after a failed test."""
        for child in self._children[-1:]:
            child.send(signal.SIGKILL)
            child.wait()
        self._process.stdin.close()


@contextlib.contextmanager
def fork_server(folder: Path, prelude: str = "") -> Iterator[ForkServer]:
    """Start a server that executes the Python code `prelude` in `folder` and runs its children there."""
    # The settings of a user: the strict modes are for tests in the same process, and warnings would add lines.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUMPY")}
    environment["XLA_FLAGS"] = " ".join(f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f)
    # XLA of JAX 0.10 prints kilobytes for each program from the compilation cache, more than a test lets a file have.
    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "tests.soak.fork_server", prelude]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
    ) as process:
        started = ForkServer(process, folder)
        try:
            yield started
        finally:
            started.end()


def main() -> None:
    from jaxtrain.cli import main as jaxtrain_main

    for name in IMPORTED:
        importlib.import_module(name)
    exec(sys.argv[1], {})
    # Collections in a child would visit, and so copy, all objects of the imported modules.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    while line := sys.stdin.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run_child(jaxtrain_main, **request)
        print(pid, flush=True)
        # The child stays a zombie until the next line, so that a late signal reaches no other process.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        print("ended", flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run_child(run: Callable[[list[str]], int], args: list[str], folder: str, out: str, prelude: str) -> None:
    """Run `jaxtrain` in the forked process, in `folder`, with its output in the file `out`."""
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
