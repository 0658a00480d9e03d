"""Import of GGUF files: weights, configuration and tokenizer as a Hugging Face folder.

Names and layouts follow llama.cpp's converter from Hugging Face, which this module inverts.
"""

import json
import logging
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kernels.attention.rotary import rope_frequencies, rope_magnitude
from model.config import ModelConfig
from model.config_fields import MOST_POSITIONS, is_count, is_positive, shown
from model.families.registry import FAMILIES
from model.files.checkpoint import tensor_shapes, write_checkpoint
from model.files.safe_io import Heard, write_json, write_text
from model.formats.ggml import Ggml
from model.formats.gguf.architectures import Architecture, architecture_in
from model.formats.gguf.blocks import BLOCK_TYPES
from model.formats.gguf.metadata import check_metadata
from model.formats.gguf.names import (
    LLAMA3_SCALING,
    LONGROPE_DIVISORS,
    ROPE_DIVISORS,
    ROPE_SCALING,
    as_in_model,
    expert_of,
    gguf_name,
    is_router,
)
from model.text.gguf_tokenizer import GGUFError, chat_template, special_token_ids, tokenizer_config, tokenizer_json

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

log = logging.getLogger(__name__)
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def import_gguf(path: str | Path, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes config.json, dense weights in `dtype`, tokenizer files and the chat template of a GGUF file into `folder`.

    Raises GGUFError naming the metadata field or tensor that is missing, unknown or not supported.
    """
    _import(_File(Path(path)), Path(folder), {}, dtype)


def import_gguf_blocks(path: str | Path, folder: str | Path, heard: Heard = lambda num_bytes: None) -> None:
    """As `import_gguf`, but matrices keep levels and scales of their blocks to the bit, and other weights their dtype.

    Matrices in blocks that are not multiplied here become bf16; a log says so. `heard` is told each tensor's bytes.
    """
    file = _File(Path(path))
    matrices = {name: tensor for name, tensor in file.places().items() if len(tensor.shape) > 1 and not is_router(name)}
    types = {name: tensor.tensor_type.name for name, tensor in matrices.items()}
    formats = {name: Ggml(type) for name, type in types.items() if type in BLOCK_TYPES}
    rest = sorted({type for type in types.values() if type not in BLOCK_TYPES})
    dtype = _DENSE.get(rest[0], torch.bfloat16) if len(rest) == 1 else torch.bfloat16 if rest else torch.float32
    if expanded := [type for type in rest if type not in _DENSE]:
        log.warning("weights in %s are expanded to bf16: they take up to 8 times as much", ", ".join(expanded))
    _import(file, Path(folder), formats, dtype, heard)


def write_gguf_tokenizer(path: Path, folder: Path) -> None:
    """The tokenizer's files alone, with the model's end-of-text tokens. Raises GGUFError as `import_gguf`."""
    file = _File(path)
    _write_tokenizer(file.metadata, file.config, folder)
    write_json(folder / "generation_config.json", {"eos_token_id": list(file.config.eos_token_ids) or None})


def gguf_config(path: str | Path) -> ModelConfig:
    """The configuration of the model in a GGUF file; its weights are not read. Raises GGUFError as `import_gguf`."""
    return _File(Path(path)).config


class _File:
    """An open file: metadata by field, and tensors by GGUF's names, which stay on disk."""

    def __init__(self, path: Path) -> None:
        reader = _open(path)
        self.path = path
        self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        check_metadata(self.metadata)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = architecture_in(self.metadata)
        self.config = _config(self.architecture, self.metadata, self.tensors)

    def places(self) -> "dict[str, ReaderTensor]":
        """What holds each tensor of the model, by Hugging Face's names: for all experts of a layer the same."""
        names = {name: gguf_name(name, self.config.kind) for name in tensor_shapes(self.config)}
        if missing := [name for name, own in names.items() if own not in self.tensors]:
            raise GGUFError(f"{self.path} lacks the tensor that becomes {missing[0]}.")
        if extra := self.tensors.keys() - {*names.values(), ROPE_DIVISORS, *LONGROPE_DIVISORS.values()}:
            raise GGUFError(f"{self.path} holds {min(extra)}, which a {self.config.family} model does not have.")
        return {name: self.tensors[own] for name, own in names.items()}

    def read(self, tensor: "ReaderTensor", name: str, format: Ggml | None, heard: Heard) -> Any:
        """One tensor of the model in fp32, or in its blocks' format, as the model has it."""
        expert = expert_of(name)
        data = tensor.data if expert is None else tensor.data[expert]
        heard(data.nbytes)
        stored = _dequantized(tensor, data) if format is None else torch.from_numpy(np.array(data))
        weight = as_in_model(stored, name, self.config.kind, self.architecture.pair_size(self.config))
        return weight if format is None else format.weight_of(weight)


def _import(
    file: _File,
    folder: Path,
    formats: Mapping[str, Ggml],
    dtype: torch.dtype,
    heard: Heard = lambda num_bytes: None,
) -> None:
    places = file.places()
    tokenizer_json(file.metadata)  # what it refuses is refused before anything is written
    sources = {name: partial(file.read, tensor, name, formats.get(name), heard) for name, tensor in places.items()}
    write_checkpoint(folder, file.config, sources, dtype=dtype, formats=formats)
    _write_tokenizer(file.metadata, file.config, folder)


def _write_tokenizer(metadata: dict[str, Any], config: ModelConfig, folder: Path) -> None:
    write_json(folder / "tokenizer.json", tokenizer_json(metadata))
    write_json(folder / "tokenizer_config.json", tokenizer_config(metadata, config.max_position_embeddings))
    if template := chat_template(metadata):
        write_text(folder / "chat_template.jinja", template)


def _open(path: Path) -> "GGUFReader":
    try:
        from gguf import GGUFReader
    except ImportError:
        raise GGUFError("Reading GGUF files needs the package gguf: pip install gguf.") from None

    class Reader(GGUFReader):
        """Looks at the mapped file as at any array: views of a `memmap` take several times as long to make."""

        data = property(lambda self: self.mapped, lambda self, file: setattr(self, "mapped", np.asarray(file)))

    try:
        return Reader(path)
    except FileNotFoundError:
        raise GGUFError(f"{path} does not exist.") from None
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as reason:
        raise GGUFError(f"{path} is not a valid GGUF file: {reason}.") from None


def _config(architecture: Architecture, metadata: dict[str, Any], tensors: "dict[str, ReaderTensor]") -> ModelConfig:
    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture.name}.{name}", default)
        if value is None:
            raise GGUFError(f"The GGUF metadata has no {architecture.name}.{name}.")
        return _as_stated(value) if isinstance(value, float) else value

    if "token_embd.weight" not in tensors:
        raise GGUFError("The GGUF file has no tensor token_embd.weight.")
    heads, hidden_size = field("attention.head_count"), field("embedding_length")
    head_dim = field("attention.key_length", hidden_size // heads)
    rotated = field("rope.dimension_count", head_dim)
    vocab_size = int(tensors["token_embd.weight"].shape[1])
    if (num_tokens := len(metadata.get("tokenizer.ggml.tokens", ()))) > vocab_size:
        raise GGUFError(f"tokenizer.ggml.tokens lists {num_tokens} tokens for {vocab_size} rows of token_embd.weight.")
    bos, eos, pad = special_token_ids(metadata)
    raw = {
        "architectures": [FAMILIES[architecture.family].architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "partial_rotary_factor": rotated / max(head_dim, 1),
        "rope_theta": field("rope.freq_base", 10_000.0),
        "max_position_embeddings": field("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    raw["rope_scaling"] = _rope_scaling(metadata, architecture.name, raw, tensors)
    raw |= {own: field(name) for name, own in architecture.fields.items()}
    present = {name: own for name, own in architecture.optional.items() if f"{architecture.name}.{name}" in metadata}
    config = architecture.as_computed(ModelConfig.from_hf(raw | {own: field(name) for name, own in present.items()}))
    if config.rotary_dims != rotated:
        raise GGUFError(
            f"{architecture.name}.rope.dimension_count differs from the head size {head_dim}: not supported."
        )
    return config


def _rope_scaling(
    metadata: dict[str, Any], family: str, raw: dict[str, Any], tensors: "dict[str, ReaderTensor]"
) -> dict[str, Any] | None:
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata[f"{family}.rope.scaling.factor"]}
    if kind == "longrope" or not tensors.keys().isdisjoint(LONGROPE_DIVISORS.values()):
        return _longrope(metadata, family, raw["max_position_embeddings"], tensors)
    if kind != "none":
        raise GGUFError(f"{family}.rope.scaling.type is {kind!r}; supported are none, linear and longrope.")
    if ROPE_DIVISORS not in tensors:
        return None
    given = torch.from_numpy(np.array(tensors[ROPE_DIVISORS].data, dtype=np.float32))
    numbers = {"factor": float(given.max()), **LLAMA3_SCALING}  # files of others keep only what follows from them
    if (stated := metadata.get(ROPE_SCALING)) is not None:
        numbers = _stated_numbers(stated, tuple(numbers))
    scaling = {"rope_type": "llama3", **numbers}
    plain = rope_frequencies(raw["head_dim"], raw["rope_theta"], None)
    expected = plain / rope_frequencies(raw["head_dim"], raw["rope_theta"], scaling)
    if given.shape != expected.shape or not torch.allclose(given, expected, rtol=1e-4):
        raise GGUFError(f"{ROPE_DIVISORS} does not follow Llama 3's rope scaling: not supported.")
    return scaling


def _longrope(
    metadata: dict[str, Any], family: str, num_positions: int, tensors: "dict[str, ReaderTensor]"
) -> dict[str, Any]:
    """What cosines are multiplied by is left out where it follows from the rest, as in most models' configurations."""
    if missing := [stored for stored in LONGROPE_DIVISORS.values() if stored not in tensors]:
        raise GGUFError(f"The GGUF file has LongRoPE but no tensor {missing[0]}.")
    length, magnitude = (
        metadata.get(f"{family}.rope.scaling.{name}") for name in ("original_context_length", "attn_factor")
    )
    if not is_count(length, MOST_POSITIONS) or length == 1:
        raise GGUFError(f"{family}.rope.scaling.original_context_length is {shown(length)}; it must be 2 or more.")
    if magnitude is not None and not is_positive(magnitude):
        raise GGUFError(f"{family}.rope.scaling.attn_factor is {shown(magnitude)}; it must be a positive number.")
    factors = {name: [_as_stated(one) for one in tensors[stored].data] for name, stored in LONGROPE_DIVISORS.items()}
    scaling = {"rope_type": "longrope", **factors, "original_max_position_embeddings": length}
    if magnitude is None or math.isclose(magnitude, rope_magnitude(scaling, num_positions), rel_tol=1e-6):
        return scaling
    return scaling | {"attention_factor": _as_stated(magnitude)}


def _as_stated(number: float) -> float:
    """1e-5 again, not 9.9999997e-06."""
    return float(str(np.float32(number)))


def _stated_numbers(text: str, names: tuple[str, ...]) -> dict[str, float]:
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError):
        stated = None
    numbers: dict[str, Any] = {name: stated.get(name) for name in names} if isinstance(stated, dict) else {}
    if not numbers or not all(type(one) in (int, float) and 0 < one < 1 << 31 for one in numbers.values()):
        raise GGUFError(f"{ROPE_SCALING} is {shown(text)}; it must be JSON with positive numbers {', '.join(names)}.")
    return numbers


def _dequantized(tensor: "ReaderTensor", data: np.ndarray) -> Tensor:
    from gguf import dequantize

    try:
        return torch.from_numpy(np.array(dequantize(data, tensor.tensor_type)))
    except NotImplementedError:
        raise GGUFError(f"{tensor.name} is stored as {tensor.tensor_type.name}, which cannot be dequantized.") from None
