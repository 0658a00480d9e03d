"""Sampling, penalties, log-probabilities, verification, look-up.

The forms in PyTorch are what one would write for a GPU: nothing is read by the host, so that a graph can hold them.
Where they draw, they draw by torch's own generator.
"""

from typing import Any

import torch
from torch import Tensor

from bench.kernels.case import Inputs, Outputs, Run, needs
from bench.kernels.inputs.sampling import DRAFTED, penalized
from kernels.sampling.ngram import MAX_NGRAM
from kernels.sampling.random import Purpose, exponential, uniform
from kernels.sampling.verification import verify_with


def torch_sample(inputs: Inputs) -> Run:
    """By sorting where a filter needs it, then an exponential race."""
    (temperature, top_k, top_p, min_p), mode = inputs.filters, inputs.shape["mode"]

    def run() -> Outputs:
        scores = inputs.logits.float() / temperature[:, None]
        if "top" in mode:
            ordered, indices = scores.sort(dim=-1)
            if "top-k" in mode:
                least = ordered.gather(1, (ordered.shape[1] - top_k.long())[:, None])
                ordered = ordered.masked_fill(ordered < least, -torch.inf)
            if "top-p" in mode:
                up_to = ordered.softmax(dim=-1).cumsum(dim=-1)
                dropped = up_to <= 1 - top_p[:, None]
                dropped[:, -1] = False
                ordered = ordered.masked_fill(dropped, -torch.inf)
            scores = torch.empty_like(scores).scatter_(1, indices, ordered)
        probabilities = scores.softmax(dim=-1)
        if "min-p" in mode:
            least = min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        return (_race(probabilities),)

    return run


def _race(weights: Tensor) -> Tensor:
    """One index a row, by weight."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1)


@needs("flashinfer.sampling")
def flashinfer_sample(flashinfer: Any, inputs: Inputs) -> Run:
    """Its kernels for this filter; the seed is a tensor, as graphs need it."""
    (temperature, top_k, top_p, min_p), mode, draws = inputs.filters, inputs.shape["mode"], _flashinfer_draws(inputs)

    def run() -> Outputs:
        logits = inputs.logits.float()
        if mode == "temperature":
            return (flashinfer.sampling_from_logits(logits / temperature[:, None], **draws),)
        if mode == "top-k top-p":
            scaled = logits / temperature[:, None]
            return (flashinfer.top_k_top_p_sampling_from_logits(scaled, top_k, top_p, **draws),)
        probabilities = flashinfer.softmax(logits, temperature)
        if mode == "top-k":
            return (flashinfer.top_k_sampling_from_probs(probabilities, top_k, **draws),)
        if mode == "top-p":
            return (flashinfer.top_p_sampling_from_probs(probabilities, top_p, **draws),)
        return (flashinfer.min_p_sampling_from_probs(probabilities, min_p, **draws),)

    return run


def _flashinfer_draws(inputs: Inputs) -> dict[str, Tensor]:
    seed = inputs.stream.seeds[:1].clone()
    return {"seed": seed, "offset": torch.zeros_like(seed)}


def torch_penalties(inputs: Inputs) -> Run:
    return lambda: (penalized(inputs.logits.float(), inputs),)


def torch_logprobs(inputs: Inputs) -> Run:
    def run() -> Outputs:
        logprobs = inputs.logits.float().log_softmax(dim=-1)
        token = inputs.tokens[:, None]
        ranks = (inputs.logits > inputs.logits.gather(1, token)).sum(dim=-1) + 1
        top = logprobs.topk(inputs.shape["num_top"], dim=-1)
        return logprobs.gather(1, token)[:, 0], ranks, top.indices, top.values

    return run


def torch_chain(inputs: Inputs) -> Run:
    """Rejection sampling of chains, all sequences at once; gives the committed tokens."""
    tokens, target, draft, n = inputs.tokens, inputs.target_p, inputs.draft_p, inputs.shape["nodes"]
    columns = torch.arange(n + 1, device=tokens.device)
    rows = torch.arange(len(tokens), device=tokens.device)

    def run() -> Outputs:
        p, q = (x[:, :n].gather(2, tokens[:, :, None])[:, :, 0] for x in (target, draft))
        accepted = (torch.rand_like(p) * q < p).cumprod(dim=1).sum(dim=1)
        left = target[rows, accepted]
        rejected = draft[rows, accepted.clamp(max=n - 1)]
        left = torch.where((accepted < n)[:, None], (left - rejected).clamp_min(0), left)
        committed = torch.nn.functional.pad(tokens, (0, 1)).masked_fill(columns > accepted[:, None], -1)
        return (committed.scatter(1, accepted[:, None], _race(left)[:, None]),)

    return run


@needs("flashinfer.sampling")
def flashinfer_chain(flashinfer: Any, inputs: Inputs) -> Run:
    """Its rejection sampling of chains; gives the committed tokens."""
    given, draws = (inputs.draft_p, inputs.tokens.int(), inputs.target_p), _flashinfer_draws(inputs)
    return lambda: (flashinfer.chain_speculative_sampling(*given, **draws)[0],)


def torch_tree(inputs: Inputs) -> Run:
    """What ours is on a CPU, node after node for all sequences, with the same draws; it reads results on the host."""
    given = (inputs.target_p, inputs.draft_p, inputs.tokens, inputs.counts, inputs.lengths)
    nodes, vocabulary = inputs.shape["nodes"], inputs.shape["vocabulary"]

    def run() -> Outputs:
        draws = uniform(inputs.stream, nodes, Purpose.ACCEPT), exponential(inputs.stream, vocabulary, Purpose.RESIDUAL)
        return tuple(verify_with(*given, parents=inputs.parents, noise=draws))

    return run


def torch_ngrams(inputs: Inputs) -> Run:
    """Compares the last tokens with all others at once."""
    tokens, last = inputs.text, inputs.lengths.long()[:, None] - 1
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    ahead = torch.arange(DRAFTED, device=tokens.device)

    def run() -> Outputs:
        same = columns < last
        size = torch.zeros_like(tokens)
        for age in range(MAX_NGRAM):
            shifted = torch.nn.functional.pad(tokens, (age, 0), value=-1)[:, : tokens.shape[1]]
            same = same & (shifted == tokens.gather(1, last - age))
            size += same
        best = (size * tokens.shape[1] + columns).masked_fill(size == 0, -1).amax(dim=1, keepdim=True)
        start = best % tokens.shape[1] + 1
        counts = torch.where(best >= 0, (last + 1 - start).clamp(max=DRAFTED), 0)
        drafts = tokens.gather(1, (start + ahead).clamp(max=tokens.shape[1] - 1))
        return drafts.masked_fill(ahead >= counts, -1), counts[:, 0]

    return run
