"""Toy data and toy runs for the trainer's tests."""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.lora import inject
from model.lora import LoraConfig
from model.transformer import Transformer
from tests.tiny import tiny_model
from train.config import TrainingConfig
from train.data import TokenizedDocuments
from train.loop import Trainer
from train.objectives import LanguageModelling, Objective
from train.packing import Batch
from train.tracking import Tracker

SEQUENCE_LENGTH = 32
STEPS = 12


def documents(lengths: Sequence[int], *, seed: int = 0, labelled: float | None = None) -> TokenizedDocuments:
    """Documents of random tokens; with `labelled`, only that fraction of them may be labels."""
    generator = np.random.default_rng(seed)
    total = int(np.sum(lengths))
    tokens = generator.integers(0, 512, total).astype(np.int32)
    mask = None if labelled is None else (generator.random(total) < labelled).astype(np.uint8)
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenizedDocuments("toy", tokens, offsets, mask, np.array(lengths, dtype=np.int64) * 4, digest)


def toy_documents() -> TokenizedDocuments:
    return documents([5, 40, 17, 70, 2, 33, 1, 90, 26, 11] * 3, seed=3)


def toy_pairs(lengths: Sequence[int] = (20, 30, 10, 12, 25, 31, 16, 8) * 2, *, prompt: int = 4) -> TokenizedDocuments:
    """Pairs of random answers of these lengths, a prompt included that both have in common."""
    found = documents(lengths, seed=5)
    tokens, mask = np.array(found.tokens), np.ones(found.num_tokens, dtype=np.uint8)
    for number, start in enumerate(found.offsets[:-1].tolist()):
        first = found.offsets[number - number % 2]
        tokens[start : start + prompt] = tokens[first : first + prompt]
        mask[start : start + prompt] = 0
    return replace(found, tokens=tokens, labels_mask=mask, paired=True)


@dataclass(frozen=True)
class ToyConfig(TrainingConfig):
    """As a stage with an adapter has it."""

    learning_rate_ratio: float = 1.0


def toy_config(**changes: Any) -> TrainingConfig:
    """Twelve steps of two micro-batches in fp32."""
    settings = {
        "tokens": STEPS * 128,
        "batch_tokens": 128,
        "micro_batch_tokens": 64,
        "learning_rate": 3e-3,
        "precision": "fp32",
        "weight_decay": 0.01,
    }
    return ToyConfig(**(settings | changes))


def toy_trainer(
    folder: Path,
    *,
    model: Transformer | None = None,
    objective: Objective | None = None,
    data: TokenizedDocuments | None = None,
    evaluate: Callable[[Transformer], dict[str, float]] | None = None,
    **changes: Any,
) -> Trainer:
    """A trainer of a tiny model; `changes` go to its settings."""
    return Trainer(
        model or tiny_model(seed=1),
        objective or LanguageModelling(),
        data or toy_documents(),
        toy_config(**changes),
        folder=folder,
        sequence_length=SEQUENCE_LENGTH,
        tracker=Tracker(folder),
        evaluate=evaluate,
    )


def adapted_model(
    *, seed: int = 1, base: int = 1, dropout: float = 0.2, dtype: torch.dtype = torch.float32, **changes: Any
) -> Transformer:
    """A tiny model of which only adapters on the feed-forward layers are trained; `base` is the seed of the rest."""
    model = tiny_model(seed=base, **changes).to(dtype)
    inject(model, LoraConfig(rank=4, dropout=dropout, targets=("gate_proj", "up_proj", "down_proj")), seed=seed)
    return model


def weights_hash(model: Transformer) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + parameter.detach().float().numpy().tobytes())
    return digest.hexdigest()


def batch_of(sequences: Sequence[Sequence[int]]) -> Batch:
    """A packed batch of plain texts: every position but each last one predicts the next token."""
    labels = [[*sequence[1:], -100] for sequence in sequences]
    lengths = [len(sequence) for sequence in sequences]
    return Batch(
        tokens=torch.tensor(list(itertools.chain(*sequences))),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        labels=torch.tensor(list(itertools.chain(*labels))),
        num_labels=sum(lengths) - len(lengths),
        num_bytes=sum(lengths) * 3,
    )


def random_sequences(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 512, length).tolist() for length in lengths]
