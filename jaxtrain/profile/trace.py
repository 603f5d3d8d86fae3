"""Where the time of training steps goes: a trace of them, and what its operations add up to.

The trace is `jax.profiler`'s, for xprof (`xprof --logdir RUN/profile`) and Perfetto. The table divides the time that
the steps took by the clock: at every moment among the operations that run, so that its rows add up to the whole,
whatever runs at once; a moment when none runs is the input's where the loop waits for a batch, else idle.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jax

from jaxtrain.errors import RunFailed
from jaxtrain.profile.kinds import KINDS, kind_of_kernel
from jaxtrain.profile.program import Operation, operations

STEPS, INPUT = "profiled steps", "input"
"""Annotations on the host: around all steps, and around the wait for a batch."""


@dataclass(frozen=True)
class Span:
    """A stretch of a trace: nanoseconds, the operation's name, its kind and its line."""

    begin: float
    end: float
    name: str
    kind: str
    line: str


@dataclass(frozen=True)
class Row:
    """A kind of work: seconds, its share of all, how often it ran; and its operations, the longest first."""

    kind: str
    seconds: float
    share: float
    count: int
    top: Sequence["Top"]


@dataclass(frozen=True)
class Top:
    """An operation, all its runs together."""

    name: str
    line: str
    seconds: float
    count: int


class StepTrace:
    """A trace of some steps of a loop, written under `folder`: within a `with`, around the steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> "StepTrace":
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call would be an event, and take time
        # The folder of the trace; by default it is named by the second, and overwritten by a second trace in it.
        options.session_id = f"{datetime.now():%Y_%m_%d_%H_%M_%S_%f}"
        jax.profiler.start_trace(self._folder, profiler_options=options)
        self._steps = jax.profiler.TraceAnnotation(STEPS)
        self._steps.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._steps.__exit__(*error)
        jax.profiler.stop_trace()


@contextmanager
def current_source_lines() -> Iterator[None]:
    """Within, a program that was kept is used again only where its lines are those of the source as it is."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


class LoopTrace:
    """A `StepTrace` of steps `begin` to `end` − 1 of a training loop, which tells it before each step."""

    def __init__(self, folder: Path, begin: int, end: int) -> None:
        self.steps = range(begin, end)
        self.hlo = ""
        """The program of a step, as text."""
        self._trace, self._running, self.done = StepTrace(folder), False, False

    def before(self, step: int, state: Any) -> None:
        """Begin, or end, where `step` is the one to; all steps before it are waited for."""
        if step in self.steps and not self.done and not self._running:
            jax.block_until_ready(state)
            self._trace.__enter__()
            self._running = True
        elif step >= self.steps.stop:
            self.close(state)

    def close(self, state: Any) -> None:
        """End, where the trace has begun and not ended."""
        if self._running:
            jax.block_until_ready(state)
            self._trace.__exit__(None, None, None)
            self._running, self.done = False, True


def newest_trace(folder: Path) -> Path:
    """The last trace written under `folder`. Raises `RunFailed` where there is none."""
    found = sorted(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise RunFailed(f"{folder} holds no trace: the profiler has written nothing")
    return found[-1]


def time_table(trace: Path, hlo: str, top: int = 3) -> list[Row]:
    """What the time of the steps in `trace` went to, the most first. `hlo`: their program, as text.

    Empty where the trace has no operations: of a GPU whose counters the driver shows to administrators alone, say;
    `jaxtrain.profile.estimate` has an estimate then.
    """
    with warnings.catch_warnings():
        # Types of jaxlib's, made as they are first asked for, lack a module, of which Python 3.12 warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        data = jax.profiler.ProfileData.from_file(str(trace))
        spans = [*_operations(data, operations(hlo), hlo.partition(",")[0].removeprefix("HloModule "))]
        annotations = [*_annotations(data)]
    window = [span for span in annotations if span.name == STEPS]
    if not spans or not window:
        return []
    waits = [span for span in annotations if span.name == INPUT]
    ran = Counter(span.name for span in spans)
    went = _divided(spans, waits, window[0].begin, window[0].end)
    return table_rows(went, {span: ran[span.name] for span in went}, top)


def _events(data: Any) -> Iterable[tuple[str, Any, Mapping[str, Any]]]:
    """(line, event, its statistics) of all that may be operations."""
    for plane in data.planes:
        for line in plane.lines:
            if plane.name.startswith("/device:") and not line.name.startswith("Stream"):
                continue  # what was derived from the streams
            for event in line.events:
                yield line.name, event, dict(event.stats)


def _operations(data: Any, program: Mapping[str, Operation], module: str) -> Iterable[Span]:
    """Those that ran; those of `module` are told by `program`, others, an evaluation's say, by their names alone."""
    begun: list[tuple[Any, Mapping[str, Any], bool]] = []
    ended: dict[tuple[str, Any], float] = {}
    for line, event, stats in _events(data):
        if "hlo_op" in stats or line.startswith("Stream"):
            begun.append((event, stats, line.startswith("Stream")))
        elif event.name.startswith("end: "):
            # On a CPU an operation that runs on other threads is over where this is, not where its call is.
            ended[event.name.removeprefix("end: "), stats.get("_c")] = event.start_ns
    for event, stats, kernel in begun:
        name = str(stats.get("hlo_op", event.name))
        known = program.get(name) if stats.get("hlo_module") == module else None
        if known is None and not kernel and _contains_others(name):
            continue
        kind = known.kind if known else kind_of_kernel(event.name)
        end = max(event.start_ns + event.duration_ns, ended.get((event.name, stats.get("_p")), 0))
        of = "" if known or "hlo_module" not in stats else f" of {stats['hlo_module']}"
        yield Span(event.start_ns, end, name + of, kind, known.line if known else "")


def _contains_others(name: str) -> bool:
    return name.partition(".")[0] in ("while", "cond", "conditional", "call")


def _annotations(data: Any) -> Iterable[Span]:
    for plane in data.planes:
        if plane.name.startswith("/host:"):
            for line in plane.lines:
                for event in line.events:
                    if event.name in (STEPS, INPUT):
                        yield Span(event.start_ns, event.start_ns + event.duration_ns, event.name, INPUT, "")


_IDLE = Span(0, 0, "", "idle", "")


def _divided(spans: Sequence[Span], waits: Sequence[Span], begin: float, end: float) -> dict[Span, float]:
    """Nanoseconds of the window by what they went to: each moment divided among what runs then.

    By operation: its first span stands for all of them.
    """
    first: dict[str, Span] = {}
    moments: list[tuple[float, int, Span]] = []
    for span in [*spans, *waits]:
        span_begin, span_end = max(span.begin, begin), min(span.end, end)
        if span_begin < span_end:
            one = first.setdefault(span.name, span)
            moments += [(span_begin, 1, one), (span_end, -1, one)]
    running: Counter[Span] = Counter()
    went: dict[Span, float] = defaultdict(float)
    now = begin
    for moment, change, span in [*sorted(moments, key=lambda m: m[0]), (end, 0, _IDLE)]:
        busy = [s for s in running if running[s] and s.kind != INPUT]
        waiting = [s for s in running if running[s]] or [_IDLE]
        for running_now in busy or waiting[:1]:
            went[running_now] += (moment - now) / len(busy or waiting[:1])
        running[span] += change
        if not running[span]:
            del running[span]
        now = moment
    return dict(went)


def table_rows(went: Mapping[Span, float], counts: Mapping[Span, int], top: int) -> list[Row]:
    """The rows of a table, the most first: of operations, each with its nanoseconds and how often it ran."""
    whole = sum(went.values())
    found = []
    for kind in KINDS:
        of_kind = sorted((span for span in went if span.kind == kind), key=lambda s: -went[s])
        if not of_kind:
            continue
        longest = [Top(s.name, s.line, went[s] / 1e9, counts.get(s, 0)) for s in of_kind[:top] if s.line or s.name]
        taken = sum(went[span] for span in of_kind)
        count = sum(counts.get(span, 0) for span in of_kind)
        found.append(Row(kind, taken / 1e9, taken / whole, count, [] if kind in (INPUT, "idle") else longest))
    return sorted(found, key=lambda row: -row.seconds)
