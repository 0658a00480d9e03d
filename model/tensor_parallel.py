"""One model over several ranks, each of which holds and computes a part of every large weight.

    q, k, v, gate, up    rows: a rank has some of the heads, with their keys and values, and some of the neurons
    o, down              columns: what ranks compute of an output is added up
    embedding, head      rows: some of the vocabulary; embeddings are added up, logits gathered

Where there are fewer KV heads than ranks, several ranks hold the same one. So a rank's layers are those of a smaller
model, and no code of theirs knows of others: the two products that end in a sum, and the vocabulary's two ends, are
objects of other classes. Norms, routers and the choice of experts are computed by all, alike to the bit, since sums
are. Source: Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.

Layers may be divided, too, among stages, one behind the other: a stage receives the residual stream and sends it on.
The first one holds the vocabulary's two ends: whoever runs the last one returns its hidden states to the first.

Legend: T tokens, N output features, K input features, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kernels.linear.lora import LoraWeights, Slots
from model.collectives import Group
from model.config import ModelConfig
from model.formats.base import ServingForm, WeightFormat
from model.fused_adapters import AdapterChoices
from model.kv_format import FixedScales
from model.layers import SelfAttention
from model.mesh import MeshError
from model.mlp import MLP, Experts
from model.transformer import Transformer

_MOST_RANKS = 64
LAYERS = "model.layers."
ALONE = Group(0, 1)
_ALL = slice(None)


class Part(NamedTuple):
    """Of a matrix [N, K], or of a vector by its rows."""

    rows: tuple[slice, ...] = (_ALL,)
    """In the order in which they stand in the part."""
    columns: slice = _ALL

    def of(self, tensor: Tensor) -> Tensor:
        """Of one without a format; a view where it can be."""
        if self.columns != _ALL:
            tensor = tensor[:, self.columns]
        return tensor[self.rows[0]] if len(self.rows) == 1 else torch.cat([tensor[rows] for rows in self.rows])

    def check(self, shape: Sequence[int], format: WeightFormat[Any]) -> None:
        """Raise ValueError where a block of a matrix [N, K] in the format would be cut."""
        if self != Part():
            format.check_narrow(self.columns, shape[1])

    def of_quantized(self, weight: Any, format: WeightFormat[Any]) -> Any:
        """Of one in the format. ValueError as `check`."""
        if self == Part():
            return weight
        self.check(weight.shape, format)
        pieces = [format.narrow(weight, rows, self.columns) for rows in self.rows]
        joined = pieces[0] if len(pieces) == 1 else format.of(pieces[0]).stack(pieces)
        if joined is None:
            raise ValueError(f"parts of joined {format.title} weights cannot be put together")
        return joined


class Layout(Protocol):
    """How much of a model a process holds, asked while it is loaded."""

    def arrange(self, model: Transformer) -> Transformer:
        """The model to be filled, of the whole one; both hold no memory yet."""
        ...

    def whole(self, model: Any) -> Any:
        """The model whose shapes files have, of one that was loaded by this layout."""
        ...

    def part(self, name: str, shape: Sequence[int]) -> Part:
        """Of the weight of that name, whose whole shape is given."""
        ...

    def place(self, name: str) -> str | None:
        """What a weight of the whole model is called in this one; None where it holds nothing of it."""
        ...

    def cache_scales(self, scales: Sequence[FixedScales]) -> Sequence[FixedScales]:
        """Those of the heads that are held, of each layer's."""
        ...


class Whole:
    """All of it."""

    def arrange(self, model: Transformer) -> Transformer:
        return model

    def whole(self, model: Any) -> Any:
        return model

    def part(self, name: str, shape: Sequence[int]) -> Part:
        return Part()

    def place(self, name: str) -> str | None:
        return name

    def cache_scales(self, scales: Sequence[FixedScales]) -> Sequence[FixedScales]:
        return scales


WHOLE = Whole()


class Split:
    """One rank's part of it."""

    def __init__(self, group: Group, config: ModelConfig, stage: Group = ALONE) -> None:
        """`config` of the whole model; MeshError, one sentence, where the ranks do not divide it."""
        check_split(config, group.count, stage.count)
        self.group, self.config, self.stage = group, config, stage
        self._layers = layers_of_stage(config, stage)

    def arrange(self, model: Transformer) -> Transformer:
        return ShardedTransformer(self.config, self.group, self.stage)

    def whole(self, model: Any) -> Any:
        with torch.device("meta"):
            return Transformer(self.config)

    def cache_scales(self, scales: Sequence[FixedScales]) -> Sequence[FixedScales]:
        held = [(self._kv_heads(layer), *scales[layer]) for layer in self._layers if scales]
        return [(k[heads], v[heads]) for heads, k, v in held]

    def place(self, name: str) -> str | None:
        if name.startswith(LAYERS):
            number, _, rest = name.removeprefix(LAYERS).partition(".")
            layer = int(number)
            return f"{LAYERS}{layer - self._layers.start}.{rest}" if layer in self._layers else None
        return name if self.stage.index == 0 or name == "model.norm.weight" else None

    def part(self, name: str, shape: Sequence[int]) -> Part:
        *path, layer, leaf = name.split(".")
        match layer:
            case "lora":  # A multiplies inputs, B makes outputs
                part = self.part(".".join((*path, "weight")), shape)
                return Part(columns=part.columns) if leaf == "a" else Part(part.rows)
            case "embed_tokens" | "lm_head":
                return Part((_vocabulary_of(self.config, self.group),))
            case "q_proj" | "k_proj" | "v_proj":
                return Part((self._heads(int(path[2]))["qkv".index(layer[0])],))
            case "qkv_proj":
                return Part(self._joined_heads(int(path[2])))
            case "gate_proj" | "up_proj":
                return Part((self._even(shape[0]),))
            case "gate_up_proj":
                half = shape[0] // 2
                return Part((self._even(half), _moved(self._even(half), half)))
            case "o_proj" | "down_proj" if len(shape) > 1:
                return Part(columns=self._even(shape[1]))
        return Part()

    def _even(self, size: int) -> slice:
        share = size // self.group.count
        return slice(self.group.index * share, (self.group.index + 1) * share)

    def _heads(self, layer: int) -> tuple[slice, slice, slice]:
        """Rows of a layer's queries, keys and values."""
        config, held = self.config, self._kv_heads(layer)
        kv = slice(held.start * config.head_dim, held.stop * config.head_dim)
        return self._even(config.num_query_heads * config.head_dim), kv, kv

    def _kv_heads(self, layer: int) -> slice:
        heads, count = self.config.kv_heads[layer], self.group.count
        first = self.group.index * heads // count
        return slice(first, first + max(1, heads // count))

    def _joined_heads(self, layer: int) -> tuple[slice, ...]:
        queries, keys, values = self._heads(layer)
        num_queries = self.config.num_query_heads * self.config.head_dim
        num_keys = self.config.kv_heads[layer] * self.config.head_dim
        return queries, _moved(keys, num_queries), _moved(values, num_queries + num_keys)


def _moved(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)


def layers_of_stage(config: ModelConfig, stage: Group, index: int | None = None) -> range:
    """Of the stage of that index, this one if none is named."""
    index = stage.index if index is None else index
    return range(index * config.num_layers // stage.count, (index + 1) * config.num_layers // stage.count)


def check_split(config: ModelConfig, count: int, stages: int = 1) -> None:
    """Raise MeshError, with the numbers of ranks that would do, unless so many can share each layer of a model.

    `stages`: among how many its layers are divided.
    """
    if stages > config.num_layers:
        raise MeshError(f"pipeline_parallel_size {stages} is more than the {config.num_layers} layers of the model")
    held = [layers_of_stage(config, Group(0, stages), index) for index in range(stages)]
    routed = [bool(set(layers) & set(config.routed_attention)) for layers in held]
    if any(routed) and not all(routed):
        raise MeshError(
            f"pipeline_parallel_size {stages} leaves a stage without any of the layers whose attention is routed, "
            f"{', '.join(map(str, config.routed_attention))}"
        )
    if (reason := obstacle(config, count)) is None:
        return
    others = [str(other) for other in range(2, _MOST_RANKS + 1) if obstacle(config, other) is None]
    would = f"sizes that do are {', '.join(others)}" if others else "this model is served by one process alone"
    raise MeshError(f"tensor_parallel_size {count} {reason}; {would}")


def obstacle(config: ModelConfig, count: int) -> str | None:
    """Why so many ranks cannot share each layer of a model, as the end of a sentence; None where they can."""
    if config.qk_norm and config.kind.norms_whole_projections:
        return f"cannot split the attention of {config.family}, which norms all heads together"
    if config.num_query_heads % count:
        return f"does not divide the {config.num_query_heads} attention heads"
    for heads in config.kv_heads:
        if heads % count and count % heads:
            return f"neither divides the {heads} KV heads nor is a multiple of them"
    sizes = {config.intermediate_size}
    if config.experts is not None:
        sizes |= {config.experts.intermediate_size, config.experts.shared_intermediate_size or 0}
    if uneven := [size for size in sorted(sizes) if size % count]:
        return f"does not divide the {uneven[0]} neurons of an MLP"
    if (count - 1) * -(-config.vocab_size // count) >= config.vocab_size:
        return f"leaves a rank without any of the {config.vocab_size} tokens"
    return None


def _vocabulary_of(config: ModelConfig, group: Group, index: int | None = None) -> slice:
    """The tokens of a rank, this one's if none is named; the last has fewer where it does not come out even."""
    width = -(-config.vocab_size // group.count)
    first = (group.index if index is None else index) * width
    return slice(first, min(first + width, config.vocab_size))


def rank_config(config: ModelConfig, group: Group) -> ModelConfig:
    """Of the model that a rank's layers are."""
    count, vocabulary = group.count, _vocabulary_of(config, group)
    kv_heads = tuple(max(1, heads // count) for heads in config.kv_heads)
    experts = config.experts
    if experts is not None:
        shared = experts.shared_intermediate_size
        sizes = experts.intermediate_size // count, None if shared is None else shared // count
        experts = replace(experts, intermediate_size=sizes[0], shared_intermediate_size=sizes[1])
    return replace(
        config,
        num_query_heads=config.num_query_heads // count,
        num_kv_heads=max(kv_heads),
        layer_kv_heads=kv_heads if len(set(kv_heads)) > 1 else (),
        intermediate_size=config.intermediate_size // count,
        experts=experts,
        vocab_size=vocabulary.stop - vocabulary.start,
    )


class ShardedTransformer(Transformer):
    """A rank's part of a model, to be served: all ranks call the same methods with the same arguments in one order.

    The hidden states of all stages but the last are of no use; the first one alone has logits.
    """

    def __init__(self, config: ModelConfig, group: Group, stage: Group = ALONE) -> None:
        """`config` of the whole model. What `config` says of this one is of its part, but for the vocabulary."""
        super().__init__(rank_config(config.keep_layers(tuple(layers_of_stage(config, stage))), group))
        self.config = replace(self.config, vocab_size=config.vocab_size)
        self._group, self._stage = group, stage
        if stage.index:
            self.model.embed_tokens, self.lm_head = nn.Identity(), None  # type: ignore[assignment]
        self._vocabularies = [_vocabulary_of(config, group, index) for index in range(group.count)]

    def pass_on(self, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """As `Transformer.pass_on`: to the next stage, too, if there is one."""
        if self._stage.index == self._stage.count - 1:
            return delta, residual
        x = delta if residual is None else delta + residual
        self._stage.send(x)
        return x, None

    def embed(self, tokens: Tensor) -> Tensor:
        """As `Transformer.embed`; each token's row is in one rank of the first stage."""
        if self._stage.index:
            return self._stage.receive(self.model.norm.weight.new_empty(len(tokens), self.config.hidden_size))
        held = self._vocabularies[self._group.index]
        is_elsewhere = (tokens < held.start) | (tokens >= held.stop)
        rows = super().embed((tokens - held.start).masked_fill(is_elsewhere, 0))
        return self._group.sum(rows.masked_fill(is_elsewhere[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [N, D] -> [N, V]`, all of them in every rank of the first stage."""
        held, width = super().logits(hidden), self._vocabularies[0].stop
        part = held.new_zeros(len(held), width)
        part[:, : held.shape[1]] = held
        sizes = [tokens.stop - tokens.start for tokens in self._vocabularies]
        gathered = self._group.gather(part)
        return torch.cat([piece[:, :size] for piece, size in zip(gathered, sizes, strict=True)], dim=1)

    def fuse(self, choices: AdapterChoices = ()) -> Transformer:
        """As `Transformer.fuse`; from here on it can be computed."""
        super().fuse(choices)
        if self._stage.count > 1:
            self.can_be_captured = False  # a capture that is given up would have received once, and receives again
        for part in self.modules():
            if isinstance(part, Experts) and part.grouped is not None:
                part.grouped.total = self._group.sum
            fused = {SelfAttention: "output", MLP: "down"}.get(type(part))
            if fused is not None:
                linear = getattr(part, fused)
                linear.products = [replace(one, form=SummedForm(one.form, self._group)) for one in linear.products]
        return self

    def _prepare_head(self) -> None:
        if not self._stage.index:
            super()._prepare_head()

    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raises ValueError: other ranks would keep theirs."""
        raise ValueError("weights cannot be replaced where several ranks share a model; start another engine")


class SummedForm(ServingForm[Any]):
    """Products of columns: their sum over all ranks is the product of the whole weight."""

    def __init__(self, form: ServingForm[Any], group: Group) -> None:
        self._form, self._group = form, group

    def prepare(self, weight: Any) -> Any:
        return self._form.prepare(weight)

    def product(
        self, x: Tensor, prepared: Any, bias: Tensor | None = None, lora: LoraWeights | None = None, slots: Slots = None
    ) -> Tensor:
        # Each rank's products take part in the sum, but a bias is added once.
        bias = bias if self._group.index == 0 else None
        return self._group.sum(self._form.product(x, prepared, bias, lora, slots))
