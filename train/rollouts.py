"""On-policy distillation: in a share of its batches the student writes on from their prompts, and learns there.

A text never shows a student where its own words lead it. So part of what it trains on is its own, of the moment, and
the teacher grades each token of that over the whole vocabulary; nothing flows back through the drawing of tokens.
Source: GKD, https://arxiv.org/abs/2306.13649.

Which batches these are and what is drawn follows from torch's generator, which the loop seeds by step and micro-batch:
a run that was resumed writes what one that was not would have written.

Legend: T tokens.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from model.layers import Routing
from model.transformer import Transformer
from train.config import Loss, OnPolicy
from train.objectives import Distillation, ObjectiveOutput
from train.packing import IGNORE_LABEL, Batch

_SEEDS = 2**62


class Rollouts(Protocol):
    """Whoever writes; `pipeline.stages.shared.rollouts` lets the serving engine do it."""

    def write(self, model: Transformer, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        """What the model, as it is now, says after each prompt: at least one token, the same for the same seed."""
        ...


class OnPolicyDistillation(Distillation):
    """Distillation on the text, and on what the student makes of its beginnings.

    A batch that the student writes counts as many labels as the one in whose place it stands.
    """

    def __init__(
        self,
        teacher: Transformer,
        loss: Loss,
        config: OnPolicy,
        rollouts: Rollouts,
        matching: Sequence[int] | None = None,
    ) -> None:
        super().__init__(teacher, loss, matching)
        self.config, self.rollouts = config, rollouts

    def __call__(
        self, model: Transformer, batch: Batch, progress: float = 1.0, routing: Routing | None = None
    ) -> ObjectiveOutput:
        if routing is not None:
            raise ValueError("what routers choose is known for the text alone, and not for what the student writes")
        writes = torch.rand(()).item() < self.config.share
        trained = self._written(model, batch) if writes else batch
        output = super().__call__(model, trained, progress)
        weight = batch.num_labels / trained.num_labels
        metrics = {name: weight * value for name, value in output.metrics.items()}
        metrics["on_policy"] = torch.tensor(float(writes * batch.num_labels))
        return ObjectiveOutput(weight * output.loss_sum, batch.num_labels, metrics)

    def _written(self, model: Transformer, batch: Batch) -> Batch:
        """What the student writes after the batch's prompts, of which it takes no more than fit as many tokens."""
        prompts: list[list[int]] = []
        room = len(batch.tokens)
        for prompt in prompts_of(batch, self.config.prompt_tokens):
            room -= len(prompt) + self.config.max_tokens
            if prompts and room < 0:
                break
            prompts.append(prompt)
        seeds = torch.randint(_SEEDS, (len(prompts),)).tolist()
        return answers_batch(prompts, self.rollouts.write(model, prompts, seeds)).to(batch.tokens.device)


def prompts_of(batch: Batch, most: int) -> list[list[int]]:
    """Of each conversation all before its first answer, of each plain text the first `most` tokens."""
    prompts = []
    borders = batch.cu_seqlens[1:-1].tolist()
    texts = (part.tensor_split(borders) for part in (batch.tokens, batch.labels))
    for tokens, labels in zip(*texts, strict=True):
        first = int((labels != IGNORE_LABEL).int().argmax())
        prompts.append(tokens[: first + 1 if first else most].tolist())
    return prompts


def answers_batch(prompts: list[list[int]], answers: list[list[int]]) -> Batch:
    """A packed batch of prompts and answers; the answers' tokens are the labels."""
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    starts = [0]
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens += prompt + answer[:-1]
        labels += [IGNORE_LABEL] * (len(prompt) - 1) + answer
        positions += range(len(tokens) - starts[-1])
        starts.append(len(tokens))
    return Batch(
        torch.tensor(tokens),
        torch.tensor(positions),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(labels),
        num_labels=sum(map(len, answers)),
    )
