"""From logits to tokens on the benchmark's shapes: sampling, penalties, log-probabilities; ours, and who does the same.

Everybody begins with the bf16 logits that the head leaves. Our tokens must be those of the reference, which draws the
same numbers; others draw their own, so each of their tokens must be one that the filters leave.

Legend: B rows, V vocabulary, S slots, M biases a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench import kernel_sampling_peers as peers
from bench.kernel_cases import Candidate, Case, Outputs, Run
from kernels.sampling.logit_adjustments import ALWAYS, IN_PROMPT, RequestState, adjust_scores
from kernels.sampling.random import Purpose, Stream, exponential
from kernels.sampling.sample import Filters, adjusted_probabilities_reference, sample, sample_tokens
from kernels.sampling.token_logprobs import Logprobs, token_logprobs, token_logprobs_reference

VOCABULARY = 128_256
BATCHES = (1, 16, 64, 256)
MODES = ("temperature", "top-k", "top-p", "min-p", "top-k top-p")
TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 50, 0.9, 0.05
PROMPT, OUTPUT, BIASES = 1000, 300, 4
"""Tokens that a request has seen, and its biases."""


def sampling_tokens(tiny: bool) -> list[Case]:
    """One token a row by each kind of filter; penalties; log-probabilities of the token and of the most likely ones."""
    batches, vocabulary = ((2,), 300) if tiny else (BATCHES, VOCABULARY)
    return [
        *(_sampling_case(mode, batch, vocabulary) for mode in MODES for batch in batches),
        *(_penalty_case(batch, vocabulary) for batch in batches),
        *(_logprobs_case(num_top, batch, vocabulary) for num_top in (0, 5, 20) for batch in batches),
    ]


@dataclass
class SamplingInputs:
    """logits [B, V] bf16."""

    logits: Tensor
    filters: Filters
    stream: Stream

    @classmethod
    def random(cls, mode: str, batch: int, vocabulary: int, device: torch.device) -> "SamplingInputs":
        def of_all(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((batch,), value, dtype=dtype, device=device)

        filters = Filters(
            temperature=of_all(TEMPERATURE),
            top_k=of_all(TOP_K if "top-k" in mode else 0, torch.int32),
            top_p=of_all(TOP_P if "top-p" in mode else 1.0),
            min_p=of_all(MIN_P if "min-p" in mode else 0.0),
        )
        return cls(random_logits(batch, vocabulary, device), filters, random_stream(batch, device))


def random_logits(batch: int, vocabulary: int, device: torch.device) -> Tensor:
    """Of a standard deviation of 3: most of the mass in some thousand tokens."""
    return torch.randn(batch, vocabulary, device=device, dtype=torch.bfloat16) * 3


def random_stream(batch: int, device: torch.device) -> Stream:
    seeds, positions = (torch.randint(0, 2**31 - 1, (batch,), device=device) for _ in range(2))
    return Stream(seeds, torch.zeros(batch, dtype=torch.int32, device=device), positions.int())


def on_host(stream: Stream) -> Stream:
    """There random numbers come from another form of the generator."""
    return Stream(*(x.cpu() for x in stream))


def sampled_reference(inputs: SamplingInputs) -> Outputs:
    """The tokens, and the probability that the filters leave to each."""
    probabilities = adjusted_probabilities_reference(inputs.logits, **inputs.filters._asdict())
    draws = exponential(on_host(inputs.stream), probabilities.shape[1], Purpose.TARGET).to(probabilities.device)
    return sample(probabilities, draws), probabilities


def _sampling_case(mode: str, batch: int, vocabulary: int) -> Case:
    return Case(
        name=f"{mode} x{batch}",
        shape={"mode": mode, "batch": batch, "vocabulary": vocabulary},
        flops=0.0,
        num_bytes=2 * batch * vocabulary + 8 * batch,
        make_inputs=partial(SamplingInputs.random, mode, batch, vocabulary),
        reference=sampled_reference,
        candidates=[
            Candidate("potstill", _our_tokens, role="ours", compare=lambda outputs, expected: (outputs, expected[:1])),
            Candidate("flashinfer", partial(peers.flashinfer_sample, mode=mode), compare=_are_kept),
            Candidate("torch", partial(peers.torch_sample, mode=mode), compare=_are_kept),
        ],
    )


def _our_tokens(inputs: SamplingInputs) -> Run:
    return lambda: (sample_tokens(inputs.logits, inputs.filters, inputs.stream),)


def _are_kept(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    """Whether each token is one that the filters leave."""
    (tokens,), (_, probabilities) = outputs, expected
    chosen = tokens.long().clamp(0, probabilities.shape[1] - 1)
    kept = (chosen == tokens) & (probabilities.gather(1, chosen[:, None])[:, 0] > 0)
    return (kept,), (torch.ones_like(kept),)


# Penalties


@dataclass
class PenaltyInputs:
    """logits [B, V] bf16, one slot a row, in any order; positions [B]."""

    logits: Tensor
    state: RequestState
    slots: Tensor
    positions: Tensor

    @classmethod
    def random(cls, batch: int, vocabulary: int, device: torch.device) -> "PenaltyInputs":
        def tokens(count: int) -> Tensor:
            return torch.randint(0, vocabulary, (batch, count), device=device)

        counts = torch.zeros(batch, vocabulary, dtype=torch.int32, device=device)
        counts.scatter_(1, tokens(min(PROMPT, vocabulary // 2)), IN_PROMPT)
        emitted = tokens(min(OUTPUT, vocabulary // 4))
        counts.scatter_add_(1, emitted, torch.ones_like(emitted, dtype=torch.int32))
        penalties = (torch.rand(batch, device=device) for _ in range(3))
        state = RequestState(
            counts,
            1 + next(penalties),
            *penalties,
            tokens(BIASES).int(),
            torch.randn(batch, BIASES, device=device),
            torch.full((batch, BIASES), ALWAYS, dtype=torch.int32, device=device),
        )
        slots = torch.randperm(batch, device=device).int()
        return cls(random_logits(batch, vocabulary, device), state, slots, torch.full_like(slots, OUTPUT))


def penalized_reference(inputs: PenaltyInputs) -> tuple[Tensor]:
    """In fp64."""
    return (peers.penalized(inputs.logits.double(), inputs.state, inputs.slots),)


def _penalty_case(batch: int, vocabulary: int) -> Case:
    def ours(inputs: PenaltyInputs) -> Run:
        return lambda: (adjust_scores(inputs.logits, inputs.state, slots=inputs.slots, positions=inputs.positions),)

    return Case(
        name=f"penalties x{batch}",
        shape={"mode": "penalties", "batch": batch, "vocabulary": vocabulary},
        flops=0.0,
        num_bytes=batch * vocabulary * (2 + 4 + 4),
        make_inputs=partial(PenaltyInputs.random, batch, vocabulary),
        reference=penalized_reference,
        candidates=[Candidate("potstill", ours, role="ours"), Candidate("torch", peers.torch_penalties)],
        dtype=torch.float32,
    )


# Log-probabilities


@dataclass
class LogprobInputs:
    """logits [B, V] bf16, tokens [B]."""

    logits: Tensor
    tokens: Tensor

    @classmethod
    def random(cls, batch: int, vocabulary: int, device: torch.device) -> "LogprobInputs":
        tokens = torch.randint(0, vocabulary, (batch,), device=device)
        return cls(random_logits(batch, vocabulary, device), tokens)


def _logprobs_case(num_top: int, batch: int, vocabulary: int) -> Case:
    def ours(inputs: LogprobInputs) -> Run:
        return lambda: tuple(token_logprobs(inputs.logits, inputs.tokens, num_top))

    return Case(
        name=f"top {num_top} logprobs x{batch}",
        shape={"mode": "logprobs", "num_top": num_top, "batch": batch, "vocabulary": vocabulary},
        flops=0.0,
        num_bytes=2 * batch * vocabulary + 8 * batch,
        make_inputs=partial(LogprobInputs.random, batch, vocabulary),
        reference=lambda inputs: tuple(token_logprobs_reference(inputs.logits, inputs.tokens, num_top)),
        candidates=[
            Candidate("potstill", ours, role="ours"),
            Candidate("torch", partial(peers.torch_logprobs, num_top=num_top), compare=_in_any_order),
        ],
        dtype=torch.float32,
    )


def _in_any_order(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    """Without the most likely tokens themselves: others may order equal ones otherwise."""

    def without_tokens(fields: Sequence[Tensor]) -> Outputs:
        logprobs = Logprobs(*fields)
        return logprobs.chosen, logprobs.ranks, logprobs.top

    return without_tokens(outputs), without_tokens(expected)
