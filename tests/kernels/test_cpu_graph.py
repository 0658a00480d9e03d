"""Captures on the CPU: a replay computes what the code would, from whatever its inputs hold by then."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.common.cpu_graph import CaptureError, CpuGraph, GraphMemory, call, refuse_capture
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu_of_halves

SHAPE = (4, 32)


def inputs(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def into(out: Tensor, values: Tensor) -> Tensor:
    out.copy_(values)
    return out


OPERATORS: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    lambda x, y: x.mul(2).sin_().add_(y),
    lambda x, y: torch.cat((x[:, :8], y[:, 8:]), dim=1),
    lambda x, y: x.view(8, 16).t().contiguous().t().reshape(SHAPE) - y,
    lambda x, y: (x @ y.t()) @ y,
    lambda x, y: x.softmax(1).bfloat16().float() + y[torch.tensor([3, 2, 1, 0])],
    lambda x, y: swiglu_of_halves(torch.cat((x, y), dim=1)),
    lambda x, y: rms_norm(x, torch.ones(32), 1e-5, y)[0],
    lambda x, y: into(x.new_empty(SHAPE), y.flip(1)),
    lambda x, y: x.chunk(2, dim=0)[0].repeat(2, 1).clamp_min(0) + x.new_zeros(SHAPE).add_(y),
]


def program(seed: int, x: Tensor) -> Tensor:
    """Random operators on what they have made so far, some of which is forgotten on the way."""
    chosen, values = random.Random(seed), [x, x * 0.5]
    for _ in range(12):
        operator, one, other = chosen.choice(OPERATORS), chosen.choice(values), chosen.choice(values)
        values.append(operator(one.clone(), other))
        if len(values) > 3:
            values.pop(chosen.randrange(1, len(values) - 1))
    return values[-1]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.tuples(st.booleans(), st.integers(0, 99)), min_size=3, max_size=6))
def test_replays_give_what_the_code_gives(seed: int, turns: list[tuple[bool, int]]) -> None:
    """Of two programs that share their memory, by turns."""
    memory, made = GraphMemory(), []
    with torch.inference_mode():
        for number in (seed, seed + 1):
            x, graph = inputs(0).clone(), CpuGraph(memory)
            with graph.capture():
                result = program(number, x)
            made.append((number, x, graph, memory.unlent(result)))
            del result
        for second, values in turns:
            number, x, graph, result = made[second]
            x.copy_(inputs(values))
            graph.replay()
            assert torch.equal(result, program(number, inputs(values)))


def test_memory_serves_again() -> None:
    memory, x = GraphMemory(), torch.randn(64, 64)
    with torch.inference_mode():
        for _ in range(3):
            graph = CpuGraph(memory)
            with graph.capture():
                y = x
                for _ in range(50):
                    y = rms_norm(y.mul(2), torch.ones(64), 1e-5)
            del y
            assert memory.num_bytes <= 4 * x.nbytes


def test_what_is_held_is_left_alone() -> None:
    memory, x = GraphMemory(), torch.ones(16)
    with torch.inference_mode():
        graph = CpuGraph(memory)
        with graph.capture():
            kept = x + 1
        view = kept[4:]
        del kept
        with CpuGraph(memory).capture():
            _ = x - 5
    assert torch.equal(view, torch.full((12,), 2.0))


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0, 0]),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: refuse_capture("it is not for that"),
    ],
)
def test_code_that_follows_numbers_is_refused(code: Callable[[Tensor], object]) -> None:
    x = inputs(0)
    with pytest.raises(CaptureError), CpuGraph(GraphMemory()).capture():
        code(x)
    code(x)  # no capture goes on


def test_a_c_function_without_memory_raises_in_replays_too() -> None:
    results = [0, 0, 1]
    graph = CpuGraph(GraphMemory())
    with graph.capture():
        call(lambda: results.pop(0))
    graph.replay()
    with pytest.raises(MemoryError, match="no room"):
        graph.replay()
    with pytest.raises(MemoryError, match="no room"):
        call(lambda: 1)
