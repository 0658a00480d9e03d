"""Packing: every token is predicted once, by a position that sees its own document and nothing else."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import tiny_model
from tests.train.toy import batch_of, documents, random_sequences
from train.config import Loss
from train.objectives import Distillation, LanguageModelling, Objective
from train.packing import calibration_batches, cut, held_out_batches, pack, plan_batches

lengths = st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(lambda found: max(found) > 1)


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(1, 40), st.integers(0, 60))
def test_every_token_but_a_documents_first_is_predicted_once(
    lengths: list[int], sequence_length: int, room: int
) -> None:
    data = documents(lengths)
    # Token values are made unique, so that a label says which token it is.
    tokens = np.arange(data.num_tokens, dtype=np.int32)
    object.__setattr__(data, "tokens", tokens)
    batch_tokens = sequence_length + room
    pieces = cut(data, sequence_length)
    predicted: Counter[int] = Counter()
    for numbers in plan_batches(pieces.length, batch_tokens):
        batch = pack(data, pieces, numbers)
        assert len(batch.tokens) <= batch_tokens
        assert torch.equal(batch.labels, batch.tokens + 1)
        assert batch.num_labels == len(batch.labels)
        bounds = batch.cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == len(batch.tokens)
        for first, end in itertools.pairwise(bounds):
            assert 0 < end - first <= sequence_length
            assert batch.positions[first:end].tolist() == list(range(end - first))
            own = np.searchsorted(data.offsets, batch.labels[first:end].numpy(), side="right")
            assert len(set(own.tolist())) == 1
        predicted.update(batch.labels.tolist())
    firsts = set(data.offsets[:-1].tolist())
    assert predicted == Counter(token for token in range(data.num_tokens) if token not in firsts)


def test_masked_tokens_are_no_labels_and_pieces_without_labels_are_left_out() -> None:
    data = documents([9, 9, 5])
    mask = np.zeros(23, dtype=np.uint8)
    mask[[3, 4, 8]] = 1  # document 0; token 18 is document 2's first and has no position before it
    mask[18] = 1
    object.__setattr__(data, "labels_mask", mask)
    pieces = cut(data, 4)
    assert pieces.start.tolist() == [0, 4]
    assert pieces.num_labels.tolist() == [2, 1]
    batch = pack(data, pieces, [0, 1])
    expected = [-100, -100, int(data.tokens[3]), int(data.tokens[4]), -100, -100, -100, int(data.tokens[8])]
    assert batch.labels.tolist() == expected
    assert batch.num_labels == 3


def test_micro_batches_are_nearly_full() -> None:
    generator = np.random.default_rng(0)
    data = documents(generator.geometric(1 / 700, 600).clip(2, 5000).tolist())
    for sequence_length, batch_tokens in ((512, 1024), (1024, 1024), (512, 2048)):
        pieces = cut(data, sequence_length)
        plan = plan_batches(pieces.length, batch_tokens)
        assert pieces.length.sum() / (len(plan) * batch_tokens) > 0.96
        assert sorted(number for numbers in plan for number in numbers) == list(range(len(pieces)))


def test_a_piece_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="70 tokens does not fit a micro-batch of 64"):
        plan_batches([3, 70], 64)


@pytest.mark.parametrize("objective", [LanguageModelling(), Distillation(tiny_model(seed=5), Loss())])
@pytest.mark.parametrize("family", ["llama", "mistral", "smollm3"])
def test_packed_loss_and_gradients_equal_unpacked(objective: Objective, family: str) -> None:
    sequences = random_sequences(3, 31, 2, 17)
    model = tiny_model(family, seed=1)
    packed = objective(model, batch_of(sequences), 1.0)
    packed.loss_sum.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    alone = [objective(model, batch_of([sequence]), 1.0) for sequence in sequences]
    for output in alone:
        output.loss_sum.backward()
    torch.testing.assert_close(packed.loss_sum, sum(output.loss_sum for output in alone), rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, name


def test_held_out_batches_take_whole_pieces_up_to_the_limit_and_know_their_bytes() -> None:
    data = documents([11, 21, 31, 41])
    batches = held_out_batches(data, sequence_length=50, batch_tokens=50, max_tokens=60)
    assert sum(len(batch.tokens) for batch in batches) == 10 + 20 + 30
    assert sum(batch.num_bytes for batch in batches) == (11 + 21 + 31) * 4
    everything = held_out_batches(data, sequence_length=50, batch_tokens=50)
    assert sum(batch.num_bytes for batch in everything) == data.num_bytes
    with pytest.raises(ValueError, match="the first of 10 tokens, max_tokens is 9"):
        held_out_batches(data, sequence_length=50, batch_tokens=50, max_tokens=9)


def test_calibration_text_lies_evenly_all_over_the_documents() -> None:
    """A document gets its share of tokens wherever it stands, and none comes twice."""
    data = documents([2001, 1001, 31, 4001])
    object.__setattr__(data, "tokens", np.arange(data.num_tokens, dtype=np.int32))
    found = torch.cat([b.tokens for b in calibration_batches(data, sequence_length=50, max_tokens=1400)])
    assert len(found) == len(found.unique()) and abs(len(found) - 1400) <= 50
    for first, end in ((0, 2001), (2001, 3002), (3033, 7034)):
        assert abs(int(((found >= first) & (found < end)).sum()) - 0.2 * (end - first)) <= 50
    everything = calibration_batches(data, sequence_length=50, max_tokens=10**6)
    assert sum(len(batch.tokens) for batch in everything) == data.num_tokens - 4
    assert sum(len(batch.tokens) for batch in calibration_batches(data, sequence_length=50, max_tokens=1)) == 50
