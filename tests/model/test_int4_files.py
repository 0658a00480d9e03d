"""INT4 and INT6 as compressed-tensors' pack-quantized: groups or whole rows, symmetric or not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compress.quantize.round_to_nearest import quantize_folder
from model.files.checkpoint import CheckpointError, load_model, save_model
from model.formats.compressed_tensors import Int4, Int6
from model.formats.registry import format_named
from model.quantized import quantized_layers
from model.transformer import Transformer
from tests.compare import relative_rms
from tests.tiny import full_logits, tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
FORMATS = pytest.mark.parametrize(
    "format",
    [Int4(), Int4(16), Int4(32, symmetric=False), Int4(None), Int4(None, symmetric=False), Int6(32), Int6(16, False)],
    ids=["32", "16", "32 asymmetric", "rows", "rows asymmetric", "int6", "int6 asymmetric"],
)


def make_folder(folder: Path, format: Int4, dtype: torch.dtype = torch.float32) -> Path:
    save_model(tiny_model().to(dtype), folder / "dense")
    quantize_folder(folder / "dense", folder / "quantized", format)
    return folder / "quantized"


def levels_of(words: Tensor, bits: int) -> Tensor:
    """One after another, from the lowest bit of the first word on: i32 [N, W] -> [N, 32·W // bits]."""
    stream = torch.stack([words.long() >> bit & 1 for bit in range(32)], dim=-1).flatten(1)
    levels = stream[:, : stream.shape[1] // bits * bits].unflatten(1, (-1, bits))
    return (levels << torch.arange(bits)).sum(-1)


def unpacked(tensors: dict[str, Tensor], name: str, format: Int4) -> Tensor:
    """The dense weight by the layout's definition."""
    rows, columns = tensors[f"{name}_shape"].tolist()
    scales = tensors[f"{name}_scale"].float()
    zeros = torch.full_like(scales, 2 ** (format.bits - 1))
    if not format.symmetric:
        zeros = levels_of(tensors[f"{name}_zero_point"].t().contiguous(), format.bits).t()[:rows].float()
    each = columns // scales.shape[1]
    levels = levels_of(tensors[f"{name}_packed"], format.bits)[:, :columns]
    return (levels - zeros.repeat_interleave(each, 1)) * scales.repeat_interleave(each, 1)


def dense_twin(folder: Path, format: Int4) -> Transformer:
    tensors, model = load_file(folder / "model.safetensors"), tiny_model()
    for name, parameter in model.named_parameters():
        stored = tensors.get(name)
        parameter.data = unpacked(tensors, name, format) if stored is None else stored.float()
    return model


@FORMATS
def test_a_model_computes_with_what_the_files_stand_for(format: Int4, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, format)
    model, twin = load_model(folder), dense_twin(folder, format)
    assert {layer.format for layer in quantized_layers(model).values()} == {format}
    assert relative_rms(full_logits(model, TOKENS), full_logits(twin, TOKENS)) < 1e-5
    assert relative_rms(full_logits(model.fuse(), TOKENS), full_logits(twin, TOKENS)) < 1e-5
    dense = load_file(tmp_path / "dense" / "model.safetensors")[Q_PROJ]
    error = (dense - twin.get_parameter(Q_PROJ)).abs().max()
    scale = load_file(folder / "model.safetensors")[f"{Q_PROJ}_scale"].max()
    assert 0.25 * scale < error < 1.01 * scale


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_folder_read_and_written_again_holds_the_same_bits(format: Int4, dtype: torch.dtype, tmp_path: Path) -> None:
    one = make_folder(tmp_path, format, dtype)
    save_model(load_model(one, dtype="auto"), tmp_path / "two")
    first, second = (load_file(path / "model.safetensors") for path in (one, tmp_path / "two"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert first[f"{Q_PROJ}_scale"].dtype == dtype
    entries = [
        json.loads((path / "config.json").read_text())["quantization_config"] for path in (one, tmp_path / "two")
    ]
    assert entries[0] == entries[1]


@pytest.mark.parametrize(
    ("format", "shape"),
    [
        (Int4(8, symmetric=False), (7, 32)),
        (Int4(8), (5, 72)),
        (Int4(None, symmetric=False), (30, 1)),
        (Int4(None), (3, 5)),
        (Int6(16, symmetric=False), (7, 48)),
        (Int6(None), (3, 5)),
    ],
)
def test_levels_and_scales_survive(format: Int4, shape: tuple[int, int]) -> None:
    rows, columns = shape
    groups = format.num_groups(columns)
    levels = torch.randint(format.num_levels, shape, dtype=torch.uint8)
    zeros = None if format.symmetric else torch.randint(format.num_levels, (rows, groups), dtype=torch.uint8)
    weight = format.pack(levels, torch.rand(rows, groups), zeros)
    tensors = format.to_files("w", weight, torch.bfloat16)
    again = format.unpack(format.from_files("w", torch.Size(shape), tensors.__getitem__))
    assert torch.equal(again[0], levels) and torch.equal(again[1], weight.scales)
    assert zeros is None or (again[2] is not None and torch.equal(again[2], zeros))
    assert sum(part.nbytes for part in format.tensors(weight).values()) == format.num_bytes(shape)


def test_recipes_name_its_options() -> None:
    assert format_named("int4", group=32, symmetric=False) == Int4(32, symmetric=False)
    assert format_named("int4", group=None) == Int4(None)
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("int8", {"symmetric": False}, "INT8 is symmetric: it takes no zeros"),
        ("gptq", {"activations": True}, "gptq has no option activations"),
        ("int4", {"group": -1}, "INT4 cannot have groups of -1"),
        ("nf4", {"group": 64}, "nf4 has no option group"),
    ]
    for name, options, sentence in wrong:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            format_named(name, **options)


def test_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="groups of 48 do not divide rows of 64 weights"):
        make_folder(tmp_path, Int4(48))
    folder = make_folder(tmp_path / "other", Int4(32))
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"group_size": 32', '"group_size": 48'))
    with pytest.raises(CheckpointError, match="weight: INT4: groups of 48 do not divide rows of 64 weights"):
        load_model(folder)
