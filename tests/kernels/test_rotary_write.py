"""One kernel does what four do, to the bit; the CPU form is those four."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.attention._kv_quantization import dequantize_rows
from kernels.attention.rotary import rope_frequencies, rotary_tables
from kernels.attention.rotary_write import HeadNorms, qk_norm_rope, rotate_and_write, rotate_and_write_reference
from kernels.attention.write_pages import write_pages
from tests.compare import check_close
from tests.interpreted import interpreted

PAGE = 16
SLOTS = (17, -1, 0, 47, 33)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
STEPS = pytest.mark.parametrize("rotates", [False, True], ids=["plain", "rotary"])
NORMS = pytest.mark.parametrize("normalizes", [False, True], ids=["plain", "norms"])
# (query heads, key/value heads, head dim): a head dim that is no power of two, heads of several programs.
SMALL, ODD, MANY = (4, 2, 16), (9, 3, 80), (17, 17, 128)
HEADS = pytest.mark.parametrize("heads", [SMALL, ODD, MANY], ids=str)
EIGHT_BITS = pytest.mark.parametrize("pages", [torch.int8, torch.float8_e4m3fn], ids=str)


@dataclass
class Case:
    """Slices of one projection, as a fused layer leaves them, and pages full of a number that must stay elsewhere."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    slots: Tensor
    rotary: tuple[Tensor, Tensor] | None
    norms: HeadNorms | None
    scales: tuple[Tensor, Tensor] | None

    def copy(self) -> "Case":
        scales = None if self.scales is None else (self.scales[0].clone(), self.scales[1].clone())
        return replace(self, k_pages=self.k_pages.clone(), v_pages=self.v_pages.clone(), scales=scales)

    def written(self) -> tuple[Tensor, ...]:
        """All that a call writes into, as bytes."""
        return tuple(x.view(torch.uint8) for x in (self.k_pages, self.v_pages, *(self.scales or ())))


def make_case(
    device: torch.device,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    rotates: bool,
    normalizes: bool,
    pages: torch.dtype | None = None,
) -> Case:
    q_heads, kv_heads, d = heads
    joint = torch.randn(len(SLOTS), q_heads + 2 * kv_heads, d).to(dtype).to(device)
    q, k, v = joint.split((q_heads, kv_heads, kv_heads), dim=1)
    tables = rotary_tables(torch.arange(len(SLOTS), device=device) + 100, rope_frequencies(d, 1e4).to(device))
    weights = (1 + 0.3 * torch.randn(2, d)).to(device)
    shape = (3, PAGE, kv_heads, d)
    scales = torch.full((2, *shape[:3]), 7.0, device=device)
    return Case(
        q, k, v, *(torch.full(shape, 7.0, device=device).to(pages or dtype) for _ in range(2)),
        slots=torch.tensor(SLOTS, device=device),
        rotary=tables if rotates else None,
        norms=HeadNorms(weights[0], weights[1], 1e-5) if normalizes else None,
        scales=(scales[0], scales[1]) if pages else None,
    )  # fmt: skip


@DTYPES
@STEPS
@NORMS
@pytest.mark.parametrize(
    ("heads", "pages"),
    [*((heads, None) for heads in (SMALL, ODD, MANY)), (SMALL, torch.int8), (ODD, torch.float8_e4m3fn)],
    ids=str,
)
def test_one_kernel_equals_its_steps_to_the_bit(
    device: torch.device, heads: tuple[int, int, int], dtype: torch.dtype, rotates: bool, normalizes: bool,
    pages: torch.dtype | None,
) -> None:  # fmt: skip
    case = make_case(device, heads, dtype, rotates=rotates, normalizes=normalizes, pages=pages)
    steps = case.copy()
    q, k = qk_norm_rope(steps.q, steps.k, rotary=steps.rotary, norms=steps.norms)
    k_scales, v_scales = steps.scales or (None, None)
    write_pages(k, steps.v, steps.k_pages, steps.v_pages, steps.slots, k_scales=k_scales, v_scales=v_scales)
    result = rotate_and_write(**vars(case))
    if device.type == "cuda" and normalizes:  # the sum of squares may be added up in another order
        check_close(result, q.double())
        if pages is None:
            check_close(case.k_pages, steps.k_pages.double())
        return
    assert result.dtype == dtype and torch.equal(result, q)
    assert all(map(torch.equal, case.written(), steps.written()))


@HEADS
@STEPS
@NORMS
@pytest.mark.parametrize("interprets", [False, True], ids=["cpu", "interpreter"])
def test_equals_the_reference(heads: tuple[int, int, int], rotates: bool, normalizes: bool, interprets: bool) -> None:
    """In fp32; a token without a slot is skipped, and no other slot is touched."""
    case = make_case(torch.device("cpu"), heads, torch.float32, rotates=rotates, normalizes=normalizes)
    expected = case.copy()
    q = rotate_and_write_reference(**vars(expected))
    if interprets and not torch.cuda.is_available():
        with interpreted():
            result = rotate_and_write(**vars(case))
    else:
        result = rotate_and_write(**vars(case))
    check_close(result, q)
    check_close(case.k_pages, expected.k_pages)
    assert torch.equal(case.v_pages, expected.v_pages)
    used = torch.zeros(3 * PAGE, dtype=torch.bool)
    used[[slot for slot in SLOTS if slot >= 0]] = True
    assert bool((case.k_pages.flatten(0, 1)[~used] == 7).all())


@EIGHT_BITS
def test_eight_bits_are_close(pages: torch.dtype) -> None:
    case = make_case(torch.device("cpu"), (4, 2, 64), torch.float32, rotates=True, normalizes=True, pages=pages)
    exact = make_case(torch.device("cpu"), (4, 2, 64), torch.float32, rotates=True, normalizes=True)
    exact = replace(exact, q=case.q, k=case.k, v=case.v, norms=case.norms)
    assert torch.equal(rotate_and_write(**vars(case)), rotate_and_write(**vars(exact)))
    assert case.scales is not None
    kept = torch.tensor([slot for slot in SLOTS if slot >= 0])
    for values, scales, wide in zip(
        (case.k_pages, case.v_pages), case.scales, (exact.k_pages, exact.v_pages), strict=True
    ):
        rows = dequantize_rows(values, scales, torch.float32).flatten(0, 1)[kept]
        expected = wide.flatten(0, 1)[kept]
        largest = expected.abs().amax(-1, keepdim=True)
        step = largest / 254 if pages == torch.int8 else expected.abs() / 16 + largest / 448 / 1024
        assert bool(((rows - expected).abs() <= 1.001 * step).all())


def test_refuses_what_it_cannot_take(device: torch.device) -> None:
    case = make_case(device, (4, 2, 16), torch.float32, rotates=True, normalizes=True)
    wrong = {
        "one dtype": {"v": case.v.bfloat16()},
        "hold": {"k_pages": case.k_pages.bfloat16(), "v_pages": case.v_pages.bfloat16()},
        "one layout": {"v_pages": case.v_pages.transpose(0, 1).contiguous().transpose(0, 1)},
        "as rotary_tables makes them": {"rotary": (case.q, case.q)},
        "contiguous in its last dimension": {"q": case.q.transpose(1, 2)},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            rotate_and_write(**(vars(case) | change))


def test_turning_heads_has_gradients() -> None:
    q, k = (torch.randn(3, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2))
    weights = tuple(torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    cos, sin = (table.double() for table in rotary_tables(torch.arange(3), rope_frequencies(8, 1e4)))
    assert torch.autograd.gradcheck(
        lambda q, k, a, b: qk_norm_rope(q, k, rotary=(cos, sin), norms=HeadNorms(a, b, 1e-3)), (q, k, *weights)
    )
