"""Record docs/first-day.md, a transcript of a newcomer's commands: `python -m docs.first_day`.

Each command runs in a separate terminal, in a folder that contains only the checkout, with an empty environment and
empty caches. The page shows the final state of each terminal. Needs `pip install pyte`.
"""

import fcntl
import os
import platform
import pty
import re
import select
import signal
import struct
import subprocess
import tempfile
import termios
import time
from dataclasses import dataclass
from pathlib import Path

import pyte

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "first-day.md"
COLUMNS, ROWS, MAX_LINES = 110, 60, 24

PORT = """\
import jax, jax.numpy as jnp, numpy as np, torch
import jaxtrain as jt
from parity import AdamW, Case


def torch_model():
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4))


def torch_loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).sum(), len(batch["x"])


def loss_fn(params, batch, rng):
    h = jax.nn.gelu(batch["x"] @ params["up"] + params["up_bias"])
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
    y = (h * params["scale"] + params["shift"]) @ params["down"] + params["down_bias"]
    return jt.Loss(((y - batch["y"]) ** 2).sum(), weight=len(y)), {}


def batch(seed, rows):
    x, y = np.random.default_rng(seed).normal(size=(2, rows, 16))
    return {"x": x.astype(np.float32), "y": y[:, :4].astype(np.float32)}


sizes = {"up": (16, 64), "up_bias": (64,), "scale": (64,), "shift": (64,), "down": (64, 4), "down_bias": (4,)}
case = Case(
    name="mine",
    torch_model=torch_model,
    torch_loss=torch_loss,
    loss_fn=loss_fn,
    params_like={name: jax.ShapeDtypeStruct(size, np.float32) for name, size in sizes.items()},
    names=None,
    batch=batch,
    rows=8,
    optimizer=AdamW(lr=1e-2),
    clip_norm=1.0,
)
"""
READ = """\
import numpy as np, onnxruntime

session = onnxruntime.InferenceSession("runs/mine.onnx")
tokens = np.frombuffer(b"The loss scale", np.uint8).astype(np.int32)[None]
(logits,) = session.run(None, {"tokens": tokens})
print(logits.shape, "next byte:", repr(chr(logits[0, -1].argmax())))
"""


HEAD = """\
# A first day

This page is a transcript of a newcomer's commands. `python -m docs.first_day` recorded it in a fresh copy of the
project, with an empty environment and empty caches, on {machine}. Long output is cut to its last {max_lines} lines.

| | command | first output | longest time without output | total |
| --- | --- | --- | --- | --- |"""
FILES = f"""
The port, `mine.py`, contains a mistake:

```py
{PORT}```

`read.py` loads the exported model:

```py
{READ}```"""


@dataclass(frozen=True)
class Stage:
    """A command.

    Attributes:
      title: Heading of its section.
      command: Shell command.
      stopped_by: Regular expression of the output at which Ctrl-C is pressed; None runs the command to its end.
      status: Expected exit status.
    """

    title: str
    command: str
    stopped_by: str | None = None
    status: int = 0


@dataclass(frozen=True)
class Transcript:
    """The output of a command.

    Attributes:
      lines: Final content of the terminal.
      first: Seconds to the first output.
      silence: Longest time without output, in seconds.
      total: Duration in seconds.
    """

    lines: list[str]
    first: float
    silence: float
    total: float


STAGES = [
    Stage("Install", "pip install -c constraints.txt '.[parity,onnx]'"),
    Stage("Check the machine", "jaxtrain doctor"),
    Stage(
        "Train on a folder of texts, and stop",
        "jaxtrain train --data docs --out runs/mine --steps 300 --eval-every 100",
        stopped_by=r"step 1[2-9]\d of 300",
    ),
    Stage("Resume the run", "jaxtrain train --resume --out runs/mine"),
    Stage("Write the report", "jaxtrain report runs/mine"),
    Stage("Generate text", "jaxtrain sample runs/mine"),
    Stage("Export the model", "jaxtrain export runs/mine --format onnx"),
    Stage("Run it in ONNX Runtime", "python read.py"),
    Stage("Verify a port of a PyTorch module", "parity run mine.py::case", status=1),
    Stage("Locate the difference", "parity locate mine.py::case", status=1),
    Stage(
        "Fix the port: PyTorch's GELU is exact by default",
        "sed -i 's/gelu(\\(.*\\))$/gelu(\\1, approximate=False)/' mine.py && parity run mine.py::case",
    ),
]


def main() -> None:
    """Run all commands and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "jaxtrain"
        checkout.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x"], cwd=checkout, input=archive, check=True)
        (checkout / "mine.py").write_text(PORT)
        (checkout / "read.py").write_text(READ)
        subprocess.run(["python3", "-m", "venv", ".venv"], cwd=checkout, check=True)
        transcripts = []
        for stage in STAGES:
            print(stage.title, flush=True)
            transcripts.append(_run(stage, checkout, Path(folder)))
            print(*transcripts[-1].lines[-3:], f"{transcripts[-1].total:.0f} s", sep="\n", flush=True)
    PAGE.write_text(_page(transcripts))


def _run(stage: Stage, checkout: Path, home: Path) -> Transcript:
    screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000)
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(checkout)
        environment = {name: os.environ[name] for name in os.environ if name == "LANG" or name.startswith("PIP_")}
        environment |= {"HOME": str(home), "TERM": "xterm-256color", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        environment["PATH"] = f"{checkout}/.venv/bin:{os.environ['PATH']}"
        os.execvpe("bash", ["bash", "-c", stage.command], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    begin = last = time.monotonic()
    first, silence, pressed = None, 0.0, False
    while True:
        ready, _, _ = select.select([terminal], [], [], 0.1)
        if not ready:
            continue
        try:
            data = os.read(terminal, 65536)
        except OSError:  # closed by the child
            break
        if not data:
            break
        now = time.monotonic()
        first = now - begin if first is None else first
        silence, last = max(silence, now - last), now
        stream.feed(data)
        if stage.stopped_by and not pressed and any(re.search(stage.stopped_by, line) for line in screen.display):
            pressed = True
            os.kill(child, signal.SIGINT)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) not in (stage.status, 130 if pressed else stage.status):
        raise SystemExit(f"{stage.command}: {os.waitstatus_to_exitcode(status)}\n" + "\n".join(_lines(screen)))
    total = time.monotonic() - begin
    lines = [line.replace(str(checkout), "~/jaxtrain") for line in _lines(screen)]
    return Transcript(lines, first or total, silence, total)


def _lines(screen: pyte.HistoryScreen) -> list[str]:
    """Return all lines of the terminal, including those scrolled out of view."""
    scrolled = ["".join(line[i].data for i in range(COLUMNS)) for line in screen.history.top]
    lines = [line.rstrip() for line in [*scrolled, *screen.display]]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _page(transcripts: list[Transcript]) -> str:
    machine = f"{os.cpu_count()} CPU cores ({platform.system()}, Python {platform.python_version()}, no GPU)"
    pairs = list(zip(STAGES, transcripts, strict=True))
    rows = [f"| {s.title} | `{s.command}` | {o.first:.1f} s | {o.silence:.1f} s | {o.total:.0f} s |" for s, o in pairs]
    return (
        "\n".join(
            [HEAD.format(machine=machine, max_lines=MAX_LINES), *rows, FILES, *(_section(*pair) for pair in pairs)]
        )
        + "\n"
    )


def _section(stage: Stage, transcript: Transcript) -> str:
    lines = transcript.lines if len(transcript.lines) <= MAX_LINES else ["…", *transcript.lines[-MAX_LINES:]]
    interruption = "Ctrl-C is pressed during training.\n\n" if stage.stopped_by else ""
    output = "\n".join(lines)
    return f"\n## {stage.title}\n\n{interruption}```sh\n{stage.command}\n```\n\n```\n{output}\n```"


if __name__ == "__main__":
    main()
