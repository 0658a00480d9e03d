"""A toy run in a process of its own: to be signalled, killed, or one of several that train together."""

import itertools
import os
import resource
import sys
import time
from pathlib import Path

import torch

from model.transformer import Transformer
from tests.train.toy import STEPS, adapted_model, toy_pairs, toy_trainer, weights_hash
from train.config import PreferenceLoss
from train.loop import Trainer
from train.preference import PreferenceTuning

INTERRUPTED = 3
EVALUATION_S = 60.0


def sleepy(model: Transformer) -> dict[str, float]:
    """An evaluation that takes a minute, unless the folder `awake` says that it need not."""
    time.sleep(EVALUATION_S)
    return {"held_out_loss": 1.0}


def awake(model: Transformer) -> dict[str, float]:
    return {"held_out_loss": 1.0}


def run(
    folder: str,
    evaluation: str | None = None,
    *,
    save_every_step: bool = True,
    steps: int = STEPS,
    adapted: bool = False,
    paired: bool = False,
    launched: dict[str, str] | None = None,
    held_at: int | None = None,
    file_limit: int | None = None,
) -> None:
    """Trains to the end and writes the hash of the weights; a stop is told by the exit code.

    `adapted`: only adapters on a frozen base, with 8-bit moments and activation checkpointing, on documents or
    `paired` answers. `launched`: what a launcher's environment says. `held_at`: the step whose checkpoint is begun and
    never finished. `file_limit`: bytes that no file of this process may exceed.
    """
    os.environ.update(launched or {})
    torch.set_num_threads(1)
    evaluate = {None: None, "sleepy": sleepy, "awake": awake}[evaluation]
    every_s = 0.0 if save_every_step else 1e6
    special = {"optimizer": "paged_adamw_8bit", "activation_checkpointing": True} if adapted else {}
    trainer: Trainer = toy_trainer(
        Path(folder),
        model=adapted_model() if adapted else None,
        objective=PreferenceTuning(PreferenceLoss(nll_weight=1.0)) if paired else None,
        data=toy_pairs() if paired else None,
        evaluate=evaluate,
        evaluate_every_tokens=500,
        checkpoint_every_s=every_s,
        tokens=steps * 128,
        **special,
    )
    if held_at is not None:
        _hold(trainer, held_at)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    if trainer.train().interrupted:
        sys.exit(INTERRUPTED)
    if trainer.is_main:
        (Path(folder) / "weights.sha256").write_text(weights_hash(trainer.model))


def _hold(trainer: Trainer, step: int) -> None:
    """Its checkpoint stays as it is after the first piece of the second file."""
    pieces = itertools.count()

    def moved(num_bytes: int) -> None:
        if (trainer.checkpoints / f".staging-step-{step:08d}").exists() and next(pieces):
            time.sleep(1e6)

    trainer.writer.moved = moved  # type: ignore[method-assign]
