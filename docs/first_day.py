"""A newcomer's first day, taken down: `python -m docs.first_day` writes docs/first-day.md.

Every command is typed into a terminal of its own, in a folder that holds the checkout and nothing else, with an empty
environment and empty caches; what the terminal shows at the end is what the page shows. Needs `pip install pyte`.
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
COLUMNS, ROWS, KEPT = 110, 60, 24

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

Written by `python -m docs.first_day`, which types these commands into a terminal, in a fresh copy of the project, with
an empty environment and empty caches, on {where}. What is long is cut to its last {kept} lines.

| | command | first sign of life | longest without one | in all |
| --- | --- | --- | --- | --- |"""
FILES = f"""
The port, `mine.py`, has a mistake in it that its writer has not seen:

```py
{PORT}```

And `read.py`:

```py
{READ}```"""


@dataclass(frozen=True)
class Stage:
    """What is typed, and why; `stopped_by`, on the screen, is when Ctrl-C is pressed; `status`, the exit status due."""

    title: str
    command: str
    stopped_by: str | None = None
    status: int = 0


@dataclass(frozen=True)
class Seen:
    """What the terminal showed, and after how many seconds; `silence`, the longest without a change."""

    lines: list[str]
    first: float
    silence: float
    total: float


STAGES = [
    Stage("Install", "pip install '.[parity,onnx]'"),
    Stage("Is this machine fit for it?", "jaxtrain doctor"),
    Stage(
        "Train on a folder of my own texts, and stop",
        "jaxtrain train --data docs --out runs/mine --steps 300 --eval-every 100",
        stopped_by=r"step 1[2-9]\d of 300",
    ),
    Stage("Go on where it stopped", "jaxtrain train --resume --out runs/mine"),
    Stage("What was it like?", "jaxtrain report runs/mine"),
    Stage("Let it write", "jaxtrain sample runs/mine"),
    Stage("Give it to another program", "jaxtrain export runs/mine --format onnx"),
    Stage("Run it there", "python read.py"),
    Stage("Is my port of a PyTorch module right?", "parity run mine.py::case", status=1),
    Stage("Where is it wrong?", "parity locate mine.py::case", status=1),
    Stage(
        "PyTorch's GELU is the exact one",
        "sed -i 's/gelu(\\(.*\\))$/gelu(\\1, approximate=False)/' mine.py && parity run mine.py::case",
    ),
]


def main() -> None:
    """Live the day, and write it down."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "jaxtrain"
        checkout.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x"], cwd=checkout, input=archive, check=True)
        (checkout / "mine.py").write_text(PORT)
        (checkout / "read.py").write_text(READ)
        subprocess.run(["python3", "-m", "venv", ".venv"], cwd=checkout, check=True)
        seen = []
        for stage in STAGES:
            print(stage.title, flush=True)
            seen.append(_typed(stage, checkout, Path(folder)))
            print(*seen[-1].lines[-3:], f"{seen[-1].total:.0f} s", sep="\n", flush=True)
    PAGE.write_text(_page(seen))


def _typed(stage: Stage, checkout: Path, home: Path) -> Seen:
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
        except OSError:  # the child has closed it
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
        raise SystemExit(f"{stage.command}: {os.waitstatus_to_exitcode(status)}\n" + "\n".join(_shown(screen)))
    total = time.monotonic() - begin
    lines = [line.replace(str(checkout), "~/jaxtrain") for line in _shown(screen)]
    return Seen(lines, first or total, silence, total)


def _shown(screen: pyte.HistoryScreen) -> list[str]:
    """All lines that the terminal has, those scrolled away too."""
    past = ["".join(line[i].data for i in range(COLUMNS)) for line in screen.history.top]
    lines = [line.rstrip() for line in [*past, *screen.display]]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _page(seen: list[Seen]) -> str:
    where = f"{os.cpu_count()} CPU cores ({platform.system()}, Python {platform.python_version()}, no GPU)"
    told = list(zip(STAGES, seen, strict=True))
    rows = [f"| {s.title} | `{s.command}` | {o.first:.1f} s | {o.silence:.1f} s | {o.total:.0f} s |" for s, o in told]
    return "\n".join([HEAD.format(where=where, kept=KEPT), *rows, FILES, *(_section(*one) for one in told)]) + "\n"


def _section(stage: Stage, one: Seen) -> str:
    lines = one.lines if len(one.lines) <= KEPT else ["…", *one.lines[-KEPT:]]
    pressed = "Ctrl-C is pressed on the way.\n\n" if stage.stopped_by else ""
    shown = "\n".join(lines)
    return f"\n## {stage.title}\n\n{pressed}```sh\n{stage.command}\n```\n\n```\n{shown}\n```"


if __name__ == "__main__":
    main()
