"""`parity COMMAND`: list, check and locate cases. A mistake of the user is reported in one line."""

import difflib
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

import jaxtrain
from jaxtrain.cli import nearest
from jaxtrain.errors import UserError
from jaxtrain.fields import Count, CountOrZero, Rate, field_errors
from jaxtrain.flags import Flag, check_writable, parse, parse_known
from parity.attestation import environment
from parity.case import Case
from parity.cases import CASES, SUMMARIES, case_of
from parity.compare.examination import Examination
from parity.explain.locate import STEPS, locate
from parity.own_errors import own_error
from parity.report import Result, bars, divergence, document, table, waiting
from parity.run import examine, replay
from parity.settings import PRECISIONS, Settings, settings_of, validate

_Case = Annotated[str, Flag(positional=True, metavar="CASE")]
_Precisions = Annotated[tuple[str, ...], Flag(metavar="P", listed=True, choices=PRECISIONS)]
_File = Annotated[Path | None, Flag(metavar="F")]
_STDOUT = Path("-")


@dataclass(frozen=True)
class _Command:
    debug: bool = False
    """Show tracebacks and log messages."""


@dataclass(frozen=True)
class _Training(_Command):
    dropout: Annotated[Rate | None, Flag(metavar="P")] = None
    """Dropout rate, with the same masks on both sides; default 0."""
    seed: Annotated[CountOrZero | None, Flag(metavar="S")] = None
    """Seed of weights and data; default: the recipe's own, or 0."""
    steps: Annotated[Count | None, Flag(metavar="N")] = None
    """Optimizer steps; default: the recipe's own, or 20."""


@dataclass(frozen=True)
class Run(_Training):
    """Train cases in PyTorch and in JAX, and compare."""

    cases: Annotated[tuple[str, ...], Flag(positional=True, metavar="CASE")] = ()
    """Built-in cases, or those of files as FILE.py::case; default: all that are built in."""
    precision: _Precisions = ()
    """Separated by commas; default: fp64,fp32."""
    accumulate: Annotated[Count | None, Flag(metavar="K")] = None
    """Micro-batches per accumulation window; default: the recipe's own, or 1."""
    remat: Annotated[str | None, Flag(metavar="P")] = None
    """JAX's rematerialization policy; default: the recipe's own, or none."""
    json: _File = None
    """Write the results as JSON."""
    html: _File = None
    """Write the results as an HTML page."""
    bundle: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Compare with a bundle of parity record, without PyTorch."""


@dataclass(frozen=True)
class Locate(_Training):
    """Find the first operation in which a case differs."""

    case: _Case = ""
    """A built-in case, or FILE.py::case."""
    steps: Annotated[Count, Flag(metavar="N")] = STEPS
    """Optimizer steps."""


@dataclass(frozen=True)
class Prove(_Command):
    """Prove that each tensor corresponds to the leaf named in the case."""

    case: _Case = ""
    """A built-in case, or FILE.py::case."""


@dataclass(frozen=True)
class Record(_Training):
    """Record a case's PyTorch side for machines without PyTorch."""

    case: _Case = ""
    """A built-in case, or FILE.py::case."""
    out: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Folder without a bundle."""
    precision: _Precisions = ()
    """Separated by commas; default: fp64,fp32."""
    accumulate: Annotated[Count | None, Flag(metavar="K")] = None
    """Micro-batches per accumulation window; default: the recipe's own, or 1."""


@dataclass(frozen=True)
class Mutate(_Command):
    """Plant bugs in a module's operations and check that each is found."""

    factories: Annotated[tuple[str, ...], Flag(positional=True, metavar="FILE.py::FACTORY")] = ()
    """Functions that return a module and an example batch."""
    clean: Annotated[CountOrZero, Flag(metavar="N")] = 0
    """Number of additional runs without a bug."""
    json: _File = None
    """Write the outcomes as JSON."""


@dataclass(frozen=True)
class Selftest(_Command):
    """Check that this machine trains correctly, without PyTorch."""

    device: Literal["cpu", "gpu"] | None = None
    """Default: JAX's default device."""
    json: _File = None
    """Write the results as JSON."""


@dataclass(frozen=True)
class Verify(_Command):
    """Give the verdict on a port that somebody else wrote, by a contract."""

    source: Annotated[str, Flag(positional=True, metavar="SOURCE")] = ""
    """The PyTorch file."""
    target: Annotated[str, Flag(positional=True, metavar="TARGET")] = ""
    """The JAX file that claims to be the same training."""
    contract: _File = None
    """The TOML file that names how both are built and stepped."""
    seed: Annotated[CountOrZero | None, Flag(metavar="S")] = None
    """Seed of weights and data; default: drawn, and printed with the verdict."""
    json: _File = None
    """Write the verdict as JSON; - prints nothing else on stdout."""


PRECISION = ("fp64", "fp32")
"""The precisions of a check by default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 if something differs, 2 for wrong usage."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["--version"]:
        print(f"parity of jaxtrain {jaxtrain.__version__}")
        return 0
    if not args or args[0] in ("-h", "--help"):
        _print_commands()
        return 0 if args else 2
    if args == ["list"]:
        width = max(map(len, SUMMARIES))
        print("\n".join(f"{name:{width}}  {summary}" for name, summary in SUMMARIES.items()))
        return 0
    try:
        options, flags = _parsed(args)
    except UserError as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    except SystemExit as stop:  # of --help
        return int(stop.code or 0)
    return _answer(_COMMANDS[args[0]][1], options, flags)


def _print_commands() -> None:
    print("usage: parity COMMAND …\n")
    summaries = {name: (kind.__doc__ or "").rstrip(".") for name, (kind, _) in _COMMANDS.items()}
    summaries = {"list": "List the built-in cases", **summaries}
    print("\n".join(f"  {name:10} {text[:1].lower()}{text[1:]}" for name, text in summaries.items()))
    print("\n  parity COMMAND --help lists its flags; parity --version")


def _parsed(args: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the options of a command, and the flags that set fields of a recipe.

    Raises:
      UserError: An argument is unknown or out of bounds.
    """
    name, *words = args
    if name not in _COMMANDS:
        raise UserError(f"no command {name!r}{nearest(name, [*_COMMANDS])}: choose one of list, {', '.join(_COMMANDS)}")
    kind, prog = _COMMANDS[name][0], f"parity {name}"
    if {"-h", "--help"} & {*words}:
        parse(kind(), words, prog)
    options, flags = parse_known(kind(), words, prog)
    named = _named(options)
    if flags and not (named and all("::" in case for case in named)):
        parse(kind(), words, prog)  # refuses them
    for case in named:
        _check_case(case)
    if wrong := field_errors(options):
        raise UserError(f"--{wrong[0]}")
    for file in (getattr(options, "json", None), getattr(options, "html", None)):
        check_writable(None if file == _STDOUT and isinstance(options, Verify) else file)
    return options, flags


def _named(options: Any) -> tuple[str, ...]:
    """Return the cases that a command names."""
    return options.cases if isinstance(options, Run) else (options.case,) if hasattr(options, "case") else ()


def _answer(command: Callable[..., int], options: Any, flags: list[str]) -> int:
    """Run a command; report a mistake of the user in one line."""
    # A pipe has no width, and a table folded to a guessed width is hard to read.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    if isinstance(options, Run):
        console.print(bars())
    if isinstance(options, Selftest):
        console.print("checking whether this machine trains correctly, without PyTorch, in about a minute")
    if options.debug:
        logging.basicConfig(level=logging.INFO)
    try:
        return command(options, flags, console)
    except UserError as error:
        if options.debug:
            traceback.print_exc()
        print(f"parity: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        line = own_error(error)
        if options.debug or line is None:
            raise
        print(f"parity: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("parity: interrupted", file=sys.stderr)
        return 130


def _run(options: Run, flags: list[str], console: Console) -> int:
    results = _replayed(options, flags, console) if options.bundle else _results(options, flags, console)
    console.print(table(results))
    if options.json:
        options.json.write_text(json.dumps(document(results), indent=2, allow_nan=False) + "\n")
    if options.html:
        from parity.report.page_case import page_case
        from parity.report.verdict_page import write_page  # imports what no other command needs

        write_page(options.html, environment(), [page_case(result) for result in results])
    return 0 if all(result.verdict.passed for result in results) else 1


def _record(options: Record, flags: list[str], console: Console) -> int:
    from parity.bundle import record

    if options.out is None:
        raise UserError("a folder is required: parity record CASE --out DIR")
    with waiting(console, f"{options.case} in PyTorch"):
        case = case_of(options.case, **_case_options(options, flags))
        record(case, options.precision or PRECISION, options.out, **_settings(options))
    console.print(
        f"{options.out} contains PyTorch's side of {case.name}: parity run {options.case} --bundle {options.out}"
    )
    return 0


def _prove(options: Prove, flags: list[str], console: Console) -> int:
    from parity.weights import prove

    case = _with_tables(case_of(options.case, **_case_options(options, flags)), console)
    with waiting(console, f"{case.name}: perturbing each tensor on both sides"):
        proof = prove(case)
    console.print(
        f"{case.name}: {proof.tensors} tensors and {proof.buffers} buffers of PyTorch correspond to {proof.leaves} "
        "leaves of JAX, each used once"
    )
    if proof.distances:
        name, apart = max(proof.distances.items(), key=lambda item: item[1])
        console.print(f"{len(proof.distances)} change both losses alike, within {apart:.0e} ({name})", markup=False)
    for alias, name in proof.tied.items():
        console.print(f"tied: {alias} is {name}", markup=False)
    for name in proof.unproven:
        console.print(f"not proven: {name} does not change the loss", markup=False)
    return 0


def _mutate(options: Mutate, flags: list[str], console: Console) -> int:
    from parity.mutate import main as mutate
    from parity.mutate import mutants_in

    if not options.factories:
        raise UserError("a function is required: parity mutate FILE.py::FACTORY")
    return mutate(mutants_in(options.factories), options.json, console, options.clean)


def _selftest(options: Selftest, flags: list[str], console: Console) -> int:
    from parity.selftest import main as selftest

    return selftest(console, device=options.device, file=options.json, debug=options.debug)


def _verify(options: Verify, flags: list[str], console: Console) -> int:
    from parity.verify import verify

    if options.contract is None:
        raise UserError("a contract is required: parity verify SOURCE TARGET --contract FILE")
    if options.json == _STDOUT:
        console = Console(stderr=True, highlight=False)
    with waiting(console, options.target):
        verdict = verify(Path(options.source), Path(options.target), options.contract, options.seed)
    for line in verdict.lines:
        console.print(line, markup=False, soft_wrap=True)
    if options.json:
        text = json.dumps(verdict.as_json(), indent=2, allow_nan=False) + "\n"
        sys.stdout.write(text) if options.json == _STDOUT else options.json.write_text(text)
    return 0 if verdict.equal else 1


def _replayed(options: Run, flags: list[str], console: Console) -> list[Result]:
    """Compare JAX with a bundle; PyTorch need not be installed."""
    from parity.bundle import open_bundle

    assert options.bundle is not None
    bundle = open_bundle(options.bundle)
    if len(options.cases) != 1:
        raise UserError(f"{options.bundle} contains one case: name it, as in parity run FILE.py::case --bundle DIR")
    case = case_of(options.cases[0], **_case_options(options, flags))
    if case.name != bundle.case:
        raise UserError(f"{options.bundle} contains {bundle.case}, not {case.name}: name {bundle.case}")
    settings = replace(bundle.settings, remat=settings_of(case, **_settings(options)).remat)
    precisions = options.precision or bundle.precisions
    return [_timed(case, p, settings, options, console, partial(_beside, bundle)) for p in precisions]


def _beside(bundle: Any, case: Case, precision: str, settings: Settings) -> Examination:
    reference = partial(bundle.reference, precision)
    return replay(case, precision, reference, **asdict(settings))


def _locate(options: Locate, flags: list[str], console: Console) -> int:
    start = time.perf_counter()
    with waiting(console, options.case):
        case = case_of(options.case, **_case_options(options, flags))
        settings = settings_of(case, **_settings(options))
        found = locate(case, seed=settings.seed, steps=settings.steps)
    seconds = time.perf_counter() - start
    console.print(
        f"{options.case} {'differs' if found else 'does not differ'} in {settings.steps} steps, {seconds:.1f} s"
    )
    if found:
        console.print(divergence(found), soft_wrap=True)
    return 1 if found else 0


def _case_options(options: Any, flags: list[str]) -> dict[str, Any]:
    dropout = getattr(options, "dropout", None)
    given = {} if dropout is None else {"dropout": dropout}
    return {**given, "flags": flags} if flags else given


def _settings(options: Any) -> dict[str, Any]:
    """Return the settings that were given; those of a recipe, or the defaults, take the place of the others."""
    found = {name: getattr(options, name, None) for name in ("accumulate", "remat", "steps", "seed")}
    return {name: value for name, value in found.items() if value is not None}


def _results(options: Run, flags: list[str], console: Console) -> list[Result]:
    """Run every check requested, after all of them are validated."""
    with waiting(console, "importing"):
        cases = [case_of(name, **_case_options(options, flags)) for name in options.cases or CASES]
    cases = [_with_tables(case, console) for case in cases]
    precisions = options.precision or PRECISION
    cases = [_with_precision(case, precisions) for case in cases]
    checks = [(case, p, settings_of(case, **_settings(options))) for case, p in product(cases, precisions)]
    for case, precision, settings in checks:
        validate(case, precision, settings)
    results: list[Result] = []
    for case, precision, settings in checks:
        if precision != "fp64" and any(_differs_in_float64(result, case) for result in results):
            console.print(f"{case.name} {precision} not run: {case.name} differs in fp64", markup=False)
        else:
            results.append(_timed(case, precision, settings, options, console, _live))
    return results


def _with_precision(case: Case, precisions: Sequence[str]) -> Case:
    """Return the case, with a line if none of its checks has the precision of its run."""
    if case.precision is None or case.precision in precisions:
        return case
    line = f"precision {case.precision}" + f": add --precision {case.precision}" * (case.precision in PRECISIONS)
    return replace(case, not_exercised=(*case.not_exercised, line))


def _differs_in_float64(result: Result, case: Case) -> bool:
    return result.case is case and result.precision == "fp64" and not result.verdict.passed


def _with_tables(case: Case, console: Console) -> Case:
    """Return the case with its name tables; print those that it leaves out as Python source to copy."""
    if case.has_tables:
        return case
    from parity.weights import as_source, proposed

    with waiting(console, f"{case.name}: matching parameters"):
        complete, notes = proposed(case)
    for field, table_of in {"names": complete.names, "buffers": complete.buffers}.items():
        if table_of is not None and getattr(case, field) is None:
            console.print(f"{case.name} is compared under these names; copy them into its {field}:", markup=False)
            console.print(as_source(table_of), markup=False, highlight=False, soft_wrap=True)
    for line in notes:
        console.print(f"  note: {line}", markup=False, soft_wrap=True)
    return complete


def _live(case: Case, precision: str, settings: Settings) -> Examination:
    return examine(case, precision, locate=True, **asdict(settings))


def _timed(
    case: Case,
    precision: str,
    settings: Settings,
    options: Run,
    console: Console,
    examined: Callable[[Case, str, Settings], Examination],
) -> Result:
    start = time.perf_counter()
    with waiting(console, case.name):
        examination = examined(case, precision, settings)
    verdict = examination.verdict
    seconds = time.perf_counter() - start
    console.print(f"{case.name} {precision} {'held' if verdict.passed else 'differs'} in {seconds:.1f} s")
    for fault in verdict.faults:
        console.print(f"  {fault}", markup=False, soft_wrap=True)
    if verdict.worst_tensor:
        console.print(f"  worst tensor: {verdict.worst_tensor}", markup=False, soft_wrap=True)
    for line in examination.notes:
        console.print(f"  note: {line}", markup=False, soft_wrap=True)
    for line in examination.not_exercised:
        console.print(f"  not exercised: {line}", style="dim", markup=False, soft_wrap=True)
    if verdict.trajectory:
        console.print(f"  {verdict.trajectory}", markup=False, soft_wrap=True)
    for where in filter(None, [verdict.stage, verdict.unlocated]):
        console.print(f"  {where}", markup=False, soft_wrap=True)
    if verdict.diagnosis:
        console.print(f"  {verdict.diagnosis}", style="bold", markup=False, soft_wrap=True)
    if verdict.first_divergence:
        console.print(divergence(verdict.first_divergence), soft_wrap=True)
    return Result(case, precision, settings, examination, options.dropout)


def _check_case(name: str) -> None:
    """Raise `UserError` for the name of a case that there cannot be."""
    if name.endswith(".py"):
        raise UserError(f"{name!r} names no case: add it, as in {name}::case")
    if "::" not in name and name not in CASES:
        near = difflib.get_close_matches(name, CASES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(CASES)}, or path/to/file.py::case"
        raise UserError(f"unknown case {name!r}: {hint}")


_COMMANDS: dict[str, tuple[type, Callable[..., int]]] = {
    "run": (Run, _run),
    "locate": (Locate, _locate),
    "prove": (Prove, _prove),
    "record": (Record, _record),
    "mutate": (Mutate, _mutate),
    "selftest": (Selftest, _selftest),
    "verify": (Verify, _verify),
}


if __name__ == "__main__":
    sys.exit(main())
