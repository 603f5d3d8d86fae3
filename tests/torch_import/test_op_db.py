"""No operation is silently wrong: PyTorch's own samples of its operations pass, or are refused."""

import pytest
import torch

from tests.torch_import import low_precision_samples
from tests.torch_import.samples import op_db, outcomes

UNDEFINED = {
    *("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted"),
    *("bernoulli", "rand_like", "randn", "randn_like", "randint", "randint_like", "normal", "uniform", "multinomial"),
    *("nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.alpha_dropout"),
    *("nn.functional.feature_alpha_dropout", "nn.functional.rrelu", "nn.functional.multi_head_attention_forward"),
    *("nn.functional.scaled_dot_product_attention", "svd_lowrank", "pca_lowrank"),
}
"""Entries whose values are random or undefined. The families are trained with dropout."""
TIES = {"sort", "argsort", "msort", "mode"}
"""Entries whose indices of equal values, which bfloat16 samples have, are undefined in PyTorch."""
LESS_EXACT = {
    # XLA's approximations of a few float32 ulps; samples near poles.
    *("polygamma", "special.polygamma", "erfinv", "tanh", "matrix_exp"),
    # The gradient of x / (1 + |x|) is a difference of close numbers, for a sample of one number.
    "nn.functional.softsign",
    # PyTorch scales a product by alpha before it rounds.
    *("addmm", "addbmm", "addr"),
}
"""Entries that are farther from float64 than twice PyTorch in float32 or bfloat16."""
PARTS = 64


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")
def test_no_operation_is_silently_wrong(part: int) -> None:
    defined = [info for info in op_db() if torch.float64 in info.supported_dtypes("cpu") and info.name not in UNDEFINED]
    wrong = [
        f"{info.name}.{info.variant_test_name}: {outcome.detail}"
        for info in defined[part::PARTS]
        for outcome in outcomes(info)
        if outcome.kind == "wrong"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.filterwarnings("ignore")
def test_low_precision_is_as_accurate_as_pytorchs(dtype: torch.dtype, part: int) -> None:
    left_out = UNDEFINED | LESS_EXACT | TIES
    defined = [info for info in op_db() if dtype in info.supported_dtypes("cpu") and info.name not in left_out]
    wrong = [
        f"{info.name}.{info.variant_test_name}: {outcome.detail}"
        for info in defined[part::PARTS]
        for outcome in low_precision_samples.outcomes(info, dtype)
        if outcome.kind == "wrong"
    ]
    assert not wrong, "\n".join(wrong)
