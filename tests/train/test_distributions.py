"""Stored distributions: what is drawn, what a shard gives back, and what a student learns from it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.losses import _projection
from kernels.losses.linear_sparse_distillation import SparseTargets
from model.files.distributions import (
    LISTED_PARTS,
    Distributions,
    DistributionsError,
    Sampled,
    rounded,
    sample,
    shard_name,
    write_index,
    write_shard,
)
from model.files.sealed_folder import seal
from model.transformer import Transformer
from tests.tiny import tiny_model
from train.config import Loss
from train.data import TokenizedDocuments
from train.objectives import Distillation, StoredDistillation, hidden_states
from train.packing import Batch, cut, pack

DRAWS = 50


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 16, generator=generator), torch.randn(vocabulary, 16, generator=generator) * 0.8


def dense(found: Sampled, vocabulary: int, draws: int = DRAWS) -> Tensor:
    """[r, V] probabilities that the counts stand for."""
    rows = np.repeat(np.arange(len(found.sizes)), found.sizes)
    table = torch.zeros(len(found.sizes), vocabulary, dtype=torch.float64)
    table[rows, found.ids] = torch.from_numpy(found.counts.astype(np.float64))
    return table / draws


def test_counts_are_within_one_of_the_expected_and_their_mean_is_the_distribution() -> None:
    hidden, projection = logits_of(3, 300)
    p = torch.softmax((hidden @ projection.t()).double(), -1)
    mean, repeats = torch.zeros_like(p), 4_000
    shifts = (torch.arange(repeats) + 0.5) / repeats
    for shift in shifts:
        found = sample(hidden, projection, shift.expand(3), DRAWS)
        assert found.counts.min() > 0
        table = dense(found, 300)
        assert torch.allclose(table.sum(-1), torch.ones(3, dtype=torch.float64))
        assert (DRAWS * (table - p)).abs().max() < 1 + 1e-6
        mean += table / repeats
    # Shifts at equal distances: what a count's mean is off by is below two of their steps.
    assert (mean - p).abs().max() < 2 / (DRAWS * repeats) + 1e-7
    entropy = torch.special.entr(p).sum(-1)
    assert np.allclose(found.entropies, entropy, rtol=1e-5)


def test_rows_are_drawn_the_same_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, projection = logits_of(37, 300)
    shifts = torch.rand(37, generator=torch.Generator().manual_seed(1))
    whole = sample(hidden, projection, shifts, DRAWS)
    monkeypatch.setattr("model.files.distributions.LOGITS_PER_BLOCK", 300 * 5)
    cut_up = sample(hidden, projection, shifts, DRAWS)
    for name in ("sizes", "ids", "counts"):
        assert np.array_equal(getattr(whole, name), getattr(cut_up, name))


def documents_of(lengths: list[int], vocabulary: int, *, masked: bool) -> TokenizedDocuments:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, vocabulary, sum(lengths)).astype(np.int32)
    mask = generator.integers(0, 2, len(tokens)).astype(np.uint8) if masked else None
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenizedDocuments("toy", tokens, offsets, mask, np.array(lengths), "digest-of-toy")


def store(folder: Path, documents: TokenizedDocuments, teacher: Transformer, shards: list[int]) -> dict[int, Tensor]:
    """Writes shards that begin at these documents; returns what was drawn by position."""
    folder.mkdir()
    pieces, drawn = cut(documents, 8), {}
    for number, (first, end) in enumerate(zip(shards, [*shards[1:], documents.num_documents], strict=True)):
        found, begin = [], int(documents.offsets[first])
        for piece in reversed(np.flatnonzero((pieces.document >= first) & (pieces.document < end))):
            batch = pack(documents, pieces, [piece])
            rows = (batch.labels >= 0).nonzero()[:, 0].numpy()
            hidden = hidden_of(teacher, batch)[rows]
            shifts = torch.rand(len(rows), generator=torch.Generator().manual_seed(int(piece)))
            sampled = sample(hidden, teacher.head_weight.detach(), shifts, DRAWS)
            positions = pieces.start[piece] + rows
            found.append((positions - begin, sampled))
            drawn |= dict(zip(positions.tolist(), dense(sampled, len(teacher.head_weight)), strict=True))
        text = documents.tokens[begin : documents.offsets[end]]
        write_shard(folder / shard_name(number), text, found)
    first_tokens = documents.offsets[shards].tolist()
    write_index(folder, first_tokens=first_tokens, draws=DRAWS, documents=documents.digest, teacher="t")
    seal(folder)
    return drawn


@torch.no_grad()
def hidden_of(model: Transformer, batch: Batch) -> Tensor:
    return hidden_states(model, batch)


@pytest.mark.parametrize(("vocabulary", "masked"), [(512, False), (512, True), (70_000, True)])
def test_a_batch_gets_what_was_drawn_for_its_positions(tmp_path: Path, vocabulary: int, masked: bool) -> None:
    """However it is packed, from several shards, with ids above 16 bits, and with documents that have no label."""
    documents = documents_of([20, 1, 9, 30, 2, 17], vocabulary, masked=masked)
    teacher = tiny_model(vocab_size=vocabulary)
    drawn = store(tmp_path / "stored", documents, teacher, [0, 1, 3])
    documents = replace(documents, distributions=Distributions(tmp_path / "stored", documents.digest))
    pieces = cut(documents, 8)
    order = np.random.default_rng(1).permutation(len(pieces))
    seen = 0
    for numbers in (order[:4], order[4:]):
        batch = pack(documents, pieces, numbers)
        targets = batch.targets
        assert targets is not None
        positions = np.concatenate([pieces.start[n] + np.arange(pieces.length[n]) for n in numbers]).tolist()
        ends = [*targets.starts[1:].tolist(), len(targets.ids)]
        for row, (position, start, end) in enumerate(zip(positions, targets.starts.tolist(), ends, strict=True)):
            table = torch.zeros(vocabulary, dtype=torch.float64)
            table[targets.ids[start:end]] = targets.weights[start:end].double()
            has_label = bool(batch.labels[row] >= 0)
            assert has_label == (position in drawn) == (end > start)
            if has_label:
                assert torch.allclose(table, drawn[position], atol=1e-7)
                seen += 1
    assert seen == len(drawn) == int(pieces.num_labels.sum())


def test_distributions_of_other_or_damaged_documents_are_refused(tmp_path: Path) -> None:
    documents = documents_of([20, 30], 512, masked=False)
    store(tmp_path / "stored", documents, tiny_model(), [0, 1])
    with pytest.raises(DistributionsError, match="of other documents"):
        Distributions(tmp_path / "stored", "another digest")
    stored = Distributions(tmp_path / "stored", documents.digest)
    moved = np.roll(documents.tokens, 1)
    with pytest.raises(DistributionsError, match="does not fit its documents at token 0"):
        stored.targets([(0, 8)], moved)
    shard = tmp_path / "stored" / shard_name(1)
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(DistributionsError, match="has been altered"):
        Distributions(tmp_path / "stored", documents.digest)


def gradients(model: Transformer, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("hard_weight", "family", "repeats"), [(0.0, "llama", 400), (0.3, "llama", 200), (0.3, "gemma2", 200)]
)
def test_the_mean_over_draws_is_the_dense_loss_and_its_gradient(hard_weight: float, family: str, repeats: int) -> None:
    """Also where logits have a soft cap."""
    teacher, student = tiny_model(family, seed=1), tiny_model(family, seed=2)
    documents = documents_of([24], 512, masked=True)
    pieces = cut(documents, 24)
    batch = pack(documents, pieces, [0])
    loss = Loss(hard_weight=hard_weight)
    expected = Distillation(teacher, loss)(student, batch)
    wanted = gradients(student, expected.loss_sum)
    rows = (batch.labels >= 0).nonzero()[:, 0]
    hidden = hidden_of(teacher, batch)[rows]
    total, values, worst = torch.zeros_like(wanted), [], 0.0
    for number in range(repeats):
        shifts = ((torch.arange(len(rows)) * 0.618 + number / repeats) % 1).double()
        cap = teacher.config.logit_soft_cap
        drawn = sample(hidden, teacher.head_weight.detach(), shifts, DRAWS, soft_cap=cap)
        stored = replace(batch, targets=targets_of(drawn, rows, len(batch.tokens)))
        found = StoredDistillation(loss)(student, stored)
        one = gradients(student, found.loss_sum)
        worst = max(worst, float((one - wanted).norm() / wanted.norm()))
        total += one / repeats
        values.append(found.loss_sum.item())
        assert found.num_labels == expected.num_labels
    assert worst > 0.02, "a single draw is off"
    assert (total - wanted).norm() < 0.005 * wanted.norm()
    assert np.mean(values) == pytest.approx(expected.loss_sum.item(), rel=5e-3)
    assert float(found.metrics["cross_entropy"]) == pytest.approx(float(expected.metrics["cross_entropy"]), rel=1e-5)


def targets_of(drawn: Sampled, rows: Tensor, length: int) -> SparseTargets:
    sizes, entropies = np.zeros(length, np.int64), np.zeros(length, np.float32)
    sizes[rows.numpy()], entropies[rows.numpy()] = drawn.sizes, drawn.entropies
    return SparseTargets(
        torch.from_numpy(drawn.ids),
        torch.from_numpy(drawn.counts.astype(np.float32) / DRAWS),
        torch.from_numpy(np.cumsum(sizes) - sizes),
        torch.from_numpy(entropies),
    )


def test_only_what_is_linear_in_the_teacher_can_be_learnt() -> None:
    for loss in (Loss(kind="reverse_kl"), Loss(temperature=2.0)):
        with pytest.raises(ValueError, match="forward_kl at temperature 1 alone"):
            StoredDistillation(loss)


def listed_in(logits: Tensor, top: int, tokens: Tensor) -> list[dict[int, float]]:
    """What a server lists: the most probable tokens, and the text's own."""
    log_p = torch.log_softmax(logits.double(), -1)
    found = torch.cat((tokens[:, None], log_p.topk(top).indices), 1)
    return [
        {token: float(position[token]) for token in ids} for position, ids in zip(log_p, found.tolist(), strict=True)
    ]


def test_what_is_listed_is_rounded_to_the_next_part() -> None:
    hidden, projection = logits_of(40, 300)
    logits = (hidden @ projection.t()) * torch.linspace(0.1, 30, 40)[:, None]  # nearly even to nearly certain
    tokens = torch.randint(300, (40,), generator=torch.Generator().manual_seed(2))
    listed = listed_in(logits, 5, tokens)
    found = rounded(listed)
    p, table = torch.softmax(logits.double(), -1), dense(found, 300, LISTED_PARTS)
    assert found.counts.dtype == np.uint16
    for row, names in enumerate(listed):
        assert set(table[row].nonzero()[:, 0].tolist()) <= set(names)
        assert all(abs(table[row, token] - p[row, token]) < 1.1 / LISTED_PARTS for token in names)
    assert table.sum(-1).max() <= 1
    rest = 1 - table.sum(-1, keepdim=True)
    assert np.allclose(found.entropies, torch.special.entr(torch.cat((table, rest), 1)).sum(-1), atol=1e-6)


@pytest.mark.parametrize(
    ("top", "family"), [(1, "llama"), (20, "llama"), (512, "llama"), (1, "gemma2"), (20, "gemma2")]
)
def test_the_rest_of_a_listed_distribution_is_one_token(
    tmp_path: Path, top: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss and its gradient are those of the plain KL over K + 1 tokens in fp64, through the files on disk."""
    monkeypatch.setattr(_projection, "_LOGITS_PER_CHUNK", 5 * 512)
    teacher, student = tiny_model(family, seed=1), tiny_model(family, seed=2)
    documents = documents_of([24, 9], 512, masked=True)
    pieces = cut(documents, 24)
    batch = pack(documents, pieces, [0, 1])
    rows = (batch.labels >= 0).nonzero()[:, 0]
    logits = teacher.logits(hidden_of(teacher, batch)[rows]).detach()
    positions = np.concatenate([pieces.start[n] + np.arange(pieces.length[n]) for n in (0, 1)])[rows.numpy()]
    folder = tmp_path / "stored"
    folder.mkdir()
    said = rounded(listed_in(logits, top, batch.labels[rows]))
    write_shard(folder / shard_name(0), documents.tokens, [(positions, said)])
    write_index(folder, first_tokens=[0], draws=LISTED_PARTS, documents=documents.digest, teacher="t")
    seal(folder)
    stored = replace(documents, distributions=Distributions(folder, documents.digest))
    found = StoredDistillation()(student, pack(stored, pieces, [0, 1]))
    gradient = gradients(student, found.loss_sum)

    q = torch.softmax(student.logits(hidden_states(student, batch)[rows]).double(), -1)
    kept = dense(said, 512, LISTED_PARTS)
    listed = kept > 0
    rest_p, rest_q = 1 - kept.sum(-1), torch.where(listed, 0.0, q).sum(-1)
    expected = (torch.special.xlogy(kept, kept) - kept * q.log()).sum()
    some = rest_p > 0.5 / LISTED_PARTS
    expected = expected + (rest_p * (rest_p.log() - rest_q.log()))[some].sum()
    wanted = gradients(student, expected)
    assert found.loss_sum.item() == pytest.approx(expected.item(), rel=2e-3)
    assert (gradient - wanted).norm() < 1e-4 * wanted.norm()
    whole = Distillation(teacher)(student, batch)
    assert found.loss_sum.item() < whole.loss_sum.item() * 1.002
    if top == 512:
        assert (gradient - gradients(student, whole.loss_sum)).norm() < 0.005 * wanted.norm()
