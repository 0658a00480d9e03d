"""The engine: requests in, steps, outputs out. One thread owns it; nothing in it waits but for the device.

A step schedules, drafts, runs the target once over everything scheduled, verifies, and reports. A request whose own
computation fails ends with finish_reason "error"; the others do not notice.

On CUDA a step is launched before the host has read what the one before it found, so that the device goes from step to
step without waiting for the host. What a sequence emits is the same: only that it ends by a token or a string is
noticed one step late, and the token computed for it meanwhile is thrown away. Steps with draft tokens are read at once:
how many of those were accepted decides where the next step begins.
"""

import logging
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from model.text.detokenizer import StreamDecoder
from serve.config import NGRAM, NO_ADAPTER, EngineConfig
from serve.engine.batch_state import Places
from serve.engine.drafts.length import MAX_DRAFT_TOKENS, AdaptiveLength, FixedLength
from serve.engine.drafts.speculate import NO_PROPOSAL, Draft, ModelDraft, NgramDraft, Proposal
from serve.engine.kv_cache import BlockTable, KVCache, pages_for
from serve.engine.loading import Models, choose_max_model_len, count_pages, load_models, most_draft_tokens
from serve.engine.runner import Runner
from serve.engine.sampling import NonFiniteLogitsError, Sampler
from serve.engine.scheduler import Chunk, Schedule, Scheduler
from serve.engine.sequence import Sequence
from serve.engine.target import Answer, Flight, Outcome, Target, Work
from serve.engine.text import TextStream
from serve.engine.transfer import PassTimer, synchronize
from serve.outputs import EngineStats, FinishReason, RequestOutput, TokenLogprobs
from serve.sampling_params import MAX_SEED, SamplingParams

__all__ = ["Engine", "EngineConfig", "EngineStats", "RequestOutput", "SamplingParams", "TokenLogprobs"]

log = logging.getLogger("potstill.engine")


@dataclass
class Counters:
    """What has happened since the engine started; see EngineStats."""

    accepted_per_position: list[int]
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    speculative_tokens: float = 0.0


class Engine:
    """Continuous batching over one target model and, if asked for, a draft."""

    def __init__(self, config: EngineConfig, models: Models | None = None) -> None:
        """`models` go before the folders that `config` names. ValueError with one sentence when options do not fit."""
        models = models or load_models(config)
        self.config = config
        self.tokenizer = models.tokenizer
        self.dtype, self.device = models.dtype, models.device
        self.vocab_size = models.num_known_tokens
        """Token ids that requests may name are below this."""
        self.num_pages = count_pages(config, models)
        self.max_model_len = choose_max_model_len(config, models.target.config, self.num_pages)
        self.eos_token_ids = tuple({*models.target.config.eos_token_ids, *models.tokenizer.eos_token_ids})
        self.cache = KVCache(self.num_pages, share_prefixes=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        fixed = config.num_speculative_tokens
        self.draft_length = AdaptiveLength() if fixed is None else FixedLength(fixed)
        self.places = Places(
            config.max_num_seqs,
            models.target.config.vocab_size,
            max_drafts=most_draft_tokens(config, models),
            device=self.device,
            num_kept_tokens=self.max_model_len if config.draft == NGRAM else 0,
        )
        sampler = Sampler(self.places)
        runner = Runner(models.target, self.num_pages, dtype=self.dtype, feed=self.places.feed)
        self.target = Target(runner, sampler, PassTimer(self.draft_length.target_costs, self.device))
        self.draft = self._make_draft(models, sampler)
        self.is_overlapped = self.device.type == "cuda"
        """Whether a step is launched before the one before it has been read, where it can be."""
        self._flights: list[Flight] = []
        """Steps that have been launched and not been read yet, the oldest first."""
        self._adapters = {name: number for number, name in enumerate(config.adapters)}
        self._random = random.Random(config.seed)
        self._next_id = 0
        self._sequences: dict[int, Sequence] = {}
        """Unfinished choices of all requests, by sequence id."""
        self._requests: dict[str, list[Sequence]] = {}
        """The same, by request."""
        self._farewells: list[RequestOutput] = []
        """Outputs of requests that ended between two steps."""
        self._counters = Counters(accepted_per_position=[0] * (fixed or MAX_DRAFT_TOKENS))

    def _make_draft(self, models: Models, sampler: Sampler) -> Draft | None:
        if models.draft is not None:
            return ModelDraft(
                Runner(models.draft, self.num_pages, dtype=self.dtype, feed=self.places.feed),
                sampler,
                self.cache,
                vocab_size=models.target.config.vocab_size,
                max_tokens=self.config.max_num_batched_tokens,
                timer=PassTimer(self.draft_length.draft_costs, self.device),
            )
        return NgramDraft(sampler) if self.config.draft == NGRAM else None

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival: float | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Queue a request. ValueError with one sentence when it can never be served; the engine is then unchanged.

        Times are seconds of `time.monotonic()`. Lower `priority` goes first. When `deadline` passes, queued or running,
        it ends with finish_reason "deadline". Only requests of equal `adapter` (a name in EngineConfig.adapters; None:
        the base) and `cache_salt` share cached prefixes.
        """
        self._check(request_id, prompt_token_ids, params)
        number = self._adapter_number(adapter)
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
                end_token_ids=(() if params.ignore_eos else self.eos_token_ids) + params.stop_token_ids,
                table=BlockTable(pages_for(self.max_model_len), f"{number}:{cache_salt or ''}"),
                text=TextStream(StreamDecoder(self.tokenizer, continues=True), params.stop),
                adapter=number,
            )
            for index in range(params.n)
        ]
        self._next_id += params.n
        leader = choices[0]
        leader.siblings = choices[1:]
        leader.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        self._requests[request_id] = choices
        self._sequences |= {sequence.id: sequence for sequence in choices}
        self.scheduler.add(leader)

    def _check(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is already being served")
        params.validate(self.vocab_size)
        if params.n > self.config.max_num_seqs:
            raise ValueError(f"n is {params.n}, but at most {self.config.max_num_seqs} sequences run at once")
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, which leaves no room for an answer within "
                f"the {self.max_model_len} tokens that this engine can hold of one sequence"
            )
        for token in prompt:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ValueError(f"prompt token ids must be integers from 0 to {self.vocab_size - 1}, not {token!r}")

    def _adapter_number(self, name: str | None) -> int:
        if name is None:
            return NO_ADAPTER
        if name not in self._adapters:
            raise ValueError(f"there is no adapter {name!r}; there are {', '.join(self._adapters) or 'none'}")
        return self._adapters[name]

    def abort(self, request_id: str) -> None:
        """End a request now, wherever it is, and free its pages; unknown ids are ignored, they may just have ended.

        The next step reports finish_reason "abort" for each of its unfinished choices.
        """
        self._farewells += self._end_all(self._requests.get(request_id, ()), "abort")

    def has_work(self) -> bool:
        """Whether a step would compute or report anything."""
        return bool(self._farewells or self._flights or self.scheduler.waiting or self.scheduler.running)

    def stats(self) -> EngineStats:
        counters = vars(self._counters) | {"accepted_per_position": tuple(self._counters.accepted_per_position)}
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=sum(sequence.num_places for sequence in self.scheduler.waiting),
            num_pages=self.cache.num_pages,
            num_pages_used=self.cache.num_used,
            num_preemptions=self.scheduler.num_preemptions,
            prefix_cache_queries=self.cache.num_queried_tokens,
            prefix_cache_hits=self.cache.num_hit_tokens,
            **counters,
        )

    # A step

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Compute one batch. Returns what is new, and the ends of requests that ended since the last step."""
        outputs, self._farewells = self._farewells, []
        now = time.monotonic()
        late = [s for s in self._sequences.values() if s.deadline is not None and s.deadline <= now]
        outputs += self._end_all(late, "deadline")
        schedule = self._schedule(outputs)
        if schedule.chunks:
            self.target.runner.copy_pages(schedule.copies)
            if isinstance(self.draft, ModelDraft):
                self.draft.runner.copy_pages(schedule.copies)
            self._compute(schedule.chunks, outputs)
            self._counters.num_steps += 1
        can_wait = schedule.chunks and not any(chunk.num_drafts for chunk in schedule.chunks)
        self._land(outputs, num_left=1 if self.is_overlapped and can_wait else 0)
        return outputs

    def _schedule(self, outputs: list[RequestOutput]) -> Schedule:
        if self.draft is None:
            return self.scheduler.schedule()
        decoding = [sequence for sequence in self.scheduler.running if sequence.num_pending == 1]
        if decoding:
            self.draft_length.begin_step(decoding)
        if self.draft_length.is_drafting:
            self._land(outputs)
        schedule = self.scheduler.schedule(self.draft_length)
        if decoding:
            mean = sum(chunk.num_drafts for chunk in schedule.chunks) / len(decoding)
            self._counters.speculative_tokens += 0.1 * (mean - self._counters.speculative_tokens)
        return schedule

    def _compute(self, chunks: tuple[Chunk, ...], outputs: list[RequestOutput]) -> None:
        """Launch a step over the chunks. Where that raises, compute each alone, and end those that fail again.

        Nothing is changed before a launch has succeeded, so it may be repeated. But a device that has failed fails for
        good: then the wait for it raises, and the process must be started afresh.
        """
        try:
            self._launch(self._propose(chunks))
            return
        except Exception:
            log.exception("a step of %d sequences failed; they are computed one by one", len(chunks))
        synchronize(self.device)
        self._land(outputs)
        self.places.forget()
        for chunk in chunks:
            sequence = self._sequences.get(chunk.sequence_id)
            if sequence is None:  # the step before was its last
                continue
            try:
                self._launch([Work(chunk, sequence)])
            except Exception as error:
                outputs += self._fail([sequence, *sequence.siblings], error)
            synchronize(self.device)
            self._land(outputs)

    def _propose(self, chunks: tuple[Chunk, ...]) -> list[Work]:
        """The chunks, with draft tokens where the schedule has room for them."""
        sequences = [self._sequences[chunk.sequence_id] for chunk in chunks]
        wanted = [(s, chunk.num_drafts) for s, chunk in zip(sequences, chunks, strict=True) if chunk.num_drafts]
        proposals: dict[int, Proposal] = {}
        if wanted and self.draft is not None:
            self.places.seat(sequence for sequence, _ in wanted)
            proposals = self.draft.propose(wanted)
        return [Work(chunk, s, proposals.get(s.id, NO_PROPOSAL)) for s, chunk in zip(sequences, chunks, strict=True)]

    def _launch(self, work: list[Work]) -> None:
        """Launch a pass; from here on the next step can be planned with what it will have computed and drawn."""
        self._flights.append(self.target.launch(work))
        for item in work:
            sequence, samples = item.sequence, item.samples
            sequence.num_computed = item.chunk.start + item.chunk.num_tokens
            self._publish(sequence)
            if samples:
                for choice in (sequence, *self.scheduler.fork(sequence)):
                    choice.num_unread += 1

    # Committing what a step found

    def _land(self, outputs: list[RequestOutput], *, num_left: int = 0) -> None:
        """Read and commit the launched steps, all but the latest `num_left`."""
        while len(self._flights) > num_left:
            for answer in self._flights.pop(0).land():
                self._commit(answer, outputs)

    def _commit(self, answer: Answer, outputs: list[RequestOutput]) -> None:
        sequence = answer.work.sequence
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += answer.prompt_logprobs
        for outcome in answer.outcomes:
            emitting = outcome.sequence
            emitting.num_unread -= 1
            if emitting.id not in self._sequences:  # it ended while the step was under way
                continue
            try:
                if outcome.error is not None:
                    raise outcome.error
                outputs.append(self._emit(outcome))
            except Exception as error:
                outputs += self._fail([emitting], error)

    def _publish(self, sequence: Sequence) -> None:
        """Offer its full pages to others, as far as its tokens are known."""
        num_known = min(sequence.num_computed, sequence.num_tokens)
        self.cache.publish(sequence.table, sequence.tokens, num_known)

    def _emit(self, outcome: Outcome) -> RequestOutput:
        """Add the outcome's tokens, up to the first that ends the sequence, and report them."""
        sequence = outcome.sequence
        if outcome.num_drafted:
            self._settle(sequence, outcome.num_drafted, outcome.num_accepted)
        elif sequence.num_output == 0 and sequence.index == 0:
            self._counters.num_prompt_tokens += sequence.num_prompt_tokens
        sequence.num_computed += outcome.num_accepted
        num_before = sequence.num_tokens
        finish_reason, stop_reason = self._extend(sequence, outcome.tokens)
        tokens = sequence.tokens[num_before:]
        self._counters.num_generation_tokens += len(tokens)
        self._publish(sequence)
        self.cache.trim(sequence.table, sequence.num_drawn)
        output = self._output(sequence, finish_reason, ends_before_stop=isinstance(stop_reason, str))
        output.new_token_ids, output.stop_reason = tokens, stop_reason
        output.drafted_mask = [number < outcome.num_accepted for number in range(len(tokens))]
        output.logprobs = None if outcome.logprobs is None else outcome.logprobs[: len(tokens)]
        output.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        if finish_reason is not None:
            self._forget(sequence)
        return output

    def _settle(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Let the draft and all counters know what became of a proposal."""
        if self.draft is not None:
            self.draft.settle(sequence, num_drafted, num_accepted)
        self.draft_length.observe(sequence, num_drafted, num_accepted)
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_accepted
        counters = self._counters
        counters.num_drafts += 1
        counters.num_draft_tokens += num_drafted
        counters.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            counters.accepted_per_position[place] += 1

    def _extend(self, sequence: Sequence, tokens: list[int]) -> tuple[FinishReason | None, str | int | None]:
        """Append tokens until one ends the sequence. Returns its finish reason and the stop string or token id."""
        params = sequence.params
        for token in tokens:
            sequence.tokens.append(token)
            may_stop = sequence.num_output >= params.min_tokens
            if may_stop and token in sequence.end_token_ids:
                return "stop", None if token in self.eos_token_ids else token
            stop = sequence.text.push(token, may_stop=may_stop)
            if stop is not None:
                return "stop", stop
            if sequence.num_output >= params.max_tokens or sequence.num_tokens >= self.max_model_len:
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

    def _end_all(self, sequences: Iterable[Sequence], reason: FinishReason) -> list[RequestOutput]:
        """End unfinished sequences for a reason of their request's, and report it."""
        outputs = []
        for sequence in list(sequences):
            self._forget(sequence)
            outputs.append(self._output(sequence, reason))
        return outputs

    def _fail(self, sequences: list[Sequence], error: Exception) -> list[RequestOutput]:
        """End sequences whose computation raised; clients get one sentence without internals, the log gets it all."""
        log.error("request %s failed", sequences[0].request_id, exc_info=error)
        outputs = self._end_all(sequences, "error")
        is_numeric = isinstance(error, NonFiniteLogitsError)
        for output in outputs:
            output.error = "the model's scores are not numbers" if is_numeric else "the engine failed on this request"
        return outputs

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.id]
        choices = self._requests[sequence.request_id]
        choices.remove(sequence)
        if not choices:
            del self._requests[sequence.request_id]
