"""Starting, merging and unmerging adapters, and what requantizing does to them."""

from pathlib import Path

import pytest
import torch

from compress.lora import inject, low_rank, merge, merge_requantized, merged_weights, start_loftq, unmerge
from compress.quantize.round_to_nearest import quantize_model
from kernels.linear.quantization import quantize_nf4
from model.files.adapter import read_adapter, save_adapter
from model.files.checkpoint import TensorFiles, load_model, save_model, write_checkpoint
from model.formats.bitsandbytes import NF4
from model.lora import LoraConfig, LoraError, adapted_layers
from model.quantized import quantized_layers
from model.transformer import Transformer
from tests.compare import relative_rms
from tests.tiny import full_logits, tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
KINDS = pytest.mark.parametrize("kind", ["dense", "nf4"])
CONFIGS = {
    "lora": LoraConfig(rank=4, alpha=6),
    "dora": LoraConfig(rank=4, alpha=6, dora=True),
    "everything": LoraConfig(rank=4, targets=("*_proj", "embed_tokens", "lm_head")),
}
ALL = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def adapted(kind: str, config: LoraConfig, size: float = 0.1) -> Transformer:
    model = tiny_model("qwen2")
    inject(quantize_model(model, NF4()) if kind == "nf4" else model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


@KINDS
@ALL
def test_the_merged_model_does_what_base_and_adapter_do(kind: str, config: LoraConfig) -> None:
    model = adapted(kind, config)
    expected = full_logits(model, TOKENS)
    merged = merge(model, dtype=torch.float32)
    torch.testing.assert_close(full_logits(merged, TOKENS), expected, rtol=1e-4, atol=1e-4)
    assert not quantized_layers(merged) and not adapted_layers(merged)
    assert torch.equal(full_logits(model, TOKENS), expected), "the model given is left as it is"
    assert merge(model).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_merging_a_fresh_adapter_changes_no_bit(kind: str) -> None:
    model = quantize_model(tiny_model("qwen2"), NF4()) if kind == "nf4" else tiny_model("qwen2")
    weights = {name: layer.weight.dequantize() for name, layer in quantized_layers(model).items()}
    weights |= {name.removesuffix(".weight"): weight.clone() for name, weight in model.named_parameters()}
    inject(model, LoraConfig(rank=4, alpha=6))
    for name, weight in merge(model, dtype=torch.float32).named_parameters():
        assert torch.equal(weight, weights[name.removesuffix(".weight")]), name


def test_a_merged_model_is_written_tensor_by_tensor(tmp_path: Path) -> None:
    model = adapted("nf4", CONFIGS["dora"])
    write_checkpoint(tmp_path / "merged", model.config, merged_weights(model), dtype=torch.bfloat16)
    read, expected = load_model(tmp_path / "merged", dtype="auto"), merge(model)
    for name, parameter in expected.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter)


@KINDS
def test_unmerging_restores_the_base(kind: str, tmp_path: Path) -> None:
    config = CONFIGS["everything"]
    model = adapted(kind, config)
    save_adapter(model, tmp_path, config)
    base = quantize_model(tiny_model("qwen2"), NF4()) if kind == "nf4" else tiny_model("qwen2")
    restored = unmerge(merge(model, dtype=torch.float32), read_adapter(tmp_path))
    torch.testing.assert_close(full_logits(restored, TOKENS), full_logits(base, TOKENS), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_merged_or_unmerged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoraError, match="no adapter to merge"):
        merge(tiny_model())
    tied = tiny_model(tie_word_embeddings=True)
    inject(tied, LoraConfig(rank=2, targets=("embed_tokens",)))
    with pytest.raises(LoraError, match="tied embeddings"):
        merge(tied)
    for name in ("lora", "dora"):
        save_adapter(adapted("nf4", CONFIGS[name]), tmp_path / name, CONFIGS[name])
    with pytest.raises(LoraError, match="lengths of the base's rows are lost"):
        unmerge(tiny_model("qwen2"), read_adapter(tmp_path / "dora"))
    with pytest.raises(LoraError, match=r"no dense weight model.layers.0.mlp.down_proj"):
        unmerge(quantize_model(tiny_model("qwen2"), NF4()), read_adapter(tmp_path / "lora"))


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (3, 50)])
@pytest.mark.parametrize("rank", [1, 5])
def test_the_low_rank_part_is_the_best_one(shape: tuple[int, int], rank: int) -> None:
    matrix = torch.randn(shape)
    b, a = low_rank(matrix, rank)
    assert b.shape == (shape[0], rank) and a.shape == (rank, shape[1])
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    best = (left[:, :rank] * values[:rank]) @ right[:rank]
    torch.testing.assert_close((b @ a).double(), best, rtol=1e-4, atol=1e-4)
    b, a = low_rank(torch.zeros(shape), rank)
    assert not (b @ a).any()


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("alpha", [4.0, 16.0])
def test_loftq_starts_closer_to_the_dense_weights(dora: bool, alpha: float, tmp_path: Path) -> None:
    """‖W − Q − s·B A‖ < ‖W − q(W)‖ in every layer; more iterations come closer still."""
    dense = tiny_model("qwen2")
    save_model(dense, tmp_path)
    errors = []
    for iterations in (0, 1, 5):
        model = quantize_model(tiny_model("qwen2"), NF4())
        before = {name: layer.weight for name, layer in quantized_layers(model).items()}
        config = LoraConfig(rank=8, alpha=alpha, dora=dora, init="loftq" if iterations else "default")
        inject(model, config, dense=TensorFiles(tmp_path))
        if iterations > 1:
            start_loftq(model, TensorFiles(tmp_path), iterations=iterations)
        same = all(layer.weight is before[name] for name, layer in quantized_layers(model).items())
        assert same == (iterations < 2), "one iteration leaves the base alone"
        merged = merge(model, dtype=torch.float32)
        errors.append([
            (merged.get_parameter(f"{name}.weight") - dense.get_parameter(f"{name}.weight")).norm().item()
            for name in before
        ])  # fmt: skip
    for plain, once, often in zip(*errors, strict=True):
        assert often < once < plain


def test_loftq_without_its_sources_is_refused(tmp_path: Path) -> None:
    config = LoraConfig(rank=2, init="loftq")
    model = tiny_model()
    save_model(model, tmp_path)
    with pytest.raises(LoraError, match="needs the weights before quantization"):
        inject(model, config)
    with pytest.raises(LoraError, match="no adapted layer of this model is quantized"):
        inject(model, config, dense=TensorFiles(tmp_path))


def requantized(size: float) -> tuple[float, float, float]:
    """What NF4 again does to a rank-16 update of a fraction `size` of its weight.

    The share of codes that change, the share of the update that is left, and the error relative to it.
    """
    generator = torch.Generator().manual_seed(0)
    weight = quantize_nf4(0.02 * torch.randn(1024, 1024, generator=generator)).dequantize()
    update = torch.randn(1024, 16, generator=generator) @ torch.randn(16, 1024, generator=generator)
    update *= size * weight.norm() / update.norm()
    before, after = (quantize_nf4(w, double=False) for w in (weight, weight + update))
    changed = (before.elements() != after.elements()).float().mean()
    left = after.dequantize() - weight
    kept = (left * update).sum() / update.square().sum()
    return changed.item(), kept.item(), relative_rms(left, update)


@pytest.mark.parametrize("size", [0.003, 0.01, 0.03])
def test_requantizing_erases_a_small_adapter(size: float) -> None:
    """The base lies on the grid already: hardly any code changes, and most of the update is gone."""
    changed, kept, _ = requantized(size)
    assert changed < 0.002 and kept < 0.1


def test_requantizing_garbles_a_large_adapter() -> None:
    _, kept, error = requantized(0.1)
    assert [kept, error] == pytest.approx([0.84, 0.78], abs=0.03)


def test_a_requantized_merge_is_further_from_the_adapter_than_a_dense_one() -> None:
    model = adapted("nf4", CONFIGS["lora"], size=0.01)
    expected = full_logits(model, TOKENS)
    requantized = merge_requantized(model, dtype=torch.float32)
    assert quantized_layers(requantized).keys() == quantized_layers(model).keys()
    dense = merge(model)
    errors = [relative_rms(full_logits(m, TOKENS).float(), expected) for m in (dense, requantized)]
    assert errors[0] < errors[1]
    for name, layer in quantized_layers(requantized).items():
        merged = merge(model, dtype=torch.float32).get_parameter(f"{name}.weight")
        assert torch.equal(layer.weight.codes, quantize_nf4(merged.detach()).codes)
