"""The engine: requests in, steps, outputs out. One thread owns it; nothing in it waits but for the device.

A step schedules, drafts, runs the target once over everything scheduled, verifies, and reports. A request whose own
computation fails ends with finish_reason "error"; the others do not notice.

A step is launched and read apart. On CUDA it is launched before the host has read what the one before it found, so that
the device goes from step to step without waiting for the host. What a sequence emits is the same: only that it ends by
a token or a string is noticed one step late, and the token computed for it meanwhile is thrown away. Of a model in
stages each computes another step, of other sequences, and what the last stage has found is drawn from when it is read.
Otherwise steps with draft tokens are read at once: how many were accepted decides where the next step begins. Launching
a step changes no sequence before it has succeeded, so it may be repeated; what it found is committed when it is read.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.common.cuda_graph import graphs_on
from model.collectives import RankError
from model.kv_format import choose_kv_format
from serve.config import DRAFT_MODEL, EngineConfig
from serve.engine.adapters import Adapters
from serve.engine.batch_state import BatchState, synchronize
from serve.engine.draft_watch import DraftWatch
from serve.engine.drafts.base import Draft, DraftContext, draft_kind
from serve.engine.drafts.length import MAX_DRAFT_TOKENS, AdaptiveLength, FixedLength, PassCosts, PassTimer, Prepares
from serve.engine.drafts.tree import NO_DRAFT, Wanted
from serve.engine.graphs import Members, UniformSteps
from serve.engine.kv_cache import PAGE_SIZE, KVCache
from serve.engine.labels import Labels
from serve.engine.loading import Models, choose_max_model_len, count_pages, load_models, load_weights, most_draft_tokens
from serve.engine.requests import Limits, Requests, Sequence
from serve.engine.runner import PendingStep, Place, Runner, UnderWay, Work, lay_out
from serve.engine.sampling import FIRST_PATH, Sampled, Sampler, SequenceRows
from serve.engine.scheduler import Chunk, Schedule, Scheduler
from serve.engine.tables import Tables
from serve.outputs import Counters, EngineStats, RequestOutput, TokenLogprobs
from serve.sampling_params import SamplingParams

__all__ = ["Engine", "EngineConfig", "EngineStats", "RequestOutput", "SamplingParams", "TokenLogprobs"]

log = logging.getLogger("potstill.engine")


class Engine:
    """Continuous batching over one target model and, if asked for, a draft."""

    def __init__(self, config: EngineConfig, models: Models | None = None) -> None:
        """`models` go before the folders that `config` names. ValueError with one sentence when options do not fit."""
        models = models or load_models(config)
        if config.num_ranks > 1 and models.ranks is None:
            raise ValueError("models that are loaded already cannot be divided among ranks")
        self.config = config
        self.tokenizer = models.tokenizer
        self.dtype, self.device = models.dtype, models.device
        self.vocab_size = models.num_known_tokens
        """Token ids that requests may name are below this."""
        kv_format = choose_kv_format(config.kv_cache_dtype, self.dtype, models.cache_scales)
        self.kv_cache_dtype = kv_format.dtype
        self.kv_bytes_per_token = models.kv_bytes_per_token(kv_format.dtype)
        """Target and draft together."""
        self.num_pages = count_pages(config, models, self.kv_bytes_per_token)
        self.max_model_len = choose_max_model_len(config, models.target.config, self.num_pages)
        self.cache = KVCache(self.num_pages, share_prefixes=config.enable_prefix_caching)
        kind = draft_kind(config.draft or (None if models.draft is None else DRAFT_MODEL))
        self.state = BatchState(
            config.max_num_seqs,
            models.target.config.vocab_size,
            max_drafts=most_draft_tokens(config, models),
            device=self.device,
            num_kept_tokens=self.max_model_len if kind is not None and kind.needs_text else 0,
        )
        slots = models.target.adapter_slots if config.enable_lora else None
        self.adapters = Adapters(config, slots, forget_others=self.state.forget_others)
        self.scheduler = Scheduler(
            self.cache,
            self.adapters.place,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        eos = tuple({*models.target.config.eos_token_ids, *models.tokenizer.eos_token_ids})
        self.requests = Requests(
            config,
            models.tokenizer,
            Limits(self.vocab_size, models.target.config.vocab_size, config.max_num_seqs, self.max_model_len, eos),
            self.adapters,
            enqueue=self.scheduler.add,
            release=self.scheduler.remove,
            share_of=self.scheduler.shares.of,
        )
        self.add_request, self.abort = self.requests.add, self.requests.abort
        self.set_token_mask, self.grammars = self.requests.set_token_mask, self.requests.grammars
        self.labels = Labels(config, models.tokenizer, self.device) if config.label_folder else None
        self.sampler = Sampler(self.state, self.labels)
        self.tables = Tables(1 + self.state.spare_row, self.max_model_len + self.state.max_drafts, self.device)
        sizes = self.tables.list_sizes
        pages = kv_format.allocate(models.target.config, self.num_pages, PAGE_SIZE, self.device, **sizes)
        self.ranks = models.ranks
        if self.ranks is not None:
            self.ranks.allocate(self.num_pages, **sizes)
        self.runner = Runner(models.target, pages, feed=self.state.feed, ranks=self.ranks)
        self.graphs = graphs_on(self.device) if self.ranks is None else None
        self.uniform_steps: UniformSteps | None = None
        """Launches steps in which every sequence decodes, where they can be captured."""
        if self.graphs is not None and models.target.can_be_captured:
            has_adapters = config.enable_lora or bool(config.adapters)
            self.uniform_steps = UniformSteps(self.runner, self.sampler, self.tables, self.graphs, has_adapters)
            self.runner.capture_passes(self.tables, self.graphs, config.max_num_batched_tokens)
        self.draft: Draft | None = None
        if kind is not None:
            self._add_draft(kind, models)
        self.num_groups = config.pipeline_parallel_size
        """Among how many steps sequences are divided, each under way in another stage of the model."""
        self.max_pending = self.num_groups - 1 or int(self.device.type == "cuda" and self.ranks is None)
        """The most steps that are launched and not read when the next one is planned, where that can be."""
        self.on_schedule: Callable[[], None] = lambda: None
        """Called in each step when it is known who takes part, before anything is computed."""
        self._pending: list[PendingStep] = []
        """Steps that have been launched and not been read yet, the oldest first."""
        self._branched: dict[int, Work] = {}
        """By sequence, what of this step is verified on several paths."""
        self.draft_watch: DraftWatch | None = None
        if config.watch_draft:
            self.draft_watch = DraftWatch(config, self.draft, self.update_draft_weights, dtype=self.dtype)
        self._counters = Counters([0] * (config.num_speculative_tokens or MAX_DRAFT_TOKENS))

    def _add_draft(self, kind: type[Draft], models: Models) -> None:
        target_costs, draft_costs = PassCosts(), PassCosts()
        self.target_timer = PassTimer(target_costs, self.device)
        self.draft = kind(
            DraftContext(
                sampler=self.sampler,
                cache=self.cache,
                model=models.draft,
                pages=self.runner.pages if models.share_cache else None,
                target=models.target,
                target_pages=self.runner.pages,
                num_layers=self.config.draft_layers,
                kv_format=choose_kv_format(self.config.kv_cache_dtype, self.dtype),
                max_tokens=self.config.max_num_batched_tokens,
                timer=PassTimer(draft_costs, self.device),
                tables=self.tables,
                graphs=self.graphs,
            )
        )
        fixed, known = self.config.num_speculative_tokens, (target_costs, draft_costs, self.draft)
        self.draft_length = AdaptiveLength(*known) if fixed is None else FixedLength(fixed, *known)

    def has_work(self) -> bool:
        """Whether a step would compute or report anything."""
        return bool(self._pending or self.scheduler.waiting or self.scheduler.running or self.requests.have_news)

    def stats(self) -> EngineStats:
        counters = vars(self._counters) | {"accepted_per_position": tuple(self._counters.accepted_per_position)}
        if self.labels is not None:
            counters |= self.labels.counts()
        if self.draft_watch is not None:
            counters |= self.draft_watch.counts()
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=sum(sequence.num_batch_rows for sequence in self.scheduler.waiting),
            num_pages=self.cache.num_pages,
            num_pages_used=self.cache.num_used,
            num_preemptions=self.scheduler.num_preemptions,
            num_prompt_tokens=self.requests.num_prompt_tokens,
            num_generation_tokens=self.requests.num_generation_tokens,
            prefix_cache_queries=self.cache.num_queried_tokens,
            prefix_cache_hits=self.cache.num_hit_tokens,
            num_graphs=0 if self.graphs is None else self.graphs.num_captured,
            num_graph_failures=0 if self.graphs is None else self.graphs.num_failures,
            **counters,
        )

    def update_weights(self, weights: Mapping[str, Tensor] | str | Path) -> None:
        """Serve other weights from here on: tensors named as in a checkpoint, some or all, or a folder of the model.

        Steps under way are read first; the next step reports them. Tokens that were emitted stay, and running requests
        go on from them as if the new weights had computed all that is before: their keys and values are computed
        again, and no cached prefix survives. ValueError, with nothing changed, for what does not fit the model, and
        where labels of the model are stored. A draft keeps its weights, which decide how often it is right alone.
        """
        if self.labels is not None:
            raise ValueError(f"{self.config.label_folder} holds labels of one model; its weights cannot be replaced")
        if self.ranks is not None:
            raise ValueError("weights cannot be replaced where several ranks share a model; start another engine")
        if not isinstance(weights, Mapping):
            weights = load_weights(weights, self.runner.model.config, self.dtype, self.device)
        outputs: list[RequestOutput] = []
        self._read(outputs)
        self.requests.report_later(outputs)
        self.runner.update_weights(weights)
        if self.draft is not None:
            self.draft.forget_captures()
        for sequence in list(self.scheduler.running):
            self.scheduler.preempt(sequence)
        self.cache.forget_prefixes()

    def close(self) -> None:
        """Put on the disk what is still to be stored, and end other ranks; the engine is not used again."""
        if self.labels is not None:
            self.labels.close()
        if self.ranks is not None:
            self.ranks.close()

    def update_draft_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Draft by other weights from here on; running requests go on, and say what they would have said.

        ValueError, with nothing changed, for what does not fit, or a draft whose weights cannot be replaced.
        """
        if self.draft is None or self.draft.replaceable is None:
            raise ValueError("there is no draft model whose weights could be replaced")
        outputs: list[RequestOutput] = []
        self._read(outputs)
        self.requests.report_later(outputs)
        self.draft.replaceable.update_weights(weights)
        self.draft_length.forget_acceptance()

    # A step

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Compute one batch. Returns what is new, and the ends of requests that ended since the last step."""
        if self.draft_watch is not None:
            self.draft_watch.between_steps()
        outputs = self.requests.take_news()
        if self.requests.have_masks and self.num_groups == 1:  # else all tokens of whom it plans are known
            self._read(outputs)
        schedule = self._schedule(outputs)
        self.on_schedule()
        if self.uniform_steps is not None and (schedule.num_admitted or schedule.copies):
            self.uniform_steps.interrupt()
        if schedule.chunks:
            self._copy_pages(schedule.copies)
            self._compute(schedule.chunks, outputs)
            self._counters.num_steps += 1
            must_know = self.num_groups == 1 and any(chunk.num_drafts for chunk in schedule.chunks)
            self._read(outputs, num_left=0 if must_know else self.max_pending)
        elif self._pending:  # whoever runs takes part in one of them
            self._read(outputs, num_left=len(self._pending) - 1)
        self.cache.drop_branches()
        return outputs

    def _schedule(self, outputs: list[RequestOutput]) -> Schedule:
        if self.draft is None:
            return self.scheduler.schedule(num_groups=self.num_groups)
        if self.draft.reads_tokens and self.num_groups == 1:
            self._read(outputs)
        decoding = [sequence for sequence in self.scheduler.running if sequence.num_pending == 1]
        if decoding:
            self.draft_length.begin_step(decoding)
        if self.draft_length.is_drafting and self.num_groups == 1:
            self._read(outputs)
        asked = self.draft_length if self.draft_length.is_drafting else None
        schedule = self.scheduler.schedule(asked, num_groups=self.num_groups)
        if decoding:
            mean = sum(chunk.num_drafts for chunk in schedule.chunks) / len(decoding)
            self._counters.speculative_tokens += 0.1 * (mean - self._counters.speculative_tokens)
        return schedule

    def _compute(self, chunks: tuple[Chunk, ...], outputs: list[RequestOutput]) -> None:
        """Launch a step over the chunks. Where that raises, compute each alone, and end those that fail again.

        A device that has failed fails for good: then the wait for it raises, out of `step`, and the process must be
        started afresh.
        """
        try:
            self._launch(self._propose(chunks))
            return
        except RankError:
            raise
        except Exception:
            log.exception("a step of %d sequences failed; they are computed one by one", len(chunks))
        synchronize(self.device)
        self._read(outputs)
        self.cache.drop_branches()
        self.state.invalidate()
        self.tables.forget(self.scheduler.running)
        for chunk in chunks:
            sequence = self.requests.find(chunk.sequence_id)
            if sequence is None:  # the step before was its last
                continue
            with self._failing_alone(sequence, outputs):
                self._launch([Work(chunk, sequence)])
            synchronize(self.device)
            self._read(outputs)

    @contextmanager
    def _failing_alone(self, sequence: Sequence, outputs: list[RequestOutput]) -> Iterator[None]:
        """What is raised within, but for the loss of a rank, ends the sequence."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            outputs += self.requests.fail([sequence, *sequence.siblings], error)

    def _propose(self, chunks: tuple[Chunk, ...]) -> list[Work]:
        """The chunks, with draft tokens where the schedule has room for them."""
        self._branched.clear()
        find = self.requests.find
        work = [Work(chunk, sequence) for chunk in chunks if (sequence := find(chunk.sequence_id)) is not None]
        if self.draft is None:
            return work
        asked = [(item.sequence, item.chunk.num_drafts) for item in work if item.chunk.num_drafts]
        for sequence, _ in asked:
            sequence.quotes = self.draft_length.takes_at_hand(sequence)
        wanted = [Wanted(sequence, k, sequence.quotes) for sequence, k in asked]
        if not wanted:
            return work
        self.state.add(sequence for sequence, _ in asked)
        drafts = self.draft.propose(wanted)
        work = [Work(item.chunk, item.sequence, drafts.get(item.sequence.id, NO_DRAFT)) for item in work]
        if any(item.draft.others for item in work):  # their pages are given back at the end of this step
            self._give_branches(work)
        return work

    def _give_branches(self, work: list[Work]) -> None:
        """Choose which other paths of the drafts are verified too, as far as there is room, and give them pages."""
        num_rows = sum(item.chunk.num_tokens + item.draft.num_tokens for item in work)
        copies: list[tuple[int, int]] = []
        may_branch = self.labels is None and not self.runner.pages.visible and self.num_groups == 1
        for item in work:
            offered, item.draft = item.draft.others, replace(item.draft, others=())
            for way in offered if may_branch and item.sequence.params.logprobs is None else ():
                way = way._replace(tokens=way.tokens[: self.draft_length.tokens_of(way, num_rows)])
                found = self.scheduler.branch(item.sequence, item.chunk.start, len(way.tokens), num_rows)
                if found is not None:
                    item.draft = replace(item.draft, others=(*item.draft.others, way))
                    item.branches = (*item.branches, found[0])
                    self._branched[item.sequence.id] = item
                    copies += found[1]
                    num_rows += 1 + len(way.tokens)
        self._copy_pages(tuple(copies))

    def _copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        self.runner.copy_pages(copies)
        if self.draft is not None:
            self.draft.copy_pages(copies)

    def _launch(self, work: list[Work]) -> None:
        """Launch a pass; from here on the next step can be planned with what it will have computed and drawn."""
        step = self.launch_pass(work)
        self._pending.append(step)
        for item in work:
            sequence, end = item.sequence, item.chunk.start + item.chunk.num_tokens
            samples = end == len(sequence.tokens) + sequence.num_unread
            sequence.num_computed = end
            if item.chunk.num_tokens > 1:  # what is decoded is offered when it is known
                self._publish(sequence)
            if samples and step.under_way is None:
                self._drawn(sequence)

    def _drawn(self, sequence: Sequence) -> None:
        sequence.num_unread += 1
        for sibling in self.scheduler.fork(sequence) if sequence.siblings else ():
            sibling.num_unread += 1

    def launch_pass(self, work: list[Work]) -> PendingStep:
        """One forward pass of the target. Raises what the model raises; batch rows are written and up to date after."""
        sequences = tuple([item.sequence for item in work])
        launch = partial(self._launch_ragged, work)
        launcher: Prepares = self.runner
        steps = self.uniform_steps
        # Who decoded in the step before, and nothing has happened to them since, have a token each to compute now.
        who = None if steps is None else steps.going_on(sequences)
        all_single = who is not None or max([item.chunk.num_tokens for item in work]) == 1
        is_uniform = not self._branched and (who is not None or (all_single and all(map(_decodes, work))))
        if steps is not None and is_uniform:
            if who is None:
                self.state.add(sequences)
                who = steps.members(sequences)
            launch, launcher = partial(self._launch_uniform, steps, who, work), steps
        if self.draft is None or self.num_groups > 1 or not all_single:
            return launch()
        # Prompts would blur what decoding costs.
        num_rows = sum(1 + item.num_draft_rows for item in work)
        with self.target_timer.measure(num_rows, launcher):
            return launch()

    def _launch_uniform(self, steps: UniformSteps, who: Members, work: list[Work]) -> PendingStep:
        is_masked = self.requests.have_masks and any(sequence.mask is not None for sequence in who.sequences)
        drafts = [] if self.draft is None else [item.draft for item in work]
        return PendingStep(steps.decode(who, drafts, is_masked=is_masked))

    def _launch_ragged(self, work: list[Work]) -> PendingStep:
        if self.uniform_steps is not None:
            self.uniform_steps.interrupt()
        if self.num_groups > 1:
            return PendingStep(under_way=UnderWay.launch(work, self.runner))
        inputs, sampled, places = lay_out(work, self.runner.feed.shape[1])
        return self._draw(places, *self.runner.run(inputs, sampled))

    def _draw(self, places: list[Place], hidden: Tensor, logits: Tensor | None) -> PendingStep:
        """Launch what is asked of the rows of a pass."""
        step, asked = PendingStep(), list[SequenceRows]()
        for item, rows, first in places:
            step.of_prompts.extend(item.of_prompt(hidden, rows, self.runner.logits))
            if item.samples:
                asked.append(SequenceRows(item.sequence, first, item.draft))
                asked += [SequenceRows(sibling, first) for sibling in item.sequence.siblings]
        if logits is not None:
            self.state.add(one.sequence for one in asked)
            step.samples.extend(self.sampler.sample(logits, asked))
        return step

    # Committing what a step found

    def _end(self, under_way: UnderWay, outputs: list[RequestOutput]) -> list[Sampled]:
        """Draw from a pass that has been through all stages, and read that."""
        with under_way.measured(None if self.draft is None else self.draft_length.target_costs):
            return [sampled for step in self._draw_left(under_way, outputs) for sampled in step.read()]

    def _draw_left(self, under_way: UnderWay, outputs: list[RequestOutput]) -> list[PendingStep]:
        """Likewise without reading; where that raises, draw for each sequence alone."""
        found, places, steps = under_way.end(), under_way.places_left(), list[PendingStep]()
        try:
            steps.append(self._draw(places, *found))
        except RankError:
            raise
        except Exception:
            log.exception("drawing for %d sequences failed; it is done one by one", len(places))
            self.state.invalidate()
            for place in places:
                with self._failing_alone(place.item.sequence, outputs):
                    steps.append(self._draw([place], *found))
        for place in under_way.places_left():
            if place.item.samples:
                self._drawn(place.item.sequence)
        return steps

    def _read(self, outputs: list[RequestOutput], *, num_left: int = 0) -> None:
        """Read and commit the pending steps, all but the latest `num_left`."""
        while len(self._pending) > num_left:
            step = self._pending.pop(0)
            for sampled in step.read() if step.under_way is None else self._end(step.under_way, outputs):
                sequence = sampled.sequence
                sequence.num_unread -= 1
                if self.requests.find(sequence.id) is None:  # it ended while the step was under way
                    continue
                try:
                    if sampled.error is not None:
                        raise sampled.error
                    outputs.append(self._commit(sampled))
                except Exception as error:
                    outputs += self.requests.fail([sequence], error)

    def _commit(self, sampled: Sampled) -> RequestOutput:
        """Add what was sampled to its sequence, and report it."""
        sequence = sampled.sequence
        if sampled.num_drafted:
            self._observe(sampled)
        sequence.num_computed += sampled.num_accepted
        position = sequence.num_tokens + sampled.num_accepted - 1
        output = self.requests.extend(
            sequence, sampled.tokens, num_accepted=sampled.num_accepted, logprobs=sampled.logprobs
        )
        self._publish(sequence)
        if self.draft is not None:  # pages for tokens that were not to be
            self.cache.trim(sequence.table, sequence.num_drawn)
        if sampled.label is not None and position < sequence.num_tokens - 1:
            sequence.labels.append((position, *sampled.label))
        if output.finished:
            if self.labels is not None:
                self.labels.offer(sequence)
            self.requests.finish(sequence)
        return output

    def _publish(self, sequence: Sequence) -> None:
        """Offer its full pages to others, as far as its tokens are known."""
        num_known = min(sequence.num_computed, len(sequence.tokens))
        if num_known >= (sequence.table.num_published + 1) * PAGE_SIZE:
            self.cache.publish(sequence.table, sequence.tokens, num_known)

    def _observe(self, sampled: Sampled) -> None:
        """Let the draft and all counters know what became of a proposal, and take the pages of the way that it took."""
        sequence, item = sampled.sequence, self._branched.get(sampled.sequence.id)
        num_drafted, num_accepted = sampled.num_drafted, sampled.num_accepted
        if self.draft is not None and not sequence.quotes:
            self.draft.observe(sequence, num_drafted, sampled.num_on_path)
            self.draft_length.observe(sequence, num_drafted, sampled.num_on_path)
        if item is not None:
            num_drafted += sum(len(way.tokens) for way in item.draft.others)
            if sampled.way != FIRST_PATH and self.draft is not None:
                self.cache.adopt(sequence.table, item.branches[sampled.way])
                self.draft.moved(sequence)
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_accepted
        self._counters.count_draft(num_drafted, num_accepted)


def _decodes(work: Work) -> bool:
    """Whether a chunk of one token is the sequence's last, and nothing but what follows it is wanted."""
    return work.samples and not (work.sequence.siblings or work.scores_prompt or work.pools_prompt)
