"""Bytes and operations by arithmetic on shapes: the plan, the report and the engine ask here. Nothing is measured.

    operations    of a forward pass and of training, for each token
    serving       weights, keys and values, what a step of an engine needs besides, on one GPU or several
    rooflines     the least time that a step can take on a GPU whose maker's figures are known

What a step of training holds is in model/training_memory.py.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from model.collectives import Group
from model.config import ModelConfig
from model.formats.base import WeightFormat
from model.kv_format import KV_FORMATS
from model.lora import Lora
from model.mesh import MeshError
from model.quantized import quantized_layers
from model.tensor_parallel import WHOLE, Layout, Part, Split, layers_of_stage, rank_config
from model.transformer import Transformer

FULL = 4
"""Bytes of a number in fp32."""


@lru_cache(maxsize=16)
def outline_of(config: ModelConfig) -> Transformer:
    """The model without any memory, for its names and shapes; it is shared, and nobody changes it."""
    with torch.device("meta"):
        return Transformer(config)


# --- operations ------------------------------------------------------------------------------------------------------


def flops_per_token(config: ModelConfig, context: int, capacities: Sequence[float] = ()) -> float:
    """Floating-point operations of a forward pass without embeddings and output head, mean over a text of `context`.

    Products and their sums count as two. `capacities`: the part of the tokens that each routed layer selects; a layer's
    scores then shrink on both sides.
    """
    query, kv = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = 2 * config.hidden_size * (2 * query + 2 * kv)
    scores = 2 * 2 * query * context / 2
    mlps = [2 * 3 * config.hidden_size * neurons for neurons in config.mlp_neurons]
    total = config.num_layers * (projections + scores) + sum(mlps)
    if (experts := config.experts) is not None:
        total += 2 * config.hidden_size * experts.num_experts * len(experts.layers)
    if (mixture := config.mixture_of_depths) is None:
        return total
    for layer, capacity in zip(mixture.layers, capacities, strict=False):
        if mixture.route != "mlp":
            total -= projections * (1 - capacity) + scores * (1 - capacity**2)
        if mixture.route != "attention":
            total -= mlps[layer] * (1 - capacity)
        total += 2 * config.hidden_size
    return total


def training_flops_per_token(config: ModelConfig, context: int) -> float:
    """Of forward and backward, which is two forwards' work, with the output head, at the capacity of its routers."""
    mixture = config.mixture_of_depths
    capacities = [mixture.capacity] * len(mixture.layers) if mixture else []
    return 3 * (flops_per_token(config, context, capacities) + 2 * config.hidden_size * config.vocab_size)


# --- serving ---------------------------------------------------------------------------------------------------------


def num_weights(model: nn.Module) -> int:
    """Parameters, quantized ones among them."""
    return _num_dense(model) + quantized_size(model)[0]


def _num_dense(model: nn.Module) -> int:
    """Parameters but for the bytes of quantized ones (`QuantizedLayer.pack`)."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.is_floating_point())


def weight_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Of all weights as files hold them: dense ones in `dtype`, those of adapters in fp32."""
    dense = _num_dense(model)
    adapters = sum(p.numel() for m in model.modules() if isinstance(m, Lora) for p in m.parameters())
    return dtype.itemsize * (dense - adapters) + FULL * adapters + quantized_size(model)[1]


def planned_weight_bytes(config: ModelConfig, formats: Mapping[str, WeightFormat[Any]], dtype: torch.dtype) -> int:
    """Of all weights of a model whose layers, by name, are quantized; the others are in `dtype`."""
    return sum(_bytes_of_weights(config, formats, dtype, WHOLE).values())


def _bytes_of_weights(
    config: ModelConfig, formats: Mapping[str, WeightFormat[Any]], dtype: torch.dtype, layout: Layout
) -> dict[str, int]:
    """Of each weight that the layout holds something of, by its name in the whole model.

    MeshError, one sentence, where it would cut a quantized one within a block.
    """
    whole = outline_of(config)
    with torch.device("meta"):
        held = dict(layout.arrange(whole).named_parameters())
    sizes = {}
    for name, weight in whole.named_parameters():
        if (place := layout.place(name)) is None:
            continue
        shape = held[place].shape
        if (format := formats.get(name.removesuffix(".weight"))) is None:
            sizes[name] = math.prod(shape) * dtype.itemsize
            continue
        part = layout.part(name, weight.shape)
        try:
            part.check(weight.shape, format)
        except ValueError as reason:
            raise MeshError(f"{name} cannot be split over ranks: {reason}") from None
        sizes[name] = (format if part == Part() else format.of_parts()).num_bytes(shape)
    return sizes


def quantized_size(model: nn.Module) -> tuple[int, int]:
    """How many weights are quantized, and the bytes of their codes and scales."""
    layers = quantized_layers(model).values()
    return sum(math.prod(one.shape) for one in layers), sum(one.weight_bytes for one in layers)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token holds in a cache of this dtype, all layers together."""
    return KV_FORMATS[dtype].bytes_per_token(config)


def visible_list_bytes(config: ModelConfig, *, rows: int, tokens: int) -> int:
    """Of the lists of slots that have a key, in layers whose attention is routed: for `rows` sequences of `tokens`."""
    return len(config.routed_attention) * rows * tokens * torch.int32.itemsize


def cached_sequences(config: ModelConfig, dtype: torch.dtype, *, cache_bytes: float, tokens: int) -> int:
    """Sequences of so many tokens whose keys and values fit."""
    return int(cache_bytes // (tokens * kv_bytes_per_token(config, dtype)))


def step_bytes(config: ModelConfig, dtype: torch.dtype, *, tokens: int, rows: int) -> int:
    """The largest temporaries of an engine's step over `tokens`, with `rows` distributions over the vocabulary."""
    widths = 4 * config.hidden_size + 3 * max(config.mlp_neurons)
    if (experts := config.experts) is not None:  # rows of each token's experts, as they go in and come out
        widths += 2 * experts.experts_per_token * config.hidden_size
    return tokens * widths * dtype.itemsize + rows * config.vocab_size * torch.float32.itemsize


@dataclass(frozen=True)
class Served:
    """A model that is to be served, known by its shape alone."""

    config: ModelConfig
    formats: Mapping[str, WeightFormat[Any]] = field(default_factory=dict)
    """Of its quantized layers, by name; the others are in `dtype`."""
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16


class OnGpus:
    """A served model in `pipeline` stages, each of which `tensor` GPUs share (model/tensor_parallel.py).

    Bytes are of the GPU that holds most.
    """

    def __init__(self, served: Served, tensor: int = 1, pipeline: int = 1) -> None:
        """MeshError, one sentence, where so many do not divide the model."""
        self.served, self.tensor, self.pipeline = served, tensor, pipeline
        self._stages = self._divided()
        self.weights = max(sum(sizes.values()) for sizes in self._stages)
        self._read_bytes, self._expert_bytes = self._read()
        kv_format = KV_FORMATS[served.kv_dtype]
        self.kv_bytes_per_token = max(kv_format.bytes_per_token(self._part(index)) for index in range(pipeline))

    def _divided(self) -> list[dict[str, int]]:
        """Bytes of each weight that a GPU of each stage holds, by its name in the whole model."""
        config, formats, dtype = self.served.config, self.served.formats, self.served.dtype
        if self.tensor * self.pipeline == 1:
            return [_bytes_of_weights(config, formats, dtype, WHOLE)]
        group = Group(0, self.tensor)
        stages = [Split(group, config, Group(index, self.pipeline)) for index in range(self.pipeline)]
        sizes = _bytes_of_weights(config, formats, dtype, Split(group, config))
        return [{name: size for name, size in sizes.items() if stage.place(name) is not None} for stage in stages]

    def _part(self, index: int) -> ModelConfig:
        config = self.served.config
        layers = config.keep_layers(tuple(layers_of_stage(config, Group(index, self.pipeline))))
        return rank_config(layers, Group(0, self.tensor))

    def step_bytes(self, *, tokens: int, rows: int) -> int:
        """As `step_bytes`, and where several GPUs share a layer the logits as they are gathered from all of them."""
        config, dtype = self.served.config, self.served.dtype
        part = rank_config(config, Group(0, self.tensor))
        gathered = 2 * rows * config.vocab_size * torch.float32.itemsize if self.tensor > 1 else 0
        return (
            step_bytes(part, dtype, tokens=tokens, rows=0) + step_bytes(config, dtype, tokens=0, rows=rows) + gathered
        )

    def read_bytes(self, tokens: int) -> float:
        """Of weights that a pass over so many tokens reads, one GPU of each stage after the other.

        Of experts those are read that at least one of the tokens would choose by chance. Embeddings are looked up.
        """
        experts = self.served.config.experts
        if experts is None:
            return self._read_bytes
        missed = (1 - experts.experts_per_token / experts.num_experts) ** tokens
        return self._read_bytes + self._expert_bytes * (1 - missed)

    def _read(self) -> tuple[int, int]:
        """Bytes of the weights that every pass reads, and of all experts."""
        is_tied, always, experts = self.served.config.tie_word_embeddings, 0, 0
        for name, size in ((name, size) for sizes in self._stages for name, size in sizes.items()):
            if ".experts." in name:
                experts += size
            elif is_tied or not name.endswith("embed_tokens.weight"):
                always += size
        return always, experts


# --- rooflines -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """What its maker says of it. Nothing here is measured, and nothing reaches it."""

    title: str
    memory: int
    """Bytes."""
    bytes_per_s: float
    """Of its memory."""
    flop_per_s: float
    """Of dense products in bf16."""
    link_bytes_per_s: float
    """To other GPUs of the machine, one way."""


GPUS = {
    "a100": Gpu("A100 SXM 80 GB", 80 << 30, 2.04e12, 312e12, 300e9),
    "h100": Gpu("H100 SXM 80 GB", 80 << 30, 3.35e12, 989e12, 450e9),
    "h200": Gpu("H200 SXM 141 GB", 141 * 10**9, 4.8e12, 989e12, 450e9),
    "l40s": Gpu("L40S 48 GB, over PCIe", 48 << 30, 864e9, 362e12, 32e9),
    "rtx4090": Gpu("RTX 4090 24 GB, over PCIe", 24 << 30, 1.008e12, 165e12, 32e9),
}
"""By the names that command lines give. Source: NVIDIA's data sheets of each; rates without sparsity."""


class Roofline:
    """The least time of a step: what must be read and what must be computed, at the rates of `gpu`.

        products     max(weights / bandwidth, operations / rate)
        attention    max(keys and values / bandwidth, operations / rate)
        between GPUs sums of every layer's two products, 2 (n − 1) / n of what is summed; what stages pass on; logits

    one after another, and so are stages. Quantized weights are multiplied at the rate of bf16; in layers with a router
    attention counts as if no token passed it by. The host, launches and waiting are not in it: steps take longer.
    """

    def __init__(self, placed: OnGpus, gpu: Gpu) -> None:
        self.placed, self.gpu = placed, gpu
        config, tensor, item = placed.served.config, placed.tensor, placed.served.dtype.itemsize
        mixture = config.mixture_of_depths
        capacities = [mixture.capacity] * len(mixture.layers) if mixture else []
        self._token_flops = flops_per_token(config, 0, capacities) / tensor
        self._row_flops = 2 * config.hidden_size * config.vocab_size / tensor
        kv_heads = rank_config(config, Group(0, tensor)).kv_heads
        head_bytes = 2 * KV_FORMATS[placed.served.kv_dtype].head_bytes(config.head_dim)
        self._pair_flops = 4 * config.num_query_heads * config.head_dim / tensor
        self._windows = Counter(config.windows)
        """Layers, by how many keys their queries see."""
        self._key_bytes: Counter[int | None] = Counter()
        """Of one token in all of these."""
        for window, heads in zip(config.windows, kv_heads, strict=True):
            self._key_bytes[window] += heads * head_bytes
        sums, shared = 2 * config.num_layers + 1, (tensor - 1) / tensor
        passed_on = placed.pipeline if placed.pipeline > 1 else 0
        self._token_link = item * config.hidden_size * (2 * sums * shared + passed_on)
        self._row_link = item * config.vocab_size * shared

    def step_s(self, chunks: Iterable[tuple[int, int]], rows: int) -> float:
        """Of a step over (first token, number of tokens) of each sequence that makes `rows` distributions. Seconds."""
        chunks = list(chunks)
        gpu, tokens = self.gpu, sum(number for _, number in chunks)
        flops = self._token_flops * tokens + self._row_flops * rows
        products = max(self.placed.read_bytes(tokens) / gpu.bytes_per_s, flops / gpu.flop_per_s)
        keys, pairs = self._attended(chunks)
        attention = max(keys / gpu.bytes_per_s, self._pair_flops * pairs / gpu.flop_per_s)
        return products + attention + (self._token_link * tokens + self._row_link * rows) / gpu.link_bytes_per_s

    def _attended(self, chunks: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Bytes of keys and values that are read, and pairs of a query and a key, in all layers."""
        keys = pairs = 0.0
        for window, layers in self._windows.items():
            most = math.inf if window is None else window
            keys += self._key_bytes[window] * sum(min(start + number, most + number - 1) for start, number in chunks)
            pairs += layers * sum(number * min(start + (number + 1) / 2, most) for start, number in chunks)
        return keys, pairs

    def ttft_s(self, prompt: int, *, budget: int) -> float:
        """Until the first token of a prompt of so many, alone, computed `budget` tokens a step. Seconds."""
        starts = range(0, prompt, budget)
        return sum(self.step_s([(at, min(budget, prompt - at))], rows=int(at + budget >= prompt)) for at in starts)

    def tpot_s(self, sequences: int, context: int) -> float:
        """Of each token behind it, while so many sequences of `context` tokens decode, in a step a stage. Seconds."""
        in_step = -(-sequences // self.placed.pipeline)
        return self.step_s([(context - 1, 1)] * in_step, rows=in_step)
