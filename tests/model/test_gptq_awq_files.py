"""GPTQ and AWQ checkpoints: layouts spelled out word by word, and AWQ as compressed-tensors converts it."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.quantize.round_to_nearest import quantize_folder
from model.files.checkpoint import CheckpointError, load_model, save_model
from model.formats.awq import Awq
from model.formats.compressed_tensors import Int4, Int6
from model.formats.convert import export_quantized
from model.formats.gptq import Gptq
from model.formats.registry import format_like
from model.quantized import quantized_layers
from serve import LLM
from serve.sampling_params import SamplingParams
from tests.compare import relative_rms
from tests.pipeline.tiny_run import WORDS, write_teacher
from tests.serve.toys import greedy_oracle, toy_tokenizer
from tests.tiny import full_logits, tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
Q_PROJ = "model.layers.0.self_attn.q_proj"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
CASES: dict[str, Any] = {
    "gptq": Gptq(32),
    "gptq rows": Gptq(None),
    "gptq asymmetric": Gptq(16, symmetric=False, version=2),
    "gptq 8 bits": Gptq(None, bits=8),
    "awq": Awq(32),
    "awq rows": Awq(None),
    "awq symmetric": Awq(16, symmetric=True),
}
ALL = pytest.mark.parametrize("case", CASES)


def make_folder(folder: Path, format: Any, dtype: torch.dtype = torch.float16, **overrides: Any) -> Path:
    """In fp16, whose numbers the scales of these files are."""
    save_model(tiny_model("qwen2").to(dtype), folder / "dense")
    quantize_folder(folder / "dense", folder / "quantized", format, overrides=overrides)
    toy_tokenizer().save(folder / "quantized")
    return folder / "quantized"


def field(word: int, number: int, bits: int) -> int:
    return (word & 0xFFFFFFFF) >> number * bits & (1 << bits) - 1


def by_gptq(tensors: dict[str, Tensor], layer: str, format: Gptq) -> Tensor:
    """W [N, K] element by element."""
    qweight, qzeros = (tensors[f"{layer}.{part}"].tolist() for part in ("qweight", "qzeros"))
    scales, index = tensors[f"{layer}.scales"].float(), tensors[f"{layer}.g_idx"].tolist()
    per, bits = 32 // format.bits, format.bits
    weight = torch.zeros(len(qweight[0]), len(qweight) * per)
    for n in range(weight.shape[0]):
        for k in range(weight.shape[1]):
            level, group = field(qweight[k // per][n], k % per, bits), index[k]
            zero = field(qzeros[group][n // per], n % per, bits) + (1 if format.version == 1 else 0)
            weight[n, k] = (level - zero) * scales[group, n]
    return weight


def by_awq(tensors: dict[str, Tensor], layer: str, format: Awq) -> Tensor:
    qweight, scales = tensors[f"{layer}.qweight"].tolist(), tensors[f"{layer}.scales"].float()
    qzeros = tensors[f"{layer}.qzeros"].tolist() if f"{layer}.qzeros" in tensors else None
    weight = torch.zeros(scales.shape[1], len(qweight))
    each = len(qweight) // len(scales)
    for n in range(weight.shape[0]):
        place = AWQ_ORDER.index(n % 8)
        for k in range(weight.shape[1]):
            zero = 8 if qzeros is None else field(qzeros[k // each][n // 8], place, 4)
            weight[n, k] = (field(qweight[k][n // 8], place, 4) - zero) * scales[k // each, n]
    return weight


@ALL
def test_the_files_are_what_the_layout_says(case: str, tmp_path: Path) -> None:
    format = CASES[case]
    folder = make_folder(tmp_path, format)
    tensors, dense = load_file(folder / "model.safetensors"), load_file(tmp_path / "dense" / "model.safetensors")
    assert f"{Q_PROJ}.weight" not in tensors and tensors[f"{Q_PROJ}.scales"].dtype == torch.float16
    weight = (by_gptq if isinstance(format, Gptq) else by_awq)(tensors, Q_PROJ, format)
    layer = quantized_layers(load_model(folder))[Q_PROJ]
    assert layer.format == format and torch.equal(layer.weight.dequantize(), weight)
    step = tensors[f"{Q_PROJ}.scales"].float().max()
    assert (weight - dense[f"{Q_PROJ}.weight"].float()).abs().max() < 1.05 * step


@ALL
def test_a_model_is_read_written_and_served(case: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CASES[case])
    model, twin = load_model(folder), load_model(tmp_path / "dense")
    for name, layer in quantized_layers(model).items():
        twin.get_submodule(name).weight.data = layer.weight.dequantize()
    assert relative_rms(full_logits(model, TOKENS), full_logits(twin, TOKENS)) < 1e-5
    (answer,) = LLM(str(folder), dtype="float32", num_pages=32).generate(
        [TOKENS], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    )
    assert answer.choices[0].token_ids == greedy_oracle(twin, TOKENS, 12)
    save_model(load_model(folder, dtype="auto"), tmp_path / "two")
    first, second = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "two"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    entries = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "two")]
    assert entries[0] == entries[1]


@pytest.mark.parametrize("case", ["awq", "awq symmetric"])
def test_the_library_converts_it(case: str, tmp_path: Path) -> None:
    """compressed-tensors reads AutoAWQ's files to write its own."""
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    from compressed_tensors.compressors import BaseCompressor

    folder = make_folder(tmp_path, CASES[case])
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    converter = converters.AutoAWQConverter.from_autoawq_config(entry)
    tensors = converter.process(load_file(folder / "model.safetensors"))
    (scheme,) = converter.update_config(None).config_groups.values()
    for name, layer in quantized_layers(load_model(folder)).items():
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
        own.pop("bias", None)
        theirs = BaseCompressor.get_value_from_registry("pack-quantized").decompress(own, scheme)["weight"]
        error = (layer.weight.dequantize() - theirs.float()).abs().max()
        assert error <= theirs.float().abs().max() * 2**-11  # it computes in fp16


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gptq", "gptq 8 bits", "awq", "exported"])
def test_transformers_opens_it(case: str, tmp_path: Path) -> None:
    """By GPTQModel's products, which compute in fp16; `exported` is a symmetric model that becomes AWQ."""
    pytest.importorskip("gptqmodel")
    from transformers import AutoModelForCausalLM

    folder = make_folder(tmp_path, CASES.get(case, Int4(32)))
    if case == "exported":
        export_quantized(folder, tmp_path / "awq", type="awq")
        folder = tmp_path / "awq"
    theirs, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        logits = theirs(torch.tensor([TOKENS])).logits[0].float()
    assert relative_rms(logits, full_logits(load_model(folder), TOKENS)) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_the_library_quantizes_opens_here(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQModel's own rounding on a text, written by it."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)  # it wants threads for its pools
    library = pytest.importorskip("gptqmodel")
    from transformers import AutoModelForCausalLM

    write_teacher(tmp_path / "dense")
    save_model(tiny_model(num_kv_heads=4, intermediate_size=128, vocab_size=320), tmp_path / "wide")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "dense" / file, tmp_path / "wide")
    kind = (
        {"sym": True, "desc_act": False}
        if method == "gptq"
        else {"sym": False, "quant_method": "awq", "format": "gemm"}
    )
    theirs = library.GPTQModel.load(
        str(tmp_path / "wide"), library.QuantizeConfig(bits=4, group_size=32, **kind), device="cpu"
    )
    theirs.quantize([" ".join(WORDS * 20)] * 4, batch_size=1)
    theirs.save(str(tmp_path / method))
    ours = load_model(tmp_path / method)
    formats = {layer.format.name for layer in quantized_layers(ours).values()}
    assert formats == {method} and len(quantized_layers(ours)) == 14
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / method, dtype=torch.float32, device_map="cpu")
    with torch.no_grad():
        logits = opened(torch.tensor([TOKENS])).logits[0].float()
    assert relative_rms(full_logits(ours, TOKENS), logits) < 5e-3


def test_config_says_what_is_in_the_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "gptq", Gptq(32), **{"*.layers.1.*": None})
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    left = [f"model.layers.1.{part}_proj" for part in ("self_attn.q", "self_attn.o", "mlp.down")]
    assert entry["checkpoint_format"] == "gptq" and not entry["desc_act"] and not entry["lm_head"]
    patterns = [pattern.removeprefix("-:") for pattern in entry["dynamic"]]
    assert all(any(re.match(pattern, name) for pattern in patterns) for name in left)
    assert not any(re.match(pattern, Q_PROJ) for pattern in patterns)
    assert load_model(folder).model.layers[0].self_attn.q_proj.format == Gptq(32)
    folder = make_folder(tmp_path / "head", Gptq(32), lm_head=Gptq(32))
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["lm_head"]
    assert "lm_head" in quantized_layers(load_model(folder))


def rewrite(folder: Path, tensor: str | None = None, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    if tensor is not None:
        tensors = load_file(folder / "model.safetensors")
        tensors[tensor] = tensors[tensor].flip(0).contiguous()
        save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("format", "tensor", "fields", "sentence"),
    [
        (Gptq(32), f"{Q_PROJ}.g_idx", {"desc_act": True}, r"q_proj.g_idx spreads groups over the row \(desc_act\)"),
        (Gptq(32), None, {"bits": 3}, r"\(gptq, 3 bits in groups of 32\)"),
        (Gptq(32), None, {"bits": 8}, r"qweight is torch.int32 \[8, 64\], not torch.int32 \[16, 64\]"),
        (Gptq(32), None, {"bits": 8, "sym": False}, r"\(gptq, 8 bits in groups of 32\)"),
        (Gptq(32), None, {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "layers that differ"),
        (Gptq(32), None, {"checkpoint_format": "marlin"}, r"\(marlin, 4 bits"),
        (Gptq(32), None, {"checkpoint_format": "gptq_v2"}, "qzeros holds other zeros than 8"),
        (Gptq(32), None, {"group_size": 48}, "groups of 48 do not divide rows of 64"),
        (Awq(32), None, {"version": "gemv"}, r"\(awq, gemv, 4 bits"),
        (Awq(32), None, {"group_size": 16}, r"q_proj.scales is torch.float16 \[2, 64\], not floats \[4, 64\]"),
    ],
)
def test_what_cannot_be_read_is_said(
    format: Any, tensor: str | None, fields: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, format)
    rewrite(folder, tensor, **fields)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(folder)


@pytest.mark.parametrize("target", [Gptq(16), Gptq(16, symmetric=False, version=2), Awq(16)])
def test_formats_of_integers_convert_to_the_bit(target: Any) -> None:
    source = Int4(16)
    weight = source.quantize(torch.randn(16, 32))
    assert torch.equal(target.convert(weight, source).dequantize(), weight.dequantize())
    with pytest.raises(ValueError, match="bits, groups and zeros must agree"):
        Gptq(16).convert(Awq(16).quantize(torch.randn(16, 32)), Awq(16))
    with pytest.raises(ValueError, match="GPTQ holds 4 or 8 bits a weight here, not 6"):
        format_like("gptq", Int6(16))
    with pytest.raises(ValueError, match="holds 4 bits in groups of 16, asymmetric and not 6 bits"):
        format_like("awq", Int6(16)).convert(Int6(16).quantize(torch.randn(16, 32)), Int6(16))


def test_a_zero_that_version_1_cannot_hold_is_refused(tmp_path: Path) -> None:
    format = Gptq(None, symmetric=False)
    weight = format.quantize(torch.rand(8, 16) + 1)  # all positive: their zero is level 0
    with pytest.raises(CheckpointError, match="zero point of 0, which only version 2"):
        format.to_files("x.weight", weight, torch.float16)
    assert Gptq(None, symmetric=False, version=2).to_files("x.weight", weight, torch.float16)
    with pytest.raises(CheckpointError, match="rows and columns in eights"):
        format.to_files("x.weight", format.quantize(torch.randn(7, 16)), torch.float16)
