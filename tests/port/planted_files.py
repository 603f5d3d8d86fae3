"""Bugs planted in the files of ported scripts: one change of `run.py` or `model.py` each, drawn by a number."""

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxtrain.run import load_recipe
from tests.mutation.mutants import sites

from .duels import clamped, duel
from .feeds import feed
from .loops import script
from .teachers import teacher

SCRIPTS = Path(__file__).parent / "scripts"
GROUPS = (
    "optimizer = torch.optim.AdamW([{'params': model[:2].parameters(), 'weight_decay': 0.1},"
    " {'params': model[2:].parameters(), 'lr': 0.02}], lr=0.01)\n"
    "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)"
)


def copied(folder: Path, name: str) -> Path:
    """Write a copy of a script of the tests."""
    path = folder / "train.py"
    path.write_text((SCRIPTS / f"{name}.py").read_text())
    return path


MATERIAL = {
    "classifier": lambda folder: copied(folder, "classifier"),
    "groups": lambda folder: script(
        folder,
        model="model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3))",
        optimizer=GROUPS,
        forward="h = model(x)\n"  # of terms that a bug may leave out
        "        loss = criterion(h * 1.5, y) + 0.1 * (h.square().sum(1) - 0.5).abs().mean()\n"
        "        loss = loss - 0.05 * h.max(1)[0].sum()",
        step="nn.utils.clip_grad_norm_(model.parameters(), 0.2); optimizer.step(); optimizer.zero_grad()",
        end="schedule.step()",
    ),
    "feed": lambda folder: feed(folder, 0),
    "duel": lambda folder: duel(folder, 35),
    "clamped": lambda folder: clamped(folder, 2, "data"),
    "teacher": lambda folder: teacher(folder, 3),
}
LEFT_OUT = {"of", "joined", "__init__", "__next__", "evaluate", "script_2", "task"}
"""Functions of written files that read names, or that training does not call."""
SETTINGS = ("batch_size", "clip_norm", "accumulate", "precision", "loss_scale")


class Bug(NamedTuple):
    """A change of a written file.

    Attributes:
      file: The file.
      lines: The lines of the statement that is changed; of one that is removed, also those of the next one that reads
        what it assigns.
      before: What is there.
      after: What is there in its place.
      text: The text of the file with it.
      setting: The setting of the recipe that it changes; "" for code.
    """

    file: str
    lines: tuple[int, ...]
    before: str
    after: str
    text: str
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.lines[0]}: {self.before}  ->  {self.after}"


def drawn(folder: Path, name: str, count: int) -> list[Bug]:
    """Return bugs of the files in a folder, of all kinds alike.

    Args:
      folder: The folder.
      name: The name of the script, which decides which these are.
      count: How many.
    """
    draw = random.Random(name)
    models = [path.relative_to(folder).as_posix() for path in sorted(folder.glob("**/model.py"))]
    kinds = [
        [*_in_code(folder, "run.py"), *_in_settings(folder)],
        *([*_in_code(folder, file), *_in_calls(folder, file)] for file in models if "shape" not in file),
    ]
    for bugs in kinds:
        draw.shuffle(bugs)
    found: list[Bug] = []
    while len(found) < count and any(kinds):
        found += [bugs.pop() for bugs in kinds if bugs]
    return found[:count]


def _in_code(folder: Path, file: str) -> Iterator[Bug]:
    """Yield changes of numbers, operators, arguments and statements."""
    text = (folder / file).read_text()
    lines = _statements(text)
    for site in sites(file, text):
        mutant = site.mutant(text)
        if mutant is not None and mutant.line in lines:
            found = lines[mutant.line]
            if mutant.after == "pass":
                found += _users(text, found[0])
            yield Bug(file, found, mutant.before, mutant.after, mutant.source)


CALLS = (
    (r"\.mean\(\)", ".sum()"),
    (r"jax\.nn\.relu\(", "jax.nn.gelu("),
    (r"jnp\.tanh\(", "jax.nn.sigmoid("),
    (r"jnp\.square\(", "jnp.abs("),
    (r"next\(keys\)", "None"),
    (r"jax\.lax\.stop_gradient\(", "("),
    (r"F\.linear\(", "1.001 * F.linear("),
    (r"return loss\b", "return loss.astype('float32')"),
    (r'"\]\)', '"] * 0)'),
    (r"weight_hh_l0", "weight_ih_l0"),
)
"""Other operations, gradients, terms and dtypes."""


def _in_calls(folder: Path, file: str) -> Iterator[Bug]:
    text = (folder / file).read_text()
    lines = _statements(text)
    for pattern, new in CALLS:
        for match in re.finditer(pattern, text):
            number = text.count("\n", 0, match.start()) + 1
            if number in lines:
                changed = text[: match.start()] + new + text[match.end() :]
                yield Bug(file, lines[number], match.group(), new, changed)


def _in_settings(folder: Path) -> Iterator[Bug]:
    """Yield changes of the settings of a recipe, and of the numbers and names of its optimizer."""
    text = (folder / "run.py").read_text()
    recipe = load_recipe(f"{folder / 'run.py'}::Run")[1]
    for name in SETTINGS:
        value = getattr(recipe, name)
        others = {"fp32": "bf16", "bf16": "fp32", None: 0.05 if name == "clip_norm" else "static_loss_scale(scale=2.0)"}
        other = others[value] if value in others else value * 2
        yield _setting(text, name, value, other)
    expression = recipe.optimizer
    source = f"def optimizer():\n    return {expression}\n"
    for site in sites("optimizer", source):
        mutant = site.mutant(source)
        if mutant is not None and not isinstance(site.node, ast.Call):
            yield _setting(text, "optimizer", mutant.before, mutant.source.partition("return ")[2].strip())
    if "held(" in expression:
        yield _setting(text, "optimizer", "held", re.sub(r"held\(schedule=(.*), every=\d+\)", r"\1", expression))
    if "weight_decay=0.1" in expression:
        other = expression.replace("weight_decay=0.1", "weight_decay=0.01")
        yield _setting(text, "optimizer", "the decay of a group", other)


def _setting(text: str, name: str, before: object, value: object) -> Bug:
    changed = text.replace("    def task(self)", f"    {name}: object = {value!r}\n\n    def task(self)")
    number = next(i for i, line in enumerate(changed.splitlines(), 1) if line.startswith(f"    {name}: object"))
    return Bug("run.py", (number,), f"{name} {before}", str(value), changed, setting=name)


def _statements(text: str) -> dict[int, tuple[int, ...]]:
    """Return the lines of the statement that each line of a function is in."""
    found = {}
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef) and function.name not in LEFT_OUT:
            for statement in function.body:
                is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                for number in () if is_text else _lines(statement):
                    found[number] = _lines(statement)
    return found


def _lines(statement: ast.stmt) -> tuple[int, ...]:
    return tuple(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))


def _users(text: str, line: int) -> tuple[int, ...]:
    """Return the lines of the next statement that reads what the statement of a line assigns."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    body = next(f.body for f in functions if any(line == statement.lineno for statement in f.body))
    (at,) = (i for i, statement in enumerate(body) if statement.lineno == line)
    parts = {id(x.value) for x in ast.walk(ast.Module(body, [])) if isinstance(x, ast.Subscript) and _is_stored(x)}

    def names(statement: ast.stmt, is_assigned: bool) -> set[str]:
        found = (x for x in ast.walk(statement) if isinstance(x, ast.Name))
        return {x.id for x in found if (_is_stored(x) or id(x) in parts) == is_assigned}

    assigned = names(body[at], True)
    return next((_lines(user) for user in body[at + 1 :] if assigned & names(user, False)), ())


def _is_stored(node: ast.Name | ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Store)
