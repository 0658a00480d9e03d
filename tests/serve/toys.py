"""Toys for the engine's tests: a tokenizer of 512 tokens, models that are a table, engines over tiny models."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, count, islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.text.detokenizer import BYTE_OF_CHARACTER
from model.text.tokenizer import Tokenizer
from serve.config import EngineConfig
from serve.engine.engine import Engine
from serve.engine.loading import Models
from serve.engine.runner import LanguageModel
from serve.outputs import RequestOutput
from serve.sampling_params import SamplingParams
from tests.tiny import full_logits, tiny_config

if TYPE_CHECKING:
    from serve.engine.ranks import Ranks

VOCAB_SIZE = 512
EOS = 1


def toy_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """<s>, </s>, the 256 bytes, then words of two letters and more: every id decodes, so random models speak."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = map("".join, chain.from_iterable(product(letters, repeat=length) for length in count(2)))
    tokens = list(islice(chain(["<s>", "</s>"], BYTE_OF_CHARACTER, words), vocab_size))
    added = [
        {"id": n, "content": tokens[n], "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for n in (0, 1)
    ]
    spec = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": {token: n for n, token in enumerate(tokens)}, "merges": []},
    }
    return Tokenizer(json.dumps(spec), config={"bos_token": "<s>", "eos_token": "</s>"})


class TableModel:
    """A language model that is a table: the next token depends on the last one alone."""

    can_be_captured = True

    def __init__(self, probabilities: Tensor) -> None:
        """`probabilities [V, V]`: row t is the distribution of the token after t."""
        size = len(probabilities)
        self.config: ModelConfig = tiny_config(num_layers=0, vocab_size=size, eos_token_ids=())
        self.log_table = probabilities.log()

    def __call__(
        self, tokens: Tensor, positions: Tensor, attention: object, *, adapters: Tensor | None = None
    ) -> Tensor:
        return tokens[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.log_table[hidden[:, 0].long()]

    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.log_table = weights["table"].log()


class CountingModel:
    """A model that counts the tokens it computes and may fail at a chosen token."""

    can_be_captured = False

    def __init__(self, model: LanguageModel, *, poison: int | None = None) -> None:
        self.model, self.config, self.poison = model, model.config, poison
        self.num_tokens = self.num_passes = 0

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Any, *, adapters: Tensor | None = None) -> Tensor:
        if self.poison is not None and bool((tokens == self.poison).any()):
            raise RuntimeError("poisoned")
        self.num_tokens += len(tokens)
        self.num_passes += 1
        return self.model(tokens, positions, attention, adapters=adapters)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.model.update_weights(weights)


def make_engine(
    target: LanguageModel,
    draft: LanguageModel | str | None = None,
    draft_model: LanguageModel | None = None,
    share_cache: bool = False,
    ranks: "Ranks | None" = None,
    **options: Any,
) -> Engine:
    """On the CPU, in the target's dtype or fp32; `draft` is a model, or a kind that may use `draft_model`."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_pages": 256, "max_model_len": 256} | options
    config = EngineConfig(model="toy", draft=draft if isinstance(draft, str) else None, **options)
    tokenizer = toy_tokenizer(target.config.vocab_size)
    device = torch.device("cpu" if config.device == "auto" else config.device)
    model, scales = draft_model if isinstance(draft, str) else draft, getattr(target, "cache_scales", ())
    named = {"cache_scales": scales, "dtype": getattr(target, "dtype", torch.float32), "device": device, "ranks": ranks}
    return Engine(config, Models(target, tokenizer, model, share_cache, **named))


def end_with(engine: Engine, token: int) -> None:
    """Let this token alone end sequences, as if the model's configuration said so."""
    engine.requests.limits = replace(engine.requests.limits, eos_token_ids=(token,))


def drain(engine: Engine) -> dict[tuple[str, int], RequestOutput]:
    """Step until nothing is left. Returns, by request and choice, all its outputs joined into one."""
    joined: dict[tuple[str, int], RequestOutput] = {}
    for _ in range(100_000):
        if not engine.has_work():
            break
        for output in engine.step():
            join(joined, output)
    else:
        raise TimeoutError("the engine does not come to an end")
    assert engine.cache.num_used == 0, "pages leaked"
    return joined


def join(joined: dict[tuple[str, int], RequestOutput], output: RequestOutput) -> None:
    before = joined.get((output.request_id, output.index))
    if before is not None:
        assert not before.finished, "a choice spoke after its end"
        output.new_token_ids = before.new_token_ids + output.new_token_ids
        output.new_text = before.new_text + output.new_text
        output.drafted_mask = before.drafted_mask + output.drafted_mask
        output.prompt_logprobs = before.prompt_logprobs or output.prompt_logprobs
        if before.logprobs is not None or output.logprobs is not None:
            output.logprobs = (before.logprobs or []) + (output.logprobs or [])
    joined[(output.request_id, output.index)] = output


def generate(
    engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[int]]:
    """Output tokens of choice 0 of each prompt, all served together."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    for number, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        engine.add_request(str(number), prompt, own)
    joined = drain(engine)
    return [joined[(str(number), 0)].new_token_ids for number in range(len(prompts))]


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)


def greedy_oracle(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation the plain way: a full forward pass over everything for each token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def random_prompts(count: int, *, seed: int = 0, low: int = 1, high: int = 60) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
