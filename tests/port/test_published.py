"""Published training scripts, ported unmodified; `JAXTRAIN_PUBLISHED` is a folder of clones of their repositories."""

import os
from pathlib import Path

import pytest

from .published.__main__ import SCRIPTS, ported


@pytest.mark.nightly
@pytest.mark.skipif("JAXTRAIN_PUBLISHED" not in os.environ, reason="JAXTRAIN_PUBLISHED is not set")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_published_script_is_equal_or_refused_by_line(name: str) -> None:
    verdict, _ = ported(Path(os.environ["JAXTRAIN_PUBLISHED"]), SCRIPTS[name], 900)
    assert verdict.startswith(("equal", "refused: jaxtrain: ")), verdict
