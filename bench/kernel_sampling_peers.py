"""Who else samples, penalizes, verifies and looks up, each behind a few lines, as in bench/kernel_peers.py.

The forms in PyTorch are what one would write for a GPU: nothing is read by the host, so that a graph can hold them.
Where they draw, they draw by torch's own generator.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bench.kernel_cases import Run, installed
from kernels.sampling.logit_adjustments import IN_PROMPT, RequestState
from kernels.sampling.random import Purpose, exponential, uniform
from kernels.sampling.verification import verify_with

if TYPE_CHECKING:
    from bench.kernel_drafts import NgramInputs, VerificationInputs
    from bench.kernel_sampling import LogprobInputs, PenaltyInputs, SamplingInputs


# Sampling


def torch_sample(inputs: "SamplingInputs", *, mode: str) -> Run:
    """By sorting where a filter needs it, then an exponential race."""
    temperature, top_k, top_p, min_p = inputs.filters

    def run() -> tuple[Tensor]:
        scores = inputs.logits.float() / temperature[:, None]
        if "top" in mode:
            ordered, places = scores.sort(dim=-1)
            if "top-k" in mode:
                least = ordered.gather(1, (ordered.shape[1] - top_k.long())[:, None])
                ordered = ordered.masked_fill(ordered < least, -torch.inf)
            if "top-p" in mode:
                up_to = ordered.softmax(dim=-1).cumsum(dim=-1)
                dropped = up_to <= 1 - top_p[:, None]
                dropped[:, -1] = False
                ordered = ordered.masked_fill(dropped, -torch.inf)
            scores = torch.empty_like(scores).scatter_(1, places, ordered)
        probabilities = scores.softmax(dim=-1)
        if "min-p" in mode:
            least = min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        return (_race(probabilities),)

    return run


def _race(weights: Tensor) -> Tensor:
    """One index a row, by weight."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1)


def flashinfer_sample(inputs: "SamplingInputs", *, mode: str) -> Run | None:
    """Its kernels for this filter; the seed is a tensor, as graphs need it."""
    if (flashinfer := installed("flashinfer.sampling")) is None:
        return None
    temperature, top_k, top_p, min_p = inputs.filters
    seed = inputs.stream.seeds[:1].clone()
    draws = {"seed": seed, "offset": torch.zeros_like(seed)}

    def run() -> tuple[Tensor]:
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


# Penalties and log-probabilities


def penalized(scores: Tensor, state: RequestState, slots: Tensor) -> Tensor:
    """Scores [B, V], of which `scores` is overwritten, after biases that hold at every position, and penalties."""
    slot = slots.long()
    counts = state.counts[slot]
    scores.scatter_add_(1, state.bias_tokens[slot].long(), state.bias_values[slot].to(scores.dtype))
    repetition, frequency, presence = (x[slot, None].to(scores.dtype) for x in state[1:4])
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(counts > 0, repeated, scores)
    emitted = counts % IN_PROMPT
    return scores - frequency * emitted - presence * (emitted > 0)


def torch_penalties(inputs: "PenaltyInputs") -> Run:
    return lambda: (penalized(inputs.logits.float(), inputs.state, inputs.slots),)


def torch_logprobs(inputs: "LogprobInputs", *, num_top: int) -> Run:
    def run() -> tuple[Tensor, ...]:
        logprobs = inputs.logits.float().log_softmax(dim=-1)
        token = inputs.tokens[:, None]
        ranks = (inputs.logits > inputs.logits.gather(1, token)).sum(dim=-1) + 1
        top = logprobs.topk(num_top, dim=-1)
        return logprobs.gather(1, token)[:, 0], ranks, top.indices, top.values

    return run


# Drafts


def torch_chain(inputs: "VerificationInputs") -> Run:
    """Rejection sampling of chains, all sequences at once; gives the committed tokens."""
    tokens, target, draft = inputs.tokens, inputs.target_p, inputs.draft_p
    places = torch.arange(tokens.shape[1] + 1, device=tokens.device)
    rows = torch.arange(len(tokens), device=tokens.device)

    def run() -> tuple[Tensor]:
        p, q = (x[:, : tokens.shape[1]].gather(2, tokens[:, :, None])[:, :, 0] for x in (target, draft))
        accepted = (torch.rand_like(p) * q < p).cumprod(dim=1).sum(dim=1)
        left = target[rows, accepted]
        rejected = draft[rows, accepted.clamp(max=tokens.shape[1] - 1)]
        left = torch.where((accepted < tokens.shape[1])[:, None], (left - rejected).clamp_min(0), left)
        committed = torch.nn.functional.pad(tokens, (0, 1)).masked_fill(places > accepted[:, None], -1)
        return (committed.scatter(1, accepted[:, None], _race(left)[:, None]),)

    return run


def flashinfer_chain(inputs: "VerificationInputs") -> Run | None:
    """Its rejection sampling of chains; gives the committed tokens."""
    if (flashinfer := installed("flashinfer.sampling")) is None:
        return None
    tokens, seed = inputs.tokens.int(), inputs.stream.seeds[:1].clone()
    draws = {"seed": seed, "offset": torch.zeros_like(seed)}
    given = (inputs.draft_p, tokens, inputs.target_p)
    return lambda: (flashinfer.chain_speculative_sampling(*given, **draws)[0],)


def torch_tree(inputs: "VerificationInputs") -> Run:
    """What ours is on a CPU, node after node for all sequences, with the same draws; it reads results on the host."""
    (_, nodes), vocabulary = inputs.tokens.shape, inputs.target_p.shape[2]
    given = (inputs.target_p, inputs.draft_p, inputs.tokens, inputs.counts, inputs.lengths)

    def run() -> tuple[Tensor, ...]:
        draws = uniform(inputs.stream, nodes, Purpose.ACCEPT), exponential(inputs.stream, vocabulary, Purpose.RESIDUAL)
        return tuple(verify_with(*given, parents=inputs.parents, noise=draws))

    return run


def torch_ngrams(inputs: "NgramInputs", *, k: int, max_ngram: int) -> Run:
    """Compares the last tokens with all places at once."""
    tokens, last = inputs.tokens, inputs.lengths.long()[:, None] - 1
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    ahead = torch.arange(k, device=tokens.device)

    def run() -> tuple[Tensor, Tensor]:
        same = columns < last
        size = torch.zeros_like(tokens)
        for age in range(max_ngram):
            shifted = torch.nn.functional.pad(tokens, (age, 0), value=-1)[:, : tokens.shape[1]]
            same = same & (shifted == tokens.gather(1, last - age))
            size += same
        best = (size * tokens.shape[1] + columns).masked_fill(size == 0, -1).amax(dim=1, keepdim=True)
        start = best % tokens.shape[1] + 1
        counts = torch.where(best >= 0, (last + 1 - start).clamp(max=k), 0)
        drafts = tokens.gather(1, (start + ahead).clamp(max=tokens.shape[1] - 1))
        return drafts.masked_fill(ahead >= counts, -1), counts[:, 0]

    return run
