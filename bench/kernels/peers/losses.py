"""Losses on an output projection: in PyTorch, as one would write them, with all logits or in chunks; Liger's."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.case import Inputs, Run, needs
from bench.kernels.inputs.losses import alpha_of, in_chunks

CHUNK = 1024
"""Rows that the chunked losses multiply at once: eight chunks at 8k tokens, products at full rate."""
LIGER_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}
"""The divergences that Liger's JSD becomes."""


def dense(inputs: Inputs) -> Run:
    return lambda: in_chunks(inputs, plain_loss, inputs.shape["tokens"])


def chunked(inputs: Inputs) -> Run:
    return lambda: in_chunks(inputs, plain_loss, CHUNK)


def plain_loss(hidden: Tensor, head: Tensor, inputs: Inputs, rows: slice) -> Tensor:
    kind, logits = inputs.shape["kind"], F.linear(hidden, head).float()
    if not kind:
        return F.cross_entropy(logits, inputs.labels[rows], reduction="sum")
    log_q = logits.log_softmax(dim=-1)
    log_p = F.linear(inputs.teacher[rows], inputs.teacher_head).float().log_softmax(dim=-1)
    if kind == "forward_kl":
        return _kl(log_p, log_q)
    if kind == "reverse_kl":
        return _kl(log_q, log_p)
    alpha = alpha_of(kind)
    weight_p = 1 - alpha if kind == "skewed_reverse_kl" else alpha
    log_m = torch.logaddexp(log_p + math.log(weight_p), log_q + math.log(1 - weight_p))
    if kind == "jsd":
        return alpha * _kl(log_p, log_m) + (1 - alpha) * _kl(log_q, log_m)
    return _kl(log_p if kind == "skewed_forward_kl" else log_q, log_m)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q), summed."""
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True)


@needs("liger_kernel.ops")
def liger_cross_entropy(liger: Any, inputs: Inputs) -> Run:
    """With sums instead of means, and the gradient of the head added up in fp32, as ours."""
    options = (None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32)
    apply = liger.LigerFusedLinearCrossEntropyFunction.apply
    return _whole(inputs, lambda hidden, head: apply(hidden, head, inputs.labels, *options)[0])


@needs("liger_kernel.ops")
def liger_jsd(liger: Any, inputs: Inputs) -> Run:
    """Its generalized JSD, a mean over the tokens."""
    teacher, options = (
        (inputs.teacher, inputs.teacher_head),
        (LIGER_BETA[inputs.shape["kind"]], -100, 1.0, torch.float32),
    )
    apply = liger.LigerFusedLinearJSDFunction.apply
    return _whole(inputs, lambda hidden, head: apply(hidden, head, *teacher, inputs.labels, *options))


def _whole(inputs: Inputs, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Run:
    return lambda: in_chunks(inputs, lambda hidden, head, *_: loss_of(hidden, head), inputs.shape["tokens"])
