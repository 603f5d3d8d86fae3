"""`jaxtrain doctor`: what is installed, which devices answer, what is wrong and what mends it."""

import json
import sys
from dataclasses import asdict, dataclass

from rich.console import Console

from jaxtrain.cli.arguments import parse

MARKS = {"fine": "[green]✓[/]", "note": "[yellow]·[/]", "problem": "[bold red]✗[/]"}


@dataclass(frozen=True)
class Doctor:
    """Look at this machine as jaxtrain will find it. The exit status is 1 where there is a problem."""

    json: bool = False
    """The findings as JSON, and nothing else."""


def main(args: list[str]) -> int:
    """Look, and say; each finding as soon as it is there."""
    asked = parse(Doctor(), args, "jaxtrain doctor")
    from jaxtrain.debug import examine

    console = Console(highlight=False, quiet=asked.json)
    found = []
    with console.status("looking"):
        for finding in examine():
            found.append(finding)
            console.print(f"{MARKS[finding.status]} [bold]{finding.name}[/]", end="  ")
            console.print(finding.said, markup=False, soft_wrap=True)
            if finding.mend:
                console.print(f"    mend: {finding.mend}", markup=False, soft_wrap=True)
    problems = sum(finding.status == "problem" for finding in found)
    if asked.json:
        sys.stdout.write(json.dumps({"findings": [asdict(f) for f in found], "problems": problems}, indent=2) + "\n")
    console.print("nothing is wrong" if not problems else f"{problems} to mend")
    return 1 if problems else 0
