"""From options to models on a device, and to the number of KV pages that fit beside them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.collectives import Grid
from model.config import ModelConfig
from model.cost import kv_bytes_per_token, step_bytes, visible_list_bytes
from model.files.adapter import check_base, load_adapters
from model.files.artifact import MANIFEST_NAME, open_artifact
from model.files.checkpoint import load_config, load_model
from model.files.progress import ReadingProgress
from model.fused_adapters import AdapterRoom
from model.kv_format import FixedScales, choose_kv_format
from model.lazy import open_published, passing
from model.lora import adapted_layers
from model.mesh import choose_device, choose_dtype
from model.quantized import quantized_layers, round_activations
from model.tensor_parallel import WHOLE, Layout, Split, check_split
from model.text.tokenizer import Tokenizer, vocabulary_difference
from model.transformer import Transformer
from serve.config import EngineConfig
from serve.engine.drafts.base import Draft, draft_kind
from serve.engine.drafts.length import MAX_DRAFT_TOKENS
from serve.engine.drafts.shared_cache import can_share_cache
from serve.engine.graph_shapes import BYTES_PER_GRAPH, captured_sizes, captured_token_counts
from serve.engine.kv_cache import PAGE_SIZE, pages_for
from serve.engine.runner import LanguageModel

if TYPE_CHECKING:
    from serve.engine.ranks import Ranks

CPU_KV_CACHE_BYTES = 2 * 2**30
"""Most that KV pages take of a CPU's memory when nothing else is said; of each rank's, where there are several."""


@dataclass(frozen=True)
class Models:
    """What an engine runs."""

    target: LanguageModel
    tokenizer: Tokenizer
    draft: LanguageModel | None = None
    share_cache: bool = False
    """Whether the draft reads the target's keys and values instead of computing its own."""
    cache_scales: Sequence[FixedScales] = ()
    """Of each layer of the target, for a cache of fp8."""
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ranks: "Ranks | None" = None
    """Those that hold the other parts of the target."""

    @property
    def num_known_tokens(self) -> int:
        """Token ids below this have a row in every embedding; what lies beyond is padding, but not in all models."""
        return min(model.config.vocab_size for model in (self.target, self.draft) if model is not None)

    def kv_bytes_per_token(self, kv_cache_dtype: torch.dtype) -> int:
        """Bytes that a token takes in the cache, target and draft together."""
        configs = [self.target.config] + ([self.draft.config] if self.draft and not self.share_cache else [])
        return sum(kv_bytes_per_token(config, kv_cache_dtype) for config in configs)

    def visible_list_bytes(self, *, rows: int, tokens: int) -> int:
        """As `model.cost` has them, target and draft together."""
        models = [model for model in (self.target, self.draft) if model is not None]
        return sum(visible_list_bytes(model.config, rows=rows, tokens=tokens) for model in models)


def load_models(config: EngineConfig) -> Models:
    """Read target, draft and tokenizer. ValueError (or a subclass) with one sentence when they do not fit together."""
    if config.num_ranks == 1:
        return load_part(config, None)
    check_ranks(config)
    from serve.engine.ranks import Ranks, rank_device

    device = rank_device(config, 0)
    dtype = str(choose_dtype(config.dtype, device)).removeprefix("torch.")
    config = replace(config, device=str(device), dtype=dtype)
    ranks = Ranks(config, device)
    try:
        return replace(load_part(config, ranks.grid), ranks=ranks)
    except BaseException:
        ranks.close()
        raise


def check_ranks(config: EngineConfig) -> None:
    """Raise ValueError, one sentence, for what several ranks cannot serve, before any of them is started."""
    kind = draft_kind(config.draft)
    if config.enable_lora:
        raise ValueError("--enable-lora cannot be used with several ranks; name the adapters when the engine starts")
    if kind is not None and kind.model_use == "target":
        raise ValueError(f"the draft {config.draft} uses layers of the target, which several ranks share")
    check_split(load_config(config.model), config.tensor_parallel_size, config.pipeline_parallel_size)


def load_part(config: EngineConfig, grid: Grid | None, *, by_layers: bool = False) -> Models:
    """What one rank holds of the target by its place among all, and the rest, which is whole; without a place all is.

    `by_layers`: of the target a layer is in memory at a time, read anew in each pass. Raises as `load_models` does.
    """
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    choose_kv_format(config.kv_cache_dtype, dtype)  # a wrong name is found before weights are read
    kind = draft_kind(config.draft)
    draft = _draft_folder(config, kind)
    for folder in (config.model, draft, *config.adapters.values()):
        if folder is not None and (Path(folder) / MANIFEST_NAME).exists():
            with ReadingProgress(f"checking {folder}", _weight_bytes(folder)) as progress:
                open_artifact(folder, verify=config.verify_artifact, heard=progress.heard)
    if draft is not None:
        check_same_vocabulary(config.model, draft)
    layout = WHOLE if grid is None else Split(grid.tensor, load_config(config.model), grid.stage)
    target = _load_target(config, dtype, device, layout, by_layers)
    drafting = _load(draft, config, dtype, device).trim_head().fuse() if draft is not None else None
    return Models(
        target=target,
        tokenizer=Tokenizer.load(config.model),
        draft=drafting,
        share_cache=drafting is not None and grid is None and can_share_cache(target, drafting, dtype, device),
        cache_scales=target.cache_scales,
        dtype=dtype,
        device=device,
    )


def _draft_folder(config: EngineConfig, kind: type[Draft] | None) -> str | None:
    """The folder of the model that drafts, if one does."""
    if config.draft_layers is not None and (kind is None or kind.model_use != "target"):
        raise ValueError(f"draft_layers is for drafts of the target's own layers, not for {config.draft or 'no draft'}")
    if kind is not None and kind.model_use == "optional":
        return config.draft_model
    if config.draft_model is not None:
        raise ValueError(f"a draft model cannot be used beside the draft {config.draft}")
    return config.draft if kind is not None and kind.model_use == "needed" else None


def _load_target(
    config: EngineConfig, dtype: torch.dtype, device: torch.device, layout: Layout, by_layers: bool
) -> Transformer:
    folders = list(config.adapters.values())
    for folder in folders:
        check_base(folder, config.model)
    model = _load(config.model, config, dtype, device, layout, by_layers)
    if config.activations != "auto" and not quantized_layers(model):
        raise ValueError(f"activations are rounded beside weights in 4 or 8 bits, and {config.model} has none")
    if (folders or config.enable_lora) and adapted_layers(model):
        raise ValueError(f"{config.model} carries an adapter itself; serve its base, and name this adapter too")
    if config.enable_lora:
        return model.fuse(AdapterRoom(config.max_loras, config.max_lora_rank))
    return model.fuse(load_adapters(model, folders, layout))


def _load(
    folder: str,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    layout: Layout = WHOLE,
    by_layers: bool = False,
) -> Transformer:
    if by_layers:
        return passing(*open_published(Path(folder), dtype, device, layout))
    with ReadingProgress(f"loading {folder}", _weight_bytes(folder)) as progress:
        model = load_model(folder, dtype=dtype, device=device, heard=progress.heard, layout=layout)
    if config.activations != "auto":
        try:
            round_activations(model)
        except ValueError as reason:
            raise ValueError(f"{reason} Leave activations at auto.") from None
    return model


def _weight_bytes(folder: str) -> int:
    """Of all weights in a folder, an adapter's base included."""
    return sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))


def load_weights(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """The tensors of another model of the same configuration. ValueError with one sentence for one of another."""
    if (Path(folder) / MANIFEST_NAME).exists():
        open_artifact(folder)
    model = load_model(folder, dtype=dtype, device=device)
    if model.config != config:
        raise ValueError(f"{folder} holds a model of another configuration than the one that is served")
    if quantized_layers(model) or adapted_layers(model) or config.draft_vocabulary:
        raise ValueError(f"{folder} holds quantized weights, an adapter or a draft vocabulary; weights must be whole")
    return dict(model.named_parameters())


def check_same_vocabulary(model: str, draft: str) -> None:
    """Raise ValueError unless every token means the same to both; how far embeddings are padded does not matter."""
    if difference := vocabulary_difference(model, draft, names=("the target", "the draft")):
        raise ValueError(f"{draft} cannot draft for {model}, because their vocabularies differ: {difference}")


def count_pages(config: EngineConfig, models: Models, bytes_per_token: int) -> int:
    """KV pages that the options and the memory allow. ValueError when not even one fits.

    `bytes_per_token`: as `Models.kv_bytes_per_token` has it.
    """
    page_bytes = PAGE_SIZE * bytes_per_token
    if config.num_pages is not None:
        num_pages = config.num_pages
    elif page_bytes == 0:
        num_pages = _useful_pages(config, models.target.config)
    elif config.kv_cache_bytes is not None:
        num_pages = config.kv_cache_bytes // page_bytes
    elif models.device.type == "cuda":
        num_pages = _pages_in(_free_gpu_bytes(config, models), page_bytes, config, models)
    else:
        affordable = min(CPU_KV_CACHE_BYTES, _available_bytes() // 4 // config.num_ranks) // page_bytes
        num_pages = min(affordable, _useful_pages(config, models.target.config))
    if num_pages < 1:
        raise ValueError(f"there is no memory for KV pages: one of {PAGE_SIZE} tokens takes {page_bytes} bytes")
    return num_pages if models.ranks is None else models.ranks.fewest_pages(num_pages)


def most_draft_tokens(config: EngineConfig, models: Models) -> int:
    """The longest draft that a step may verify; 0 without a draft."""
    if config.draft is None and models.draft is None:
        return 0
    return config.num_speculative_tokens or MAX_DRAFT_TOKENS


def choose_max_model_len(config: EngineConfig, model: ModelConfig, num_pages: int) -> int:
    """Most tokens of one sequence: it must fit the pages all alone, so that somebody can always go on."""
    trained, held = model.num_positions, num_pages * PAGE_SIZE
    wanted = config.max_model_len
    if wanted is None:
        return min(trained, held)
    if not 2 <= wanted <= trained:
        raise ValueError(f"max_model_len must be between 2 and the {trained} positions of the model, not {wanted}")
    if wanted > held:
        raise ValueError(f"max_model_len {wanted} does not fit the {num_pages} KV pages, which hold {held} tokens")
    return wanted


def _useful_pages(config: EngineConfig, model: ModelConfig) -> int:
    """Pages that every sequence could fill at once."""
    return config.max_num_seqs * pages_for(config.max_model_len or model.num_positions)


def _free_gpu_bytes(config: EngineConfig, models: Models) -> int:
    """Bytes of the granted share of the GPU that weights and a step's largest temporaries leave."""
    torch.cuda.empty_cache()  # what torch keeps of unfused weights is free, though the driver does not know it
    free, total = torch.cuda.mem_get_info(models.device)
    rows = num_distributions(config, most_draft_tokens(config, models))
    tokens = config.max_num_batched_tokens
    temporaries = step_bytes(models.target.config, models.dtype, tokens=tokens, rows=rows)
    return bytes_for_pages(config, total, total - free, temporaries)


def num_distributions(config: EngineConfig, most_drafts: int) -> int:
    """Rows over the vocabulary that a step may hold: scores, distributions, counts; both models' of draft tokens."""
    return config.max_num_seqs * (5 + 2 * most_drafts)


def bytes_for_pages(config: EngineConfig, total: int, used: int, temporaries: int) -> int:
    """Of a GPU's `total` what its granted share leaves beside what is `used`, a step's temporaries and its graphs."""
    sizes = captured_sizes(config.max_num_seqs), captured_token_counts(config.max_num_batched_tokens)
    graphs = BYTES_PER_GRAPH * sum(map(len, sizes))
    return int(total * config.gpu_memory_utilization) - used - temporaries - graphs


def _pages_in(num_bytes: int, page_bytes: int, config: EngineConfig, models: Models) -> int:
    """Pages that fit beside the lists of visible slots, which are as long as the longest sequence may be."""
    rows, most_drafts = 1 + config.max_num_seqs, most_draft_tokens(config, models)
    longest = config.max_model_len or models.target.config.num_positions
    lists = models.visible_list_bytes(rows=rows, tokens=longest + most_drafts + PAGE_SIZE)
    beside = (num_bytes - lists) // page_bytes
    if config.max_model_len is not None:
        return beside
    # No sequence is longer than all pages, and then neither is a list.
    lists, drafts = (models.visible_list_bytes(rows=rows, tokens=n) for n in (PAGE_SIZE, most_drafts + PAGE_SIZE))
    return max(beside, (num_bytes - drafts) // (page_bytes + lists))


def _available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
