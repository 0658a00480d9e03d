"""Soft caps of scores and logits in every form of attention and loss: torch, C, and Triton on a GPU or interpreted."""

import math
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import kernels.attention._decode_cpu as decode_in_c
import kernels.attention._flash_cpu as packed
import kernels.attention._flash_tiles as flash_tiles
import kernels.attention._paged_cpu as paged
from kernels.attention._flash_cpu import attend_masked
from kernels.attention._flash_tiles import Inputs, Settings, Tile, Tiles
from kernels.attention._kv_quantization import LIMITS
from kernels.attention._paged_plan import Tiles as PagedTiles
from kernels.attention.flash import flash_attention, flash_attention_reference
from kernels.common.soft_cap import soft_cap_, soft_cap_slopes, soft_capped
from kernels.losses.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from kernels.losses.linear_distillation import DivergenceKind, linear_distillation, linear_distillation_reference
from tests.compare import check_all_close, check_close, check_slopes
from tests.interpreted import needs_triton
from tests.kernels.losses import LOGITS, choose_logits, use_small_tiles, wide
from tests.paged import PagedCase, grow_trees, hide_slots, make_case
from tests.trials import covering

CPU = torch.device("cpu")
# One that most scores feel, and Gemma's, under which nearly all lie in its straight part.
CAPS = pytest.mark.parametrize("cap", [1.5, 50.0])
WINDOWS = pytest.mark.parametrize("window", [None, 20])
SCALE = 0.7
LENGTHS = [17, 0, 1, 33]
SEQUENCES = [(1, 66), (18, 33), (0, 9), (4, 16), (1, 0), (40, 75), (70, 150)]
KINDS = get_args(DivergenceKind)


def heads_of(device: torch.device, dtype: torch.dtype, d: int = 16) -> tuple[Tensor, ...]:
    """q, k and v, which want gradients, and those of their attention."""
    leaves = (torch.randn(sum(LENGTHS), heads, d) for heads in (4, 2, 2))
    return *(x.to(device, dtype).requires_grad_() for x in leaves), torch.randn(sum(LENGTHS), 4, d).to(device, dtype)


def check_packed(device: torch.device, dtype: torch.dtype, d: int = 16, **options: Any) -> None:
    """Output, also without gradients, and gradients, against the reference in fp64."""
    *leaves, grad = heads_of(device, dtype, d)
    borders, twins = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int(), wide(*leaves)
    result = flash_attention(*leaves, borders, **options)
    options.pop("deterministic", None)
    expected = flash_attention_reference(*twins, borders, **options)
    check_close(result, expected)
    with torch.no_grad():
        check_close(flash_attention(*leaves, borders, **options), expected)
    check_all_close(torch.autograd.grad(result, leaves, grad), torch.autograd.grad(expected, twins, grad.double()))


def test_the_reference_is_the_formula() -> None:
    q, k, v = torch.randn(3, 2, 1, 4, dtype=torch.float64)
    scores = [1.5 * math.tanh(SCALE * float(q[1, 0] @ key[0]) / 1.5) for key in k]
    weights = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
    expected = weights[0] * v[0, 0] + weights[1] * v[1, 0]
    result = flash_attention_reference(q, k, v, torch.tensor([0, 2]), scale=SCALE, soft_cap=1.5)
    torch.testing.assert_close(result[1, 0], expected, rtol=1e-12, atol=0)


def test_in_place_and_slopes() -> None:
    x = torch.linspace(-9, 9, 50, dtype=torch.float64, requires_grad=True)
    capped = soft_capped(x, 2.0)
    torch.testing.assert_close(soft_cap_(x.detach().clone(), 2.0), capped)
    torch.testing.assert_close(soft_cap_slopes(capped.detach(), 2.0), torch.autograd.grad(capped.sum(), x)[0])
    assert soft_cap_slopes(torch.tensor([-math.inf]), 2.0).item() == 0
    assert soft_capped(x, None) is x and soft_cap_(x, None) is x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{"window": None}, {"window": 20}, {"causal": False}], ids=str)
@CAPS
def test_packed_on_the_cpu(dtype: torch.dtype, options: dict[str, Any], cap: float) -> None:
    scale = 0.2 if dtype == torch.bfloat16 else SCALE  # scores of bands are rounded
    check_packed(CPU, dtype, scale=scale, soft_cap=cap, **options)


def test_gradients_on_the_cpu_are_slopes() -> None:
    *leaves, grad = heads_of(CPU, torch.float64, 4)
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    check_slopes(lambda *x: (flash_attention(*x, borders, window=9, soft_cap=1.5) * grad).sum(), tuple(leaves))


DTYPES: tuple[tuple[torch.dtype, float], ...] = (
    (torch.float32, 1.5),
    (torch.bfloat16, 1.5),
    (torch.float16, 50.0),
)
SEEN: tuple[dict[str, Any], ...] = ({"window": None}, {"window": 20}, {"causal": False})


@pytest.mark.parametrize(("of", "options"), covering(product(DTYPES, SEEN)), ids=str)
def test_packed_in_triton(
    device: torch.device, of: tuple[torch.dtype, float], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, cap = of
    tile = Tile(16, 16, 4, 2)
    monkeypatch.setattr(flash_tiles, "choose_tiles", lambda *_: Tiles(tile, tile, tile))
    scale = SCALE if dtype == torch.float32 else 0.3
    check_packed(device, dtype, scale=scale, soft_cap=cap, deterministic=False, **options)
    if options == {"window": 20}:
        check_packed(device, dtype, scale=scale, soft_cap=cap, deterministic=True, **options)


def readable(case: PagedCase) -> PagedCase:
    """The reference reads whole tables."""
    return replace(case, block_tables=case.block_tables.clamp(max=len(case.k_pages) - 1))


@pytest.mark.parametrize("form", ["C", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (7, 1)], ids=str)
@WINDOWS
@CAPS
def test_pages_on_the_cpu(
    form: str, dtype: torch.dtype, heads: tuple[int, int], window: int | None, cap: float, monkeypatch: Any
) -> None:
    """Prompts, decoding and verification: those that C takes, and where it takes nothing."""
    case = readable(make_case(SEQUENCES, dtype, CPU, heads=heads, head_dim=64))
    if form == "torch":
        for name in ("decodes", "prefills"):
            monkeypatch.setattr(paged, name, lambda *_: False)
    options = {"window": window, "soft_cap": cap, "scale": SCALE if form == "C" else 0.1}
    check_close(case.attend(**options), case.expected(**options))


@pytest.mark.parametrize("stored", LIMITS, ids=str)
@CAPS
def test_pages_of_8_bits_on_the_cpu(stored: torch.dtype, cap: float) -> None:
    case = readable(make_case(SEQUENCES, torch.float32, CPU, head_dim=64, stored=stored))
    check_close(case.attend(soft_cap=cap, scale=SCALE), case.expected(soft_cap=cap, scale=SCALE))


@pytest.mark.skipif(decode_in_c._library(torch.float32) is None, reason="no C compiler, or a processor without AVX2")
@WINDOWS
def test_company_and_chunks_change_no_bit_in_c(window: int | None) -> None:
    case = make_case([(70, 150), (3, 300), (1, 290)], torch.float32, CPU, head_dim=64)
    together = case.attend(window=window, soft_cap=1.5, scale=SCALE).split([70, 3, 1])
    for number, rows in enumerate(together):
        assert torch.equal(case.sequence(number).attend(window=window, soft_cap=1.5, scale=SCALE), rows)
    halves = [case.sequence(0, *part).attend(window=window, soft_cap=1.5, scale=SCALE) for part in ((0, 31), (31, 70))]
    assert torch.equal(torch.cat(halves), together[0])


@pytest.mark.skipif(decode_in_c._library(torch.float32) is None, reason="no C compiler, or a processor without AVX2")
@pytest.mark.parametrize("cap", [0.5, 2.0, 50.0, 1e5])
def test_c_is_exact_from_the_smallest_to_the_largest_scores(cap: float) -> None:
    """Of one key of weight exp(s) beside one of weight 1, both ways; a tanh that loses digits near 0 would show."""
    sizes = torch.tensor([0.0, 1e-6, 1e-4, 1e-2, 0.3, 1.0, 3.0, 30.0, -3.0])
    for queries in (1, 20):  # decode, prefill
        keys = torch.zeros(len(sizes) * 2, 1, 1, 64)
        keys[::2, 0, 0, 0] = sizes
        values = torch.zeros_like(keys)
        values[::2] = 1
        tables = torch.arange(len(keys)).view(-1, 2).int().repeat_interleave(queries, 0)
        q = torch.zeros(len(tables), 1, 64)
        q[..., 0] = 1
        case = PagedCase(q, keys, values, tables, torch.arange(len(q) + 1).int(), torch.full((len(q),), 2).int())
        expected = torch.sigmoid(cap * torch.tanh(sizes.double() / cap)).repeat_interleave(queries)
        found = case.attend(scale=1.0, soft_cap=cap)[:, 0, 0]
        torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=0)


PAGES = ("plain", "int8", "hidden slots", "trees", "batch-invariant", "many rows")


@pytest.mark.parametrize(
    ("what", "of", "window"),
    covering(product(PAGES, [(torch.float32, 1.5), (torch.bfloat16, 50.0)], [None, 20])),
    ids=str,
)
def test_pages_in_triton(device: torch.device, what: str, of: tuple[torch.dtype, float], window: int | None) -> None:
    dtype, cap = of
    stored = torch.int8 if what == "int8" else None
    case = make_case(SEQUENCES[:6], dtype, device, stored=stored)
    case = {"hidden slots": hide_slots, "trees": grow_trees}.get(what, lambda it: it)(case)
    tiles = PagedTiles(rows=64 if what == "many rows" else 16, keys=16, chunk=16, warps=4, ahead=1, residents=2)
    options = {"window": window, "soft_cap": cap, "scale": SCALE}
    result = case.attend(**options, tiles=tiles, batch_invariant=what == "batch-invariant")
    check_close(result, readable(case).expected(**options))


def test_under_a_mask_as_torch_has_it() -> None:
    """What holds for a mask of truth values holds for one that is added, and for its gradient."""
    q, k, v = (torch.randn(2, n, 8, dtype=torch.float64) for n in (3, 5, 5))
    seen = torch.rand(3, 5) > 0.3
    seen[:, 0] = True
    added = torch.zeros(3, 5, dtype=torch.float64).masked_fill(~seen, -math.inf).requires_grad_()
    result = attend_masked(q, k, v, added, soft_cap=1.5)
    check_close(attend_masked(q, k, v, seen, soft_cap=1.5), result, dtype=torch.float32)
    assert torch.autograd.grad(result.sum(), added)[0][seen].abs().min() > 0
    assert not torch.allclose(result, attend_masked(q, k, v, seen))


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_logits(monkeypatch, request.param)
    use_small_tiles(monkeypatch)


def projections(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Hidden states and heads of student and teacher, and labels; logits are of the size of a cap of 2."""
    sizes = ((37, 24), (101, 24), (37, 16), (90, 16))
    tensors = (torch.randn(size) * (1 if size[0] == 37 else 0.4) for size in sizes)
    labels = torch.randint(0, 90, (37,))
    labels[::5] = -100
    return *(x.to(device, dtype) for x in tensors), labels.to(device)


def check_cross_entropy(device: torch.device, dtype: torch.dtype, cap: float) -> None:
    hidden, weight, *_, labels = projections(device, dtype)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    oracle = wide(*leaves)
    expected = linear_cross_entropy_reference(*oracle, labels, soft_cap=cap)
    loss = linear_cross_entropy(*leaves, labels, soft_cap=cap)
    check_close(loss, expected, dtype=dtype)
    with torch.no_grad():
        check_close(linear_cross_entropy(*leaves, labels, soft_cap=cap), expected, dtype=dtype)
    check_all_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, oracle))


def check_distillation(device: torch.device, dtype: torch.dtype, **options: Any) -> None:
    hidden, weight, *teacher, labels = projections(device, dtype)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    oracle, taught = wide(*leaves), [x.double() for x in teacher]
    options |= {"temperature": 1.5, "alpha": 0.3, "hard_weight": 0.2}
    sums = linear_distillation(*leaves, *teacher, labels, **options)
    expected = linear_distillation_reference(*oracle, *taught, labels, **options)
    check_all_close(tuple(sums), tuple(expected), dtype=dtype)
    check_all_close(torch.autograd.grad(sums.loss, leaves), torch.autograd.grad(expected.loss, oracle))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cap", [2.0, 30.0])
def test_losses_on_the_cpu(dtype: torch.dtype, cap: float) -> None:
    check_cross_entropy(CPU, dtype, cap)
    # The slope of total variation is a sign, which rounded logits turn over.
    for kind in KINDS if dtype != torch.bfloat16 else ("forward_kl", "reverse_kl", "jsd"):
        for caps in ((cap, None), (None, cap), (cap, cap)):
            check_distillation(CPU, dtype, kind=kind, soft_caps=caps)


def test_gradients_of_losses_are_slopes() -> None:
    hidden, weight, *teacher, labels = projections(CPU, torch.float64)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    check_slopes(lambda *x: linear_cross_entropy(*x, labels, soft_cap=2.0), leaves)
    options = {"kind": "jsd", "hard_weight": 0.3, "soft_caps": (2.0, 3.0)}
    check_slopes(lambda *x: linear_distillation(*x, *teacher, labels, **options).loss, leaves)


@pytest.mark.parametrize(
    ("way", "dtype", "cap"),
    [(way, *of) for way, of in covering(product(LOGITS, [(torch.float32, 2.0), (torch.bfloat16, 30.0)]))],
    ids=str,
    indirect=["way"],
)
@pytest.mark.usefixtures("way")
def test_losses_in_triton(device: torch.device, dtype: torch.dtype, cap: float) -> None:
    check_cross_entropy(device, dtype, cap)
    for kind in KINDS if dtype == torch.float32 else ("forward_kl", "jsd"):
        check_distillation(device, dtype, kind=kind, soft_caps=(cap, 3.0))


def test_a_cap_that_is_none_is_an_error() -> None:
    q, k, v, _ = heads_of(CPU, torch.float32)
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    case = make_case([(1, 5)], torch.float32, CPU)
    hidden, weight, *teacher, labels = projections(CPU, torch.float32)
    for asked in (
        lambda: flash_attention(q, k, v, borders, soft_cap=0.0),
        lambda: case.attend(soft_cap=-1.0),
        lambda: linear_cross_entropy(hidden, weight, labels, soft_cap=0.0),
        lambda: linear_distillation(hidden, weight, *teacher, labels, soft_caps=(None, -2.0)),
    ):
        with pytest.raises(ValueError, match="soft_cap must be positive, not"):
            asked()


def test_without_gradients_packed_documents_go_to_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above: they would pass, too, if C never ran under a cap."""
    if decode_in_c._library(torch.float32) is None:
        pytest.skip("no C compiler, or a processor without AVX2")
    met = []
    monkeypatch.setattr(packed, "attend_prefill", lambda *given: met.append(given[-1]))
    q, k, v, _ = heads_of(CPU, torch.float32)
    with torch.no_grad():
        flash_attention(q, k, v, torch.tensor([0, *LENGTHS]).cumsum(0).int(), soft_cap=1.5)
    assert met == [1.5]


@needs_triton
def test_the_kernels_in_gluon_leave_a_cap_to_the_portable_ones() -> None:
    hopper = pytest.importorskip("kernels.attention._flash_hopper")
    q, k, v, _ = heads_of(CPU, torch.bfloat16, 64)
    inputs, plain = Inputs.of(q, k, v, torch.tensor([0, len(q)]), None), Settings(True, None, 1.0, False)
    assert hopper.supports(inputs, plain) and not hopper.supports(inputs, plain._replace(soft_cap=50.0))
