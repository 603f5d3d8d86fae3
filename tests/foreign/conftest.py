"""Published models need JAX's implicit promotion, which the other tests forbid."""

import warnings

import pytest

from tests.foreign.edits import implicit_promotion

# These versions of transformers and diffusers import torchao where it is installed. It warns, which is an error in a
# test, and PyTorch's registry does not let a failed import be repeated.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchao  # noqa: F401


@pytest.fixture(autouse=True)
def _implicit_promotion():
    with implicit_promotion():
        yield
