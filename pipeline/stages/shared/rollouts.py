"""What a student writes while it learns: the serving engine beside its trainer, with the weights of the moment."""

import copy

import torch

from model.mesh import choose_dtype
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from serve.engine.kv_cache import pages_for
from serve.engine.loading import Models
from serve.llm import LLM
from serve.sampling_params import SamplingParams
from train.config import OnPolicy

MOST_AT_ONCE = 32
"""Sequences that are written together: as many as the engine's pages hold at full length."""


class EngineRollouts:
    """An engine of one model, made when it is first asked for, whose weights are then updated in place."""

    def __init__(self, tokenizer: Tokenizer, config: OnPolicy, *, sequence_length: int) -> None:
        """`sequence_length`: the most tokens of a prompt."""
        self.tokenizer, self.config, self.sequence_length = tokenizer, config, sequence_length
        self._llm: LLM | None = None

    def write(self, model: Transformer, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        temperature, most = self.config.temperature, self.config.max_tokens
        params = [SamplingParams(temperature=temperature, max_tokens=most, seed=seed) for seed in seeds]
        with torch.autocast(model.device.type, enabled=False):
            answers = self._engine(model).generate(prompts, params)
        return [answer.choices[0].token_ids for answer in answers]

    def _engine(self, model: Transformer) -> LLM:
        """The engine, with the model's weights."""
        dtype = choose_dtype("auto", model.device)
        if self._llm is not None:
            weights = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
            self._llm.engine.update_weights(weights)
            return self._llm
        target = copy.deepcopy(model).requires_grad_(False).eval().to(dtype).fuse()
        length = self.sequence_length + self.config.max_tokens
        self._llm = LLM(
            "student",
            models=Models(target, self.tokenizer, dtype=dtype, device=model.device),
            max_model_len=length,
            max_num_seqs=MOST_AT_ONCE,
            num_pages=MOST_AT_ONCE * pages_for(length),
        )
        return self._llm
