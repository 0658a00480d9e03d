"""Attention for Hopper, run in NumPy: right for any batch, whatever order barriers, copies and products happen in."""

import re
from itertools import chain
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.machine_code.pipes import overlapped_exponentials, waits
from bench.machine_code.program import Program as MachineCode
from bench.machine_code.program import assemble
from kernels.attention import _flash_hopper as hopper
from kernels.attention import _flash_hopper_backward as backward
from kernels.attention._flash_cpu import documents, visible_keys
from kernels.attention._flash_tiles import Inputs, Settings
from kernels.attention.flash import flash_attention_reference
from kernels.common.ragged_tiles import plan_tiles
from tests.compare import check_all_close, check_close
from tests.interpreted import interpreted
from tests.kernels.gluon_model import Deadlock, Descriptor, Overwritten, Pointer, Program, run
from tests.native_compile import ptx_of

ROWS, KEYS, D = 4, 4, 8
"""Of a consumer's queries, of a tile of keys, of a head: as small as they can be."""


def attend(
    lengths: list[tuple[int, int]], heads: tuple[int, int], causal: bool, seed: int, unowned: int = 0, **options: Any
) -> tuple[torch.Tensor, ...]:
    """O and L of all programs, and what they should be; behind the last document there are rows that nobody owns."""
    generator = torch.Generator().manual_seed(seed)
    sides = [torch.tensor([0, *side]).cumsum(0).int() for side in zip(*lengths, strict=True)]
    q, k, v = (
        torch.randn(int(sides[side][-1]) + unowned, heads[side], D, dtype=torch.float64, generator=generator)
        for side in (0, 1, 1)
    )
    for x, side in ((q, 0), (k, 1), (v, 1)):
        x[int(sides[side][-1]) :] = torch.nan
    with interpreted():
        plan = plan_tiles(*sides, num_rows=len(q), rows_per_tile=2 * ROWS, last_first=True)
    out, lse = np.full(q.shape, np.nan), np.full((q.shape[1], len(q)), np.nan)
    descriptors = [Descriptor(x.flatten(1).numpy(), [rows, D]) for x, rows in ((q, ROWS), (k, KEYS), (v, KEYS))]
    memory = [Pointer(x) for x in (out, lse, plan[0].numpy(), plan[1].numpy())]
    numbers = len(q), heads[0], heads[0] // heads[1], heads[0], 0.3
    chance = Random(seed)
    with np.errstate(all="ignore"):
        for number in range(len(plan[0]) * heads[0]):
            arguments = *descriptors, *memory, *numbers, causal, D, KEYS, 2
            check_turns(run(hopper._forward_kernel, number, chance, *arguments, **options))
    expected = flash_attention_reference(q, k, v, *sides, causal=causal, scale=0.3)
    return torch.from_numpy(out), torch.from_numpy(lse), expected, sides[0]


def check_turns(program: Program) -> None:
    """Both consumers have taken as many turns: each passes one on to the other, and the first is given."""
    if program.barriers:  # in the order in which the kernel sets them up: queries and turn of each consumer
        first, second = program.barriers[1], program.barriers[3]
        assert first.arrivals == second.arrivals + 1


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    causal=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_batch_in_any_order(
    lengths: list[tuple[int, int]], heads: tuple[int, int], causal: bool, seed: int
) -> None:
    out, lse, expected, ends = attend(lengths, heads, causal, seed, unowned=3)
    owned = int(ends[-1])
    check_close(out[:owned], expected[:owned], dtype=torch.float64)
    assert (out[owned:] == 0).all() and torch.isposinf(lse[:, owned:]).all()


def test_the_logarithms_are_those_that_the_backward_pass_expects() -> None:
    """exp2(S - L) sums to 1 over the keys that a query sees."""
    _, lse, _, _ = attend([(11, 11)], (1, 1), True, seed=5)
    generator = torch.Generator().manual_seed(5)
    q, k, _ = (torch.randn(11, 1, D, dtype=torch.float64, generator=generator)[:, 0] for _ in range(3))
    scores = (0.3 * q @ k.T).masked_fill(~torch.ones(11, 11).tril().bool(), -torch.inf)
    check_close(lse[0], scores.logsumexp(1) / np.log(2), dtype=torch.float64)


def gradients(
    lengths: list[tuple[int, int]], heads: tuple[int, int], causal: bool, seed: int, **options: Any
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """dQ, dK and dV of all programs, and those of autograd; behind the last document there are rows of NaN."""
    generator = torch.Generator().manual_seed(seed)
    sides = [torch.tensor([0, *side]).cumsum(0).int() for side in zip(*lengths, strict=True)]
    ends = [int(side[-1]) for side in sides]
    q, k, v, grad = (
        torch.randn(ends[side] + 3, heads[side], D, dtype=torch.float64, generator=generator) for side in (0, 1, 1, 0)
    )
    for x, side in ((q, 0), (k, 1), (v, 1), (grad, 0)):
        x[ends[side] :] = torch.nan
    leaves = [x[: ends[side]].clone().requires_grad_() for x, side in ((q, 0), (k, 1), (v, 1))]
    out = flash_attention_reference(*leaves, *sides, causal=causal, scale=0.3)
    expected = torch.autograd.grad(out, leaves, grad[: ends[0]], materialize_grads=True)
    delta, lse = torch.full((2, heads[0], len(q)), torch.nan, dtype=torch.float64)
    delta[:, : ends[0]] = (out * grad[: ends[0]]).sum(-1).T.detach()
    lse[:, : ends[0]] = logarithms(leaves[0].detach(), leaves[1].detach(), sides, causal)
    delta[:, ends[0] :], lse[:, ends[0] :] = 0, torch.inf
    found = torch.zeros_like(q), torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    with interpreted():
        plan = plan_tiles(*reversed(sides), num_rows=len(k), rows_per_tile=2 * ROWS, last_first=False)
    queries = 4
    shapes = (k, ROWS), (v, ROWS), (q, queries), (grad, queries)
    descriptors = [Descriptor(x.flatten(1).numpy(), [rows, D]) for x, rows in shapes]
    memory = [Pointer(x.numpy()) for x in (lse, delta, *found, *plan)]
    numbers = len(q), heads[1], heads[0] // heads[1], heads[1], 0.3
    chance = Random(seed)
    with np.errstate(all="ignore"):
        for number in range(len(plan[0]) * heads[1]):
            run(backward._backward_kernel, number, chance, *descriptors, *memory, *numbers, causal, D, 2, **options)
    assert all((x[ends[side] :] == 0).all() for x, side in zip(found, (0, 1, 1), strict=True))
    return tuple(x[: ends[side]] for x, side in zip(found, (0, 1, 1), strict=True)), expected


def logarithms(q: torch.Tensor, k: torch.Tensor, sides: list[torch.Tensor], causal: bool) -> torch.Tensor:
    """L [Hq, T], base 2; infinite for queries without keys."""
    parts = [torch.zeros(q.shape[1], 0, dtype=torch.float64)]
    for queries, keys in documents(*sides, len(q), len(k)):
        keys_of_heads = k[keys].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = 0.3 * torch.einsum("qhd,khd->hqk", q[queries], keys_of_heads)
        visible = visible_keys(scores.shape[1], scores.shape[2], causal, None, q.device)
        sums = scores.masked_fill(~visible, -torch.inf).logsumexp(2) / np.log(2)
        parts.append(sums.where(visible.any(1), torch.inf))
    return torch.cat(parts, 1)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    causal=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_gradients_of_any_batch_in_any_order(
    lengths: list[tuple[int, int]], heads: tuple[int, int], causal: bool, seed: int
) -> None:
    check_all_close(*gradients(lengths, heads, causal, seed), dtype=torch.float64)


BREAKS = {
    "turns of one phase only": {"turn_parity": lambda tile: 0},
    "stages that count no rounds": {"stage_of": lambda tile, STAGES: (tile % STAGES, 0)},
    "a round too late": {"stage_of": lambda tile, STAGES: (tile % STAGES, (tile // STAGES + 1) & 1)},
    "values of the next document": {"zero_past": lambda *_: None},
    "a tile too few": {"key_tiles": lambda query, s_q, s_k, CAUSAL, QUERIES, KEYS: max(s_k // KEYS, 1)},
    "no mask on the diagonal": {"full_tiles": lambda row, s_q, s_k, num_tiles, CAUSAL, KEYS: num_tiles},
}


@pytest.mark.parametrize("changed", BREAKS.values(), ids=BREAKS)
def test_the_model_sees_a_broken_schedule(changed: dict[str, Any]) -> None:
    with pytest.raises((Deadlock, Overwritten, AssertionError)):
        for seed in range(5):
            out, _, expected, ends = attend([(30, 30)], (1, 1), True, seed, unowned=3, changed=changed)
            check_close(out[: ends[-1]], expected[: ends[-1]], dtype=torch.float64)


def test_what_it_supports() -> None:
    def supports(q: torch.Tensor, kv: torch.Tensor, window: int | None = None) -> bool:
        inputs = Inputs.of(q, kv, kv, torch.tensor([0, len(q)], dtype=torch.int32), None)
        return hopper.supports(inputs, Settings(True, window, 0.1, False))

    def heads(count: int, d: int = 128, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(20, count, d, dtype=dtype)

    assert supports(heads(4), heads(2)) and supports(heads(4, 64, torch.float16), heads(4, 64, torch.float16))
    fused = heads(8).split((4, 2, 2), dim=1)
    assert supports(fused[0], fused[1])
    assert not supports(heads(4), heads(2), window=5)
    assert not supports(heads(4, 80), heads(2, 80))
    assert not supports(heads(4, dtype=torch.float32), heads(2, dtype=torch.float32))
    assert not supports(heads(4), heads(2).transpose(0, 1).contiguous().transpose(0, 1))
    assert not supports(heads(4), heads(2)[:0])


# Its machine code


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, MachineCode]]]:
    """PTX and machine code: forward at both head dims, causal and not; backward at one."""
    compiled = ptx_of(90, "hopper", tmp_path_factory.mktemp("triton"))
    names = "_forward_kernel", "_backward_kernel"
    programs = {
        name: [(ptx, assemble(ptx, 90)) for of, ptx in compiled.items() if of.startswith(name)] for name in names
    }
    assert [len(programs[name]) for name in names] == [4, 2]
    return programs


@pytest.mark.machine_code("attention")
@pytest.mark.slow
def test_registers_go_to_the_consumers_and_none_is_spilled(programs: dict[str, list[tuple[str, MachineCode]]]) -> None:
    for ptx, found in chain(*programs.values()):
        changes = re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32\s+(\d+)", ptx)
        assert set(changes) >= {("dec", "240"), ("inc", "240"), ("dec", "24")}  # both consumers, and the producer
        assert found.spill_bytes == found.stack_bytes == 0, found.report
        assert not found.serializes_products, found.report


@pytest.mark.machine_code("attention")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "left", "loops_each"),
    [
        ("_forward_kernel", [1, 0], 4),  # of both consumers: tiles that all queries see, and others
        ("_backward_kernel", [1, 0, 2, 1, 0], 2),
    ],
)
def test_the_softmax_runs_beside_a_product(
    programs: dict[str, list[tuple[str, MachineCode]]], name: str, left: list[int], loops_each: int
) -> None:
    """In machine code, for the assembler may move a wait."""
    for ptx, program in programs[name]:
        assert "cp.async.bulk.tensor" in ptx
        loops = [loop for loop in program.loops if any("HGMMA" in line for line in loop)]
        assert len(loops) == loops_each
        for loop in loops:
            assert waits(loop)["products"] == left
            beside, exponentials = overlapped_exponentials(loop)
            assert exponentials >= 32 and beside == exponentials
