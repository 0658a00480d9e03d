"""Export of a Hugging Face folder of dense weights as one GGUF file that llama.cpp loads: the inverse of `reader.py`.

Matrices take the type that is asked for, everything else is fp32. As in llama.cpp's own files the matrix that makes
logits keeps more bits where others have 4, and rows that blocks of 256 do not divide are stored in blocks of 32.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from kernels.attention.rotary import rope_frequencies, rope_magnitude
from kernels.linear.quantization import IntegerWeight
from model.config import ModelConfig
from model.files.adapter import base_folder
from model.files.checkpoint import (
    EMBEDDING,
    HEAD,
    dense_sources,
    is_quantized,
    load_config,
    load_model,
    tensor_shapes,
)
from model.files.safe_io import sync_file
from model.formats.ggml import to_ggml
from model.formats.gguf.architectures import architecture_of, check_fits
from model.formats.gguf.blocks import BLOCK_TYPES
from model.formats.gguf.names import (
    LLAMA3_SCALING,
    LONGROPE_DIVISORS,
    ROPE_DIVISORS,
    ROPE_SCALING,
    as_stored,
    expert_of,
    gguf_name,
    is_router,
    stored_shape,
)
from model.quantized import quantized_layers
from model.text.gguf_tokenizer import GGUFError
from model.text.gguf_vocabulary import tokenizer_metadata

if TYPE_CHECKING:
    from gguf import GGUFWriter

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""For rows that a type's blocks do not divide; of other types F16."""


@dataclass(frozen=True)
class FileType:
    """How a file stores its matrices, by ggml's names of types."""

    number: int
    """llama.cpp's."""
    matrices: str
    head: str = ""
    """Of the matrix that makes logits; "" for that of the others."""
    sensitive: str = ""
    """Of values and down projections in half of the layers; "" for that of the others."""

    def of_tensor(self, name: str, config: ModelConfig, shape: Sequence[int]) -> str:
        """The type of a tensor by Hugging Face's name; vectors and routers are not quantized."""
        if len(shape) == 1 or is_router(name):
            return "F32"
        wanted = self.matrices
        if name == (EMBEDDING if config.tie_word_embeddings else HEAD):
            wanted = self.head or wanted
        elif ".v_proj." in name or ".down_proj." in name:
            layer = int(name.split(".")[2])
            wanted = self.sensitive if self.sensitive and _is_sensitive(layer, config.num_layers) else wanted
        while wanted in BLOCK_TYPES and shape[-1] % BLOCK_TYPES[wanted].num_weights:
            wanted = FALLBACKS.get(wanted, "F16")
        return wanted


def _is_sensitive(layer: int, num_layers: int) -> bool:
    """The first and the last eighth of the layers, and every third between; llama.cpp's use_more_bits."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


FILE_TYPES = {
    "bf16": FileType(32, "BF16"),
    "f16": FileType(1, "F16"),
    "f32": FileType(0, "F32"),
    "q8_0": FileType(7, "Q8_0"),
    "q6_k": FileType(18, "Q6_K"),
    "q4_k_m": FileType(15, "Q4_K", head="Q6_K", sensitive="Q6_K"),
    "q4_1": FileType(3, "Q4_1", head="Q6_K"),
    "q4_0": FileType(2, "Q4_0", head="Q6_K"),
}
"""What can be asked for of dense weights."""
BLOCKS = "blocks"
"""Of quantized ones: as they are, in the blocks that hold them."""
QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file, made when it is written: dense, or a matrix in its blocks, u8 [N, bytes of a row]."""

    name: str
    shape: tuple[int, ...]
    type: str
    """ggml's name."""
    reads: tuple[Callable[[], Tensor], ...]
    """One, or for each expert of a layer its own."""

    @property
    def row_bytes(self) -> int:
        if self.type in DENSE:
            return self.shape[-1] * DENSE[self.type].itemsize
        block = BLOCK_TYPES[self.type]
        return self.shape[-1] // block.num_weights * block.num_bytes

    def stored(self) -> np.ndarray:
        """u8 [..., bytes of a row]; GGUFError where a weight is too large for the type."""
        parts = [self._stored(read()) for read in self.reads]
        return np.stack(parts) if len(self.shape) > 2 else parts[0]

    def _stored(self, weight: Tensor) -> np.ndarray:
        if weight.dtype == torch.uint8:
            return weight.numpy()
        if self.type not in DENSE:
            return BLOCK_TYPES[self.type].quantize(weight).numpy()
        dense = weight.to(DENSE[self.type]).contiguous()
        if not torch.isfinite(dense).all():
            raise GGUFError(f"{self.name} holds values that are not finite in {self.type}; nothing is written.")
        return dense.view(torch.uint8).numpy()


def export_gguf(folder: str | Path, path: str | Path, *, type: str = "bf16", name: str | None = None) -> None:
    """Writes the model in `folder` to the new file `path`, its matrices in `type`: one of FILE_TYPES, or BLOCKS.

    `name` is what the file says that it holds; None: the folder's. Raises GGUFError for what GGUF or llama.cpp cannot
    hold, CheckpointError or TokenizerError for a folder that cannot be read.
    """
    folder, path = Path(folder), Path(path)
    if type not in (*FILE_TYPES, BLOCKS):
        raise GGUFError(f"{type!r} is not a type of GGUF file; known are {', '.join(FILE_TYPES)} and {BLOCKS}.")
    if path.exists():
        raise GGUFError(f"{path} is there already; remove it or name another file.")
    _check_weights(folder, type)
    config = load_config(folder)
    check_fits(config)
    metadata = {
        "general.name": name or folder.name,
        **_metadata(config),
        **tokenizer_metadata(folder, config.vocab_size),
    }
    metadata["general.quantization_version"] = QUANTIZATION_VERSION
    if type == BLOCKS:
        tensors = _blocks(folder, config)  # and no type of the file: llama.cpp counts those of its tensors
    else:
        tensors, metadata["general.file_type"] = _tensors(folder, config, FILE_TYPES[type]), FILE_TYPES[type].number
    part = path.with_name(f"{path.name}.part")
    try:
        _write(part, architecture_of(config.family).name, metadata, tensors)
        sync_file(part)
        os.replace(part, path)
        sync_file(path.absolute().parent)
    finally:
        part.unlink(missing_ok=True)


def _check_weights(folder: Path, type: str) -> None:
    if base_folder(folder) != folder:
        raise GGUFError(
            f"{folder} holds an adapter beside its base; merge it into the base and export what that gives."
        )
    if is_quantized(folder) and type != BLOCKS:
        raise GGUFError(
            f"The weights of {folder} are quantized already: write them as they are, with the type {BLOCKS}, or export "
            "the model that they were made of."
        )
    if not is_quantized(folder) and type == BLOCKS:
        raise GGUFError(
            f"The weights of {folder} are in no blocks; types to round them to are {', '.join(FILE_TYPES)}."
        )


def _metadata(config: ModelConfig) -> dict[str, Any]:
    architecture = architecture_of(config.family)
    fields: dict[str, Any] = architecture.own_fields(config) | {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_query_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.rotary_dims,
        "rope.freq_base": float(config.rope_theta),
        "vocab_size": config.vocab_size,
    }
    if config.rope_scaling and config.rope_scaling["rope_type"] == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope_scaling["factor"])}
    if config.rope_scaling and config.rope_scaling["rope_type"] == "longrope":
        fields |= {
            "rope.scaling.original_context_length": config.rope_scaling["original_max_position_embeddings"],
            "rope.scaling.attn_factor": rope_magnitude(config.rope_scaling, config.max_position_embeddings),
        }
    metadata = {f"{architecture.name}.{name}": value for name, value in fields.items()}
    if config.rope_scaling and config.rope_scaling["rope_type"] == "llama3":
        metadata[ROPE_SCALING] = json.dumps({name: config.rope_scaling[name] for name in ("factor", *LLAMA3_SCALING)})
    return metadata


def _tensors(folder: Path, config: ModelConfig, type: FileType) -> list[StoredTensor]:
    shapes = tensor_shapes(config)
    types = {name: type.of_tensor(name, config, shape) for name, shape in shapes.items()}
    return _named(config, types, dense_sources(folder))


def _blocks(folder: Path, config: ModelConfig) -> list[StoredTensor]:
    """The model is in memory, a weight's blocks only when they are written."""
    model = load_model(folder, dtype="auto")
    parameters, names = dict(model.named_parameters()), {dtype: name for name, dtype in DENSE.items()}
    types = {
        name: "F32" if weight.ndim == 1 or is_router(name) else names[weight.dtype]
        for name, weight in parameters.items()
    }
    sources: dict[str, Callable[[], Tensor]] = {name: weight.detach for name, weight in parameters.items()}
    for layer_name, layer in quantized_layers(model).items():
        name, source = f"{layer_name}.weight", cast(IntegerWeight, layer.weight)
        try:
            format, weight = to_ggml(source, layer.format)
        except ValueError as reason:
            raise GGUFError(f"{name} cannot be written: {reason}.") from None
        types[name], sources[name] = format.type, partial(format.blocks_of, weight)
    return _named(config, types, sources)


def _named(config: ModelConfig, types: dict[str, str], sources: dict[str, Callable[[], Tensor]]) -> list[StoredTensor]:
    """By Hugging Face's names -> by GGUF's, stored as it stores them."""
    pair_size, parts = architecture_of(config.family).pair_size(config), dict[str, list[str]]()
    shapes = tensor_shapes(config)
    for name in shapes:
        parts.setdefault(gguf_name(name, config.kind), []).append(name)
    tensors = []
    for stored, names in parts.items():
        kinds = sorted({types[name] for name in names})
        if len(kinds) > 1:
            raise GGUFError(f"{stored} holds all experts of a layer, but these are in {' and '.join(kinds)}.")
        reads = tuple(partial(_as_stored, sources[name], name, config.kind, pair_size) for name in names)
        shape = stored_shape(names[0], shapes[names[0]])
        if expert_of(names[0]) is not None:
            shape = (len(names), *shape)
        tensors.append(StoredTensor(stored, shape, kinds[0], reads))
    if config.rope_scaling and config.rope_scaling["rope_type"] == "llama3":
        plain, scaled = (
            rope_frequencies(config.head_dim, config.rope_theta, how) for how in (None, config.rope_scaling)
        )
        tensors.append(StoredTensor(ROPE_DIVISORS, tuple(plain.shape), "F32", (lambda: plain / scaled,)))
    if config.rope_scaling and config.rope_scaling["rope_type"] == "longrope":
        for name, stored in LONGROPE_DIVISORS.items():
            factors = torch.tensor(config.rope_scaling[name], dtype=torch.float32)
            tensors.append(StoredTensor(stored, tuple(factors.shape), "F32", (factors.clone,)))
    return tensors


def _as_stored(read: Callable[[], Tensor], *how: Any) -> Tensor:
    return as_stored(read(), *how)


def _write(path: Path, architecture: str, metadata: dict[str, Any], tensors: list[StoredTensor]) -> None:
    """One tensor is in memory at a time."""
    writer, types = _open(path, architecture)
    for name, value in metadata.items():
        _add(writer, name, value)
    for tensor in tensors:
        shape = (*tensor.shape[:-1], tensor.row_bytes)
        num_bytes = math.prod(shape)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), num_bytes, raw_dtype=types[tensor.type])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.stored())
    finally:
        writer.close()


def _open(path: Path, architecture: str) -> "tuple[GGUFWriter, Any]":
    """A writer, and the types of tensors by name."""
    try:
        from gguf import GGMLQuantizationType, GGUFWriter
    except ImportError:
        raise GGUFError("Writing GGUF files needs the package gguf: pip install gguf.") from None
    return GGUFWriter(path, architecture), GGMLQuantizationType


def _add(writer: "GGUFWriter", name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)
