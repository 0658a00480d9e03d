"""From logits to tokens, penalties, log-probabilities; verification of chains and trees; look-up in the text.

Everybody begins with the bf16 logits that the head leaves. Our tokens must be those of the reference, which draws the
same numbers; others draw their own, so each of their tokens must be possible: `are_kept`, `are_possible`. The forms in
PyTorch are what one would write for a GPU: nothing is read by the host, so that a graph can hold them. Where they draw,
they draw by torch's own generator.

Legend: B sequences, V vocabulary, M biases a request, n drafted tokens, S tokens of a text.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.case import Call, Inputs, Outputs, Shape, in_fp64, needs, normal
from kernels.sampling.logit_adjustments import ALWAYS, IN_PROMPT, RequestState
from kernels.sampling.ngram import MAX_NGRAM, find_ngrams_reference
from kernels.sampling.random import Purpose, Stream, exponential, uniform
from kernels.sampling.sample import Filters, adjusted_probabilities_reference, sample
from kernels.sampling.token_logprobs import Logprobs, token_logprobs_reference
from kernels.sampling.verification import verify_in_torch, verify_reference

TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 50, 0.9, 0.05
PROMPT, OUTPUT, BIASES = 1000, 300, 4
"""Tokens that a request has seen, and its biases."""
DRAFT_NOISE = 0.5
"""Standard deviation of the draft's logits around the target's: it is right often, and wrong often."""
LETTERS, DRAFTED = 20, 5
"""Kinds of tokens of a text, so that about half of the texts repeat their last three."""


def random_logits(batch: int, vocabulary: int) -> Tensor:
    """Of a standard deviation of 3: most of the mass in some thousand tokens."""
    return normal(batch, vocabulary) * 3


def random_stream(batch: int) -> Stream:
    seeds, positions = torch.randint(0, 2**31 - 1, (2, batch))
    return Stream(seeds, torch.zeros(batch, dtype=torch.int32), positions.int())


def tokens(mode: str, batch: int, vocabulary: int) -> Shape:
    """logits [B, V] bf16, and the filter that is on."""

    def make() -> dict[str, Any]:
        top_k, top_p, min_p = TOP_K * ("top-k" in mode), TOP_P if "top-p" in mode else 1.0, MIN_P * ("min-p" in mode)
        wanted = ((TEMPERATURE, None), (top_k, torch.int32), (top_p, None), (min_p, None))
        filters = Filters(*(torch.full((batch,), value, dtype=dtype) for value, dtype in wanted))
        return {"logits": random_logits(batch, vocabulary), "filters": filters, "stream": random_stream(batch)}

    fields = {"mode": mode, "batch": batch, "vocabulary": vocabulary}
    return Shape(f"{mode} x{batch}", fields, make, _sampled, num_bytes=2 * batch * vocabulary + 8 * batch)


def _sampled(inputs: Inputs) -> Outputs:
    """The tokens, and the probability that the filters leave to each."""
    probabilities = adjusted_probabilities_reference(inputs.logits, **inputs.filters._asdict())
    stream = Stream(*(x.cpu() for x in inputs.stream))  # the host's random numbers are another form of the generator
    draws = exponential(stream, probabilities.shape[1], Purpose.TARGET).to(probabilities.device)
    return sample(probabilities, draws), probabilities


def are_kept(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    """Whether each token is one that the filters leave."""
    (tokens,), (_, probabilities) = outputs, expected
    chosen = tokens.long().clamp(0, probabilities.shape[1] - 1)
    kept = (chosen == tokens) & (probabilities.gather(1, chosen[:, None])[:, 0] > 0)
    return (kept,), (torch.ones_like(kept),)


def penalties(batch: int, vocabulary: int) -> Shape:
    """logits [B, V] bf16, one slot a row, in any order; positions [B]."""

    def make() -> dict[str, Any]:
        tokens, counts = partial(torch.randint, 0, vocabulary), torch.zeros(batch, vocabulary, dtype=torch.int32)
        counts.scatter_(1, tokens((batch, min(PROMPT, vocabulary // 2))), IN_PROMPT)
        emitted = tokens((batch, min(OUTPUT, vocabulary // 4)))
        counts.scatter_add_(1, emitted, torch.ones_like(emitted, dtype=torch.int32))
        repetition, frequency, presence = torch.rand(3, batch)
        listed = (batch, BIASES)
        biases = tokens(listed).int(), torch.randn(listed), torch.full(listed, ALWAYS).int()
        slots = torch.randperm(batch).int()
        state = RequestState(counts, 1 + repetition, frequency, presence, *biases)
        logits, positions = random_logits(batch, vocabulary), torch.full_like(slots, OUTPUT)
        return {"logits": logits, "state": state, "slots": slots, "positions": positions}

    fields = {"mode": "penalties", "batch": batch, "vocabulary": vocabulary}
    num_bytes = batch * vocabulary * (2 + 4 + 4)
    return Shape(f"penalties x{batch}", fields, make, in_fp64(penalized), num_bytes, dtype=torch.float32)


def penalized(logits: Tensor, state: RequestState, slots: Tensor) -> Tensor:
    """Scores [B, V], for which `logits` is overwritten, after biases that hold at every position, and penalties."""
    slot, dtype = slots.long(), logits.dtype
    counts = state.counts[slot]
    scores = logits.scatter_add_(1, state.bias_tokens[slot].long(), state.bias_values[slot].to(dtype))
    repetition, frequency, presence = (x[slot, None].to(dtype) for x in state[1:4])
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(counts > 0, repeated, scores)
    emitted = counts % IN_PROMPT
    return scores - frequency * emitted - presence * (emitted > 0)


def logprobs(num_top: int, batch: int, vocabulary: int) -> Shape:
    """logits [B, V] bf16, tokens [B]."""

    def make() -> dict[str, Any]:
        tokens = torch.randint(0, vocabulary, (batch,))
        return {"logits": random_logits(batch, vocabulary), "tokens": tokens}

    fields = {"mode": "logprobs", "num_top": num_top, "batch": batch, "vocabulary": vocabulary}
    name, num_bytes = f"top {num_top} logprobs x{batch}", 2 * batch * vocabulary + 8 * batch
    return Shape(name, fields, make, in_fp64(token_logprobs_reference), num_bytes, dtype=torch.float32)


def in_any_order(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    """Without the most likely tokens themselves: others may order equal ones otherwise."""
    ours, wanted = (Logprobs(*fields) for fields in (outputs, expected))
    return (ours.chosen, ours.ranks, ours.top), (wanted.chosen, wanted.ranks, wanted.top)


def drafted(tree: bool, nodes: int, batch: int, vocabulary: int) -> Shape:
    """target_p [B, n + 1, V] and draft_p [B, n, V] fp32; tokens [B, n]; parents [B, n], None for chains."""

    def make() -> dict[str, Any]:
        logits = random_logits(batch * (nodes + 1), vocabulary).float().unflatten(0, (batch, -1))
        draft_p = (logits[:, :-1] + DRAFT_NOISE * torch.randn_like(logits[:, :-1])).softmax(dim=-1)
        # In a tree every node has two children, drawn from the same distribution.
        parents = torch.arange(nodes) // (2 if tree else 1)
        drawn = draft_p[:, parents] / torch.empty_like(draft_p).exponential_()
        return {
            "target_p": logits.softmax(dim=-1), "draft_p": draft_p, "tokens": drawn.argmax(dim=-1),
            "parents": parents.expand(batch, -1).contiguous() if tree else None,
            "counts": torch.full((batch,), nodes, dtype=torch.int32),
            "lengths": torch.randint(100, 1000, (batch,), dtype=torch.int32), "stream": random_stream(batch),
        }  # fmt: skip

    fields = {"tree": tree, "nodes": nodes, "batch": batch, "vocabulary": vocabulary}
    name, num_bytes = f"{'tree' if tree else 'chain'} of {nodes} x{batch}", 8 * batch * vocabulary  # p, q of one node
    return Shape(name, fields, make, _verified, num_bytes, dtype=torch.float32)


def _verified(inputs: Inputs) -> Outputs:
    """The five results, one sequence after the other in fp64; then what a commitment is checked against."""
    (batch, nodes), vocabulary = inputs.tokens.shape, inputs.target_p.shape[2]
    stream = Stream(*(x.cpu() for x in inputs.stream))
    u, draws = uniform(stream, nodes, Purpose.ACCEPT), exponential(stream, vocabulary, Purpose.RESIDUAL)
    parents = [list(range(nodes))] * batch if inputs.parents is None else inputs.parents.tolist()
    found = []
    for row, tokens in enumerate(inputs.tokens.tolist()):
        p, q, noise, race = (x[row].cpu().numpy() for x in (inputs.target_p, inputs.draft_p, u, draws))
        path, next_token = verify_reference(p, q, tokens, parents[row], u=noise, exponential=race)
        committed = [tokens[node - 1] for node in path] + [next_token]
        length, padding = int(inputs.lengths[row]) + len(committed), [-1] * (nodes + 1 - len(committed))
        found.append((len(path), next_token, committed + padding, [*path, -1, *padding], length))
    output = (torch.tensor(column, device=inputs.tokens.device) for column in zip(*found, strict=True))
    return *output, inputs.target_p, inputs.draft_p, inputs.tokens


def are_possible(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    """Whether each row of committed tokens is a beginning of its draft, a token that may follow it, and −1."""
    (committed,), (target_p, draft_p, tokens) = outputs, expected[-3:]
    rows, nodes = torch.arange(len(tokens), device=tokens.device), tokens.shape[1]
    accepted = (committed[:, :nodes] == tokens).cumprod(dim=1).sum(dim=1)
    left, rejected = target_p[rows, accepted], draft_p[rows, accepted.clamp(max=nodes - 1)]
    left = torch.where((accepted < nodes)[:, None], left - rejected, left)
    following = committed.gather(1, accepted[:, None]).long()
    chosen = following.clamp(0, target_p.shape[2] - 1)
    columns = torch.arange(nodes + 1, device=tokens.device)
    ends = ((committed == -1) | (columns <= accepted[:, None])).all(dim=1)
    possible = ends & (chosen == following)[:, 0] & (left.gather(1, chosen)[:, 0] > 0)
    return (possible,), (torch.ones_like(possible),)


def texts(num_tokens: int, batch: int) -> Shape:
    """tokens [B, S] int64, of which `lengths` [B] are there: half of them to all."""

    def make() -> dict[str, Any]:
        lengths = torch.randint(num_tokens // 2, num_tokens + 1, (batch,), dtype=torch.int32)
        return {"tokens": torch.randint(0, LETTERS, (batch, num_tokens)), "lengths": lengths}

    fields, num_bytes = {"tokens": num_tokens, "batch": batch}, 8 * batch * num_tokens * 0.75
    return Shape(f"n-gram in {num_tokens} x{batch}", fields, make, _ngrams, num_bytes)


def _ngrams(inputs: Inputs) -> Outputs:
    """Drafts [B, k] with −1 behind them, counts [B]."""
    listed = zip(inputs.tokens.tolist(), inputs.lengths.tolist(), strict=True)
    drafts = [find_ngrams_reference(tokens[:length], DRAFTED) for tokens, length in listed]
    found = [draft + [-1] * (DRAFTED - len(draft)) for draft in drafts], [len(draft) for draft in drafts]
    return tuple(torch.tensor(one, device=inputs.tokens.device) for one in found)


def torch_sample(logits: Tensor, filters: Filters, mode: str) -> Tensor:
    """By sorting where a filter needs it, then an exponential race."""
    scores = logits.float() / filters.temperature[:, None]
    if "top" in mode:
        ordered, indices = scores.sort(dim=-1)
        if "top-k" in mode:
            least = ordered.gather(1, (ordered.shape[1] - filters.top_k.long())[:, None])
            ordered = ordered.masked_fill(ordered < least, -torch.inf)
        if "top-p" in mode:
            dropped = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - filters.top_p[:, None]
            dropped[:, -1] = False
            ordered = ordered.masked_fill(dropped, -torch.inf)
        scores = torch.empty_like(scores).scatter_(1, indices, ordered)
    probabilities = scores.softmax(dim=-1)
    if "min-p" in mode:
        least = filters.min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return _race(probabilities)


def _race(weights: Tensor) -> Tensor:
    """One index a row, by weight."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1)


@needs("flashinfer.sampling")
def flashinfer_sample(flashinfer: Any, inputs: Inputs) -> Call:
    """Its kernels for this filter; the seed is a tensor, as graphs need it."""
    (temperature, *limits), mode, draws = inputs.filters, inputs.shape["mode"], _flashinfer_draws(inputs)

    def run() -> Tensor:
        logits = inputs.logits.float()
        if mode == "temperature":
            return flashinfer.sampling_from_logits(logits / temperature[:, None], **draws)
        if mode == "top-k top-p":
            return flashinfer.top_k_top_p_sampling_from_logits(logits / temperature[:, None], *limits[:2], **draws)
        sample = getattr(flashinfer, f"{mode.replace('-', '_')}_sampling_from_probs")
        limit = limits[("top-k", "top-p", "min-p").index(mode)]
        return sample(flashinfer.softmax(logits, temperature), limit, **draws)

    return run


def _flashinfer_draws(inputs: Inputs) -> dict[str, Tensor]:
    seed = inputs.stream.seeds[:1].clone()
    return {"seed": seed, "offset": torch.zeros_like(seed)}


def torch_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Outputs:
    """By a softmax of everything, and a count of the more likely."""
    logprobs, token = logits.float().log_softmax(dim=-1), tokens[:, None]
    ranks = (logits > logits.gather(1, token)).sum(dim=-1) + 1
    top = logprobs.topk(num_top, dim=-1)
    return logprobs.gather(1, token)[:, 0], ranks, top.indices, top.values


def torch_chain(inputs: Inputs) -> Call:
    """Rejection sampling of chains, all sequences at once; gives the committed tokens."""
    tokens, target, draft, n = inputs.tokens, inputs.target_p, inputs.draft_p, inputs.shape["nodes"]
    columns, rows = (torch.arange(count, device=tokens.device) for count in (n + 1, len(tokens)))

    def run() -> Tensor:
        p, q = (x[:, :n].gather(2, tokens[:, :, None])[:, :, 0] for x in (target, draft))
        accepted = (torch.rand_like(p) * q < p).cumprod(dim=1).sum(dim=1)
        left, rejected = target[rows, accepted], draft[rows, accepted.clamp(max=n - 1)]
        left = torch.where((accepted < n)[:, None], (left - rejected).clamp_min(0), left)
        committed = F.pad(tokens, (0, 1)).masked_fill(columns > accepted[:, None], -1)
        return committed.scatter(1, accepted[:, None], _race(left)[:, None])

    return run


@needs("flashinfer.sampling")
def flashinfer_chain(flashinfer: Any, inputs: Inputs) -> Call:
    """Its rejection sampling of chains; gives the committed tokens."""
    given, draws = (inputs.draft_p, inputs.tokens.int(), inputs.target_p), _flashinfer_draws(inputs)
    return lambda: flashinfer.chain_speculative_sampling(*given, **draws)[0]


def torch_tree(
    target_p: Tensor, draft_p: Tensor, tokens: Tensor, counts: Tensor, lengths: Tensor, parents: Tensor, stream: Stream
) -> Outputs:
    """What ours is on a CPU, node after node for all sequences, with the same draws; it reads results on the host."""
    return tuple(verify_in_torch(target_p, draft_p, tokens, counts, lengths, stream, parents))


def torch_ngrams(inputs: Inputs) -> Call:
    """Compares the last tokens with all others at once."""
    tokens, last = inputs.tokens, inputs.lengths.long()[:, None] - 1
    columns, ahead = (torch.arange(count, device=tokens.device) for count in (tokens.shape[1], DRAFTED))

    def run() -> Outputs:
        same, size = columns < last, torch.zeros_like(tokens)
        for age in range(MAX_NGRAM):
            shifted = F.pad(tokens, (age, 0), value=-1)[:, : tokens.shape[1]]
            same = same & (shifted == tokens.gather(1, last - age))
            size += same
        best = (size * tokens.shape[1] + columns).masked_fill(size == 0, -1).amax(dim=1, keepdim=True)
        start = best % tokens.shape[1] + 1
        counts = torch.where(best >= 0, (last + 1 - start).clamp(max=DRAFTED), 0)
        drafts = tokens.gather(1, (start + ahead).clamp(max=tokens.shape[1] - 1))
        return drafts.masked_fill(ahead >= counts, -1), counts[:, 0]

    return run
