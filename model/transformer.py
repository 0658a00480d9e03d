"""The one model definition: what is trained is what is served.

A batch is flat and ragged: T tokens of all sequences one after another. Parameters carry Hugging Face's names.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.attention.rotary import partial_frequencies, rope_frequencies, rope_magnitude, rotary_tables
from kernels.common.soft_cap import soft_cap_, soft_capped
from kernels.linear.dense import PreparedWeight, linear_in_fp32, prepare_head_weight
from model.adapter_slots import AdapterSlots
from model.attention import AttentionOverBatch
from model.config import ModelConfig
from model.fused import Fused, FusedTensor
from model.fused_adapters import AdapterChoices, AdapterRoom
from model.kv_format import FixedScales
from model.layers import DecoderLayer, RMSNorm, Rotary, Routing, SelfAttention
from model.linear import AnyEmbedding, AnyLinear, Embedding, Linear
from model.lora import LoraError, adapted_layers
from model.mlp import MLP, Experts
from model.quantized import QuantizedLayer, QuantizedLinear
from model.routed import RoutedLayer
from model.unmade import LaterLayers, when_made

_HEADS = ("model.embed_tokens.weight", "lm_head.weight")
_UNSAID = -1e4
"""Logit of a token that a trimmed head has no row for: never drawn, but where a mask forbids all others."""


class Body(nn.Module):
    """Embeddings, layers and the final norm: what checkpoints call `model.`"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens: AnyEmbedding = Embedding(config.vocab_size, config.hidden_size)
        routed = config.mixture_of_depths.layers if config.mixture_of_depths else ()
        self.layers = nn.ModuleList(
            (RoutedLayer if layer in routed else DecoderLayer)(config, layer) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config, config.hidden_size, scale=1 / config.logit_divisor)


class Transformer(nn.Module):
    """A decoder-only language model of any family in `model.config`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.can_be_captured = config.experts is None
        """Whether its code decides nothing by what tensors hold; where experts are chosen that are not grouped, the
        host reads how many rows each has."""
        self.model = Body(config)
        self.lm_head: AnyLinear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.cache_scales: Sequence[FixedScales] = ()
        """Of each layer's keys and values in a cache of fp8, if its checkpoint brings them."""
        self.activation_checkpointing = False
        self.num_choices = 0
        """Adapters that tokens can choose from, once fused."""
        self.adapter_slots: AdapterSlots | None = None
        """Where adapters come and go, if it was fused with room for them."""
        self._carries_adapter = False
        """Whether the layers were fused with an adapter that is everybody's."""
        self._prepared_head: PreparedWeight | None = None
        self._head_tokens: Tensor | None = None
        """`[v]` int64: those of the head's rows, once trimmed."""
        # Not a buffer: `model.to(torch.bfloat16)` must not round the angles.
        self._frequencies: dict[tuple[torch.device, bool], Tensor] = {}
        """By device, and whether they are those of windowed layers with a base of their own."""
        self._rope_magnitude = rope_magnitude(config.rope_scaling, config.max_position_embeddings)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: AttentionOverBatch,
        routing: Routing | None = None,
        *,
        adapters: Tensor | None = None,
        states: list[Tensor] | None = None,
        num_layers: int | None = None,
    ) -> Tensor:
        """Runs the layers.

        tokens, positions: `[T]` int64; positions restart at 0 for each document. `routing`: who passes the layers that
        have a router; None is the rule by which the model is served, the thresholds of its configuration.
        adapters: `[T]` int32, the number of each token's adapter among those given to `fuse`, −1 for none; None: nobody
        has one. Without any given, the adapter that the model carries, if it does, is everybody's.
        states: takes the residual stream behind each layer, `[T, D]`. num_layers: ends after so many; None: all.
        Returns the hidden states after the final norm, divided by what the family divides its logits by, `[T, D]`.
        """
        if adapters is not None and not self.num_choices:
            raise ValueError("tokens choose among the adapters given to fuse(), and none were")
        if self._carries_adapter:
            adapters = torch.zeros(tokens.shape, dtype=torch.int32, device=tokens.device)
        rotary = self.rotary(positions)
        delta, residual = self.embed(tokens), None
        for layer in islice(self.model.layers, num_layers):
            if self.activation_checkpointing and torch.is_grad_enabled():
                delta, residual = checkpoint(
                    layer, delta, residual, rotary=rotary, attention=attention, routing=routing, use_reentrant=False
                )
            else:
                delta, residual = layer(
                    delta, residual, rotary=rotary, attention=attention, routing=routing, slots=adapters
                )
            if states is not None:
                states.append(residual + delta)
        return self.model.norm.add(*self.pass_on(delta, residual))[0]

    def pass_on(self, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the final norm adds up, `[T, D]` each, of what the last layer here has left."""
        return delta, residual

    def embed(self, tokens: Tensor) -> Tensor:
        """What the first layer reads, `[T, D]`, of tokens `[T]`."""
        multiplier, embedded = self.config.embedding_multiplier, self.model.embed_tokens(tokens)
        return embedded if multiplier == 1 else embedded * _rounded(multiplier, embedded.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [N, D] -> [N, V]` in fp32: in bf16 the likeliest tokens would often be as likely as one another.

        Training uses the chunked losses of `kernels` instead.
        """
        if (head := self._quantized_head) is not None:
            logits = head.format.in_fp32(hidden, head.prepared_weight)
        else:
            logits = linear_in_fp32(hidden, self._prepared_head or self.head_weight)
        logits = (soft_capped if logits.requires_grad else soft_cap_)(logits, self.config.logit_soft_cap)
        if self._head_tokens is None:
            return logits
        return logits.new_full((len(logits), self.config.vocab_size), _UNSAID).index_copy_(1, self._head_tokens, logits)

    @property
    def head_weight(self) -> Tensor:
        """The output projection, `[V, D]`; a quantized one is expanded, an adapted one merged, each time."""
        head = (self.lm_head or self.model.embed_tokens).weight
        lora = None if self.lm_head is None else self.lm_head.lora
        weight = head if isinstance(head, Tensor) else head.dequantize(self.dtype)
        return weight if lora is None else lora.merged(weight).to(self.dtype)

    @property
    def _quantized_head(self) -> QuantizedLayer | None:
        """What multiplies with the output projection as it is stored; None if that is dense or adapted."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        is_adapted = self.lm_head is not None and self.lm_head.lora is not None
        return head if isinstance(head, QuantizedLayer) and not is_adapted else None

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of what is not quantized."""
        return self.model.norm.weight.dtype

    def rotary(self, positions: Tensor) -> Rotary:
        """Cosine and sine of each token's angles, fp32, for positions `[T]` int64."""
        if (theta := self.config.local_rope_theta) is None:
            return self._rotary(positions)
        device = positions.device
        if (device, True) not in self._frequencies:
            self._frequencies[device, True] = rope_frequencies(self.config.head_dim, theta).to(device)
        return *self._rotary(positions), *rotary_tables(positions, self._frequencies[device, True])

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of layers that have no base of their own."""
        cos, sin = rotary_tables(positions, frequencies := self._rope_frequencies(positions.device))
        if self._rope_magnitude == 1:
            return cos, sin
        factors = torch.where(frequencies == 0, 1.0, self._rope_magnitude).repeat(2)
        return cos * factors, sin * factors

    def _rope_frequencies(self, device: torch.device) -> Tensor:
        if (device, False) not in self._frequencies:
            config = self.config
            frequencies = rope_frequencies(config.rotary_dims, config.rope_theta, config.rope_scaling)
            self._frequencies[device, False] = partial_frequencies(frequencies, config.head_dim).to(device)
        return self._frequencies[device, False]

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fresh weights: normal with the configured deviation, norms of factors one, biases zero. Always the same."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            parameter.copy_(fresh_weight(self.config, name, parameter.shape, generator))

    def fuse(self, choices: AdapterChoices = ()) -> "Transformer":
        """Turns the model into its serving form: one matmul for q, k, v and one for gate, up. Not trainable after.

        `choices`: adapters of the decoder's linear layers (`load_adapters`), or room for such, which `adapter_slots`
        fills; each token of a batch names its own.
        LoraError if the model carries one itself: that is everybody's; or its layers have no memory yet. Adapters of
        the decoder's layers stay unmerged, in the model's dtype; that of the head is merged.
        """
        self.requires_grad_(False)
        carried, come_later = adapted_layers(self), isinstance(self.model.layers, LaterLayers)
        if carried and choices:
            raise LoraError("The model carries an adapter, so requests cannot choose among others.")
        if come_later and choices:
            raise LoraError("The model's layers come one at a time, so requests cannot choose among adapters.")
        room = choices if isinstance(choices, AdapterRoom) else None
        self.num_choices, self._carries_adapter = len(choices) if room is None else room.num_slots, bool(carried)
        when_made(self, lambda module, name: self._fuse_parts(module, choices))
        experts = [part for part in self.modules() if isinstance(part, Experts)]
        self.can_be_captured = not come_later and all(part.grouped is not None for part in experts)
        if room is not None:
            self.adapter_slots = self._slots(room)
        self._prepare_head()
        return self.eval()

    def _fuse_parts(self, module: nn.Module, choices: AdapterChoices) -> None:
        if self._carries_adapter:
            choices = [{layer: layer.lora for layer in adapted_layers(module).values()}]
        for part in module.modules():
            if isinstance(part, SelfAttention | MLP):
                part.fuse(choices, self.dtype)
        for part in module.modules():
            if isinstance(part, Experts):
                part.group(self.dtype)

    def _slots(self, room: AdapterRoom) -> AdapterSlots:
        places = {
            f"{path.rpartition('.')[0]}.{name}": place
            for path, module in self.named_modules()
            if isinstance(module, Fused)
            for name, place in module.adapter_places(room.max_rank).items()
        }
        return AdapterSlots(places, **room._asdict(), dtype=self.dtype)

    @torch.no_grad()
    def trim_head(self) -> "Transformer":
        """Turns a model into a draft, before `fuse`: leaves the head's rows of its draft vocabulary, if it has one.

        What is left is computed as before, but a quantized head is quantized anew.
        """
        if not self.config.draft_vocabulary:
            return self
        tokens, quantized = torch.tensor(self.config.draft_vocabulary, device=self.device), self._quantized_head
        rows = self.head_weight[tokens]
        if quantized is None:
            with torch.device("meta"):
                self.lm_head = Linear(rows.shape[1], rows.shape[0], bias=False)
            self.lm_head.weight = nn.Parameter(rows)
        else:
            self.lm_head = QuantizedLinear(quantized.format.quantize(rows), quantized.format)
        self._head_tokens = tokens
        return self

    def _prepare_head(self) -> None:
        if (head := self._quantized_head) is not None:
            _ = head.prepared_weight
        else:
            self._prepared_head = prepare_head_weight(self.head_weight)

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces some or all weights, named and shaped as in a checkpoint, before or after `fuse`.

        They are written into the memory of the old ones, so that captured graphs stay valid (on a CPU that packs
        weights, into new memory). Raises ValueError, with nothing written, for a name, shape or dtype that does not
        fit, a quantized weight, or a model with adapters.
        """
        if self.num_choices or self._carries_adapter or adapted_layers(self):
            raise ValueError("The model has adapters, which were made for the weights that it has; load a new one.")
        places = self._places()
        for name, values in weights.items():
            if name not in places:
                raise ValueError(f"The model has no tensor {name}.")
            _check_update(name, values, places[name])
        for name, values in weights.items():
            place: Any = places[name]
            place.write(values) if isinstance(place, FusedTensor) else place.copy_(values)
        for part in self.modules():
            if isinstance(part, Experts):
                part.group_again(self.dtype)
        if self._prepared_head is not None and not weights.keys().isdisjoint(_HEADS):
            self._prepare_head()

    def _places(self) -> dict[str, Tensor | FusedTensor | None]:
        """Where each tensor of a checkpoint lies; None for quantized weights."""
        places: dict[str, Tensor | FusedTensor | None] = dict(self.named_parameters())
        for path, module in self.named_modules():
            if isinstance(module, Fused):
                parent = path.rpartition(".")[0]
                places |= {f"{parent}.{name}": tensor for name, tensor in module.tensors().items()}
            elif isinstance(module, QuantizedLayer):
                places[f"{path}.weight"] = None
        return places


def fresh_weight(config: ModelConfig, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """One of those that `Transformer.initialize` gives a model, fp32 on the CPU."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.full(shape, 1.0 - config.kind.norm_offset)
    return torch.randn(shape, generator=generator) * config.initializer_range


@cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=dtype))


def _check_update(name: str, values: Tensor, place: Tensor | FusedTensor | None) -> None:
    if place is None:
        raise ValueError(f"{name} is quantized and cannot be replaced; quantize the new model, and load that.")
    if tuple(values.shape) != place.shape or not values.is_floating_point():
        found = f"{values.dtype} {list(values.shape)}"
        raise ValueError(f"{name} cannot become {found}; it holds floating-point numbers {list(place.shape)}.")
