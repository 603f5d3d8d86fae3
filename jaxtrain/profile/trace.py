"""Traces of training steps, and a table of the time of each kind of operation.

Traces are written by `jax.profiler`, for xprof (`xprof --logdir RUN/profile`) and Perfetto. The table divides the wall
time of the steps: at every moment, time is divided equally among the running operations, so that the rows add up to the
total. When no operation runs, time counts as input while the loop waits for a batch, and as idle otherwise.
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
from jaxtrain.folder_files import is_folder, make_folder
from jaxtrain.profile.kinds import KINDS, kind_of_kernel
from jaxtrain.profile.program_text import Operation, operations

STEPS, INPUT = "profiled steps", "input"
"""Names of annotations on the host: around all steps, and around the wait for a batch."""


@dataclass(frozen=True)
class Span:
    """One run of an operation in a trace.

    Attributes:
      begin: Its start, in nanoseconds.
      end: Its end, in nanoseconds.
      name: Name of the operation.
      kind: One of `jaxtrain.profile.kinds.KINDS`.
      line: Source line as file:line; empty if it is unknown.
    """

    begin: float
    end: float
    name: str
    kind: str
    line: str


@dataclass(frozen=True)
class Row:
    """A row of a time table.

    Attributes:
      kind: The kind of operation.
      seconds: Time of all operations of this kind.
      share: Fraction of the total time.
      count: Number of runs.
      top: The operations with the most time, longest first.
    """

    kind: str
    seconds: float
    share: float
    count: int
    top: Sequence["Top"]


@dataclass(frozen=True)
class Top:
    """Time and number of all runs of one operation, in seconds."""

    name: str
    line: str
    seconds: float
    count: int


class StepTrace:
    """A context manager that traces the training steps within it.

    Args:
      folder: The folder to write the trace to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> "StepTrace":
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # an event per Python call would slow down the steps
        # The default name of a trace's folder has seconds: a second trace within one would overwrite the first.
        make_folder(self._folder)
        for folder in (self._folder / "plugins", self._folder / "plugins" / "profile"):
            is_folder(folder)  # raises for a link, which the profiler would follow
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
    """Reuse programs of the compilation cache within the context only if their source lines are current."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


class LoopTrace:
    """A `StepTrace` of the steps `begin` to `end` − 1 of a training loop.

    Args:
      folder: The folder to write the trace to.
      begin: The first step.
      end: The step after the last one.
    """

    def __init__(self, folder: Path, begin: int, end: int) -> None:
        self.steps = range(begin, end)
        self.hlo = ""
        """Text of the compiled step."""
        self._trace, self._running, self.done = StepTrace(folder), False, False

    def before(self, step: int, state: Any) -> None:
        """Start the trace before its first step and stop it after its last, once `state` is computed."""
        if step in self.steps and not self.done and not self._running:
            jax.block_until_ready(state)
            self._trace.__enter__()
            self._running = True
        elif step >= self.steps.stop:
            self.close(state)

    def close(self, state: Any) -> None:
        """Stop the trace if it is running."""
        if self._running:
            jax.block_until_ready(state)
            self._trace.__exit__(None, None, None)
            self._running, self.done = False, True


def newest_trace(folder: Path) -> Path:
    """Return the newest trace in a folder.

    Raises:
      RunFailed: There is none.
    """
    files = [path for path in folder.glob("plugins/profile/*/*.xplane.pb") if not path.is_symlink()]
    found = sorted(files, key=lambda path: path.stat().st_mtime)
    if not found:
        raise RunFailed(f"{folder} holds no trace: the profiler wrote nothing")
    return found[-1]


def time_table(trace: Path, hlo: str, top: int = 3) -> list[Row]:
    """Return the time of the traced steps by kind of operation, longest first.

    Args:
      trace: The trace, as returned by `newest_trace`.
      hlo: Text of the compiled step; if it is empty, kinds are derived from names.
      top: Number of operations per row.

    Returns:
      The rows. Empty if the trace has no operations, for example because the driver permits only administrators to
      read the counters of the GPU; `estimate_table` then gives an estimate.
    """
    with warnings.catch_warnings():
        # Python 3.12 warns that types created lazily by jaxlib have no module.
        warnings.simplefilter("ignore", DeprecationWarning)
        data = jax.profiler.ProfileData.from_file(str(trace))
        program = operations(hlo) if hlo else {}
        spans = [*_operations(data, program, hlo.partition(",")[0].removeprefix("HloModule "))]
        annotations = [*_annotations(data)]
    window = [span for span in annotations if span.name == STEPS]
    if not spans or not window:
        return []
    waits = [span for span in annotations if span.name == INPUT]
    counts = Counter(span.name for span in spans)
    times = _divide_time(spans, waits, window[0].begin, window[0].end)
    return table_rows(times, {span: counts[span.name] for span in times}, top)


def _events(data: Any) -> Iterable[tuple[str, Any, Mapping[str, Any]]]:
    """Yield the name of the line, the event and its statistics for all events that may be operations."""
    for plane in data.planes:
        for line in plane.lines:
            if plane.name.startswith("/device:") and not line.name.startswith("Stream"):
                continue  # lines derived from those of the streams
            for event in line.events:
                yield line.name, event, dict(event.stats)


def _operations(data: Any, program: Mapping[str, Operation], module: str) -> Iterable[Span]:
    """Yield the runs of operations.

    Operations of `module` are classified by `program`, those of other modules, such as an evaluation, by their names.
    """
    starts: list[tuple[Any, Mapping[str, Any], bool]] = []
    ends: dict[tuple[str, Any], float] = {}
    for line, event, stats in _events(data):
        if "hlo_op" in stats or line.startswith("Stream"):
            starts.append((event, stats, line.startswith("Stream")))
        elif event.name.startswith("end: "):
            # On a CPU, an operation that runs on other threads ends at this event, not when its call returns.
            ends[event.name.removeprefix("end: "), stats.get("_c")] = event.start_ns
    for event, stats, kernel in starts:
        name = str(stats.get("hlo_op", event.name))
        operation = program.get(name) if stats.get("hlo_module") == module else None
        if operation is None and not kernel and _is_container(name):
            continue
        kind = operation.kind if operation else kind_of_kernel(event.name)
        end = max(event.start_ns + event.duration_ns, ends.get((event.name, stats.get("_p")), 0))
        suffix = "" if operation or "hlo_module" not in stats else f" of {stats['hlo_module']}"
        yield Span(event.start_ns, end, name + suffix, kind, operation.line if operation else "")


def _is_container(name: str) -> bool:
    return name.partition(".")[0] in ("while", "cond", "conditional", "call")


def _annotations(data: Any) -> Iterable[Span]:
    for plane in data.planes:
        if plane.name.startswith("/host:"):
            for line in plane.lines:
                for event in line.events:
                    if event.name in (STEPS, INPUT):
                        yield Span(event.start_ns, event.start_ns + event.duration_ns, event.name, INPUT, "")


_IDLE = Span(0, 0, "", "idle", "")


def _divide_time(spans: Sequence[Span], waits: Sequence[Span], begin: float, end: float) -> dict[Span, float]:
    """Return the nanoseconds of each operation, with every moment divided among the running ones.

    The first span of an operation is the key for all of its spans.
    """
    first: dict[str, Span] = {}
    moments: list[tuple[float, int, Span]] = []
    for span in [*spans, *waits]:
        span_begin, span_end = max(span.begin, begin), min(span.end, end)
        if span_begin < span_end:
            one = first.setdefault(span.name, span)
            moments += [(span_begin, 1, one), (span_end, -1, one)]
    running: Counter[Span] = Counter()
    times: dict[Span, float] = defaultdict(float)
    now = begin
    for moment, change, span in [*sorted(moments, key=lambda m: m[0]), (end, 0, _IDLE)]:
        busy = [s for s in running if running[s] and s.kind != INPUT]
        waiting = [s for s in running if running[s]] or [_IDLE]
        for running_now in busy or waiting[:1]:
            times[running_now] += (moment - now) / len(busy or waiting[:1])
        running[span] += change
        if not running[span]:
            del running[span]
        now = moment
    return dict(times)


def table_rows(times: Mapping[Span, float], counts: Mapping[Span, int], top: int) -> list[Row]:
    """Return the rows of a time table, longest first.

    Args:
      times: Nanoseconds of each operation.
      counts: Number of runs of each operation.
      top: Number of operations per row.
    """
    total = sum(times.values())
    rows = []
    for kind in KINDS:
        of_kind = sorted((span for span in times if span.kind == kind), key=lambda s: -times[s])
        if not of_kind:
            continue
        longest = [Top(s.name, s.line, times[s] / 1e9, counts.get(s, 0)) for s in of_kind[:top] if s.line or s.name]
        nanoseconds = sum(times[span] for span in of_kind)
        count = sum(counts.get(span, 0) for span in of_kind)
        rows.append(
            Row(kind, nanoseconds / 1e9, nanoseconds / total, count, [] if kind in (INPUT, "idle") else longest)
        )
    return sorted(rows, key=lambda row: -row.seconds)
