"""Norm, rotation and page write as one kernel, natively: model shapes, huge pools of pages, one graph for all slots."""

import pytest
import torch
from torch import Tensor

from kernels.attention._kv_quantization import dequantize_rows
from kernels.attention.rotary import rope_frequencies, rotary_tables
from kernels.attention.rotary_write import HeadNorms, qk_norm_rope, rotate_and_write, rotate_and_write_reference
from kernels.attention.write_pages import write_pages
from tests.compare import check_close

pytestmark = pytest.mark.gpu
PAGE = 16


def projections(tokens: int, heads: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q_heads, kv_heads, d = heads
    joint = torch.randn(tokens, q_heads + 2 * kv_heads, d, device="cuda").to(dtype)
    q, k, v = joint.split((q_heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def pool(pages: int, heads: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    k_pages, v_pages = (torch.zeros(pages, PAGE, *heads[1:], device="cuda").to(dtype) for _ in range(2))
    return k_pages, v_pages


def tables(tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    return rotary_tables(torch.arange(tokens, device="cuda"), rope_frequencies(head_dim, 1e6).cuda())


@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "heads", [(9, 3, 64), (14, 2, 64), (32, 8, 128), (16, 16, 96), (8, 1, 256), (32, 32, 80)], ids=str
)
@pytest.mark.parametrize("tokens", [1, 5, 700])
@pytest.mark.parametrize("rotates", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("normalizes", [False, True], ids=["plain", "norms"])
def test_equals_the_reference(
    dtype: torch.dtype, heads: tuple[int, int, int], tokens: int, rotates: bool, normalizes: bool
) -> None:
    q, k, v = projections(tokens, heads, dtype)
    slots = torch.randperm(50 * PAGE, device="cuda")[:tokens]
    slots[tokens // 2 :: 3] = -1
    weights = 1 + 0.3 * torch.randn(2, heads[2], device="cuda")
    norms = HeadNorms(weights[0], weights[1], 1e-6) if normalizes else None
    rotary = tables(tokens, heads[2]) if rotates else None
    pages = pool(50, heads, dtype)
    result = rotate_and_write(q, k, v, *pages, slots, rotary=rotary, norms=norms)
    wide = tuple(x.double() for x in pool(50, heads, dtype))
    wide_norms = None if norms is None else HeadNorms(norms.q_weight.double(), norms.k_weight.double(), norms.eps)
    wide_rotary = None if rotary is None else (rotary[0].double(), rotary[1].double())
    expected = rotate_and_write_reference(
        q.double(), k.double(), v.double(), *wide, slots, rotary=wide_rotary, norms=wide_norms
    )
    check_close(result, expected)
    check_close(pages[0], wide[0])
    assert torch.equal(pages[1].double(), wide[1])
    if not normalizes:
        steps = pool(50, heads, dtype)
        roped_q, roped_k = qk_norm_rope(q, k, rotary=rotary, norms=norms)
        write_pages(roped_k, v, *steps, slots)
        assert torch.equal(result, roped_q) and torch.equal(pages[0], steps[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_eight_bits_equal_the_separate_write(dtype: torch.dtype) -> None:
    heads = (32, 8, 128)
    q, k, v = projections(300, heads, torch.bfloat16)
    slots, rotary = torch.randperm(40 * PAGE, device="cuda")[:300], tables(300, 128)
    (k_pages, v_pages), (k_steps, v_steps) = pool(40, heads, dtype), pool(40, heads, dtype)
    scales, step_scales = torch.zeros(2, 2, 40, PAGE, 8, device="cuda")
    rotate_and_write(q, k, v, k_pages, v_pages, slots, rotary=rotary, scales=(scales[0], scales[1]))
    _, turned = qk_norm_rope(q, k, rotary=rotary, norms=None)
    write_pages(turned, v, k_steps, v_steps, slots, k_scales=step_scales[0], v_scales=step_scales[1])
    assert torch.equal(scales, step_scales)
    for one, other in ((k_pages, k_steps), (v_pages, v_steps)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    stored = dequantize_rows(v_pages, scales[1], torch.float32).flatten(0, 1)[slots]
    assert ((stored - v).abs() <= v.abs().amax(-1, keepdim=True) / 14).all()


def test_pools_beyond_31_bits() -> None:
    heads = (2, 8, 128)
    num_pages = 2**31 // (PAGE * 8 * 128) + 3
    q, k, v = projections(2, heads, torch.bfloat16)
    shape = (num_pages, PAGE, *heads[1:])
    k_pages, v_pages = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    slots = torch.tensor([num_pages * PAGE - 1, 3], device="cuda")
    rotate_and_write(q, k, v, k_pages, v_pages, slots, rotary=None)
    for pages, new in ((k_pages, k), (v_pages, v)):
        assert torch.equal(pages[-1, -1], new[0]) and torch.equal(pages[0, 3], new[1])


def test_one_cuda_graph_serves_all_slots() -> None:
    heads = (32, 8, 128)
    q, k, v = projections(8, heads, torch.bfloat16)
    (cos, sin), (k_pages, v_pages) = tables(8, 128), pool(20, heads, torch.bfloat16)
    weight = torch.ones(128, device="cuda", dtype=torch.bfloat16)
    slots = torch.full((8,), -1, device="cuda")
    options = {"rotary": (cos, sin), "norms": HeadNorms(weight, weight, 1e-6)}
    rotate_and_write(q, k, v, k_pages, v_pages, slots, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rotate_and_write(q, k, v, k_pages, v_pages, slots, **options)
    assert not k_pages.any() and not v_pages.any()
    slots.copy_(torch.randperm(20 * PAGE, device="cuda")[:8])
    slots[3] = -1
    q.normal_(), k.normal_(), v.normal_()
    graph.replay()
    others = pool(20, heads, torch.bfloat16)
    assert torch.equal(captured, rotate_and_write(q, k, v, *others, slots, **options))
    assert torch.equal(k_pages, others[0]) and torch.equal(v_pages, others[1])
