"""`parity COMMAND`: list, check and locate cases. A mistake of the user is reported in one line."""

import argparse
import difflib
import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

import jaxtrain
from jaxtrain.errors import UserError
from parity.attestation import environment
from parity.case import Case
from parity.cases import CASES, SUMMARIES, case_of
from parity.compare.examination import Examination
from parity.explain.locate import STEPS, locate
from parity.own_errors import own_error
from parity.report import Result, bars, divergence, document, table, waiting
from parity.run import examine, replay
from parity.settings import PRECISIONS, Settings, settings_of, validate

PRECISION = ("fp64", "fp32")
"""The precisions of a check by default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 if something differs, 2 for wrong usage."""
    try:
        options, others = _parser().parse_known_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    options.flags = others
    if others and not _are_recipes(options):
        print(f"parity: unrecognized arguments: {' '.join(others)}", file=sys.stderr)
        return 2
    if options.command == "list":
        width = max(map(len, SUMMARIES))
        print("\n".join(f"{name:{width}}  {summary}" for name, summary in SUMMARIES.items()))
        return 0
    commands = {
        "run": _run,
        "locate": _locate,
        "prove": _prove,
        "record": _record,
        "mutate": _mutate,
        "selftest": _selftest,
    }
    return _answer(commands[options.command], options)


def _are_recipes(options: argparse.Namespace) -> bool:
    """Whether a command names cases of files alone, whose fields flags may set."""
    named = options.cases if "cases" in options else [getattr(options, "case", "")]
    return bool(named) and all("::" in name for name in named)


def _answer(command: Callable[[argparse.Namespace, Console], int], options: argparse.Namespace) -> int:
    """Run a command; report a mistake of the user in one line."""
    # A pipe has no width, and a table folded to a guessed width is hard to read.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    if options.command == "run":
        console.print(bars())
    if options.command == "selftest":
        console.print("checking whether this machine trains correctly, without PyTorch, in about a minute")
    if getattr(options, "debug", False):
        logging.basicConfig(level=logging.INFO)
    try:
        return command(options, console)
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


def _run(options: argparse.Namespace, console: Console) -> int:
    results = _replayed(options, console) if options.bundle else _results(options, console)
    console.print(table(results))
    if options.json:
        options.json.write_text(json.dumps(document(results), indent=2, allow_nan=False) + "\n")
    if options.html:
        from parity.report.page import write_page  # imports what no other command needs
        from parity.report.page_case import page_case

        write_page(options.html, environment(), [page_case(result) for result in results])
    return 0 if all(result.verdict.passed for result in results) else 1


def _record(options: argparse.Namespace, console: Console) -> int:
    from parity.bundle import record

    with waiting(console, f"{options.case} in PyTorch"):
        case = case_of(options.case, **_case_options(options))
        record(case, options.precision or PRECISION, options.out, **_settings(options))
    console.print(
        f"{options.out} contains PyTorch's side of {case.name}: parity run {options.case} --bundle {options.out}"
    )
    return 0


def _prove(options: argparse.Namespace, console: Console) -> int:
    from parity.weights import prove

    case = _with_tables(case_of(options.case, **_case_options(options)), console)
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


def _mutate(options: argparse.Namespace, console: Console) -> int:
    from parity.mutate import main as mutate
    from parity.mutate import mutants_in

    return mutate(mutants_in(options.factories), options.json, console, options.clean)


def _selftest(options: argparse.Namespace, console: Console) -> int:
    from parity.selftest import main as selftest

    return selftest(console, device=options.device, file=options.json, debug=options.debug)


def _replayed(options: argparse.Namespace, console: Console) -> list[Result]:
    """Compare JAX with a bundle; PyTorch need not be installed."""
    from parity.bundle import open_bundle

    bundle = open_bundle(options.bundle)
    if len(options.cases) != 1:
        raise UserError(f"{options.bundle} contains one case: name it, as in parity run FILE.py::case --bundle DIR")
    case = case_of(options.cases[0], **_case_options(options))
    if case.name != bundle.case:
        raise UserError(f"{options.bundle} contains {bundle.case}, not {case.name}: name {bundle.case}")
    settings = replace(bundle.settings, remat=settings_of(case, **_settings(options)).remat)
    precisions = options.precision or bundle.precisions
    return [_timed(case, p, settings, options, console, partial(_beside, bundle)) for p in precisions]


def _beside(bundle: Any, case: Case, precision: str, settings: Settings) -> Examination:
    reference = partial(bundle.reference, precision)
    return replay(case, precision, reference, **asdict(settings))


def _locate(options: argparse.Namespace, console: Console) -> int:
    start = time.perf_counter()
    with waiting(console, options.case):
        case = case_of(options.case, **_case_options(options))
        settings = settings_of(case, **{"steps": STEPS, **_settings(options)})
        found = locate(case, seed=settings.seed, steps=settings.steps)
    seconds = time.perf_counter() - start
    console.print(
        f"{options.case} {'differs' if found else 'does not differ'} in {settings.steps} steps, {seconds:.1f} s"
    )
    if found:
        console.print(divergence(found), soft_wrap=True)
    return 1 if found else 0


def _case_options(options: argparse.Namespace) -> dict[str, Any]:
    dropout = getattr(options, "dropout", None)
    given = {} if dropout is None else {"dropout": dropout}
    return {**given, "flags": options.flags} if options.flags else given


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given; those of a recipe, or the defaults, take the place of the others."""
    found = {name: getattr(options, name, None) for name in ("accumulate", "remat", "steps", "seed")}
    return {name: value for name, value in found.items() if value is not None}


def _results(options: argparse.Namespace, console: Console) -> list[Result]:
    """Run every check requested, after all of them are validated."""
    with waiting(console, "importing"):
        cases = [case_of(name, **_case_options(options)) for name in options.cases or CASES]
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
    options: argparse.Namespace,
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


class _Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"parity: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("parity", description="Check that a JAX training step equals PyTorch's.")
    parser.add_argument("--version", action="version", version=f"parity of jaxtrain {jaxtrain.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="list the built-in cases")
    own = "default: the recipe's own, or"
    run = commands.add_parser("run", help="train cases in PyTorch and in JAX, and compare")
    run.add_argument("cases", nargs="*", type=_case, metavar="CASE", help="default: all")
    run.add_argument(
        "--precision",
        action="extend",
        type=_precisions,
        help="default fp64,fp32; also " + ", ".join(name for name in PRECISIONS if name not in ("fp64", "fp32")),
    )
    run.add_argument("--remat", metavar="P", help=f"JAX's rematerialization policy; {own} none")
    run.add_argument("--json", type=_writable, metavar="F", help="write the results as JSON")
    run.add_argument("--html", type=_writable, metavar="F", help="write the results as an HTML page")
    run.add_argument(
        "--bundle", type=Path, metavar="DIR", help="compare with a bundle of parity record, without PyTorch"
    )
    locating = commands.add_parser("locate", help="find the first operation in which a case differs")
    locating.add_argument("case", type=_case, metavar="CASE")
    locating.add_argument("--steps", type=_at_least(1), metavar="N", help=f"optimizer steps; default {STEPS}")
    proof = commands.add_parser("prove", help="prove that each tensor corresponds to the leaf named in the case")
    proof.add_argument("case", type=_case, metavar="CASE")
    proof.add_argument("--debug", action="store_true", help="show tracebacks and log messages")
    record = commands.add_parser("record", help="record a case's PyTorch side for machines without PyTorch")
    record.add_argument("case", type=_case, metavar="CASE")
    record.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder without a bundle")
    record.add_argument("--precision", action="extend", type=_precisions, help="default fp64,fp32")
    for command in (run, record):
        command.add_argument(
            "--accumulate", type=_at_least(1), metavar="K", help=f"micro-batches per accumulation window; {own} 1"
        )
        command.add_argument("--steps", type=_at_least(1), metavar="N", help="optimizer steps; default 20")
    bugs = commands.add_parser("mutate", help="plant bugs in a module's operations and check that each is found")
    bugs.add_argument(
        "factories", nargs="+", metavar="FILE.py::FACTORY", help="a function that returns a module and an example batch"
    )
    bugs.add_argument(
        "--clean", type=_at_least(0), default=0, metavar="N", help="number of additional runs without a bug"
    )
    bugs.add_argument("--json", type=_writable, metavar="F", help="write the outcomes as JSON")
    bugs.add_argument("--debug", action="store_true", help="show tracebacks and log messages")
    health = commands.add_parser("selftest", help="check that this machine trains correctly, without PyTorch")
    health.add_argument("--device", choices=["cpu", "gpu"], help="default: JAX's default device")
    health.add_argument("--json", type=_writable, metavar="F", help="write the results as JSON")
    health.add_argument("--debug", action="store_true", help="show tracebacks and log messages")
    for command in (run, locating, record):
        command.add_argument(
            "--dropout", type=_rate, metavar="P", help="dropout rate, with the same masks on both sides; default 0"
        )
        command.add_argument("--seed", type=_at_least(0), metavar="S", help=f"seed of weights and data; {own} 0")
        command.add_argument("--debug", action="store_true", help="show tracebacks and log messages")
    return parser


def _case(name: str) -> str:
    if name.endswith(".py"):
        raise argparse.ArgumentTypeError(f"{name!r} names no case: add it, as in {name}::case")
    if "::" not in name and name not in CASES:
        near = difflib.get_close_matches(name, CASES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(CASES)}, or path/to/file.py::case"
        raise argparse.ArgumentTypeError(f"unknown case {name!r}: {hint}")
    return name


def _precisions(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PRECISIONS:
            raise argparse.ArgumentTypeError(f"unknown precision {name!r}: choose from {','.join(PRECISIONS)}")
    return names


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 <= rate < 1:
        raise argparse.ArgumentTypeError(f"rate must be in [0, 1), got {text!r}")
    return rate


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: name a file in a writable folder")
    return path


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
        return int(text)

    return number


if __name__ == "__main__":
    sys.exit(main())
