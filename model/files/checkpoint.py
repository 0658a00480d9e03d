"""Model folders as Hugging Face writes them: config.json, safetensors in one file or in shards, generation_config.json.

Reading is strict: the folder must hold exactly the tensors that the configuration calls for, each of the right shape.
Linear weights may be in one of the formats of model/formats. A folder may also hold an adapter and, below it, the base
that it belongs to (model/files/adapter.py): it opens as the base with the adapter attached.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from model.config import ModelConfig
from model.config_fields import ConfigError, check_token_ids
from model.files.adapter import base_folder, check_base, load_adapter
from model.files.cache_scales import CACHE_SCALES, cache_scale_tensors, read_cache_scales, with_cache_scheme
from model.files.safe_io import CheckpointError, Heard, read_json_object, sync_file, write_json
from model.formats.base import FormatOfLayer, QuantizedMatrix, WeightFormat
from model.formats.registry import formats_of_config
from model.kv_format import FixedScales
from model.linear import Embedding, Linear
from model.lora import adapted_layers
from model.mlp import Scores
from model.quantized import quantized_layers, set_quantized
from model.tensor_parallel import WHOLE, Layout
from model.transformer import Transformer

log = logging.getLogger(__name__)
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
EMBEDDING, HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYERS = "model.layers."
# A header names tensors only: 16 MiB is a hundred times what the largest known model needs.
MAX_HEADER_BYTES = 16 << 20
_TABLES = 2048
"""About so many bytes of codebooks and descriptions are stored with a quantized weight."""
# Early Llama checkpoints store the rotary frequencies, which config.json already defines; scales of caches are apart.
_NO_WEIGHTS = (".rotary_emb.inv_freq", *CACHE_SCALES)
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_config(folder: str | Path) -> ModelConfig:
    """The configuration in a model folder; the end-of-text tokens of `generation_config.json` go before its own."""
    folder = base_folder(folder)
    raw = read_json_object(folder / "config.json", CheckpointError)
    formats_of_config(folder, raw)
    try:
        config = ModelConfig.from_hf(raw)
    except ConfigError as error:
        raise ConfigError(f"In {folder}, {error}") from None
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = read_json_object(generation, CheckpointError).get("eos_token_id")
        check_token_ids("eos_token_id", eos, "generation_config.json")
        if eos is not None:
            config = replace(config, eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,))
    return config


def formats_of_folder(folder: str | Path) -> FormatOfLayer | None:
    """The format of each layer of a model folder; None if all are dense, CheckpointError for an unknown one."""
    folder = base_folder(folder)
    return formats_of_config(folder, read_json_object(folder / "config.json", CheckpointError))


def formats_by_layer(folder: str | Path) -> dict[str, WeightFormat[Any]]:
    """Of the quantized layers of a model folder, by their names in the model."""
    folder = base_folder(folder)
    with torch.device("meta"):
        model = Transformer(load_config(folder))
    stored = _stored_formats(model, formats_of_folder(folder), TensorFiles(folder))
    return {name.removesuffix(".weight"): format for name, format in stored.items()}


def is_quantized(folder: str | Path) -> bool:
    """Whether a model folder holds quantized weights; CheckpointError for a format that is not known."""
    return formats_of_folder(folder) is not None


class TensorFiles:
    """The tensors of a model folder, by their names in the model, to be read one at a time."""

    def __init__(self, folder: str | Path, heard: Heard = lambda num_bytes: None) -> None:
        """Raises CheckpointError where there are none, or the index and the files disagree."""
        self._kind = load_config(folder).kind
        self.places = {self._kind.name_in_model(name): path for name, path in _tensor_files(Path(folder)).items()}
        self._heard = heard

    def read(self, name: str) -> Tensor:
        """A tensor as it is in its file, on the CPU; CheckpointError if there is none of that name."""
        if name not in self.places:
            raise CheckpointError(f"The model's files lack the tensor {name}.")
        with _open_safetensors(self.places[name]) as file:
            tensor = file.get_tensor(self._kind.name_in_files(name))
        self._heard(tensor.nbytes)
        return tensor


def dense_sources(folder: str | Path) -> dict[str, Callable[[], Tensor]]:
    """Every tensor of a folder of dense weights, in the order of `tensor_shapes`, to be read when it is called.

    Raises CheckpointError as `load_model` does: for names at once, for a tensor when it is read.
    """
    folder = Path(folder)
    config, files = load_config(folder), TensorFiles(folder)
    shapes = tensor_shapes(config)
    _check_names(folder, config, shapes.keys(), files.places)
    if config.tie_word_embeddings and HEAD in files.places:
        _check_tied_head(files)
    return {name: partial(_read_dense, files, name, shape) for name, shape in shapes.items()}


def _read_dense(files: TensorFiles, name: str, shape: torch.Size) -> Tensor:
    tensor = files.read(name)
    _check_tensor(f"{files.places[name]} holds {name}", tensor, shape)
    return tensor


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    device: str | torch.device = "cpu",
    heard: Heard = lambda num_bytes: None,
    layout: Layout = WHOLE,
) -> Transformer:
    """Opens an artifact or any Hugging Face folder of a known family, in evaluation mode: a trainer asks for its own.

    Tensors go one by one from the file to the device, so memory holds the model once; `heard` is told each one's bytes.
    `dtype="auto"` keeps the dtype of the file (of its embeddings, or of its norms where those are quantized); quantized
    weights stay as they are. `layout`: which part of them is kept. Raises ConfigError or CheckpointError naming the
    field, file or tensor that is wrong, AdapterError for an adapter that does not belong to the base beside it.
    """
    base = base_folder(folder)
    model = _load_base(base, dtype, device, heard, layout)
    if base != Path(folder):
        check_base(folder, base)
        load_adapter(model, folder, layout)
    return model.eval()


def open_layerwise(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    layout: Layout = WHOLE,
) -> tuple[Transformer, Callable[[int], None]]:
    """A folder as a model whose decoder layers hold no memory yet, and what loads one by its number.

    `layout`: which part of it is kept, of all layers. Raises as `load_model` does: for names at once, for a tensor when
    it is read.
    """
    model, load = _open(Path(folder), dtype, device, layout=layout)
    load(lambda name: not name.startswith(_LAYERS))
    return model.eval(), lambda number: load(lambda name: name.startswith(f"{_LAYERS}{number}."))


def _load_base(
    folder: Path, dtype: torch.dtype | Literal["auto"], device: str | torch.device, heard: Heard, layout: Layout
) -> Transformer:
    model, load = _open(folder, dtype, device, heard, layout)
    load(lambda name: True)
    return model


def _open(
    folder: Path,
    dtype: torch.dtype | Literal["auto"],
    device: str | torch.device,
    heard: Heard = lambda num_bytes: None,
    layout: Layout = WHOLE,
) -> tuple[Transformer, Callable[[Callable[[str], bool]], None]]:
    """A model without any memory, and what loads those weights whose names in the whole model it is asked for."""
    config = load_config(folder)
    files = TensorFiles(folder, heard)
    with torch.device("meta"):
        model = Transformer(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    formats = _stored_formats(model, formats_of_folder(folder), files)
    stored = {name: format.stored_names(name) for name, format in formats.items()}
    names = {name for name in shapes if name in stored.get(name, (name,))}
    known = {piece for pieces in stored.values() for piece in pieces if piece in files.places}
    _check_names(folder, config, names | known, files.places)
    wanted = _resolve_dtype(dtype, files)
    with torch.device("meta"):
        model = layout.arrange(model)
    places = {name: place for name in shapes if (place := layout.place(name)) is not None}

    def load(is_asked: Callable[[str], bool]) -> None:
        for name in [name for name in places if name not in formats and is_asked(name)]:
            tensor = files.read(name)
            _check_tensor(f"{files.places[name]} holds {name}", tensor, shapes[name])
            part = layout.part(name, shapes[name]).of(tensor)
            _set_parameter(model, places[name], torch.empty(part.shape, dtype=wanted, device=device).copy_(part))
        for name, format in [(name, formats[name]) for name in formats if name in places and is_asked(name)]:
            weight = format.from_files(name, shapes[name], files.read)
            try:
                weight = layout.part(name, shapes[name]).of_quantized(weight, format)
            except ValueError as reason:
                raise CheckpointError(f"{name} cannot be split over ranks: {reason}.") from None
            set_quantized(model, places[name].removesuffix(".weight"), format.moved(weight, device), format)

    if config.tie_word_embeddings and HEAD in files.places:
        _check_tied_head(files)
    quantization = read_json_object(folder / "config.json", CheckpointError).get("quantization_config") or {}
    model.cache_scales = layout.cache_scales(read_cache_scales(config, quantization, files.places, files.read))
    return model, load


def save_model(
    model: Transformer,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    cache_scales: Sequence[FixedScales] = (),
) -> None:
    """Writes a folder that transformers, vLLM and `load_model` open; everything is on the disk on return.

    `dtype` None keeps the model's; quantized weights stay as they are. `cache_scales`: for a cache in 8 bits, of each
    layer; the model's own only where the weights are still those that they were calibrated for. Raises CheckpointError
    for a fused model, one with an adapter, weights that are not finite, or a folder that already holds weights.
    """
    if adapted := adapted_layers(model):
        raise CheckpointError(
            f"The model has an unmerged adapter, on {next(iter(adapted))} among others; merge it, or save it by itself "
            "with save_adapter."
        )
    if model.cache_scales and not cache_scales:
        log.info("Scales of keys and values are not written: they were calibrated for the weights as they came.")
    weights: dict[str, Tensor | QuantizedMatrix] = {name: weight.detach() for name, weight in model.named_parameters()}
    quantized = {f"{name}.weight": layer for name, layer in quantized_layers(model).items()}
    weights |= {name: layer.weight for name, layer in quantized.items()}
    shapes = tensor_shapes(model.config)
    if weights.keys() != shapes.keys():
        raise CheckpointError("Only a model in its training form can be saved, not one that fuse() has changed.")
    write_checkpoint(
        folder,
        model.config,
        {name: partial(weights.__getitem__, name) for name in shapes},
        dtype=dtype or model.dtype,
        max_shard_bytes=max_shard_bytes,
        formats={name: layer.format for name, layer in quantized.items()},
        cache_scales=cache_scales,
    )


def write_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    sources: Mapping[str, Callable[[], Tensor | QuantizedMatrix]],
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = 5_000_000_000,
    formats: Mapping[str, WeightFormat[Any]] | None = None,
    cache_scales: Sequence[FixedScales] = (),
) -> None:
    """Writes config.json, weights and generation_config.json; `sources[name]()` makes one tensor when its turn comes.

    `formats`: of those that make quantized weights. At most one shard is in memory at a time. See `save_model` for the
    errors.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("model*.safetensors*")):
        raise CheckpointError(f"{folder} already holds weights; save into an empty folder.")
    shapes, formats = tensor_shapes(config), formats or {}
    quantization = _quantization(config, formats, dtype, cache_scales)
    sizes = {
        name: formats[name].num_bytes(shape) + _TABLES if name in formats else shape.numel() * dtype.itemsize
        for name, shape in shapes.items()
    }
    shards = _plan_shards(sizes, max_shard_bytes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE_NAME]
    weight_map: dict[str, str] = {}
    total = 0
    for file_name, shard in zip(names, shards, strict=True):
        tensors = cache_scale_tensors(cache_scales) if file_name == names[-1] else {}
        for name in shard:
            prepared = _prepare(name, sources[name](), shapes[name], dtype, formats.get(name))
            tensors |= {config.kind.name_in_files(name): tensor for name, tensor in prepared.items()}
        _save_shard(folder / file_name, tensors)
        weight_map |= dict.fromkeys(tensors, file_name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_configs(folder, config, dtype, quantization)
    sync_file(folder)


def replace_config(folder: str | Path, config: ModelConfig) -> None:
    """Another configuration for the weights in `folder`; what its config.json says of how they are stored remains."""
    path = Path(folder) / "config.json"
    write_json(path, read_json_object(path, CheckpointError) | config.to_hf())


def _write_configs(folder: Path, config: ModelConfig, dtype: torch.dtype, quantization: dict[str, Any]) -> None:
    dtype_name = str(dtype).removeprefix("torch.")
    # transformers 5 reads `dtype`, earlier releases and most servers `torch_dtype`.
    fields = {"dtype": dtype_name, "torch_dtype": dtype_name} | quantization
    write_json(folder / "config.json", config.to_hf() | fields)
    write_json(folder / "generation_config.json", _generation_config(config))


def _quantization(
    config: ModelConfig,
    formats: Mapping[str, WeightFormat[Any]],
    dtype: torch.dtype,
    cache_scales: Sequence[FixedScales],
) -> dict[str, Any]:
    """What config.json adds for quantized weights and scales of caches."""
    if not formats:
        return with_cache_scheme({}, cache_scales)
    with torch.device("meta"):  # what routes to experts is a linear layer for others
        modules = Transformer(config).named_modules()
        linear = [name for name, module in modules if isinstance(module, Linear | Scores)]
    in_files = config.kind.name_in_files
    dense = {in_files(name) for name in [*linear, "lm_head"] if f"{name}.weight" not in formats}
    layers = {in_files(name.removesuffix(".weight")): format for name, format in formats.items()}
    entry = next(iter(layers.values())).entry_of_layers(layers, dtype, dense)
    return {"quantization_config": with_cache_scheme(entry, cache_scales)}


def tensor_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Name and shape of every tensor in a checkpoint of this configuration, in the order of the model's layers."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Transformer(config).named_parameters()}


def _resolve_dtype(dtype: torch.dtype | Literal["auto"], files: TensorFiles) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        raise CheckpointError(f'dtype must be a torch.dtype or "auto", not {dtype!r}.')
    found = files.read(EMBEDDING).dtype if EMBEDDING in files.places else None
    return found if found in FLOATING else files.read(_NORM).dtype


def _stored_formats(
    model: Transformer, formats: FormatOfLayer | None, files: TensorFiles
) -> dict[str, WeightFormat[Any]]:
    """By the names of the weights that the files hold quantized."""
    layers = [name for name, module in model.named_modules() if isinstance(module, Linear | Embedding)]
    in_files = model.config.kind.name_in_files
    named = {f"{name}.weight": one for name in layers if formats and (one := formats(in_files(name))) is not None}
    return {name: format for name, format in named.items() if format.stored_names(name)[-1] in files.places}


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Maps each tensor's name to the file that holds it."""
    if (folder / SINGLE_NAME).exists():
        return dict.fromkeys(_names_in(folder / SINGLE_NAME), folder / SINGLE_NAME)
    if not (folder / INDEX_NAME).exists():
        raise CheckpointError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}.")
    weight_map = read_json_object(folder / INDEX_NAME, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{folder / INDEX_NAME} has no weight_map.")
    files: dict[str, Path] = {}
    for shard in sorted({str(shard) for shard in weight_map.values()}):
        if Path(shard).name != shard:
            raise CheckpointError(f"{folder / INDEX_NAME} points outside its folder: {shard!r}.")
        for name in _names_in(folder / shard):
            if weight_map.get(name) != shard:
                raise CheckpointError(f"{folder / shard} holds {name}, which {INDEX_NAME} does not place there.")
            files[name] = folder / shard
    if missing := sorted(weight_map.keys() - files.keys()):
        raise CheckpointError(f"{folder / weight_map[missing[0]]} lacks {missing[0]}, which {INDEX_NAME} places there.")
    return files


def _names_in(path: Path) -> list[str]:
    with _open_safetensors(path) as file:
        return list(file.keys())


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with open(path, "rb") as raw:
            header_bytes = int.from_bytes(raw.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} claims a header of {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}.")
        opened = safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except SafetensorError as reason:
        raise CheckpointError(f"{path} is not a valid safetensors file: {reason}.") from None
    with opened as file:
        yield file


def _check_names(folder: Path, config: ModelConfig, names: Set[str], files: Mapping[str, Path]) -> None:
    missing = sorted(names - files.keys())
    if missing:
        raise CheckpointError(f"{folder} lacks the tensor {missing[0]}{_and_more(missing)}.")
    known = {*names, HEAD} if config.tie_word_embeddings else names
    extra = [name for name in files if name not in known and not name.endswith(_NO_WEIGHTS)]
    if extra:
        raise CheckpointError(
            f"{files[extra[0]]} holds the tensor {extra[0]}{_and_more(extra)}, which a {config.family} model of "
            "this configuration does not have."
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_tensor(what: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        raise CheckpointError(f"{what} with shape {list(tensor.shape)}; config.json calls for {list(shape)}.")
    if tensor.dtype not in FLOATING:
        raise CheckpointError(f"{what} in {tensor.dtype}; only plain floating-point weights can be read.")


def _check_tied_head(files: TensorFiles) -> None:
    """A file may repeat the tied head, but never with other values: one of the two would be silently lost."""
    if not torch.equal(files.read(HEAD), files.read(EMBEDDING)):
        raise CheckpointError(
            f"{files.places[HEAD]} holds {HEAD} with other values than {EMBEDDING}, though config.json says that "
            "they are tied (tie_word_embeddings)."
        )


def _set_parameter(model: nn.Module, name: str, tensor: Tensor) -> None:
    """In place of one that is trained or not."""
    module, _, leaf = name.rpartition(".")
    trained = model.get_parameter(name).requires_grad
    setattr(model.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=trained))


def _plan_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Splits the names in order; a shard is over the limit only when it holds a single tensor."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _prepare(
    name: str, weight: Any, shape: torch.Size, dtype: torch.dtype, format: WeightFormat[Any] | None
) -> dict[str, Tensor]:
    """The tensors to be stored for a parameter, by name."""
    if format is not None:
        stored = format.to_files(name, weight, dtype)
        # Both: a number may be stored as text, or be too large for what it is stored in.
        held = [*stored.values(), *(getattr(weight, field.name) for field in fields(weight))]
    else:
        _check_tensor(f"The model to save has {name}", weight, shape)
        stored = {name: weight.to(device="cpu", dtype=dtype).contiguous()}
        held = [*stored.values()]
    floats = (one.float() for one in held if isinstance(one, Tensor) and one.is_floating_point())
    if not all(torch.isfinite(one).all() for one in floats):
        raise CheckpointError(f"{name} holds values that are not finite in {dtype}; nothing is saved.")
    return stored


def _save_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    path.touch()
    mode = path.stat().st_mode  # as the umask wants it; safetensors would keep others from reading the file
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as reason:
        raise OSError(f"Writing {path} failed: {reason}") from None
    path.chmod(mode)
    sync_file(path)


def _generation_config(config: ModelConfig) -> dict[str, Any]:
    raw = config.to_hf()
    return {name: raw[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if raw[name] is not None}
