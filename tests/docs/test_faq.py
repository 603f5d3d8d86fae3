"""The messages that the page on errors quotes are those of the code, and of JAX."""

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
    """A text of the code: its words, None where something is filled in."""

    words: list[str | None]

    @property
    def own(self):
        return len("".join(filter(None, self.words)))

    def filled(self, message):
        """What is filled in to make the message; None if it is not made of this text."""
        if not all(word in message for word in self.words if word):
            return None  # sooner than by the pattern
        pattern = "".join("(.*?)" if word is None else re.escape(word) for word in self.words)
        match = re.fullmatch(pattern, message)
        return match and match.groups()


def templates(*files):
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            words = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            template = Template(words)
            if all(word is None or isinstance(word, str) for word in words) and template.own >= 12:
                yield template


def letters_of(known, message):
    """How many of a message's letters are those of texts, one filled into the other."""
    made = [(template, filled) for template in known if (filled := template.filled(message)) is not None]
    inner = [sum(letters_of(known, part) for part in filled if len(part) > 20) for _, filled in made]
    return max((template.own + more for (template, _), more in zip(made, inner, strict=True)), default=0)


def raisers():
    """What makes each error of JAX's, in the order of the page. conftest.py has set the strict modes."""
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


def test_our_messages_are_those_of_the_code():
    known = list(templates(*(path for package in ("jaxtrain", "parity") for path in (ROOT / package).rglob("*.py"))))
    messages = quoted(OURS)
    assert len(messages) > 50
    for message in messages:
        assert letters_of(known, message) > len(message) / 3, message


def test_jaxs_messages_are_what_it_says():
    no_gpu, *messages = quoted(JAXS)
    assert any(template.filled(no_gpu) for template in templates(Path(xla_bridge.__file__)))
    for message, raiser in zip(messages, raisers(), strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(Exception, match=re.sub(r"\d{5,}", r"\\d+", re.escape(message))):
                raiser()


def test_under_every_message_stands_what_to_do():
    for page in (OURS, JAXS):
        for after in re.split(r"```text\n.*?```\n", page, flags=re.S)[1:]:
            assert re.match(r"\n(?!#|```text)\S", after), after[:80]
