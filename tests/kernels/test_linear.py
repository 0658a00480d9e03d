import pytest
import torch

from kernels.linear.dense import linear, linear_reference, prepare_linear_weight
from tests.compare import check_close

SHAPES = pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(0, 64, 48), (1, 7, 5), (1, 640, 512), (9, 513, 700)]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


@SHAPES
@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_equals_the_reference(
    tokens: int, inputs: int, outputs: int, dtype: torch.dtype, has_bias: bool, prepared: bool
) -> None:
    x, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    result = linear(x, prepare_linear_weight(weight) if prepared else weight, bias)
    assert result.dtype == dtype
    expected = linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
    check_close(result, expected)


@DTYPES
def test_prepared_weight_takes_strided_rows(dtype: torch.dtype) -> None:
    x, weight = torch.randn(6, 1300).to(dtype)[::2, ::2], torch.randn(800, 650).to(dtype)
    check_close(linear(x, prepare_linear_weight(weight)), linear_reference(x.double(), weight.double()))


@DTYPES
def test_preparing_copies_strided_weights(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 650).to(dtype), torch.randn(650, 800).to(dtype).t()
    check_close(linear(x, prepare_linear_weight(weight)), linear_reference(x.double(), weight.double()))


def test_gradients() -> None:
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (4, 5), (4,)))
    assert torch.autograd.gradcheck(linear, (x, weight, bias))
