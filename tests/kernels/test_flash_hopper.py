"""The forward for Hopper, run in NumPy: right for any batch, whatever order barriers, copies and products happen in."""

import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import _flash_hopper as hopper
from kernels.attention._flash_tiles import Inputs, Settings
from kernels.attention.flash import flash_attention_reference
from kernels.common.ragged_tiles import plan_tiles
from kernels.common.triton_support import interpreted
from tests.compare import check_close
from tests.kernels.gluon_model import Deadlock, Descriptor, Overwritten, Pointer, Program, run
from tests.machine_code import assemble, ptx_of

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


BREAKS = {
    "turns of one phase only": {"turn_parity": lambda tile: 0},
    "stages that count no rounds": {"stage_of": lambda tile, STAGES: (tile % STAGES, 0)},
    "a round too late": {"stage_of": lambda tile, STAGES: (tile % STAGES, (tile // STAGES + 1) & 1)},
    "values of the next document": {"_zero_past": lambda *_: None},
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
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """PTX of the kernel at both head dims, causal and not."""
    compiled = ptx_of(90, "hopper", tmp_path_factory.mktemp("triton"))
    programs = [ptx for name, ptx in compiled.items() if name.startswith("_forward_kernel")]
    assert len(programs) == 4
    return programs


@pytest.mark.slow
def test_registers_go_to_the_consumers_and_none_is_spilled(programs: list[str], tmp_path: Path) -> None:
    for program in programs:
        changes = re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32\s+(\d+)", program)
        assert set(changes) >= {("dec", "240"), ("inc", "240"), ("dec", "24")}  # both consumers, and the producer
        said = assemble(program, 90, tmp_path)
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
        assert "C7510" not in said and "C7515" not in said, "ptxas makes products wait for each other"


@pytest.mark.slow
def test_the_softmax_runs_beside_a_product(programs: list[str]) -> None:
    """In each loop over tiles: products issued, a wait for all but the last, exponentials, the wait for that one."""
    step = re.compile(r"wgmma\.mma_async|wgmma\.wait_group\S*\s+\d|ex2\.approx|cp\.async\.bulk\.tensor")
    for program in programs:
        assert "cp.async.bulk.tensor" in program
        kinds = {"wgmma.m": "P", "ex2.app": "E", "cp.asyn": "C"}
        names = "".join(kinds.get(found[:7], found[-1]) for found in step.findall(program))
        between = re.findall(r"P+1(E+)0", names)
        assert len(between) == 4, names  # two consumers, each with tiles that all queries see and others
        assert all(len(exponentials) > 64 for exponentials in between)
