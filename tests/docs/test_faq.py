"""The error messages quoted in docs/faq.md are those of the code, and of JAX."""

import ast
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import xla_bridge

import jaxtrain as jt

ROOT = Path(__file__).parent.parent.parent
OURS, _, JAXS = (ROOT / "docs" / "faq.md").read_text().partition("## Errors of JAX")


def quoted(page):
    return [line for block in re.findall(r"```text\n(.*?)```", page, re.S) for line in block.splitlines()]


class Template(NamedTuple):
    """A string of the code: its literal parts, with None for each placeholder."""

    parts: list[str | None]

    @property
    def literal_length(self):
        return len("".join(filter(None, self.parts)))

    def values(self, message):
        """Return the values of the placeholders in the message, or None if it does not match."""
        if not all(part in message for part in self.parts if part):
            return None  # faster than the regular expression
        pattern = "".join("(.*?)" if part is None else re.escape(part) for part in self.parts)
        match = re.fullmatch(pattern, message)
        return match and match.groups()


def templates(*files):
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.JoinedStr | ast.Constant):
                continue
            nodes = node.values if isinstance(node, ast.JoinedStr) else [node]
            parts = [part.value if isinstance(part, ast.Constant) else None for part in nodes]
            template = Template(parts)
            if all(part is None or isinstance(part, str) for part in parts) and template.literal_length >= 12:
                yield template


def matched_length(candidates, message):
    """Return how many characters of a message are literal text of templates, including nested ones."""
    matches = [(template, values) for template in candidates if (values := template.values(message)) is not None]
    inner = [sum(matched_length(candidates, part) for part in values if len(part) >= 12) for _, values in matches]
    return max((template.literal_length + more for (template, _), more in zip(matches, inner, strict=True)), default=0)


def raisers():
    """Return a function that raises each error of JAX, in the order of the page, in the strict modes of conftest.py."""
    leaked, old = [], jnp.ones(3)

    def leak():
        jax.jit(lambda x: leaked.append(x) or x)(1.0)
        return leaked[0] + 1

    def donated():
        step = jt.train_step(lambda params, batch, rng: (jt.Loss((params * batch).sum(), 1), {}), optax.sgd(0.1))
        state = step.init(old)
        step(state, old)
        return state

    def nan():
        with jax.debug_nans(True):
            jnp.log(-jnp.ones(3))

    state = donated()
    return [
        lambda: jax.jit(lambda x: x if x > 0 else -x)(1.0),
        lambda: jax.jit(lambda x: float(x))(1.0),
        lambda: jax.jit(lambda x: np.sin(x))(1.0),
        lambda: jax.jit(lambda x, mask: x[mask])(jnp.ones(3), jnp.array([True, False, True])),
        leak,
        lambda: jnp.ones(3, jnp.float32) + jnp.ones(3, jnp.bfloat16),
        lambda: jnp.ones(3) + jnp.ones((2, 3)),
        lambda: jnp.ones(3, np.float64),
        lambda: np.asarray(state.params),
        lambda: jax.grad(lambda x: x)(jnp.ones(3)),
        lambda: jax.grad(lambda x: x)(3),
        nan,
        lambda: jnp.zeros(2**45).block_until_ready(),
    ]


def test_quoted_messages_of_this_project_exist_in_the_code():
    candidates = list(
        templates(*(path for package in ("jaxtrain", "parity") for path in (ROOT / package).rglob("*.py")))
    )
    messages = quoted(OURS)
    assert len(messages) > 50
    for message in messages:
        assert matched_length(candidates, message) > len(message) / 3, message


def test_quoted_messages_of_jax_are_raised_by_jax():
    no_gpu, *messages = quoted(JAXS)
    assert any(template.values(no_gpu) for template in templates(Path(xla_bridge.__file__)))
    for message, raiser in zip(messages, raisers(), strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(Exception, match=re.sub(r"\d{5,}", r"\\d+", re.escape(message))):
                raiser()


def test_every_message_is_followed_by_an_explanation():
    for page in (OURS, JAXS):
        for after in re.split(r"```text\n.*?```\n", page, flags=re.S)[1:]:
            assert re.match(r"\n(?!#|```text)\S", after), after[:80]
