"""What a step of the engine reports. Plain data, no torch: it crosses the socket to the HTTP process."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error", "deadline"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the model's own distribution (no penalties, no temperature)."""

    token_id: int
    """The token that stands at this position."""
    logprob: float
    rank: int
    """1 for the most probable token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most probable tokens, best first; as many as were asked for."""


@dataclass
class RequestOutput:
    """News of one choice of one request. The last one for a choice, and only that, has a finish_reason.

    `new_token_ids`, `logprobs` and `drafted_mask` are parallel. `new_text` may lag behind the tokens: an incomplete
    character, or the beginning of a stop string, is held back until it is decided.
    """

    request_id: str
    index: int
    """Which choice, 0..n-1."""
    new_token_ids: list[int] = field(default_factory=list)
    new_text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for end-of-sequence."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each new token, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token (the first is None), once, with the first output of choice 0."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    num_output_tokens: int = 0
    """Output tokens of this choice so far."""
    num_drafted: int = 0
    """Draft tokens that the target looked at for this choice so far."""
    num_accepted: int = 0
    """Those of them that it accepted."""
    drafted_mask: list[bool] = field(default_factory=list)
    """True where a new token was proposed by the draft and accepted."""
    error: str | None = None
    """One sentence for the client, with finish_reason "error"."""
    embedding: list[float] | None = None
    """The prompt's, when asked for, once, with the first output of choice 0; not normalised."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class EngineStats:
    """Gauges of this moment and counters since the engine started."""

    num_running: int = 0
    """Sequences in the running batch."""
    num_waiting: int = 0
    """Sequences waiting for a batch row, preempted ones included."""
    num_pages: int = 0
    num_pages_used: int = 0
    """Pages held by sequences; cached pages that nobody holds count as free."""
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of all requests whose prompt has been computed (or found in the cache)."""
    num_generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Tokens found there."""
    num_drafts: int = 0
    """Verifications that had at least one draft token."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    """Accepted tokens by their position in the draft, first position first."""
    speculative_tokens: float = 0.0
    """Mean draft length that the latest steps asked for."""
    num_draft_swaps: int = 0
    """Newer drafts that were swapped in."""
    num_draft_rollbacks: int = 0
    """Those of them that were taken back."""
    draft_on_trial: int = 0
    """1 while it is not known whether the newest is as good as the one before."""
    num_labels: int = 0
    """Stored for training."""
    num_dropped_labels: int = 0
    """Answers whose labels could not be stored."""
    label_bytes: int = 0
    """That stored labels take."""
    num_graphs: int = 0
    """Kinds of steps that are replayed from a CUDA graph."""
    num_graph_failures: int = 0
    """Captures that failed; such steps are launched kernel by kernel."""


@dataclass
class Counters:
    """What an engine itself counts of EngineStats."""

    accepted_per_position: list[int]
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    speculative_tokens: float = 0.0

    def count_draft(self, num_drafted: int, num_accepted: int) -> None:
        """One that was verified."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1
