"""The site: every page is in it, every link and name leads somewhere, and it builds without a warning."""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
FENCED = re.compile(r"^(```+).*?^\1\s*$", re.M | re.S)


def text_of(page):
    """A page without its blocks of code."""
    return FENCED.sub("", (DOCS / page).read_text())


def in_nav(entries):
    for entry in entries:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            yield from in_nav(target) if isinstance(target, list) else [target]


def anchors(page):
    """The ids of its headings as Python-Markdown's table of contents makes them, and those of its API entries."""
    text, found = text_of(page), set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        given = re.search(r"\{ *#([\w-]+) *\}$", heading)
        plain = re.sub(r"\[(.*?)\]\(.*?\)|[`*]", r"\1", heading)
        ascii_only = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())
        name = given[1] if given else slug
        found.add(name if name not in found else f"{name}_1")
    return found | set(re.findall(r"^::: ([\w.]+)$", text, re.M))


def named_tests():
    for page in PAGES:
        for path, _, function in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", text_of(page)):
            yield page, path, function


def test_every_page_is_in_the_navigation_once():
    assert sorted(in_nav(SITE["nav"])) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text_of(page)):
        path, _, anchor = link.partition("#")
        target = (DOCS / page).parent / path if path else DOCS / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.resolve().relative_to(DOCS).as_posix()), link


def test_every_test_that_a_page_names_exists():
    named = list(named_tests())
    assert len({function for page, _, function in named if page == "guarantees.md" and function}) > 60
    for page, path, function in named:
        assert (ROOT / path).exists(), f"{page}: {path}"
        functions = {n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)}
        assert not function or function in functions, f"{page}: {path}::{function}"


PACKAGES = ("", ".optim", ".losses", ".models", ".data", ".runner", ".observe", ".distributed", ".interop")


def resolved(entry):
    """What an entry of the reference is: a module, or something in one."""
    try:
        return importlib.import_module(entry)
    except ModuleNotFoundError:
        module, _, name = entry.rpartition(".")
        return getattr(importlib.import_module(module), name)


def test_the_reference_has_every_public_name_once():
    entries = [name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", text_of(page), re.M)]
    assert len(entries) == len(set(entries))
    shown = [resolved(entry) for entry in entries]
    for package in [*(f"jaxtrain{name}" for name in PACKAGES), "parity"]:
        module = importlib.import_module(package)
        for name in module.__all__:
            assert any(getattr(module, name) is one for one in shown), f"{package}.{name}"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs the extra `docs`")
def test_it_builds_without_a_warning_and_fetches_nothing(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in tmp_path.rglob("*.html"):
        for tag in re.findall(r"<(?:script|img|source|iframe|link)\b[^>]*>", page.read_text()):
            assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", tag), f"{page.name}: {tag}"
