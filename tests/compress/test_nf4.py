"""Quantizing folders and models to NF4."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compress.lora import inject
from compress.quantize.round_to_nearest import QuantizationError, quantize_folder, quantize_model
from model.files.checkpoint import load_model, save_model
from model.formats.bitsandbytes import NF4
from model.lora import LoraConfig
from model.quantized import quantized_layers
from tests.tiny import full_logits, tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_is_quantized_like_the_model_in_memory(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=tied).to(dtype)
    save_model(model, tmp_path / "dense", max_shard_bytes=50_000)
    quantize_folder(tmp_path / "dense", tmp_path / "nf4", NF4(), max_shard_bytes=50_000)
    assert len(list((tmp_path / "nf4").glob("*.safetensors"))) > 1
    opened, expected = load_model(tmp_path / "nf4", dtype="auto"), quantize_model(model, NF4())
    assert len(quantized_layers(opened)) == 14 and opened.dtype == dtype
    assert torch.equal(full_logits(opened, TOKENS), full_logits(expected, TOKENS))


def test_the_quantized_layers_are_close_to_the_dense_ones() -> None:
    dense = tiny_model()
    quantized = quantize_model(tiny_model(), NF4())
    for name, layer in quantized_layers(quantized).items():
        weight = dense.get_parameter(f"{name}.weight")
        error = (layer.weight.dequantize() - weight).norm() / weight.norm()
        assert 0.08 < error < 0.1, name
    assert not any(name.endswith("proj.weight") for name, _ in quantized.named_parameters())


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made by torch's operators held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self.hold(tensor)
        return result

    def hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.holders[storage.data_ptr()] = self.holders.get(storage.data_ptr(), 0) + 1
        self.sizes[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(tensor, self.release, storage.data_ptr())
        self.peak = max(self.peak, sum(self.sizes.values()))

    def release(self, place: int) -> None:
        self.holders[place] -= 1
        if not self.holders[place]:
            del self.holders[place], self.sizes[place]


def test_memory_holds_the_quantized_model_and_one_layer(tmp_path: Path) -> None:
    """Of a sharded fp32 model of 24 equal layers: far less than the dense model."""
    model = tiny_model(num_layers=24, hidden_size=128, intermediate_size=256, vocab_size=128)
    save_model(model, tmp_path / "dense", max_shard_bytes=2_000_000)
    dense_bytes = sum(parameter.nbytes for parameter in model.parameters())
    layer_bytes = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    largest_bytes = max(parameter.nbytes for parameter in model.parameters())
    del model
    gc.collect()
    with LiveBytes() as live:
        quantize_folder(tmp_path / "dense", tmp_path / "nf4", NF4())
    nf4_bytes = sum(path.stat().st_size for path in (tmp_path / "nf4").glob("*.safetensors"))
    assert largest_bytes < live.peak < nf4_bytes + layer_bytes < 0.4 * dense_bytes


def test_a_quantized_base_is_refused(tmp_path: Path) -> None:
    save_model(quantize_model(tiny_model(), NF4()), tmp_path / "nf4")
    with pytest.raises(QuantizationError, match="nf4 is quantized already; quantize the model that it was made from"):
        quantize_folder(tmp_path / "nf4", tmp_path / "again", NF4())
    with pytest.raises(QuantizationError, match="is quantized already"):
        quantize_model(load_model(tmp_path / "nf4"), NF4())
    assert not (tmp_path / "again").exists()


def test_an_adapted_model_is_refused() -> None:
    model = tiny_model()
    inject(model, LoraConfig(rank=2))
    with pytest.raises(QuantizationError, match="merge it before"):
        quantize_model(model, NF4())


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model(tiny_model(), tmp_path / "dense")
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(tensors, tmp_path / "dense" / "model.safetensors")
    with pytest.raises(QuantizationError, match=r"model.layers.1.mlp.up_proj.weight that are not finite"):
        quantize_folder(tmp_path / "dense", tmp_path / "nf4", NF4())
