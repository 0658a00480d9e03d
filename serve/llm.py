"""Serving from Python, without a server: `LLM(path).generate(prompts, SamplingParams(...))`."""

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from serve.config import EngineConfig, with_folders
from serve.engine.engine import Engine
from serve.engine.loading import Models
from serve.outputs import FinishReason, RequestOutput, TokenLogprobs
from serve.sampling_params import SamplingParams

Prompt = str | list[int]
Conversation = Sequence[Mapping[str, Any]]
Adapter = str | None
Params = SamplingParams | Sequence[SamplingParams] | None
Adapters = Adapter | Sequence[Adapter]
Listener = Callable[[RequestOutput], None]


@dataclass
class Choice:
    """One continuation of a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    drafted_mask: list[bool] = field(default_factory=list)
    """True for tokens that the draft proposed and the target accepted."""
    num_drafted: int = 0
    num_accepted: int = 0
    error: str | None = None


@dataclass
class Generation:
    """What became of one prompt."""

    prompt: str | None
    """None when the prompt was given as token ids."""
    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


class LLM:
    """An engine in this process, for scripts and batch jobs."""

    def __init__(self, model: str, *, draft: str | None = None, models: Models | None = None, **options: Any) -> None:
        """`model` and `draft`: as model/files/sources.py names them; `options`: fields of EngineConfig.

        `models`: what the folders hold, read before (`serve.engine.loading.load_models`); several engines may share it.
        """
        config = EngineConfig(model=str(model), draft=None if draft is None else str(draft), **options)
        self.engine = Engine(config if models is not None else with_folders(config), models)
        self.tokenizer = self.engine.tokenizer
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        adapter: Adapters = None,
        progress: bool = False,
    ) -> list[Generation]:
        """Continue each prompt; a prompt is text, or a list of token ids. Results are in the order of the prompts.

        `params`, and `adapter` by its name in EngineConfig.adapters: one for all prompts, or one for each. `progress`
        shows a line on stderr. Raises ValueError, before anything is computed, when something cannot be served.
        """
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        several = cast("list[Prompt]", [prompts] if is_one else list(prompts))
        texts = [prompt if isinstance(prompt, str) else None for prompt in several]
        ids = [
            self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
            for prompt in several
        ]
        return self._run(texts, ids, params, adapter, progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        adapter: Adapters = None,
        progress: bool = False,
        **template_variables: Any,
    ) -> list[Generation]:
        """Answer each conversation: a list of messages, or a list of such lists. Otherwise like `generate`."""
        is_one = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        several = cast("list[Conversation]", [conversations] if is_one else list(conversations))
        ids = [
            self.tokenizer.chat_token_ids(messages, add_generation_prompt=True, **template_variables)
            for messages in several
        ]
        return self._run([None] * len(ids), ids, params, adapter, progress)

    def as_completed(
        self,
        prompts: Sequence[list[int]],
        params: Params = None,
        *,
        heard: Listener | None = None,
    ) -> Generator[tuple[int, Generation], None, None]:
        """Like `generate` of token ids, but yields the number of a prompt and its result as soon as that is finished.

        `heard` is called with all that is written on the way. Whoever closes the iterator gives up the rest.
        """
        return self._each([None] * len(prompts), [list(prompt) for prompt in prompts], params, None, heard)

    def _run(
        self, texts: list[str | None], ids: list[list[int]], params: Params, adapter: Adapters, progress: bool
    ) -> list[Generation]:
        if not progress:
            finished = dict(self._each(texts, ids, params, adapter, None))
        else:
            line = ProgressLine(sum(own.n for own in _for_each(params, len(ids))))
            finished = dict(self._each(texts, ids, params, adapter, line.add))
            line.close()
        return [finished[number] for number in range(len(ids))]

    def _each(
        self,
        texts: list[str | None],
        ids: list[list[int]],
        params: Params,
        adapter: Adapters,
        heard: Listener | None,
    ) -> Generator[tuple[int, Generation], None, None]:
        each = _for_each(params, len(ids))
        if len(each) != len(ids):
            raise ValueError(f"there are {len(ids)} prompts, but sampling parameters for {len(each)}")
        adapters = [adapter] * len(ids) if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(adapters) != len(ids):
            raise ValueError(f"there are {len(ids)} prompts, but adapters for {len(adapters)}")
        generations: dict[str, Generation] = {}
        first = self._num_requests
        try:
            for text, prompt, own, its_adapter in zip(texts, ids, each, adapters, strict=True):
                request_id = str(self._num_requests)
                self.engine.add_request(request_id, prompt, own, adapter=its_adapter)
                self._num_requests += 1
                generations[request_id] = Generation(text, prompt, [Choice() for _ in range(own.n)])
            for request_id, generation in self._drain(generations, heard):
                yield int(request_id) - first, generation
        except BaseException:  # also Ctrl-C: the engine must be free for the next call
            for request_id in generations:
                self.engine.abort(request_id)
            self.engine.step()
            raise

    def _drain(self, generations: dict[str, Generation], heard: Listener | None) -> Iterator[tuple[str, Generation]]:
        while self.engine.has_work():
            for output in self.engine.step():
                generation = generations[output.request_id]
                _collect(generation, output)
                if heard is not None:
                    heard(output)
                if all(choice.finish_reason for choice in generation.choices):
                    yield output.request_id, generation


def _for_each(params: Params, count: int) -> list[SamplingParams]:
    return list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * count


def _collect(generation: Generation, output: RequestOutput) -> None:
    choice = generation.choices[output.index]
    choice.text += output.new_text
    choice.token_ids += output.new_token_ids
    choice.drafted_mask += output.drafted_mask
    choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
    choice.num_drafted, choice.num_accepted = output.num_drafted, output.num_accepted
    choice.error = output.error
    if output.logprobs is not None:
        choice.logprobs = (choice.logprobs or []) + output.logprobs
    if output.prompt_logprobs is not None:
        generation.prompt_logprobs = output.prompt_logprobs
    generation.num_cached_tokens = output.num_cached_tokens


class ProgressLine:
    """One line on stderr, redrawn at most ten times a second."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._num_finished = self._num_tokens = 0
        self._started = self._drawn = time.perf_counter()

    def add(self, output: RequestOutput) -> None:
        self._num_tokens += len(output.new_token_ids)
        self._num_finished += output.finished
        if time.perf_counter() - self._drawn > 0.1:
            self._draw()

    def close(self) -> None:
        self._draw()
        print(file=sys.stderr)

    def _draw(self) -> None:
        self._drawn = time.perf_counter()
        rate = self._num_tokens / max(self._drawn - self._started, 1e-9)
        counts = f"{self._num_finished}/{self._num_choices} answers, {self._num_tokens} tokens, {rate:.1f} tokens/s"
        print(f"\r{counts}\x1b[K", end="", file=sys.stderr, flush=True)
