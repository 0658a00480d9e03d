"""Philox against its published vectors and against Triton's own; the distributions of the draws."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from scipy import stats

from kernels.sampling import random
from kernels.sampling.random import (
    Purpose,
    Stream,
    exponential,
    philox_reference,
    philox_words,
    to_exponential,
    uniform,
    words_reference,
)
from kernels.sampling.sample import race

ONES = 0xFFFFFFFF


def stream(device: torch.device | str = "cpu") -> Stream:
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 123_456_789_012_345], device=device)
    choices = torch.tensor([0, 1, 2**31 - 1, 3, 0], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 7, 2**31 - 1, 4, 1], dtype=torch.int32, device=device)
    return Stream(seeds, choices, positions)


def many(rows: int) -> Stream:
    zeros = torch.zeros(rows, dtype=torch.int32)
    return Stream(torch.arange(rows), zeros, zeros)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """The vectors of Random123's kat_vectors for philox4x32-10."""
    assert philox_reference(counter, key) == words  # type: ignore[arg-type]


@triton.jit
def _words_kernel(p_ours, p_theirs, p_seed, first, BLOCK: tl.constexpr):
    seed = tl.load(p_seed)
    b_ours = philox_words(seed, tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), first, 0, BLOCK)
    tl.store(p_ours + tl.arange(0, BLOCK), b_ours.to(tl.int64))
    o_block = first // 4 + tl.arange(0, BLOCK // 4)
    b_0, b_1, b_2, b_3 = tl.randint4x(seed, o_block)
    p_theirs += 4 * tl.arange(0, BLOCK // 4)
    tl.store(p_theirs, b_0.to(tl.int64))
    tl.store(p_theirs + 1, b_1.to(tl.int64))
    tl.store(p_theirs + 2, b_2.to(tl.int64))
    tl.store(p_theirs + 3, b_3.to(tl.int64))


@pytest.mark.parametrize("seed", [0, 5, -1, 2**62 + 12345])
def test_words_in_a_kernel(device: torch.device, seed: int) -> None:
    ours, theirs = torch.empty(2, 64, dtype=torch.int64, device=device)
    _words_kernel[(1,)](ours, theirs, torch.tensor([seed], device=device), 128, BLOCK=64)
    zero = torch.zeros(1, dtype=torch.int64)
    expected = words_reference(Stream(torch.tensor([seed]), zero, zero), 192, 0)[0, 128:]
    assert torch.equal(ours.cpu(), expected)
    assert torch.equal(theirs.cpu(), expected)


@pytest.mark.usefixtures("sampling_form")
@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("count", [1, 4, 39, 300])
def test_words_of_every_row(purpose: Purpose, count: int) -> None:
    assert torch.equal(random._words(stream(), count, purpose), words_reference(stream(), count, purpose))


@pytest.mark.parametrize("count", [1, 4, 9])
def test_drawing_leaves_the_stream_as_it_was(count: int) -> None:
    wide = Stream(*(x.long() for x in stream()))
    for draw in (uniform, exponential):
        draw(wide, count, Purpose.ACCEPT)
    assert all(torch.equal(x, y) for x, y in zip(wide, stream(), strict=True))


@pytest.mark.parametrize("count", [1, 70, 2100])
def test_draws_are_those_of_the_cpu(device: torch.device, count: int) -> None:
    words = words_reference(stream(), count, Purpose.ACCEPT)
    assert torch.equal(uniform(stream(device), count, Purpose.ACCEPT).cpu(), (words >> 8).float() / 2**24)
    expected = -torch.log1p(-(words.double() + 0.5) / 2**32)
    torch.testing.assert_close(
        exponential(stream(device), count, Purpose.ACCEPT).cpu().double(), expected, rtol=1e-6, atol=0
    )


@pytest.mark.covering
@pytest.mark.usefixtures("sampling_form")
@pytest.mark.parametrize("count", [1, 127, 128, 3001])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])  # all equal, as of a model, nearly one-hot
def test_races_by_them(count: int, spread: float) -> None:
    """The winner is that of the words in fp64, unless another one is as near as fp32 can tell."""
    draws = Stream(torch.arange(200) * 2**30, torch.zeros(200, dtype=torch.int64), torch.arange(200))
    p = (spread * torch.randn(200, count)).softmax(dim=1)
    p[torch.rand(p.shape) < 0.3] = 0
    p[:, -1] = torch.maximum(p[:, -1], torch.tensor(1e-3))
    p[::3, : count // 2] = 0
    words = words_reference(draws, count, Purpose.RESIDUAL)
    values = p.double() / -torch.log1p(-(words.double() + 0.5) / 2**32)
    won = values.gather(1, race(p, draws, Purpose.RESIDUAL)[:, None])[:, 0]
    torch.testing.assert_close(won, values.amax(dim=1), rtol=2e-6, atol=0)


@pytest.mark.usefixtures("sampling_form")
def test_a_race_of_nobody_and_of_no_numbers_ends_with_a_token() -> None:
    p = torch.stack((torch.zeros(9), torch.full((9,), torch.nan), torch.eye(9)[5]))
    tokens = race(p, Stream(*(x[:3] for x in stream())), Purpose.DRAFT).tolist()
    assert all(0 <= token < 9 for token in tokens) and tokens[2] == 5


@pytest.mark.usefixtures("sampling_form")
def test_draws_of_the_cpu() -> None:
    words = words_reference(stream(), 300, Purpose.TARGET)
    expected = -torch.log1p(-(words.double() + 0.5) / 2**32)
    torch.testing.assert_close(exponential(stream(), 300, Purpose.TARGET).double(), expected, rtol=1e-6, atol=0)


@triton.jit
def _exponential_kernel(p_words, p_out, BLOCK: tl.constexpr):
    o_word = tl.arange(0, BLOCK)
    tl.store(p_out + o_word, to_exponential(tl.load(p_words + o_word).to(tl.uint32)))


def test_extreme_words(device: torch.device) -> None:
    """Never 0 or infinite, and exact to fp32 where the series meets the logarithm."""
    words = [0, 1, 2, 1000, 2**28 - 1, 2**28, 2**28 + 1, 2**31 - 1, 2**31, ONES - 300, ONES - 1, ONES, 5, 77, 2**20, 7]
    out = torch.empty(16, device=device)
    _exponential_kernel[(1,)](torch.tensor(words, device=device), out, BLOCK=16)
    expected = torch.tensor([-math.log1p(-(word + 0.5) / 2**32) for word in words])
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=0)
    assert float(out.min()) > 2**-34 and float(out.max()) < 23


def test_distributions() -> None:
    assert stats.kstest(exponential(many(50), 4000, Purpose.TARGET).flatten().numpy(), "expon").pvalue > 1e-4
    assert stats.kstest(uniform(many(50), 4000, Purpose.ACCEPT).flatten().numpy(), "uniform").pvalue > 1e-4
    across = uniform(many(100_000), 1, Purpose.ACCEPT)[:, 0].numpy()
    assert stats.kstest(across, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(across[1:], across[:-1])[0, 1]) < 0.015


def test_every_part_of_the_key_matters() -> None:
    one = Stream(torch.tensor([7]), torch.tensor([1]), torch.tensor([3]))
    draws = [uniform(one, 8, Purpose.TARGET), uniform(one, 8, Purpose.DRAFT)]
    draws += [uniform(one._replace(**{name: value + 1}), 8, Purpose.TARGET) for name, value in one._asdict().items()]
    draws.append(uniform(one._replace(seeds=one.seeds + 2**32), 8, Purpose.TARGET))
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == len(draws)
    assert torch.equal(uniform(one, 8, Purpose.TARGET), draws[0])


def test_bad_input_is_refused(device: torch.device) -> None:
    good = stream(device)
    with pytest.raises(ValueError, match="int64"):
        uniform(good._replace(seeds=good.seeds.int()), 3, 0)
    with pytest.raises(ValueError, match="positions"):
        uniform(good._replace(positions=good.positions[:2]), 3, 0)
