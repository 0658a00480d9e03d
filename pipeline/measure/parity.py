"""The parity gate: whether the server computes what the trainer computed, on the same weights and text."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from model.attention import PackedAttention
from model.files.checkpoint import load_model
from model.quantized import quantized_layers
from model.transformer import Transformer
from pipeline.results import Parity
from serve.llm import LLM
from serve.outputs import TokenLogprobs
from serve.sampling_params import SamplingParams
from train.packing import Batch

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
    log-probabilities of its prompts.
    """
    prompts = prompts_of(batches)
    model = load_model(folder, dtype=torch.float32, device=device)
    trained = [_log_probabilities(model, prompt) for prompt in prompts]
    is_rounded = any(layer.format.rounds_activations for layer in quantized_layers(model).values())
    del model
    engine = LLM(str(folder), dtype="float32", device=str(device), max_model_len=2 * PARITY_TOKENS, num_pages=64)
    served = engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
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


def prompts_of(batches: Sequence[Batch]) -> list[list[int]]:
    """What both sides read: the beginnings of the first few sequences."""
    prompts = []
    for batch in batches:
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            if end - start >= 2:
                prompts.append(batch.tokens[start : min(end, start + PARITY_TOKENS)].tolist())
    return prompts[:PARITY_SEQUENCES]


@torch.no_grad()
def _log_probabilities(model: Transformer, tokens: list[int]) -> Tensor:
    """log p `[T, V]`, fp32, of one sequence as the trainer computes it, on the CPU."""
    ids = torch.tensor(tokens, device=model.device)
    cu_seqlens = torch.tensor([0, len(tokens)], dtype=torch.int32, device=model.device)
    positions = torch.arange(len(tokens), device=model.device)
    hidden = model(ids, positions, PackedAttention(model.config, cu_seqlens))
    return torch.log_softmax(model.logits(hidden).float(), dim=-1).cpu()
