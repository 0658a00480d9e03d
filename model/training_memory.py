"""Bytes that a step of training holds, by arithmetic on shapes (see model/cost.py): no weight is made, no GPU is used.

Memory peaks at one of three points:

    loss        weights, moments, everything that forward keeps, the buffers of the loss
    backward    the same without those buffers, and what one layer's gradients need on their way; at the other end of
                the model all gradients have taken the place of what was kept
    update      weights, moments, gradients

Gradients live from backward to the update, and through the whole step where it has several micro-batches. Counted are
tensors: what the driver, the allocator's rounding and the libraries take comes on top. A token is what takes memory:
attention keeps nothing that grows with the square of a sequence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any, Literal, Protocol, cast

import torch

from kernels.adamw_8bit import BLOCK
from kernels.linear._skinny_cpu import BLOCK_ELEMENTS_IN_C
from kernels.losses import _projection, _streamed_projection
from model.config import ModelConfig
from model.cost import FULL, outline_of, planned_weight_bytes
from model.formats.base import WeightFormat
from model.formats.registry import NO_FORMAT, format_named
from model.linear import Linear
from model.lora import LoraConfig, matching_layers
from model.mesh import training_dtype
from model.tensor_parallel import LAYERS
from model.transformer import Transformer

HALF = 2
# fp32 buffers of a block of logits on the CPU: of cross-entropy, and of a divergence.
_LOSS_BLOCKS, _DIVERGENCE_BLOCKS = 2, 6
SMALLEST_IN_8_BITS = 4_096
"""Parameters with fewer elements keep fp32 moments: they cost little and their blocks hold few values."""
SMALLEST_PAGED = 100_000
"""Moments of parameters with fewer elements stay on the device: each copy costs more than they do."""
PAGED_PIECE = 1 << 22
"""Elements whose moments are copied at once: in fp32 32 MB, which takes far longer than the launch. Whole blocks."""
PAGED_BUFFERS = 3
"""Pieces on the device: one is fetched, one updated, one written back."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, on the device that trains; the parts do not all exist at once."""

    weights: int
    """As loaded: master weights, or the frozen base, and a teacher's."""
    adapters: int
    gradients: int
    optimizer: int
    activations: int
    """What forward keeps for backward, the weights' copies in the dtype of products among it, and a layer's work."""
    loss: int
    """Logits of a chunk, hidden states and gradients of the output projection."""
    peak: int
    host: int = 0
    """Moments in pinned host memory; and what is trained in shards, whole: as the main process gets it back."""
    checkpoint: int = 0
    """As large as its files: in host memory, a copy that is written behind training. Beside a GPU it is pinned, and
    made for the first one; without a GPU it is there from half-way to the first one on. Of processes that hold the
    same, the first one has it."""


class TrainingStep(Protocol):
    """What counts of a configuration of training, a frozen dataclass; see `train.config.TrainingConfig`."""

    @property
    def micro_batch_tokens(self) -> int: ...
    @property
    def micro_batches_per_step(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def activation_checkpointing(self) -> bool: ...


@dataclass(frozen=True)
class Rounding:
    """Of a model that is trained through rounding (compress/quantize/qat.py)."""

    trained: Literal["scales", "low_rank", "all"]
    formats: Mapping[str, WeightFormat[Any]]
    """Of each quantized layer, by its name in the model."""
    rank: int
    """Of low-rank updates."""


@dataclass(frozen=True)
class Setup:
    """What is trained, and how."""

    model: ModelConfig
    training: TrainingStep
    teacher: ModelConfig | None = None
    """Of a distillation; bf16 where that is fast."""
    teacher_formats: Mapping[str, WeightFormat[Any]] = field(default_factory=dict)
    """Of its quantized layers, by name."""
    adapter: LoraConfig | None = None
    """Train this alone, over a frozen base."""
    routers: int = 0
    """Or train the routers of this many layers alone."""
    quantization: str = NO_FORMAT
    """Of the frozen base: a format of `model.formats.registry`, or none."""
    double_quantization: bool = True
    fp32_base: bool = False
    """Whether a frozen base that is not quantized is in fp32, as trained weights are, whatever products are in."""
    rounding: Rounding | None = None
    """Or train through rounding, in fp32."""
    routed: bool = False
    """Whether routers that are not in `model` yet choose among the tokens of each document."""
    whole_documents: bool = False
    """Whether no two processes can share a micro-batch: its losses are those of whole documents, as of stored
    distributions."""
    on_gpu: bool = True
    processes: int = 1
    shards: int = 1
    """Processes that hold a copy of the models together (train/sharding.py)."""
    context: int = 1
    """Among these, processes that compute a micro-batch together, each a part of its tokens (model/context.py)."""
    tensor: int = 1
    """Or each a part of every layer (model/trained_split.py)."""

    @property
    def asked_teacher(self) -> ModelConfig | None:
        """The teacher, if it makes passes in training: what learns from stored distributions has it to measure by."""
        return None if self.whole_documents else self.teacher

    def memory(self) -> Memory:
        """Raises LoraError for a target that names no layer, MeshError for `tensor` that cannot be."""
        return self.arithmetic().memory()

    def arithmetic(self) -> "Arithmetic":
        """Raises as `memory` does."""
        in_shards = self.shards > 1
        if self.rounding is not None:  # modules by name: they build on what is here
            module = import_module("model.rounding_memory")
            kind = module.RoundingInShards if in_shards else module.ThroughRounding
        else:
            kind = import_module("model.sharded_memory").InShards if in_shards else Arithmetic
        return cast("Arithmetic", kind(self))

    def with_tokens(self, tokens: int) -> "Setup":
        """The same with micro-batches of this size, as many in a step as before."""
        training: Any = self.training
        batch_tokens = training.micro_batches_per_step * tokens
        return replace(self, training=replace(training, micro_batch_tokens=tokens, batch_tokens=batch_tokens))


def largest_micro_batch(setup: Setup, budget: int, *, step: int = 256) -> int:
    """The most tokens of a micro-batch, in multiples of `step`, whose peak fits `budget` bytes; 0 if none does.

    They may as well be of a single sequence.
    """

    def fits(count: int) -> bool:
        return setup.with_tokens(count * step).memory().peak <= budget

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 1 << 20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


@lru_cache(maxsize=16)
def shapes_of(config: ModelConfig) -> dict[str, torch.Size]:
    """Of all its weights, by name."""
    return {name: parameter.shape for name, parameter in outline_of(config).named_parameters()}


def quantized(
    config: ModelConfig | None, formats: Mapping[str, WeightFormat[Any]]
) -> list[tuple[str, WeightFormat[Any], torch.Size]]:
    """Name, format and shape of each quantized layer; none of no model."""
    return [] if config is None else [(name, one, shapes_of(config)[f"{name}.weight"]) for name, one in formats.items()]


def _moment_bytes(count: int, eight_bit: bool) -> int:
    if eight_bit and count >= SMALLEST_IN_8_BITS:
        return -(-count // BLOCK) * 2 * (BLOCK + FULL)
    return 2 * FULL * count


class Arithmetic:
    """A setup with everything that is derived from it."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.config, self.training = setup, setup.model, setup.training
        pieces = 1 if setup.context == 1 else 2
        self.tokens = pieces * -(-setup.training.micro_batch_tokens // (pieces * setup.context))
        """Of a micro-batch, those that the process computes."""
        self.rows = -(-self.tokens // setup.tensor)
        """And those whose losses it computes."""
        self.frozen = setup.adapter is not None or setup.routers > 0
        # Of activations, and of weights and the residual stream, which takes the embeddings' dtype.
        self.item = training_dtype(setup.training.precision, on_gpu=setup.on_gpu).itemsize
        self.teacher_dtype = training_dtype("bf16", on_gpu=setup.on_gpu)
        self.teacher_item = self.teacher_dtype.itemsize
        self.stream = self.item if self.frozen and not setup.fp32_base else FULL

    @property
    def shape(self) -> Transformer:
        """The model without any memory."""
        return outline_of(self.config)

    @cached_property
    def adapted(self) -> dict[str, Any]:
        adapter = self.setup.adapter
        return {} if adapter is None else matching_layers(self.shape, adapter.targets)

    @cached_property
    def trained_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Of each trained tensor, behind the name of what it belongs to."""
        adapter = self.setup.adapter
        if not self.frozen:
            return [(name, tuple(parameter.shape)) for name, parameter in self.shape.named_parameters()]
        if adapter is None:
            return [(f"{LAYERS}{number}", shape) for number in range(self.setup.routers) for shape in self._router]
        shapes: list[tuple[str, tuple[int, ...]]] = []
        for name, layer in self.adapted.items():
            outputs, inputs = layer.weight.shape
            parts = [(adapter.rank, inputs), (outputs, adapter.rank), *[(outputs,)] * adapter.dora]
            shapes += [(name, shape) for shape in parts]
        return shapes

    @property
    def _router(self) -> list[tuple[int, ...]]:
        return [(1, self.config.hidden_size), (1,)]

    @cached_property
    def trained(self) -> list[int]:
        """Elements of each trained tensor, as many as the process updates."""
        return [self._held(name, shape) for name, shape in self.trained_shapes]

    def _held(self, name: str, shape: Sequence[int]) -> int:
        """Elements of a tensor that the process has."""
        return math.prod(shape)

    def memory(self) -> Memory:
        weights, adapters = self._weights(), FULL * sum(self.trained) * self.frozen
        gradients, (optimizer, host) = FULL * sum(self.trained), self._moments()
        fixed, copies, loss = weights + adapters + optimizer + self._prepared(), self._copies(), self._loss()
        kept, work = self._kept(), self._work()
        # Several processes keep the memory that gradients travel from; one holds them from micro-batch to micro-batch.
        is_held = self.setup.processes > 1 or self.training.micro_batches_per_step > 1
        held = gradients if is_held else 0
        head = self._head_gradient()
        peaks = {
            "forward": fixed + held + copies + kept + self._expanded(),
            "loss": fixed + held + copies + kept + loss,
            "first layer of backward": fixed + max(held, head) + copies * (not self._recomputes) + kept + work,
            "last layer of backward": fixed + gradients + work + self._layer() * (not self._recomputes),
            "update": fixed + gradients,
        }
        activations, peak = kept + copies + work + self._prepared(), max(peaks.values())
        return Memory(weights, adapters, gradients, optimizer, activations, loss, peak, host, self._checkpoint())

    @property
    def _recomputes(self) -> bool:
        return self.training.activation_checkpointing

    # What lasts

    def _weights(self) -> int:
        total = self._of_teacher()
        if not self.frozen:
            return total + FULL * sum(self.trained)
        dtype = torch.float32 if self.stream == FULL else torch.bfloat16
        return total + planned_weight_bytes(self.config, self.formats(), dtype)

    def _of_teacher(self) -> int:
        """What the process has of it."""
        return sum(self.taught.values())

    @cached_property
    def taught(self) -> dict[str, int]:
        """Bytes of each of the teacher's weights, by its name."""
        teacher, formats = self.setup.teacher, self.setup.teacher_formats
        if teacher is None:
            return {}
        dense = {name: self.teacher_item * shape.numel() for name, shape in shapes_of(teacher).items()}
        return dense | {f"{name}.weight": one.num_bytes(shape) for name, one, shape in quantized(teacher, formats)}

    def _prepared(self) -> int:
        """Of quantized layers, what products read besides."""
        setup = self.setup
        layers = quantized(setup.model, self.formats()) + quantized(setup.teacher, setup.teacher_formats)
        return sum(one.prepared_bytes(shape, on_gpu=setup.on_gpu) for _, one, shape in layers)

    def formats(self) -> dict[str, WeightFormat[Any]]:
        """Of the quantized layers of a frozen base, by name."""
        if not self.frozen:
            return {}
        format = format_named(self.setup.quantization, double=self.setup.double_quantization)
        names = [name for name, layer in self.shape.model.named_modules(prefix="model") if isinstance(layer, Linear)]
        return {} if format is None else dict.fromkeys(names, format)

    def _layers(self) -> list[Linear]:
        """Every linear layer but the output projection: what is quantized."""
        return [layer for layer in self.shape.model.modules() if isinstance(layer, Linear)]

    def _moments(self) -> tuple[int, int]:
        """Bytes on the device, and in host memory."""
        name = self.training.optimizer
        paged, eight_bit = name.startswith("paged") and self.setup.on_gpu, name.endswith("8bit")
        near, far, largest = 0, 0, 0
        for count in self.trained:
            if paged and count >= SMALLEST_PAGED:
                far += _moment_bytes(count, eight_bit)
                largest = max(largest, _moment_bytes(min(count, PAGED_PIECE), eight_bit))
            else:
                near += _moment_bytes(count, eight_bit)
        return near + PAGED_BUFFERS * largest, far

    def _checkpoint(self) -> int:
        eight_bit = self.training.optimizer.endswith("8bit")
        return FULL * sum(self.trained) + sum(_moment_bytes(count, eight_bit) for count in self.trained)

    # What a step adds

    def _copies(self) -> int:
        """Trained fp32 matrices in the dtype of products: autocast makes them once and keeps them through forward."""
        if self.frozen or self.item == FULL:
            return 0
        return HALF * sum(layer.weight.numel() for layer in self._layers())

    def _kept(self) -> int:
        """By all layers and the final norm, and what the loss compares besides."""
        size, layers = self.config.hidden_size, self.config.num_layers
        final = size * (self.tokens * self.stream + self.rows * self.item) + self._compared()
        return final + layers * self._kept_by_layer()

    def _kept_by_layer(self) -> int:
        """What it came from, where it is recomputed."""
        if self._recomputes:
            return self.tokens * self.config.hidden_size * (self.stream + self.item)
        return self._layer()

    def _compared(self) -> int:
        """Residual streams of both models, where a distillation has them compared."""
        teacher, loss = self.setup.asked_teacher, getattr(self.training, "loss", None)
        if teacher is None or loss is None or not loss.hidden_weight:
            return 0
        ours = self.config.num_layers * self.config.hidden_size * self.stream
        return self.tokens * (ours + teacher.num_layers * teacher.hidden_size * self.teacher_item)

    def _layer(self) -> int:
        """Kept by one layer where nothing is recomputed."""
        config, item = self.config, self.item
        queries, keys = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
        gathered = self._gathered_keys() * 2 * item * keys
        norms = config.kind.norms
        before, behind = (sum(name is not None for name in names) for names in (norms[::2], norms[1::2]))
        token = before * self.stream * config.hidden_size + behind * item * config.hidden_size
        token += FULL * config.kind.num_norms + item * queries + (0 if gathered else 2 * item * keys)
        if config.qk_norm:
            rows = 2 if config.kind.norms_whole_projections else config.num_query_heads + config.num_kv_heads
            token += item * (queries + keys) + FULL * rows
        joins = config.kind.joins_projections
        saved = self._inputs(["qkv_proj"] if joins else ["q_proj", "k_proj", "v_proj"], config.hidden_size)
        saved += self._inputs(["o_proj"], queries) + self._mlp()
        if self.setup.on_gpu or item == FULL:  # attention's own output, which is o_proj's input, and its normalizers
            shared = not self.frozen or (self._adapts("o_proj") and not self._dropout)
            token += item * queries * (not shared) + FULL * config.num_query_heads
        return self.tokens * (token + saved) + gathered + self._frozen_copies()

    def _gathered_keys(self) -> int:
        """That the process's queries see, where it has not the tokens of them all; of one document most.

        Those of its first piece, and those of its last, which sees the first ones again.
        """
        count = self.setup.context
        return 0 if count == 1 else (2 * count + 1) * self.tokens // 2

    def _mlp(self) -> int:
        """Bytes a token that a layer keeps behind attention, the mean of all layers."""
        config, experts = self.config, self.config.experts
        dense, size = self._mlp_of(config.intermediate_size), config.hidden_size
        if experts is None:
            return dense
        # Of each expert its outputs too, which are weighted; the router's input in fp32, and its probabilities.
        sparse = experts.experts_per_token * (self._mlp_of(experts.intermediate_size) + self.item * size)
        sparse += FULL * experts.num_experts + FULL * size * (not self.frozen and self.item != FULL)
        if experts.shared_intermediate_size is not None:
            sparse += self._mlp_of(experts.shared_intermediate_size) + self.item * size
        share = len(experts.layers) / config.num_layers
        return int(dense * (1 - share) + sparse * share)

    def _mlp_of(self, size: int) -> int:
        """Of an MLP of so many neurons, a row."""
        names = ["gate_up_proj"] if self.config.kind.joins_projections else ["gate_proj", "up_proj"]
        activations = (2 if self.config.kind.activation == "silu" else 3) * self.item * size
        return activations + self._inputs(names, self.config.hidden_size) + self._inputs(["down_proj"], size)

    def _inputs(self, names: list[str], size: int) -> int:
        """Bytes a token that layers with one input keep of it: once, or as dropout left it for each adapter."""
        if not self.frozen:
            return self.item * size
        adapter, adapted = self.setup.adapter, [name for name in names if self._adapts(name)]
        if adapter is None or not adapted:
            return 0
        own = self.item * adapter.rank * len(adapted)
        if adapter.dora:
            own += sum(self.item * self._outputs(name) for name in adapted)
        mask = 1 if self.setup.on_gpu else self.item
        return own + ((self.item + mask) * size * len(adapted) if self._dropout else self.item * size)

    def _adapts(self, name: str) -> bool:
        return any(layer.endswith(f".{name}") for layer in self.adapted)

    def _outputs(self, name: str) -> int:
        return next(layer.out_features for path, layer in self.adapted.items() if path.endswith(f".{name}"))

    @property
    def _dropout(self) -> bool:
        return self.setup.adapter is not None and self.setup.adapter.dropout > 0

    def _frozen_copies(self) -> int:
        """A layer's share of A and B, and of an fp32 base's matrices, in the dtype of products: kept for backward."""
        if not self.frozen or self.item == FULL:
            return 0
        matrices = sum(layer.weight.numel() for layer in self._layers()) if self._casts_base else 0
        return HALF * (sum(math.prod(shape) for _, shape in self.trained_shapes) + matrices) // self.config.num_layers

    @property
    def _casts_base(self) -> bool:
        """Whether products cast a frozen base's matrices, and keep them so."""
        return self.setup.fp32_base

    def _work(self) -> int:
        """What one layer's backward pass holds besides: the gradients that are on their way, and what it recomputes."""
        config = self.config
        wide, narrow = (2, 0) if self.item == FULL else (4, 3)  # autocast holds both sides of its casts
        moving = wide * self.item * self._widest_mlp() + narrow * self.stream * config.hidden_size
        moving *= self.tokens
        widest = max(layer.weight.numel() for layer in self._layers())
        moving += max(0 if self.frozen else self.item * widest, self._expanded())  # its gradient, or itself
        return moving + self._gathering() + (self._layer() if self._recomputes else 0)

    def _expanded(self) -> int:
        """Of a quantized weight what products have in their own dtype at a time."""
        setup, most = self.setup, math.inf if self.setup.on_gpu else BLOCK_ELEMENTS_IN_C
        own, taught = quantized(setup.model, self.formats()), quantized(setup.teacher, setup.teacher_formats)
        sizes = [self.item * min(shape.numel(), most) for _, _, shape in own]
        return int(max([0, *sizes, *(self.teacher_item * min(shape.numel(), most) for _, _, shape in taught)]))

    def _gathering(self) -> int:
        """Gradients of the keys and values that queries see, and of those of all processes."""
        numbers = 2 * self.config.num_kv_heads * self.config.head_dim
        return self.item * numbers * self._gathered_keys() * 2

    def _widest_mlp(self) -> int:
        """Numbers a token that its backward pass moves at once; of experts, their rows, as they come out and go in."""
        config, experts = self.config, self.config.experts
        if experts is None:
            return config.intermediate_size
        return max(config.intermediate_size, experts.experts_per_token * config.hidden_size)

    def _loss(self) -> int:
        """Buffers of the loss; the gradients of hidden states and of a trained output projection."""
        config, teacher, tokens = self.config, self.setup.asked_teacher, self.rows
        heads = [(config, self.stream)] + ([(teacher, self.teacher_item)] if teacher is not None else [])
        total = sum(self._head(head, dtype) for head, dtype in heads)
        if self.setup.on_gpu:
            return total + FULL * tokens * config.hidden_size + self._head_gradient()
        block = _projection.rows_per_block(self._rows_of_loss, config.vocab_size) * config.vocab_size
        blocks = _LOSS_BLOCKS if self.setup.teacher is None else _DIVERGENCE_BLOCKS
        return total + self.item * tokens * config.hidden_size + self._head_gradient() + blocks * FULL * block

    @property
    def _rows_of_loss(self) -> int:
        """Whose logits are looked at together: of pairs an answer's, as long as one may be."""
        return self.rows // 2 if hasattr(self.training, "preference_loss") else self.rows

    def _head(self, config: ModelConfig, dtype: int) -> int:
        """Hidden states, the projection where it must be cast, and a chunk of logits."""
        chunk = _streamed_projection._KEPT_LOGITS if self.setup.on_gpu else _projection._LOGITS_PER_CHUNK
        rows = max(1, min(self._rows_of_loss, chunk // config.vocab_size))
        cast = config.vocab_size * config.hidden_size if dtype != self.item else 0
        return self.item * (self.rows * config.hidden_size + cast + rows * config.vocab_size)

    def _head_gradient(self) -> int:
        return 0 if self.frozen else FULL * self.config.vocab_size * self.config.hidden_size
