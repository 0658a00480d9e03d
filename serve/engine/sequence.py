"""The whole state of one choice of one request, from arrival to its last token."""

from dataclasses import dataclass, field

from serve.config import NO_ADAPTER
from serve.engine.kv_cache import BlockTable
from serve.engine.text import TextStream
from serve.outputs import TokenLogprobs
from serve.sampling_params import SamplingParams


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One choice: prompt plus output tokens, and how much of them the cache holds.

    `num_computed` tokens have keys and values in the cache. A sequence decodes when that is all but the last token;
    with less it is still (or, after preemption, again) computing its prompt; there is no other difference.
    """

    id: int
    """Unique in the engine, ascending in order of arrival."""
    request_id: str
    index: int
    """Which choice of the request, 0..n-1."""
    params: SamplingParams
    tokens: list[int]
    """Prompt and output, all committed; the device may have drawn one more that the host has not read yet."""
    num_prompt_tokens: int
    arrival: float
    """Monotonic clock, seconds."""
    priority: int
    """Lower goes first."""
    deadline: float | None
    """Monotonic clock, seconds."""
    seed: int
    """Keys all random draws of this choice, together with their positions."""
    end_token_ids: tuple[int, ...]
    """Tokens that end it: end-of-sequence unless ignored, and stop_token_ids."""
    table: BlockTable
    text: TextStream
    adapter: int = NO_ADAPTER
    """Number of the adapter that the target computes it with; a draft has none."""

    place: int = -1
    """Its place in the running batch, which names its state on the device; -1 while it has none."""
    num_unread: int = 0
    """Tokens that steps have drawn, or are drawing, and that the host has not read yet."""
    num_computed: int = 0
    num_draft_computed: int = 0
    """The same for the draft model's keys and values."""
    siblings: list["Sequence"] = field(default_factory=list)
    """Choices 1..n-1 of the same request, until the prompt that they share has been computed."""
    is_running: bool = False
    num_cached: int = 0
    """Prompt tokens found in the prefix cache on first admission."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Grows with the computed prompt, when asked for; None again once it is complete and has been reported."""
    num_drafted: int = 0
    num_accepted: int = 0
    recent_accepted: float = 0.0
    """Decaying count of accepted draft tokens."""
    recent_rejected: float = 0.0
    """Decaying count of rejections."""

    @property
    def verifies_by_rejection(self) -> bool:
        """Nothing but the distribution of its tokens is promised, so drafts can be accepted as often as possible."""
        return self.params.seed is None and not self.params.is_greedy

    @property
    def order(self) -> tuple[int, float, int]:
        """Who goes first: sort key of waiting and running; the last is preempted first."""
        return (self.priority, self.arrival, self.id)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_tokens_left(self) -> int:
        """The most that it may still emit."""
        return self.params.max_tokens - self.num_output

    @property
    def num_drawn(self) -> int:
        """All its tokens, those included that the host has not read yet."""
        return len(self.tokens) + self.num_unread

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) + self.num_unread - self.num_computed

    @property
    def num_places(self) -> int:
        """Places that it takes in the running batch: its own and those of the siblings that it will fork into."""
        return 1 + len(self.siblings)
