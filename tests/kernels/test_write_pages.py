from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.attention._kv_quantization import LIMITS, dequantize_rows, quantize_rows_reference
from kernels.attention.paged import paged_attention
from kernels.attention.rotary_write import rotate_and_write
from kernels.attention.write_pages import write_pages, write_pages_reference
from tests.compare import relative_rms

PAGE, PAGES = 4, 6
SLOTS = [17, -1, 0, 23, 5, -7, 4]


def make_pool(stored: torch.dtype, device: torch.device, num_heads: int, head_dim: int) -> dict[str, Tensor]:
    pages = {name: torch.ones(PAGES, PAGE, num_heads, head_dim, device=device).to(stored) for name in ("k", "v")}
    pool = {f"{name}_pages": x for name, x in pages.items()}
    if stored in LIMITS:
        pool |= {f"{name}_scales": torch.full((PAGES, PAGE, num_heads), 3.0, device=device) for name in ("k", "v")}
    return pool


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def check_equal(pool: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        assert torch.equal(bits(pool[name]), bits(x)), name


CASES = [(dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
CASES += [(dtype, stored) for dtype in (torch.float32, torch.bfloat16) for stored in LIMITS]


@pytest.mark.parametrize(("dtype", "stored"), CASES, ids=str)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 16), (3, 20)])
@pytest.mark.parametrize("on_cpu", [False, True], ids=["triton", "torch"])
def test_equals_the_reference_to_the_bit(
    dtype: torch.dtype, stored: torch.dtype, num_heads: int, head_dim: int, on_cpu: bool, request: pytest.FixtureRequest
) -> None:
    device = torch.device("cpu") if on_cpu else request.getfixturevalue("device")
    joint = (torch.randn(len(SLOTS), 2 * num_heads, head_dim) * 3).to(dtype)
    joint[0, 0] = 0  # a row of zeros
    joint[2, 1, :3] = torch.tensor([1e-3, 700.0, -2e-5])
    k, v = joint.to(device).chunk(2, dim=1)  # strided, as slices of a projection are
    slots = torch.tensor(SLOTS, device=device)
    pool, expected = (make_pool(stored, device, num_heads, head_dim) for _ in range(2))
    write_pages(k, v, **pool, slots=slots)
    write_pages_reference(k, v, **expected, slots=slots)
    check_equal(pool, expected)


@pytest.mark.parametrize("stored", LIMITS, ids=str)
@pytest.mark.parametrize("on_cpu", [False, True], ids=["triton", "torch"])
def test_scales_for_all_tokens(stored: torch.dtype, on_cpu: bool, request: pytest.FixtureRequest) -> None:
    """Numbers beyond them are cut off; those of rows that reach just so far are stored as with scales of their own."""
    device = torch.device("cpu") if on_cpu else request.getfixturevalue("device")
    k, v = (torch.randn(len(SLOTS), 2, 16) for _ in range(2))
    fixed = k[0].abs().amax(-1) / LIMITS[stored], v[0].abs().amax(-1) / LIMITS[stored]
    pools = [make_pool(stored, device, 2, 16) for _ in range(4)]
    on_device, scales = [x.to(device) for x in (k, v, torch.tensor(SLOTS))], (fixed[0].to(device), fixed[1].to(device))
    write_pages(*on_device[:2], **pools[0], slots=on_device[2], fixed=scales)
    write_pages_reference(*on_device[:2], **pools[1], slots=on_device[2], fixed=scales)
    rotated = {f"{name}_pages": pools[2][f"{name}_pages"] for name in "kv"}
    both = pools[2]["k_scales"], pools[2]["v_scales"]
    rotate_and_write(
        on_device[0], *on_device[:2], **rotated, slots=on_device[2], rotary=None, scales=both, fixed=scales
    )
    write_pages(*on_device[:2], **pools[3], slots=on_device[2])
    check_equal(pools[0], pools[1])
    check_equal(pools[0], pools[2])
    kept = [number for number, slot in enumerate(SLOTS) if slot >= 0]
    for x, name, own in ((k, "k", fixed[0]), (v, "v", fixed[1])):
        at, own = divmod(SLOTS[0], PAGE), own[:, None]
        assert torch.equal(bits(pools[0][f"{name}_pages"][at]), bits(pools[3][f"{name}_pages"][at]))
        rows = pools[0][f"{name}_pages"].cpu().float() * pools[0][f"{name}_scales"].cpu()[..., None]
        expected = x.double().clamp(-LIMITS[stored] * own, LIMITS[stored] * own)[kept]
        found = rows.double().flatten(0, 1)[[SLOTS[number] for number in kept]]
        half_steps = own / 2 if stored == torch.int8 else torch.maximum(expected.abs() / 16, own / 1024)
        assert bool(((found - expected).abs() <= half_steps * (1 + 1e-6)).all()), name


def test_heads_outside_of_pages(device: torch.device) -> None:
    """Pages whose storage keeps each head's part of a page together."""
    k, v = torch.randn(2, len(SLOTS), 2, 16, device=device)
    slots = torch.tensor(SLOTS, device=device)
    pages = torch.ones(2, PAGES, 2, PAGE, 16, device=device).transpose(2, 3)
    expected = make_pool(torch.float32, device, 2, 16)
    write_pages(k, v, pages[0], pages[1], slots)
    write_pages_reference(k, v, **expected, slots=slots)
    assert torch.equal(pages[0], expected["k_pages"]) and torch.equal(pages[1], expected["v_pages"])


@pytest.mark.parametrize("stored", LIMITS, ids=str)
def test_rounding_is_to_the_nearest_and_halves_to_even(device: torch.device, stored: torch.dtype) -> None:
    """Each number that the format holds, and each midpoint of two neighbours, in rows with a scale of 1."""
    grid = torch.arange(256, dtype=torch.uint8).view(stored).float()
    grid = grid[grid.isfinite() & (grid.abs() <= LIMITS[stored])].unique()
    numbers = torch.cat((grid, (grid[1:] + grid[:-1]) / 2, (grid[1:] * 0.51 + grid[:-1] * 0.49)))
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 15)).view(-1, 1, 15)
    rows = torch.cat((numbers, torch.full((len(numbers), 1, 1), LIMITS[stored])), dim=-1).to(device)
    count = len(rows)
    pages = torch.zeros(2, count, 1, 1, 16, device=device).to(stored)
    scales = torch.zeros(2, count, 1, 1, device=device)
    write_pages(
        rows, rows, pages[0], pages[1], torch.arange(count, device=device), k_scales=scales[0], v_scales=scales[1]
    )
    values = rows.cpu()
    distances = (values[..., None].double() - grid.double()).abs()
    nearest = distances.amin(-1)
    stored_values = pages[0].float().cpu().view(values.shape)
    assert torch.equal((values.double() - stored_values.double()).abs(), nearest) and bool((scales == 1).all())
    expected, _ = quantize_rows_reference(values, stored)
    assert torch.equal(stored_values, expected.float())


@pytest.mark.parametrize(("stored", "error"), [(torch.int8, 0.01), (torch.float8_e4m3fn, 0.03)], ids=str)
def test_eight_bits_are_close(stored: torch.dtype, error: float) -> None:
    x = torch.randn(50, 4, 64)
    values, scales = quantize_rows_reference(x, stored)
    assert relative_rms(dequantize_rows(values, scales, torch.float32), x) < error


def test_nothing_to_write(device: torch.device) -> None:
    pool = make_pool(torch.float32, device, 2, 16)
    before = {name: x.clone() for name, x in pool.items()}
    nothing = torch.zeros(0, 2, 16, device=device)
    write_pages(nothing, nothing, **pool, slots=torch.zeros(0, dtype=torch.int64, device=device))
    check_equal(pool, before)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    k = torch.zeros(1, 2, 16, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    for stored, message in ((torch.float16, "they hold"), (torch.int8, "need k_scales")):
        pages = torch.zeros(1, PAGE, 2, 16, device=device).to(stored)
        with pytest.raises(ValueError, match=message):
            write_pages(k, k, pages, pages, slots)


def test_fp8_pages_are_refused_where_the_gpu_cannot_convert_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all three kernels that touch pages; int8 pages stay."""
    monkeypatch.setattr("kernels.attention.write_pages.compute_capability", lambda device: (8, 6))
    x = torch.zeros(1, 2, 16, device=device)
    slots, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int32, device=device)
    cu_seqlens = torch.arange(2, dtype=torch.int32, device=device)
    scales = torch.zeros(1, PAGE, 2, device=device)

    def use(stored: torch.dtype) -> list[Callable[[], object]]:
        pages = torch.zeros(1, PAGE, 2, 16, device=device).to(stored)
        named = {"k_scales": scales, "v_scales": scales}
        return [
            lambda: write_pages(x, x, pages, pages, slots, **named),
            lambda: rotate_and_write(x, x, x, pages, pages, slots, rotary=None, scales=(scales, scales)),
            lambda: paged_attention(x, pages, pages, slots.int()[None], cu_seqlens, one, **named),
        ]

    for call in use(torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=r"compute capability 8.9, and .* has 8.6: use torch.int8"):
            call()
    for call in use(torch.int8):
        call()
