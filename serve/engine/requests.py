"""The lifecycle of requests: how they come, what they have said so far, how they finish.

Nothing here knows of batches or models. A step hands in what was drawn for a sequence; what its client is told of it,
and whether that was its end, is decided here.
"""

import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from model.text.detokenizer import StreamDecoder
from model.text.tokenizer import Tokenizer
from serve.config import NO_ADAPTER, EngineConfig
from serve.engine.adapters import Adapters, LoadedAdapter
from serve.engine.fair_shares import Share
from serve.engine.grammars import Grammars
from serve.engine.kv_cache import BlockTable, pages_for
from serve.engine.token_mask import BothMasks, TokenMask, WordMask
from serve.grammar import GrammarError
from serve.outputs import FinishReason, RequestOutput, TokenLogprobs
from serve.sampling_params import MAX_SEED, SamplingParams
from serve.tenant import Tenant

log = logging.getLogger("potstill.engine")
Label = tuple[int, Tensor, Tensor]
"""A position, what was drawn from the model's distribution of the token behind it, and the entropy of that."""


class NonFiniteLogitsError(RuntimeError):
    """The model's scores for a request are not numbers."""


class TextStream:
    """Turns output tokens into text that is safe to show.

    Text that might be the beginning of a stop string is held back until the next tokens decide.
    """

    def __init__(self, decoder: StreamDecoder, stop: tuple[str, ...] = (), *, shows_stop: bool = False) -> None:
        """`shows_stop`: the text ends behind the stop string, not before it."""
        self._decoder = decoder
        self._stop = stop
        self._shows_stop = shows_stop
        self._ready = ""
        """Safe to show, not taken yet."""
        self._held = ""
        """Decoded text that a stop string may still claim."""

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add one token. Returns the stop string that it completes, if any; the text then ends there.

        Text pushed with `may_stop` false belongs to no stop string.
        """
        self._held += self._decoder.push((token_id,))
        if not self._stop or not may_stop:
            self._ready, self._held = self._ready + self._held, ""
            return None
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda match: match[0])
            end = at + len(stop) if self._shows_stop else at
            self._ready, self._held = self._ready + self._held[:end], ""
            return stop
        num_held = self._num_undecided()
        cut = len(self._held) - num_held
        self._ready, self._held = self._ready + self._held[:cut], self._held[cut:]
        return None

    def take(self) -> str:
        """What became safe to show since the last call."""
        text, self._ready = self._ready, ""
        return text

    def finish(self) -> str:
        """The rest, for a choice that no stop string ended; an incomplete character shows as U+FFFD."""
        text = self._ready + self._held + self._decoder.flush()
        self._ready = self._held = ""
        return text

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that some stop string begins with."""
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0


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
    adapter: LoadedAdapter | None = None
    """What the target computes it with; a draft has none."""

    share: Share | None = None
    """What its tenant has had."""
    mask: TokenMask | None = None
    """Which tokens may come next; None: all."""
    own_mask: TokenMask | None = None
    """What its parameters say of that; part of `mask`."""
    batch_row: int = -1
    """Its row in the running batch, where the device keeps its state; -1 while it has none."""
    num_unread: int = 0
    """Tokens that steps have drawn, or are drawing, and that the host has not read yet."""
    num_computed: int = 0
    siblings: list["Sequence"] = field(default_factory=list)
    """Choices 1..n-1 of the same request, until the prompt that they share has been computed."""
    is_running: bool = False
    num_cached: int = 0
    """Prompt tokens found in the prefix cache on first admission."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Grows with the computed prompt, when asked for; None again once it is complete and has been reported."""
    pooled: np.ndarray | None = None
    """Sum of the hidden states that its `params.pooling` asks for, `[D]` fp32; grows with the computed prompt."""
    num_pooled: int = 0
    """Prompt tokens that have been considered for it."""
    labels: list[Label] = field(default_factory=list)
    """Kept for training, with consent."""
    num_drafted: int = 0
    num_accepted: int = 0
    quotes: bool = False
    """Whether its latest draft tokens were what the draft had at hand."""
    recent_accepted: float = 0.0
    """Decaying count of accepted draft tokens."""
    recent_rejected: float = 0.0
    """Decaying count of rejections."""

    @property
    def adapter_slot(self) -> int:
        """The slot of its adapter, which stays while it runs."""
        return NO_ADAPTER if self.adapter is None else self.adapter.slot

    @property
    def verifies_by_rejection(self) -> bool:
        """Nothing but the distribution of its tokens is promised, so drafts can be accepted as often as possible."""
        return self.params.seed is None and not self.params.is_greedy

    @property
    def needs_whole_prompt(self) -> bool:
        """What is reported of every prompt token, or of all together, is still missing: cached pages do not hold it."""
        return self.prompt_logprobs is not None or (self.params.pooling == "mean" and self.num_output == 0)

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
    def num_batch_rows(self) -> int:
        """Rows that it takes in the running batch: its own and those of the siblings that it will fork into."""
        return 1 + len(self.siblings)


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against, and what ends them."""

    vocab_size: int
    """Token ids that they may name are below this."""
    num_scores: int
    """What the model scores at a position: these tokens, and rows that stand for none."""
    max_num_seqs: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


class Requests:
    """All unfinished requests of an engine."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        limits: Limits,
        adapters: Adapters,
        *,
        enqueue: Callable[[Sequence], None],
        release: Callable[[Sequence], None],
        share_of: Callable[[Tenant | None], Share | None],
    ) -> None:
        """`enqueue` takes the first choice of a new request; `release` frees whatever a sequence still holds."""
        self.limits = limits
        self.grammars = Grammars(tokenizer, num_scores=limits.num_scores, eos_token_ids=limits.eos_token_ids)
        """What grammars of requests are compiled to."""
        self.num_prompt_tokens = self.num_generation_tokens = 0
        """Of all requests since the engine started; prompts count once they have been computed."""
        self._tokenizer = tokenizer
        self._enqueue, self._release, self._share_of = enqueue, release, share_of
        self._adapters = adapters
        self._random = random.Random(config.seed)
        self._next_id = 0
        self._sequences: dict[int, Sequence] = {}
        """Unfinished choices of all requests, by sequence id."""
        self._requests: dict[str, list[Sequence]] = {}
        """The same, by request."""
        self._masked: set[int] = set()
        """Ids of those that have a token mask."""
        self._unreported: list[RequestOutput] = []
        """Outputs that came up between two steps."""

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival: float | None = None,
        priority: int = 0,
        deadline: float | None = None,
        tenant: Tenant | None = None,
        adapter: str | None = None,
    ) -> None:
        """Queue a request. ValueError with one sentence when it can never be served; nothing has changed then.

        Times are seconds of `time.monotonic()`. Lower `priority` goes first. When `deadline` passes, queued or running,
        it ends with finish_reason "deadline". Only requests of one `adapter` (the name of one that is loaded; None: the
        base) and of equal `tenant.cache_salt` share cached prefixes.
        """
        self._check(request_id, prompt_token_ids, params)
        loaded = self._adapters.find(adapter)
        salt = "" if tenant is None else tenant.cache_salt or ""
        root, share = f"{NO_ADAPTER if loaded is None else loaded.number}:{salt}", self._share_of(tenant)
        ends = (() if params.ignore_eos else self.limits.eos_token_ids) + params.stop_token_ids
        masks = self._own_masks(params, ends)
        choices = [
            Sequence(
                id=self._next_id + index,
                request_id=request_id,
                index=index,
                params=params,
                tokens=list(prompt_token_ids),
                num_prompt_tokens=len(prompt_token_ids),
                arrival=time.monotonic() if arrival is None else arrival,
                priority=priority,
                deadline=deadline,
                seed=self._random.randrange(MAX_SEED) if params.seed is None else params.seed,
                end_token_ids=ends,
                table=BlockTable(pages_for(self.limits.max_model_len), root),
                text=self._text_stream(params),
                adapter=loaded,
                share=share,
                mask=mask,
                own_mask=mask,
            )
            for index, mask in enumerate(masks)
        ]
        self._next_id += params.n
        leader = choices[0]
        leader.siblings = choices[1:]
        leader.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        self._requests[request_id] = choices
        self._sequences |= {sequence.id: sequence for sequence in choices}
        self._masked |= {sequence.id for sequence in choices if sequence.mask is not None}
        self._enqueue(leader)

    def _check(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        limits = self.limits
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is already being served")
        params.validate(limits.vocab_size)
        if params.n > limits.max_num_seqs:
            raise ValueError(f"n is {params.n}, but at most {limits.max_num_seqs} sequences run at once")
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if len(prompt) >= limits.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, which leaves no room for an answer within "
                f"the {limits.max_model_len} tokens that this engine can hold of one sequence"
            )
        for token in prompt:
            if type(token) is not int or not 0 <= token < limits.vocab_size:
                raise ValueError(f"prompt token ids must be integers from 0 to {limits.vocab_size - 1}, not {token!r}")

    def _text_stream(self, params: SamplingParams) -> TextStream:
        decoder = StreamDecoder(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown_special_tokens=params.shown_special_tokens,
            continues=True,
        )
        return TextStream(decoder, params.stop, shows_stop=params.include_stop_str_in_output)

    def _own_masks(self, params: SamplingParams, ends: tuple[int, ...]) -> list[TokenMask | None]:
        """Of each choice."""
        words = self._word_mask(params, ends)
        if params.grammar is None:
            return [words] * params.n
        grammars = [self.grammars.mask(params.grammar) for _ in range(params.n)]
        return [grammar if words is None else BothMasks(words, grammar) for grammar in grammars]

    def _word_mask(self, params: SamplingParams, ends: tuple[int, ...]) -> WordMask | None:
        if params.allowed_token_ids is None and not params.bad_words:
            return None
        allowed = np.zeros(self.limits.num_scores, dtype=bool)
        named = params.allowed_token_ids
        allowed[slice(self.limits.vocab_size) if named is None else list(named)] = True
        # A word begins a text or stands behind a space, and tokenizers spell the two differently.
        texts = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        words = {tuple(ids) for ids in self._tokenizer.encode_batch(texts) if ids}
        return WordMask(allowed, words, min_tokens=params.min_tokens, ends=ends)

    def set_token_mask(self, request_id: str, mask: TokenMask) -> None:
        """From here on let all choices of a request emit only what the mask allows. KeyError for an unknown request."""
        for sequence in self._requests[request_id]:
            sequence.mask = mask if sequence.own_mask is None else BothMasks(sequence.own_mask, mask)
            self._masked.add(sequence.id)

    @property
    def have_masks(self) -> bool:
        """Whether any unfinished request has a token mask."""
        return bool(self._masked)

    @property
    def have_news(self) -> bool:
        """Whether something came up between two steps."""
        return bool(self._unreported)

    def find(self, sequence_id: int) -> Sequence | None:
        """A choice by its id; None once it has finished."""
        return self._sequences.get(sequence_id)

    def take_news(self) -> list[RequestOutput]:
        """What came up since the last step, and the ends of requests whose deadline has passed."""
        now = time.monotonic()
        late = [s for s in self._sequences.values() if s.deadline is not None and s.deadline <= now]
        outputs, self._unreported = self._unreported, []
        return outputs + self._finish_all(late, "deadline")

    def report_later(self, outputs: list[RequestOutput]) -> None:
        """Have the next step report these."""
        self._unreported += outputs

    def abort(self, request_id: str) -> None:
        """End a request now, wherever it is, and free its pages; unknown ids are ignored, they may just have ended.

        The next step reports finish_reason "abort" for each of its unfinished choices.
        """
        self._unreported += self._finish_all(self._requests.get(request_id, ()), "abort")

    def fail(self, sequences: list[Sequence], error: Exception) -> list[RequestOutput]:
        """End sequences whose computation raised; clients get one sentence without internals, the log gets it all."""
        log.error("request %s failed", sequences[0].request_id, exc_info=error)
        outputs = self._finish_all(sequences, "error")
        is_told = isinstance(error, NonFiniteLogitsError | GrammarError)
        for output in outputs:
            output.error = str(error) if is_told else "the engine failed on this request"
        return outputs

    def extend(
        self, sequence: Sequence, drawn: list[int], *, num_accepted: int, logprobs: list[TokenLogprobs] | None
    ) -> RequestOutput:
        """Add tokens, the first `num_accepted` of which were drafted, up to the one that ends the sequence.

        The output is final when there was one; the sequence is then still to be finished.
        """
        if sequence.num_output == 0 and sequence.index == 0:
            self.num_prompt_tokens += sequence.num_prompt_tokens
        num_before = sequence.num_tokens
        finish_reason, stop_reason = self._append(sequence, drawn)
        tokens = sequence.tokens[num_before:]
        self.num_generation_tokens += len(tokens)
        if sequence.share is not None:
            sequence.share.charge(output_tokens=len(tokens))
        output = self._output(sequence, finish_reason, ends_before_stop=isinstance(stop_reason, str))
        output.new_token_ids, output.stop_reason = tokens, stop_reason
        output.drafted_mask = [number < num_accepted for number in range(len(tokens))]
        output.logprobs = None if logprobs is None else logprobs[: len(tokens)]
        output.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        if sequence.pooled is not None:
            num_rows = sequence.num_prompt_tokens if sequence.params.pooling == "mean" else 1
            output.embedding, sequence.pooled = (sequence.pooled / num_rows).tolist(), None
        return output

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence and give back what it holds."""
        self._release(sequence)
        self._masked.discard(sequence.id)
        del self._sequences[sequence.id]
        choices = self._requests[sequence.request_id]
        choices.remove(sequence)
        if not choices:
            del self._requests[sequence.request_id]

    def _append(self, sequence: Sequence, tokens: list[int]) -> tuple[FinishReason | None, str | int | None]:
        """Append tokens until one ends the sequence. Returns its finish reason and the stop string or token id."""
        params, known = sequence.params, sequence.tokens
        for token in tokens:
            known.append(token)
            num_output = len(known) - sequence.num_prompt_tokens
            may_stop = num_output >= params.min_tokens
            if may_stop and token in sequence.end_token_ids:
                if params.include_stop_str_in_output:
                    sequence.text.push(token, may_stop=False)
                return "stop", None if token in self.limits.eos_token_ids else token
            stop = sequence.text.push(token, may_stop=may_stop)
            if stop is not None:
                return "stop", stop
            if num_output >= params.max_tokens or len(known) >= self.limits.max_model_len:
                return "length", None
        return None, None

    def _output(
        self, sequence: Sequence, finish_reason: FinishReason | None, *, ends_before_stop: bool = False
    ) -> RequestOutput:
        is_final = finish_reason is not None and not ends_before_stop
        return RequestOutput(
            request_id=sequence.request_id,
            index=sequence.index,
            new_text=sequence.text.finish() if is_final else sequence.text.take(),
            finish_reason=finish_reason,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached,
            num_output_tokens=sequence.num_output,
            num_drafted=sequence.num_drafted,
            num_accepted=sequence.num_accepted,
        )

    def _finish_all(self, sequences: Iterable[Sequence], reason: FinishReason) -> list[RequestOutput]:
        """End unfinished sequences for a reason of their request's, and report it."""
        outputs = []
        for sequence in list(sequences):
            self.finish(sequence)
            outputs.append(self._output(sequence, reason))
        return outputs
