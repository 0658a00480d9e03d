"""Pairs of answers: the loss and its gradient beside a plain one in fp64, the reference, and pairs in batches."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.lora import inject
from compress.quantize.round_to_nearest import quantize_model
from model.attention import PackedAttention
from model.formats.registry import format_named
from model.lora import LoraConfig, adapted_layers, detach_lora, without_lora
from model.transformer import Transformer
from tests.tiny import full_logits, tiny_model
from tests.train.toy import adapted_model, toy_pairs, toy_trainer, weights_hash
from train.config import PreferenceLoss
from train.loop import Trainer
from train.packing import Batch, cut, pack
from train.preference import (
    PreferenceTuning,
    chosen_answers,
    count_unfit,
    pair_batches,
    pair_logps,
    sequence_logps,
)
from train.sampler import Sampler

LOSSES = [
    PreferenceLoss(),
    PreferenceLoss(beta=0.7, label_smoothing=0.2, nll_weight=1.5),
    PreferenceLoss("ipo", beta=0.3, nll_weight=0.5),
]


def batch_of_pairs(lengths: list[int]) -> Batch:
    found = toy_pairs(lengths)
    return pack(found, cut(found, 64), np.arange(len(lengths)))


def trained_model(*, dropout: float = 0.0) -> Transformer:
    """An adapter that does something."""
    model = adapted_model(dropout=dropout)
    generator = torch.Generator().manual_seed(7)
    for layer in adapted_layers(model).values():
        layer.lora.b.data = 0.1 * torch.randn(layer.lora.b.shape, generator=generator)
    return model


def plain_logps(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of each sequence by itself, from all its logits: the sum over its labels, and how many there are."""
    sums, counts = [], []
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        labels = batch.labels[start:end]
        attention = PackedAttention(model.config, torch.tensor([0, end - start], dtype=torch.int32))
        logits = model.logits(model(batch.tokens[start:end], batch.positions[start:end], attention))
        sums.append(-F.cross_entropy(logits, labels, reduction="sum"))
        counts.append((labels != -100).sum())
    return torch.stack(sums), torch.stack(counts)


def plain_loss(model: Transformer, base: Transformer, batch: Batch, loss: PreferenceLoss) -> Tensor:
    """The papers' formulas, written out for each pair."""
    (policy, counts), (reference, _) = plain_logps(model, batch), plain_logps(base, batch)
    gained = policy - reference.detach()
    total = torch.zeros((), dtype=torch.float64)
    for chosen in range(0, len(gained), 2):
        if loss.kind == "ipo":
            h = gained[chosen] / counts[chosen] - gained[chosen + 1] / counts[chosen + 1]
            total = total + (h - 1 / (2 * loss.beta)) ** 2
        else:
            right = torch.sigmoid(loss.beta * (gained[chosen] - gained[chosen + 1]))
            total = total - (1 - loss.label_smoothing) * right.log() - loss.label_smoothing * (1 - right).log()
        # TRL of a batch of one pair: losses + rpo_alpha * nll_loss, a mean over the chosen answer's tokens.
        total = total + loss.nll_weight * -policy[chosen] / counts[chosen]
    return total


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.kind}-{loss.label_smoothing}")
def test_loss_and_gradient_are_those_of_the_plain_formula_in_fp64(loss: PreferenceLoss) -> None:
    batch, model = batch_of_pairs([20, 13, 9, 24, 6, 31]), trained_model()
    plain = copy.deepcopy(model).double()
    base = copy.deepcopy(plain)
    detach_lora(base)
    expected = plain_loss(plain, base, batch, loss)
    expected.backward()
    output = PreferenceTuning(loss)(model, batch)
    output.loss_sum.backward()
    assert output.num_labels == 3
    assert output.loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    trained = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}
    assert len(trained) == 12
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, trained[name].grad.float(), rtol=1e-3, atol=1e-5)


def test_sequences_are_scored_under_the_models_soft_cap() -> None:
    batch, model = batch_of_pairs([20, 13, 9, 24]), tiny_model("gemma2")
    with torch.no_grad():
        torch.testing.assert_close(sequence_logps(model, batch), plain_logps(model, batch)[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "NF4"])
def test_a_fresh_adapter_costs_log_2(quantized: bool) -> None:
    """With dropout: B is zero, so that model and reference say the same."""
    model = adapted_model(dropout=0.5).train()
    if quantized:
        model = quantize_model(tiny_model(), format_named("nf4"))
        inject(model.train(), LoraConfig(rank=4, dropout=0.5))
    output = PreferenceTuning()(model, batch_of_pairs([20, 13, 9, 24]))
    assert output.loss_sum.item() / 2 == pytest.approx(math.log(2), abs=1e-6)
    output.loss_sum.backward()
    assert all(layer.lora.b.grad.abs().sum() > 0 for layer in adapted_layers(model).values())


def test_the_reference_is_the_model_without_its_adapter_and_dropout() -> None:
    batch, beta = batch_of_pairs([20, 13, 9, 24]), 0.5
    model = trained_model(dropout=0.5).train()
    base = copy.deepcopy(model)
    detach_lora(base)
    with torch.no_grad():
        expected, _ = plain_logps(base.eval(), batch)
    found = PreferenceTuning(PreferenceLoss(beta=beta))(model, batch).metrics
    for side, (first, name) in enumerate((("rewards/chosen", "logps/chosen"), ("rewards/rejected", "logps/rejected"))):
        reference = found[name] - found[first] / beta
        assert reference.item() == pytest.approx(expected[side::2].sum().item(), rel=1e-5)
        assert abs(found[first].item()) > 0.1, "else the adapter says nothing"


def test_adapters_come_back_whatever_happens() -> None:
    model = trained_model()
    before = [layer.lora for layer in adapted_layers(model).values()]
    expected = full_logits(model, [3, 4, 5, 6])
    with pytest.raises(KeyError), without_lora(model):
        assert not adapted_layers(model)
        raise KeyError
    assert [layer.lora for layer in adapted_layers(model).values()] == before
    assert torch.equal(full_logits(model, [3, 4, 5, 6]), expected)


def test_metrics_are_those_of_the_pairs() -> None:
    batch, model = batch_of_pairs([20, 13, 9, 24, 6, 31]), trained_model()
    with torch.no_grad():
        policy, counts = plain_logps(model, batch)
        with without_lora(model):
            reference, _ = plain_logps(model, batch)
    chosen, rejected = (0.1 * (policy - reference)).view(-1, 2).t()
    found = PreferenceTuning()(model, batch).metrics
    expected = {
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/margins": (chosen - rejected).sum(),
        "rewards/accuracies": (chosen > rejected).sum(),
        "logps/chosen": policy[::2].sum(),
        "logps/rejected": policy[1::2].sum(),
        "nll_loss": (-policy / counts)[::2].sum(),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-5), name


def test_label_smoothing_belongs_to_the_sigmoid() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing is 0\.1, but ipo knows none"):
        PreferenceLoss("ipo", label_smoothing=0.1)


# --- pairs in batches -------------------------------------------------------------------------------------------------


def test_answers_of_a_pair_stay_together_and_each_pair_comes_once_an_epoch() -> None:
    found = toy_pairs([12, 17, 9, 9, 20, 6, 11, 15, 8, 8, 30, 5, 14, 14])
    sampler = Sampler(found, sequence_length=32, micro_batch_tokens=64, seed=0)
    epochs = []
    for _ in range(2):
        taken = sampler.take(len(sampler._plan))
        assert all((numbers[1::2] == numbers[::2] + 1).all() and (numbers[::2] % 2 == 0).all() for numbers in taken)
        assert [sampler.num_terms(numbers) for numbers in taken] == [len(numbers) // 2 for numbers in taken]
        assert all(len(sampler.batch(numbers).tokens) <= 64 for numbers in taken)
        halves = [sampler.split(numbers, 2) for numbers in taken]
        assert all((part[1::2] == part[::2] + 1).all() for parts in halves for part in parts), "where memory is short"
        assert all(
            np.concatenate(parts).tolist() == numbers.tolist() for parts, numbers in zip(halves, taken, strict=True)
        )
        epochs.append(np.concatenate(taken).tolist())
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(14)) and epochs[0] != epochs[1]
    with pytest.raises(ValueError, match=r"micro_batch_tokens \(63\) must be at least twice the sequence_length"):
        Sampler(found, sequence_length=32, micro_batch_tokens=63, seed=0)


def test_a_long_answer_ends_with_the_sequence_and_a_long_prompt_leaves_its_pair_out() -> None:
    """The third prompt has as many tokens as a sequence, so that its label would be the first of an answer."""
    lengths = [12, 17, 40, 9, 30, 30, 8, 6]
    found = toy_pairs(lengths, prompt=4)
    mask = np.array(found.labels_mask)
    mask[found.offsets[4] : found.offsets[4] + 17] = 0  # of one answer alone
    found = replace(found, labels_mask=mask)
    pieces = cut(found, 16)
    assert pieces.document.tolist() == [0, 1, 2, 3, 6, 7]
    assert pieces.length.tolist() == [11, 16, 16, 8, 7, 5]
    assert (pieces.start == found.offsets[pieces.document]).all()
    assert count_unfit(found, 16) == (1, 1)
    mask[found.offsets[4] + 16] = 1
    assert count_unfit(replace(found, labels_mask=mask), 16) == (2, 0)


def test_held_out_pairs_are_scored_in_their_order() -> None:
    found, model = toy_pairs([12, 17, 9, 9, 20, 6, 11, 15]), trained_model()
    batches = pair_batches(found, sequence_length=32, max_tokens=60)
    assert sum(len(batch.cu_seqlens) - 1 for batch in batches) == 4, "as many pairs as fit 60 tokens"
    expected = torch.cat([plain_logps(model, batch)[0].detach() for batch in batches])
    torch.testing.assert_close(pair_logps(model, batches).flatten(), expected, rtol=1e-4, atol=1e-4)
    chosen = chosen_answers(found)
    assert chosen.num_documents == 4 and not chosen.paired
    for number in range(4):
        own = chosen.tokens[chosen.offsets[number] : chosen.offsets[number + 1]]
        assert own.tolist() == found.tokens[found.offsets[2 * number] : found.offsets[2 * number + 1]].tolist()


def test_training_that_dies_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trainer(folder: str, *, checkpoint_every_s: float = 1e6) -> Trainer:
        return toy_trainer(
            tmp_path / folder,
            model=adapted_model(),
            objective=PreferenceTuning(),
            data=toy_pairs(),
            tokens=5 * 128,  # more than an epoch
            checkpoint_every_s=checkpoint_every_s,
        )

    whole = trainer("whole")
    first = whole.train()
    step = Trainer._run_step

    def dies_at_the_fourth(self: Trainer, *arguments: object) -> object:
        if self.counters.step == 3:
            raise KeyboardInterrupt
        return step(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_run_step", dies_at_the_fourth)
        trainer("died", checkpoint_every_s=0.0).train()
    again = trainer("died")
    assert again.train().metrics == first.metrics
    assert weights_hash(again.model) == weights_hash(whole.model) != weights_hash(adapted_model())
