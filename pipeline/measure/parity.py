"""The parity gate: whether the server computes what the trainer computed, on the same weights and text."""

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from model.attention import PackedAttention
from model.files.checkpoint import load_config
from model.lazy import PassingLayers, open_published, passing
from model.quantized import quantized_layers
from model.transformer import Transformer
from pipeline.results import Parity
from serve.config import EngineConfig
from serve.engine.loading import load_part
from serve.llm import LLM, Generation
from serve.outputs import TokenLogprobs
from serve.sampling_params import SamplingParams
from train.packing import Batch
from train.progress import Progress

PARITY_SEQUENCES, PARITY_TOKENS = 4, 96
PARITY_TOLERANCE = 1e-3
"""Nats, in fp32. Different matmul shapes and summation orders give about 1e-5; a wrong mask, position or page gives
whole nats; a GPU's fp32 lies between."""
ROUNDED_TOLERANCE = 5e-2
"""The same in the mean, where products round activations: what differs in its last bit is rounded to another step here
and there, and every layer has more of those than the one before. SmolLM2 beside itself on one token fewer: 0.2 nats at
one position in a hundred, 0.01 in the mean."""


def check_parity(folder: Path, batches: Sequence[Batch], device: torch.device | str) -> Parity:
    """Whether the server computes what the trainer computed: the same weights and text through both, in fp32.

    The trainer's side is one packed forward; the server's is the real engine with its pages and chunks, asked for the
    log-probabilities of its prompts. Of either model a layer is in memory at a time.
    """
    config = load_config(folder)
    prompts = prompts_of(batches, config.num_positions)
    with Progress("parity", 2 * config.num_layers) as progress:
        model = passing(*open_published(folder, torch.float32, device))
        trained = log_probabilities(_shown(model, "the trainer", progress), prompts)
        is_rounded = any(layer.format.rounds_activations for layer in quantized_layers(model).values())
        served = _served(folder, prompts, device, progress)
    differences, same = [], []
    for prompt, expected, answer in zip(prompts, trained, served, strict=True):
        entries: Sequence[TokenLogprobs | None] = answer.prompt_logprobs or ()
        for position, entry in enumerate(entries):
            if entry is not None:
                row = expected[position - 1]
                differences.append(abs(float(row[prompt[position]]) - entry.logprob))
                same.append(int(row.argmax()) == entry.top[0][0])
    return Parity(
        tokens=len(differences),
        max_difference=max(differences, default=math.inf),
        tolerance=ROUNDED_TOLERANCE if is_rounded else PARITY_TOLERANCE,
        same_top=sum(same) / max(len(same), 1),
        mean_difference=sum(differences) / len(differences) if is_rounded and differences else None,
    )


def _served(folder: Path, prompts: list[list[int]], device: torch.device | str, progress: Progress) -> list[Generation]:
    longest = max(map(len, prompts), default=1) + 1
    options: Any = {"dtype": "float32", "device": str(device), "max_model_len": longest, "num_pages": 64}
    models = load_part(EngineConfig(model=str(folder), **options), None, by_layers=True)
    _shown(cast("Transformer", models.target), "the server", progress)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    return LLM(str(folder), models=models, **options).generate(prompts, params)


def _shown(model: Transformer, whose: str, progress: Progress) -> Transformer:
    layers = cast("PassingLayers", model.model.layers)
    layers.then(lambda layer, name: progress.advance(1, f"layers of {whose}"), "model.layers")
    return model


def prompts_of(batches: Sequence[Batch], num_positions: int) -> list[list[int]]:
    """What both sides read: the beginnings of the first few sequences, in fewer tokens than a model knows positions."""
    longest = min(PARITY_TOKENS, num_positions - 1)
    prompts = []
    for batch in batches:
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            if end - start >= 2:
                prompts.append(batch.tokens[start : min(end, start + longest)].tolist())
    return prompts[:PARITY_SEQUENCES]


@torch.no_grad()
def log_probabilities(model: Transformer, prompts: Sequence[list[int]]) -> list[Tensor]:
    """log p `[T, V]` of each prompt, fp32, on the CPU, as the trainer computes them: as documents of one batch."""
    if not prompts:
        return []
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.tensor([token for prompt in prompts for token in prompt], device=model.device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(model.device)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=model.device)
    hidden = model(ids, positions, PackedAttention(model.config, cu_seqlens))
    return [torch.log_softmax(model.logits(rows).float(), dim=-1).cpu() for rows in hidden.split(lengths)]
