"""POST /v1/completions: prompts in any of OpenAI's four forms, echo, log-probabilities in parallel lists."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from model.text.detokenizer import StreamDecoder
from serve.http.errors import invalid
from serve.http.generation import LOWEST, Reply, Service, token_text
from serve.http.protocol import sampling_params
from serve.http.requests import CompletionRequest
from serve.http.responses import Completion, CompletionChoice, LegacyLogprobs, Usage
from serve.outputs import RequestOutput, TokenLogprobs
from serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


class CompletionReply(Reply[CompletionRequest]):
    """One request to /v1/completions. Choice `index` of prompt i is choice `i * n + index` of the response.

    An output becomes a part of a choice; a stream sends parts, a whole response joins them.
    """

    id_prefix = "cmpl"

    def __init__(self, request: CompletionRequest, service: Service) -> None:
        super().__init__(request, service)
        self._writers: dict[int, LegacyLogprobsWriter] = {}
        self._outputs: list[tuple[int, RequestOutput]] = []
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}

    @property
    def _prompts(self) -> list[str | list[int]]:
        prompt = self.request.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return prompt  # type: ignore[return-value]

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def _echo_only(self) -> bool:
        """max_tokens 0: the engine must compute the prompt and cannot but sample one token, which is dropped."""
        return self.max_tokens == 0

    def tokenize(self) -> list[list[int]]:
        special = self.request.add_special_tokens is not False
        for prompt in self._prompts:
            if isinstance(prompt, str):
                self.check_text(prompt)
        return [
            self.tokenizer.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
            for prompt in self._prompts
        ]

    def params(self, room: int) -> SamplingParams:
        if self._echo_only and not self.request.echo:
            raise invalid("max_tokens must be at least 1 without echo", "max_tokens")
        logprobs = self.request.logprobs
        return sampling_params(
            self.request,
            max_tokens=min(DEFAULT_MAX_TOKENS, room) if self.max_tokens is None else max(self.max_tokens, 1),
            logprobs=logprobs,
            prompt_logprobs=logprobs if self.request.echo else self.request.prompt_logprobs,
        )

    def received(self, output: RequestOutput) -> RequestOutput:
        if not self._echo_only:
            return output
        return RequestOutput(
            output.request_id,
            output.index,
            finish_reason="length" if output.finished else None,
            prompt_logprobs=output.prompt_logprobs,
            logprobs=None if output.logprobs is None else [],
            num_prompt_tokens=output.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
        )

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[Completion]:
        part = self._part(prompt_index, output)
        has_logprobs = part.logprobs is not None and part.logprobs.tokens
        if part.text or part.finish_reason or has_logprobs or part.token_ids:
            yield self._completion([part], self.chunk_usage())

    def usage_chunk(self, usage: Usage) -> Completion:
        return replace(self._completion([], usage), metrics=self.usage.metrics())

    def collect(self, prompt_index: int, output: RequestOutput) -> None:
        self._outputs.append((prompt_index, output))

    def whole(self, usage: Usage) -> Completion:
        parts: dict[int, list[CompletionChoice]] = {}
        for prompt_index, output in self._outputs:
            part = self._part(prompt_index, output)
            parts.setdefault(part.index, []).append(part)
        choices = [_joined(parts[index]) for index in sorted(parts)]
        if self.request.prompt_logprobs is not None:
            found = {prompt: self.by_token(positions) for prompt, positions in self._prompt_logprobs.items()}
            choices = [replace(one, prompt_logprobs=found[one.index // self.num_choices]) for one in choices]
        return replace(self._completion(choices, usage), metrics=self.usage.metrics())

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self.id, self.created, self.model, choices, usage)

    def _part(self, prompt_index: int, output: RequestOutput) -> CompletionChoice:
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        index = prompt_index * self.num_choices + output.index
        text, entries, is_first = output.new_text, [], index not in self._writers
        if is_first:
            self._writers[index] = LegacyLogprobsWriter(
                self.tokenizer, continues=not self.request.echo, skip_special_tokens=self.skips_special_tokens
            )
            if self.request.echo:
                text = self._prompt_text(prompt_index) + text
                entries = self._prompt_entries(self._writers[index], prompt_index)
        if output.logprobs is not None:
            drafted = output.drafted_mask if self.speculates else None
            entries.append(self._writers[index].write(output.new_token_ids, output.logprobs, drafted))
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=join(entries) if entries else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_token_ids=self.shown_ids(self.prompt_ids[prompt_index]) if is_first else UNSET,
            token_ids=self.shown_ids(output.new_token_ids),
        )

    def _prompt_text(self, prompt_index: int) -> str:
        prompt = self._prompts[prompt_index]
        if isinstance(prompt, str) and self.request.truncate_prompt_tokens is None:
            return prompt
        return self.tokenizer.decode(self.prompt_ids[prompt_index], skip_special_tokens=self.skips_special_tokens)

    def _prompt_entries(self, writer: "LegacyLogprobsWriter", prompt_index: int) -> list[LegacyLogprobs]:
        if self.request.logprobs is None:
            return []
        ids = self.prompt_ids[prompt_index]
        drafted = [False] * len(ids) if self.speculates else None
        return [writer.write(ids, self._prompt_logprobs[prompt_index], drafted)]


def _joined(parts: list[CompletionChoice]) -> CompletionChoice:
    """The whole choice that consecutive parts make up."""
    entries = [part.logprobs for part in parts if part.logprobs is not None]
    first, last = parts[0], parts[-1]
    tokens = [part.token_ids for part in parts if not isinstance(part.token_ids, UnsetType)]
    return CompletionChoice(
        index=last.index,
        text="".join(part.text for part in parts),
        logprobs=join(entries) if entries else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_token_ids=first.prompt_token_ids,
        token_ids=[token for some in tokens for token in some] if tokens else UNSET,
    )


class LegacyLogprobsWriter:
    """The lists of /v1/completions for one choice, made part by part as its tokens arrive."""

    def __init__(self, tokenizer: "Tokenizer", *, continues: bool, skip_special_tokens: bool = True) -> None:
        """`continues`: the choice's text does not begin with the prompt."""
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens=skip_special_tokens, continues=continues)
        self._offset = 0

    def write(
        self,
        token_ids: Sequence[int],
        positions: Sequence[TokenLogprobs | None],
        drafted: Sequence[bool] | None = None,
    ) -> LegacyLogprobs:
        """The next tokens of the choice. A position without log-probabilities (the first of a prompt) is null."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push([token_id]))
        return LegacyLogprobs(
            tokens=[token_text(self._tokenizer, token_id) for token_id in token_ids],
            token_logprobs=[None if position is None else max(position.logprob, LOWEST) for position in positions],
            top_logprobs=[None if position is None else self._top(position) for position in positions],
            text_offset=offsets,
            drafted=UNSET if drafted is None else list(drafted),
        )

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """By text, best first. Two tokens may spell alike: the better one stays, so that the maximum is right.

        The token itself is always there, as OpenAI has it, even when it is not among the most probable.
        """
        result: dict[str, float] = {}
        for token_id, logprob in (*position.top, (position.token_id, position.logprob)):
            result.setdefault(token_text(self._tokenizer, token_id), max(logprob, LOWEST))
        return result


def join(parts: Sequence[LegacyLogprobs]) -> LegacyLogprobs:
    """Consecutive parts of one choice as one."""
    drafted = [part.drafted for part in parts if not isinstance(part.drafted, UnsetType)]
    return LegacyLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
        drafted=[mark for marks in drafted for mark in marks] if drafted else UNSET,
    )
