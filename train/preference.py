"""Preference tuning without a reward model: answers that were chosen become likelier than rejected ones.

    h = (log π(c) − log π_ref(c)) − (log π(r) − log π_ref(r))          of a chosen answer c and a rejected one r
    sigmoid   −(1 − ε) log σ(β h) − ε log σ(−β h)                        ε: the part of the labels that are wrong
    ipo       (h − 1 / 2β)²                                              log π: a token's mean instead of the sum
    both      + α (− log π(c) / |c|)                                      α: nll_weight; |c|: tokens of c

Without α both may make chosen answers less likely too, and rejected ones by more.
π_ref is the model without its adapters, which are taken off for a second pass: no other model is held.
Log-probabilities are sums over an answer's tokens, from hidden states and output projection by `linear_cross_entropy`,
so the logits of a batch never exist.

Sources: DPO https://arxiv.org/abs/2305.18290, its label smoothing (cDPO) https://ericmitchell.ai/cdpo.pdf, IPO
https://arxiv.org/abs/2310.12036; a token's mean in IPO as in TRL; α of chosen answers: Iterative Reasoning Preference
Optimization https://arxiv.org/abs/2404.19733, where each pair counts alike (TRL takes a batch's mean over tokens).

Legend: T tokens, S sequences, P pairs; sequences 2p and 2p + 1 of a batch are the chosen and the rejected answer of a
pair, each behind its prompt.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.losses.linear_cross_entropy import linear_cross_entropy
from model.lora import without_lora
from model.transformer import Transformer
from train.config import PreferenceLoss
from train.data import TokenizedDocuments
from train.objectives import ObjectiveOutput, hidden_states
from train.packing import IGNORE_LABEL, Batch, cut, pack, plan_together


class PreferenceTuning:
    """The loss of pairs of answers, of a model with adapters, whose base is the reference."""

    def __init__(self, loss: PreferenceLoss | None = None) -> None:
        self.loss = loss or PreferenceLoss()

    def __call__(self, model: Transformer, batch: Batch, progress: float = 1.0) -> ObjectiveOutput:
        """Sums over the pairs of a batch; the metrics are named as in TRL."""
        labels = labels_of_sequences(batch)
        with torch.no_grad(), without_lora(model):
            reference = self._taken(sequence_logps(model, batch), labels)
        sums = sequence_logps(model, batch)
        logps, nll = self._taken(sums, labels), (-sums / labels)[::2]
        rewards = self.loss.beta * (logps - reference)
        losses = preference_losses(rewards[0] - rewards[1], nll, self.loss)
        chosen, rejected = rewards.detach()
        metrics = {
            "rewards/chosen": chosen.sum(),
            "rewards/rejected": rejected.sum(),
            "rewards/margins": (chosen - rejected).sum(),
            "rewards/accuracies": (chosen > rejected).float().sum(),
            "logps/chosen": logps[0].detach().sum(),
            "logps/rejected": logps[1].detach().sum(),
            "nll_loss": nll.detach().sum(),
        }
        return ObjectiveOutput(losses.sum(), len(losses), metrics)

    def _taken(self, sums: Tensor, labels: Tensor) -> Tensor:
        """Log-probabilities [S] as the loss takes them, of chosen and rejected answers, fp32 [2, P]."""
        return (sums / labels if self.loss.kind == "ipo" else sums).view(-1, 2).t()


def preference_losses(margins: Tensor, nll: Tensor, loss: PreferenceLoss) -> Tensor:
    """Of each pair, from the margin β h of its rewards and its chosen answer's nats a token; any shape, float dtype."""
    found = _driving_apart(margins, loss)
    return found + loss.nll_weight * nll if loss.nll_weight else found


def _driving_apart(margins: Tensor, loss: PreferenceLoss) -> Tensor:
    if loss.kind == "ipo":
        return ((margins - 0.5) / loss.beta).square()  # (h − 1/2β)², of β h
    wrong = loss.label_smoothing
    return -(1 - wrong) * F.logsigmoid(margins) - wrong * F.logsigmoid(-margins)


def sequence_logps(model: Transformer, batch: Batch) -> Tensor:
    """Log-probability of each sequence's labels, in nats, fp32 [S]; differentiable."""
    hidden, head, cap = hidden_states(model, batch), model.head_weight, model.config.logit_soft_cap
    lengths = batch.cu_seqlens.diff().tolist()
    sequences = zip(hidden.split(lengths), batch.labels.split(lengths), strict=True)
    return torch.stack([-linear_cross_entropy(rows, head, labels, soft_cap=cap) for rows, labels in sequences])


def labels_of_sequences(batch: Batch) -> Tensor:
    """How many labels each sequence has, int64 [S]."""
    sums = F.pad((batch.labels != IGNORE_LABEL).cumsum(0), (1, 0))
    return sums[batch.cu_seqlens.long()].diff()


# --- held-out pairs ---------------------------------------------------------------------------------------------------


def pair_batches(documents: TokenizedDocuments, *, sequence_length: int, max_tokens: int) -> list[Batch]:
    """Packed batches of the first pairs that fit `max_tokens`, at least one, each batch some pairs."""
    pieces = cut(documents, sequence_length)
    lengths = pieces.length.reshape(-1, 2).sum(axis=1)
    number = max(int((np.cumsum(lengths) <= max_tokens).sum()), 1)
    how = {"neighbours": 2, "batch_tokens": 2 * sequence_length}
    return [pack(documents, pieces, numbers) for numbers in plan_together(pieces, np.arange(number), **how)]


@torch.no_grad()
def pair_logps(model: Transformer, batches: Sequence[Batch]) -> Tensor:
    """Log-probabilities of chosen and rejected answers, fp32 [P, 2] on the CPU, pairs in the order of the batches."""
    return torch.cat([sequence_logps(model, batch.to(model.device)).view(-1, 2).cpu() for batch in batches])


def labels_of_pairs(batches: Sequence[Batch]) -> Tensor:
    """How many tokens each answer has, int64 [P, 2], pairs in the order of the batches."""
    return torch.cat([labels_of_sequences(batch).view(-1, 2) for batch in batches])


def chosen_answers(documents: TokenizedDocuments) -> TokenizedDocuments:
    """The chosen sides of paired documents, as documents of their own."""
    lengths = np.diff(documents.offsets)
    is_chosen = np.tile([True, False], len(lengths) // 2)
    tokens = is_chosen.repeat(lengths)
    return replace(
        documents,
        tokens=documents.tokens[tokens],
        offsets=np.concatenate([[0], np.cumsum(lengths[is_chosen])]),
        labels_mask=None if documents.labels_mask is None else documents.labels_mask[tokens],
        num_bytes_per_document=documents.num_bytes_per_document[is_chosen],
        paired=False,
    )


def count_unfit(documents: TokenizedDocuments, sequence_length: int) -> tuple[int, int]:
    """How many pairs have an answer that ends with the sequence, and how many are left out: their prompt fills it."""
    kept = cut(documents, sequence_length).document[::2] // 2
    longest = np.diff(documents.offsets).reshape(-1, 2).max(axis=1)
    return int((longest[kept] > sequence_length + 1).sum()), documents.num_documents // 2 - len(kept)
