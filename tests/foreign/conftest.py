"""Published models need JAX's implicit promotion, which the other tests forbid."""

import pytest

from tests.foreign.edits import implicit_promotion


@pytest.fixture(autouse=True)
def _implicit_promotion():
    with implicit_promotion():
        yield
