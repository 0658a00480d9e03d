"""Memory that is short: steps are computed in smaller parts, to the same losses; one document too long is the end."""

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.transformer import Transformer
from tests.train.toy import documents, toy_trainer
from tests.trials import trials
from train.loop import MemoryShortageError
from train.objectives import LanguageModelling, ObjectiveOutput
from train.packing import Batch
from train.sampler import Sampler
from train.tracking import read_metrics


class Small:
    """Language modelling on a device that holds so many tokens, from the n-th batch on.

    A larger one fails in forward, or in backward when most of its gradients have been added.
    """

    def __init__(self, tokens: int, *, first: int = 0, in_backward: bool = False) -> None:
        self.tokens, self.first, self.in_backward, self.count = tokens, first, in_backward, itertools.count()

    def __call__(self, model: Transformer, batch: Batch, progress: float) -> ObjectiveOutput:
        short = next(self.count) >= self.first and len(batch.tokens) > self.tokens
        if short and not self.in_backward:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if short:
            self._fail_behind(next(model.model.layers[0].parameters()))
        return LanguageModelling()(model, batch)

    def _fail_behind(self, parameter: Tensor) -> None:
        def fail(gradient: Tensor) -> None:
            hook.remove()
            raise torch.OutOfMemoryError("CUDA out of memory")

        hook = parameter.register_hook(fail)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("straight")
    toy_trainer(folder).train()
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("first", sorted({0, 1, 9, *range(trials(0, 20))}))
def test_a_step_in_halves_has_the_same_losses(
    first: int, in_backward: bool, straight: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = toy_trainer(tmp_path, objective=Small(50, first=first, in_backward=in_backward))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.micro_batch_parts == 2
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "memory is short. Each micro-batch is computed in 2 parts" in said[0]
    for line, expected in zip(read_metrics(tmp_path / "metrics.jsonl"), straight, strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


def test_they_are_halved_until_they_fit(
    straight: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = toy_trainer(tmp_path, objective=Small(32, in_backward=True))
    trainer.train()
    assert trainer.micro_batch_parts == 4
    assert [record.message.split()[-6:-4] for record in caplog.records] == [["2", "parts,"], ["4", "parts,"]]
    for line, expected in zip(read_metrics(tmp_path / "metrics.jsonl"), straight, strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


def test_one_document_that_does_not_fit_is_the_end(tmp_path: Path) -> None:
    with pytest.raises(MemoryShortageError, match="not hold one document of 32 tokens: lower sequence_length, or"):
        toy_trainer(tmp_path, data=documents([17, 33, 20]), objective=Small(31)).train()


def test_one_process_of_several_does_not_go_on_alone(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, objective=Small(50))
    trainer.world = 2
    with pytest.raises(MemoryShortageError, match=r"not hold a micro-batch of \d\d tokens: lower micro_batch_tokens"):
        trainer.train()


def test_parts_are_even_and_whole(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(2, 33, 60).tolist()
    sampler = Sampler(documents(lengths), sequence_length=32, micro_batch_tokens=256, seed=0)
    for numbers in sampler.take(4):
        for count in (1, 2, 3, 8, 1000):
            parts = sampler.split(numbers, count)
            assert np.concatenate(parts).tolist() == numbers.tolist() and all(map(len, parts))
            tokens = [int(sampler.pieces.length[part].sum()) for part in parts]
            assert len(parts) <= count and max(tokens) <= sum(tokens) / count + 32
    assert all(len(part) == 1 for part in parts)
