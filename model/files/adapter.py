"""Adapter folders: `adapter_config.json` and `adapter_model.safetensors`, as peft writes and reads them.

    base_model.model.LAYER.lora_A.weight             [r, K] fp32
    base_model.model.LAYER.lora_B.weight             [N, r] fp32
    base_model.model.LAYER.lora_magnitude_vector     [N] fp32: DoRA
    base_model.model.LAYER.lora_embedding_A, _B      [r, V], [D, r]: embeddings

An adapter that potstill publishes lies beside its base, a model folder of its own called `base`, and names the base's
digest among its parents (model/files/artifact.py). It also serves with any other folder of the same base.

Legend: N output features, K input features, r rank, V vocabulary, D hidden size.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model.adapter_slots import AdapterSlots
from model.files.artifact import MANIFEST_NAME, open_artifact
from model.files.safe_io import read_json_object, sync_file, write_json
from model.lora import (
    EmbeddingLora,
    Lora,
    LoraConfig,
    LoraError,
    adaptable_layers,
    adapted_layers,
    attach_lora,
    detach_lora,
)
from model.tensor_parallel import WHOLE, Layout, Part
from model.unmade import when_made

log = logging.getLogger(__name__)

CONFIG_NAME, WEIGHTS_NAME, BASE_NAME = "adapter_config.json", "adapter_model.safetensors", "base"
_PREFIX = "base_model.model."
_SUFFIXES = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
}
# Each makes an adapter that does something other than y = W x + s·B A x, unless it is empty.
_UNSUPPORTED = (
    "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias", "layer_replication",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "use_qalora", "use_bdlora",
    "arrow_config", "kasa_config", "velora_config", "monteclora_config", "megatron_config",
)  # fmt: skip
_MOST_CONFIG_BYTES, _MOST_HEADER_BYTES = 1 << 20, 1 << 22
_HARMLESS_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base as it is."""


class AdapterError(LoraError):
    """An adapter folder that cannot be read or written faithfully, or is of another base."""


@dataclass(frozen=True)
class LayerAdapter:
    """The adapter of one layer, on the CPU."""

    a: Tensor
    """fp32 [r, K]; [r, V] of embeddings."""
    b: Tensor
    """fp32 [N, r]; [D, r] of embeddings."""
    magnitude: Tensor | None = None
    """fp32 [N]: DoRA."""


@dataclass(frozen=True)
class Adapter:
    """What an adapter folder holds."""

    config: LoraConfig
    layers: dict[str, LayerAdapter]
    """By the layer's name in the model."""


def base_folder(folder: str | Path) -> Path:
    """Where the weights of a model folder lie: in `base` of one that holds an adapter, else in the folder itself.

    Raises AdapterError for an adapter without its base.
    """
    folder = Path(folder)
    if not (folder / CONFIG_NAME).exists():
        return folder
    if not (folder / BASE_NAME / "config.json").exists():
        raise AdapterError(f"{folder} holds an adapter without its base; name the model that it was trained on.")
    return folder / BASE_NAME


def read_adapter(folder: str | Path) -> Adapter:
    """Reads an adapter folder. Raises AdapterError naming the file and what is wrong or not supported."""
    folder = Path(folder)
    raw = read_json_object(folder / CONFIG_NAME, AdapterError)
    _check_supported(folder / CONFIG_NAME, raw)
    layers = _read_layers(folder / WEIGHTS_NAME)
    try:
        config = LoraConfig(
            rank=int(raw["r"]),
            alpha=float(raw["lora_alpha"]),
            dropout=float(raw.get("lora_dropout") or 0.0),
            rslora=bool(raw.get("use_rslora")),
            dora=bool(raw.get("use_dora")),
            targets=tuple(layers),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as reason:
        raise AdapterError(f"{folder / CONFIG_NAME} describes no adapter: {reason}") from None
    for name, tensors in layers.items():
        _check_layer(folder / WEIGHTS_NAME, name, tensors, config)
    return Adapter(config, layers)


def load_adapter(model: nn.Module, folder: str | Path, layout: Layout = WHOLE) -> LoraConfig:
    """Attaches the adapter in `folder` to the model, which keeps its dtype and device; returns its configuration.

    `layout`: by which the model was loaded. Raises AdapterError for a folder that cannot be read or does not fit the
    model, LoraError if the model has one.
    """
    adapter = read_adapter(folder)
    whole = adaptable_layers(layout.whole(model))
    for name, tensors in adapter.layers.items():
        _check_fits(Path(folder), name, tensors, whole.get(name))
    places = {name: place for name in adapter.layers if (place := layout.place(name)) is not None}
    if places:
        attach_lora(model, replace(adapter.config, targets=tuple(places.values())))
    held = {place: _part(Path(folder), name, adapter.layers[name], layout) for name, place in places.items()}
    when_made(model, partial(_copy, held=held))
    return adapter.config


@torch.no_grad()
def _copy(part: nn.Module, prefix: str, *, held: dict[str, LayerAdapter]) -> None:
    """To the adapters of a part of the model."""
    for name, layer in adapted_layers(part, prefix).items():
        for leaf in ("a", "b", "magnitude"):
            if (own := getattr(layer.lora, leaf)) is not None:
                own.copy_(getattr(held[name], leaf))


def _part(folder: Path, name: str, tensors: LayerAdapter, layout: Layout) -> LayerAdapter:
    """What a layer's part needs of its adapter."""
    part = layout.part(f"{name}.weight", (tensors.b.shape[0], tensors.a.shape[1]))
    if part == Part():
        return tensors
    if tensors.magnitude is not None or not name.startswith("model.layers."):
        kind = "is a DoRA adapter" if tensors.magnitude is not None else f"adapts {name}"
        raise AdapterError(f"{folder} {kind}; such a one is not served by several ranks.")
    a, b = (layout.part(f"{name}.lora.{leaf}", one.shape).of(one) for leaf, one in (("a", tensors.a), ("b", tensors.b)))
    return LayerAdapter(a, b)


def load_adapters(
    model: nn.Module, folders: Sequence[str | Path], layout: Layout = WHOLE
) -> list[dict[nn.Module, Lora]]:
    """The adapters in `folders`, for `Transformer.fuse`: tokens choose among them. The model stays as it is.

    `layout` as in `load_adapter`. Raises what that does, and AdapterError for one of the embeddings or the head.
    """
    choices = []
    for folder in folders:
        load_adapter(model, folder, layout)
        adapted = adapted_layers(model)
        detached = {layer: layer.lora for layer in adapted.values()}
        detach_lora(model)
        if outside := [name for name in adapted if not name.startswith("model.layers.")]:
            raise AdapterError(
                f"{folder} adapts {outside[0]}; adapters to choose from may only adapt linear layers of the decoder."
            )
        choices.append(detached)
    return choices


def read_adapter_for(slots: AdapterSlots, folder: str | Path) -> Adapter:
    """The adapter in `folder`, checked so that it can be written into a slot of a model.

    Raises what `read_adapter` does, and AdapterError for one that does not fit or whose values are not finite. Files
    that are larger than any that fits are not read.
    """
    folder = Path(folder)
    _check_size(folder / CONFIG_NAME, _MOST_CONFIG_BYTES)
    _check_size(folder / WEIGHTS_NAME, _MOST_HEADER_BYTES + 8 * slots.most_values)
    adapter = read_adapter(folder)
    if adapter.config.dora:
        raise AdapterError(f"{folder} is a DoRA adapter; such a one can only be served without slots that change.")
    if adapter.config.rank > slots.max_rank:
        raise AdapterError(f"{folder} has rank {adapter.config.rank}; the most that fits here is {slots.max_rank}.")
    for name, tensors in adapter.layers.items():
        if name not in slots.places:
            raise AdapterError(f"{folder} adapts {name}, which is no linear layer of this model's decoder.")
        _check_fits(folder, name, tensors, slots.places[name])
        if not all(torch.isfinite(factor.to(slots.dtype)).all() for factor in (tensors.a, tensors.b)):
            raise AdapterError(f"{folder} adapts {name} with values that are not finite in {slots.dtype}.")
    return adapter


def _check_size(path: Path, most_bytes: int) -> None:
    if not path.is_file():
        raise AdapterError(f"{path} does not exist.")
    if (size := path.stat().st_size) > most_bytes:
        raise AdapterError(f"{path} has {size} bytes; the largest that fits this model here has {most_bytes}.")


def save_adapter(model: nn.Module, folder: str | Path, config: LoraConfig, *, base: str = "") -> None:
    """Writes the model's adapter, made by `config`, for `load_adapter` and peft; all is on the disk on return.

    `base` is the name or path of the base that other tools will look for. Raises AdapterError if the model has no
    adapter, values are not finite, or the folder holds one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / WEIGHTS_NAME).exists():
        raise AdapterError(f"{folder} already holds an adapter; save into an empty folder.")
    adapted = adapted_layers(model)
    if not adapted:
        raise AdapterError("The model has no adapter to save.")
    tensors = {key: tensor for name, layer in adapted.items() for key, tensor in _to_file(name, layer.lora).items()}
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise AdapterError(f"{key} holds values that are not finite; nothing is saved.")
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    sync_file(folder / WEIGHTS_NAME)
    write_json(folder / CONFIG_NAME, _config_to_file(config, _module_names(model, adapted), base))
    sync_file(folder)


def check_base(adapter: str | Path, base: str | Path) -> None:
    """Raises AdapterError if the adapter in one folder was trained on another base than that in the other.

    Published artifacts tell by their digests. A folder of other tools names none: then only shapes can be compared. On
    the model that was quantized to make its base an adapter still serves, and a warning says that it is another one.
    """
    if not (Path(adapter) / MANIFEST_NAME).exists():
        return
    parents = open_artifact(adapter, verify=False).parents
    if not (Path(base) / MANIFEST_NAME).exists():
        log.warning("%s has no %s, so nothing shows that %s was trained on it.", base, MANIFEST_NAME, adapter)
        return
    digest = open_artifact(base, verify=False).digest
    if digest not in parents:
        trained_on = ", ".join(parent[:12] for parent in parents) or "no base that it names"
        raise AdapterError(f"{adapter} was trained on {trained_on}, not on {base}, which is {digest[:12]}.")
    own = Path(adapter) / BASE_NAME
    if (own / MANIFEST_NAME).exists() and open_artifact(own, verify=False).digest != digest:
        log.warning("%s was trained on the quantized %s; on %s it computes something else.", adapter, own, base)


def _check_supported(path: Path, raw: dict[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{path} has peft_type {raw.get('peft_type')!r}; only 'LORA' can be read.")
    if raw.get("bias", "none") != "none":
        raise AdapterError(f"{path} has bias {raw['bias']!r}; trained biases cannot be read, only 'none'.")
    for field in _UNSUPPORTED:
        if raw.get(field):
            raise AdapterError(f"{path} sets {field}, which potstill does not support.")
    start = raw.get("init_lora_weights", True)
    if start not in _HARMLESS_STARTS:
        raise AdapterError(
            f"{path} has init_lora_weights {start!r}, which changes the base too; save the changed base, and set it to "
            "true here."
        )


def _read_layers(path: Path) -> dict[str, LayerAdapter]:
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise AdapterError(f"{path} does not exist.") from None
    except SafetensorError as reason:
        raise AdapterError(f"{path} is not a valid safetensors file: {reason}.") from None
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        suffix = next((suffix for suffix in _SUFFIXES if key.endswith(suffix)), None)
        if suffix is None or not key.startswith(_PREFIX):
            raise AdapterError(f"{path} holds {key}, which is no part of a LoRA adapter.")
        name = key.removeprefix(_PREFIX).removesuffix(suffix)
        found.setdefault(name, {})[_SUFFIXES[suffix]] = tensor.float()
    if not found:
        raise AdapterError(f"{path} holds no adapter.")
    for name, parts in found.items():
        if "a" not in parts or "b" not in parts:
            raise AdapterError(f"{path} holds only one of the two factors of {name}.")
    return {name: LayerAdapter(**parts) for name, parts in found.items()}


def _check_layer(path: Path, name: str, tensors: LayerAdapter, config: LoraConfig) -> None:
    a, b = tensors.a, tensors.b
    if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] == config.rank:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise AdapterError(f"{path} holds {name} with factors {shapes}; {CONFIG_NAME} says r = {config.rank}.")
    if (tensors.magnitude is not None) != config.dora:
        has = "lacks the magnitudes" if config.dora else "has magnitudes"
        raise AdapterError(f"{path} {has} of {name}, but {CONFIG_NAME} says use_dora = {config.dora}.")
    if tensors.magnitude is not None and tensors.magnitude.shape != b.shape[:1]:
        raise AdapterError(f"{path} holds {list(tensors.magnitude.shape)} magnitudes for the {len(b)} rows of {name}.")


def _check_fits(folder: Path, name: str, tensors: LayerAdapter, layer: Any) -> None:
    if layer is None:
        raise AdapterError(f"{folder} adapts {name}, a layer that this model does not have.")
    if isinstance(layer, nn.Embedding):
        wanted = layer.num_embeddings, layer.embedding_dim
    else:
        wanted = layer.in_features, layer.out_features
    found = tensors.a.shape[1], tensors.b.shape[0]
    if found != wanted:
        raise AdapterError(
            f"{folder} adapts {name} with {found[0]} inputs and {found[1]} outputs; this model's has {wanted[0]} and "
            f"{wanted[1]}."
        )


def _to_file(name: str, lora: Lora) -> dict[str, Tensor]:
    suffixes = (".lora_A.weight", ".lora_B.weight")
    if isinstance(lora, EmbeddingLora):
        suffixes = (".lora_embedding_A", ".lora_embedding_B")
    tensors = dict(zip(suffixes, (lora.a, lora.b), strict=True))
    if lora.magnitude is not None:
        tensors[".lora_magnitude_vector"] = lora.magnitude
    return {f"{_PREFIX}{name}{end}": tensor.detach().float().cpu().contiguous() for end, tensor in tensors.items()}


def _module_names(model: nn.Module, adapted: dict[str, Any]) -> list[str]:
    """The shortest names by which peft finds exactly these layers: a kind where all of it are adapted."""
    others = {name.rpartition(".")[2] for name in adaptable_layers(model) if name not in adapted}
    kinds = ((name, name.rpartition(".")[2]) for name in adapted)
    return sorted({name if kind in others else kind for name, kind in kinds})


def _config_to_file(config: LoraConfig, targets: list[str], base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
