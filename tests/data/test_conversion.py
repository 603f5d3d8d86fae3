"""Conversion of examples into batches of arrays that JAX takes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.data.collate import Collator
from jaxtrain.data.columns import Columns
from jaxtrain.data.conversion import as_array, stack
from jaxtrain.errors import UserError


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, np.int32),
        (1.0, np.float32),
        (True, np.bool_),
        ([[1, 2], [3, 4]], np.int32),
        (1j, np.complex64),
        (np.float16(1), np.float16),
        (np.ones(2, np.uint8), np.uint8),
        (np.ones(2, np.uint64), np.uint32),
        (np.ones(2), np.float32),
        (np.ones(2, ml_dtypes.bfloat16), ml_dtypes.bfloat16),
        (jnp.ones(2, jnp.bfloat16), ml_dtypes.bfloat16),
        (torch.ones(2, dtype=torch.float64, requires_grad=True), np.float32),
        (torch.ones(2, dtype=torch.int64), np.int32),
        (torch.ones(2, dtype=torch.bool), np.bool_),
        (torch.ones(2, 3, dtype=torch.bfloat16).T, ml_dtypes.bfloat16),
        (torch.tensor(1.0, dtype=torch.bfloat16), ml_dtypes.bfloat16),
        (torch.ones(2, dtype=torch.float8_e4m3fn), ml_dtypes.float8_e4m3fn),
        (torch.nn.Parameter(torch.ones(2)), np.float32),
    ],
)
def test_values_become_arrays_of_the_types_of_jax(value, dtype):
    array = as_array(value, "x", "example 0")
    assert isinstance(array, np.ndarray)
    assert array.dtype == dtype
    assert array.shape == np.shape(value if not isinstance(value, torch.Tensor) else value.detach().float().numpy())
    assert jnp.asarray(array).dtype == dtype  # JAX converts it no further


AT_BOUNDS = st.builds(
    lambda sign, bits, more: sign * 2**bits + more, st.sampled_from([-1, 1]), st.integers(29, 65), st.integers(-2, 2)
)


@given(st.lists(st.integers(-(2**40), 2**40) | AT_BOUNDS, min_size=1, max_size=4))
def test_integers_are_kept_or_refused(numbers):
    """As Python's, which NumPy makes float64 or objects beyond 64 bits, and in an array."""
    for given_as in (numbers, *([np.array(numbers)] if all(-(2**63) <= n < 2**63 for n in numbers) else [])):
        if all(-(2**31) <= n < 2**31 for n in numbers):
            assert as_array(given_as, "x", "example 0").tolist() == numbers
        else:
            with pytest.raises(UserError, match=r"int(32|64) cannot hold"):
                as_array(given_as, "x", "example 0")


def test_infinities_and_nan_are_kept_and_overflow_is_refused():
    kept = as_array(np.array([np.inf, -np.inf, np.nan, 1e-300]), "x", "example 0")
    np.testing.assert_array_equal(kept, np.array([np.inf, -np.inf, np.nan, 0], np.float32))
    with pytest.raises(UserError, match=r"^'x' of example 4 at \[1\] has 1e\+39, which float32 cannot hold"):
        as_array([0, 1e39], "x", "example 4")


def test_with_x64_wide_types_are_kept():
    with jax.enable_x64(True):
        assert as_array([0.1], "x", "example 0").dtype == np.float64
        assert as_array(2**40, "x", "example 0") == 2**40


@pytest.mark.parametrize("value", ["a text", b"bytes", None, {"nested": 1}, object(), [None, 1], ["a"], np.array("a")])
def test_a_value_that_is_not_a_number_is_refused_in_one_line(value):
    with pytest.raises(UserError, match=r"^'x' of example 3 is .*: tokenize or drop it, in a transform") as error:
        stack([value], "x", [3])
    assert "\n" not in str(error.value)


def test_ragged_lists_are_refused():
    with pytest.raises(UserError, match=r"^'x' of example 0 is not an array \(.*inhomogeneous"):
        as_array([[1], [1, 2]], "x", "example 0")


def test_ragged_examples_are_refused_with_both_shapes():
    message = r"^'x' has shape \[2\] in example 5 but \[3\] in example 9: pad it, or give a collate function"
    with pytest.raises(UserError, match=message):
        Collator()([{"x": [1, 2]}, {"x": [1, 2, 3]}], [5, 9])


def test_a_number_that_does_not_fit_names_its_example():
    with pytest.raises(UserError, match=r"^'x' of example 9 has 2147483648, which int32 cannot hold"):
        Collator()([{"x": [1, 2]}, {"x": [1, 2**31]}], [5, 9])


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"x": 1, "y": 2}, {"x": 1}], "^example 9 has no 'y', which example 5 has"),
        ([{"x": 1}, {"x": 1, "y": 2}], "^example 5 has no 'y', which example 9 has"),
        ([(1, 2), (1, 2)], "^example 5 is a tuple of 2 values: name them with batch_keys"),
        ([{}, {}], "^example 5 is empty: give it at least one array"),
        ([7, 7], "^example 5 is of type int: use a dict, or a tuple with batch_keys"),
    ],
)
def test_examples_without_common_names_are_refused(examples, message):
    with pytest.raises(UserError, match=message):
        Collator()(examples, [5, 9])


def test_batch_keys_name_tuples_lists_and_single_tensors():
    for examples in ([(1, 2.0), (3, 4.0)], [[1, 2.0], [3, 4.0]]):
        batch = Collator(batch_keys=("a", "b"))(examples, [0, 1])
        assert {name: array.tolist() for name, array in batch.items()} == {"a": [1, 3], "b": [2, 4]}
    for example in (torch.ones(2), np.ones(2)):
        assert Collator(batch_keys=("a",))([example], [0])["a"].shape == (1, 2)
    with pytest.raises(UserError, match=r"^example 0 has 2 values, but batch_keys has 3 names: a, b, c"):
        Collator(batch_keys=("a", "b", "c"))([(1, 2)], [0])


def test_collate_replaces_stacking():
    def pad(texts):
        width = max(map(len, texts))
        return torch.tensor([[ord(c) for c in text.ljust(width)] for text in texts]), [len(text) for text in texts]

    batch = Collator(pad, ("tokens", "length"))(["a", "bcd"], [0, 1])
    assert (batch["tokens"].shape, batch["tokens"].dtype, batch["length"].tolist()) == ((2, 3), np.int32, [1, 3])
    message = "^the batch that collate returned has 1 rows of 'x', not 2: return one row per example"
    with pytest.raises(UserError, match=message):
        Collator(lambda examples: {"x": [0]})(["a", "b"], [0, 1])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "^the data is an empty mapping"),
        ({"x": 1.0}, "^'x' of the data is a single number"),
        ({"x": np.ones(3), "y": np.ones(2)}, "^'x' has 3 examples but 'y' 2: give all arrays of the data the same"),
        ({"x": ["a", "b"]}, "^'x' of the data is"),
        ({"x": [1, 2**40]}, r"^'x' of the data at \[1\] has 1099511627776, which int32 cannot hold"),
    ],
)
def test_invalid_columns_are_refused(arrays, message):
    with pytest.raises(UserError, match=message):
        Columns(arrays)


def test_masked_arrays_are_refused():
    masked = np.ma.masked_array(np.ones(3), [0, 1, 0])
    with pytest.raises(UserError, match=r"'x' of the data is a masked array: give x\.filled\(0\), and the mask"):
        Columns({"x": masked})
    with pytest.raises(UserError, match=r"'x' of example 4 is a masked array"):
        stack([masked, masked], "x", [4, 5])
