"""`jaxtrain doctor`: check the installation and the devices, and suggest fixes."""

import json
import sys
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text

from jaxtrain.flags import parse

MARKS = {"fine": ("✓", "green"), "note": ("·", "yellow"), "problem": ("✗", "bold red")}


@dataclass(frozen=True)
class Doctor:
    """Check this machine for training with jaxtrain. The exit status is 1 if there is a problem."""

    json: bool = False
    """Print the findings as JSON and nothing else."""


def main(args: list[str]) -> int:
    """Run the checks and print each finding as it arrives."""
    options = parse(Doctor(), args, "jaxtrain doctor")
    from jaxtrain.debug import run_checks

    console = Console(highlight=False, quiet=options.json)
    findings = []
    with console.status("checking"):
        for finding in run_checks():
            findings.append(finding)
            mark, style = MARKS[finding.status]
            # One text, because the spinner erases the unfinished line of another.
            line = Text.assemble((mark, style), " ", (finding.name, "bold"), "  ", finding.message)
            console.print(line, soft_wrap=True)
            if finding.fix:
                console.print(f"    fix: {finding.fix}", markup=False, soft_wrap=True)
    problems = sum(finding.status == "problem" for finding in findings)
    if options.json:
        sys.stdout.write(json.dumps({"findings": [asdict(f) for f in findings], "problems": problems}, indent=2) + "\n")
    console.print("no problems" if not problems else f"{problems} problem{'s' if problems > 1 else ''}")
    return 1 if problems else 0
