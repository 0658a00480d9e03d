"""A model over several ranks computes what it computes in one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention import PackedAttention
from model.collectives import Group
from model.config import MixtureOfDepths
from model.files.adapter import AdapterError, load_adapters, save_adapter
from model.files.checkpoint import CheckpointError, load_config, load_model, save_model
from model.formats.registry import format_named
from model.linear import Linear
from model.lora import adapted_layers, attach_lora
from model.lora_config import LoraConfig
from model.mesh import MeshError
from model.quantized import quantized_tensors, set_quantized
from model.routed import routed_layers
from model.tensor_parallel import Split, check_split
from model.transformer import Transformer
from tests.compare import check_close
from tests.ranks import in_ranks
from tests.tiny import tiny_config, tiny_model

TOKENS = [5, 509, 0, 17, 255, 256, 300, 17, 4]
SHAPE: dict[str, Any] = {
    "vocab_size": 510,
    "num_query_heads": 8,
    "head_dim": 32,
    "intermediate_size": 256,
}
"""Four ranks hold uneven vocabularies, and two of them each KV head."""


def write(folder: Path, family: str = "llama", *, format: str = "none", **changes: Any) -> Path:
    save_model(tiny_model_in(format, family, **changes), folder)
    return folder


def tiny_model_in(format: str, family: str = "llama", **changes: Any) -> Transformer:
    """A tiny model with its decoder's layers in a format."""
    model = tiny_model(family, seed=4, **(SHAPE | changes))
    kind = format_named(format)
    for name, layer in list(model.named_modules()):
        if kind is not None and isinstance(layer, Linear) and name != "lm_head":
            set_quantized(model, name, kind.quantize(layer.weight.detach()), kind)
    return model


def sharded_logits(
    folder: Path, count: int, adapters: Sequence[Path] = (), slots: Tensor | None = None
) -> list[Tensor]:
    """In each rank."""

    def run(group: Group) -> Tensor:
        layout = Split(group, load_config(folder))
        model = load_model(folder, layout=layout)
        return logits_of(model.fuse(load_adapters(model, adapters, layout)), slots)

    return in_ranks(count, run)


def logits_of(model: Transformer, slots: Tensor | None = None) -> Tensor:
    attention = PackedAttention(model.config, torch.tensor([0, len(TOKENS)], dtype=torch.int32))
    with torch.no_grad():
        return model.logits(model(torch.tensor(TOKENS), torch.arange(len(TOKENS)), attention, adapters=slots))


@pytest.mark.parametrize(
    ("format", "count"), [("none", 2), ("none", 4), ("nf4", 2), ("nf4", 4), ("int4", 4), ("int8", 2), ("fp8", 2)]
)
def test_logits_are_those_of_one_process(tmp_path: Path, format: str, count: int) -> None:
    folder = write(tmp_path / "model", format=format)
    expected = logits_of(load_model(folder).fuse())
    first, *others = sharded_logits(folder, count)
    check_close(first, expected)
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize(
    "family", ["qwen2", "gemma2", "gemma3_text", "phi3", "granite", "mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_families_too(tmp_path: Path, family: str) -> None:
    changes = {"tie_word_embeddings": family == "gemma3_text", "intermediate_size": 160}
    folder = write(tmp_path / "model", family, **changes)
    check_close(sharded_logits(folder, 2)[1], logits_of(load_model(folder).fuse()))


def test_biases_are_added_once(tmp_path: Path) -> None:
    changes = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
    model = tiny_model(seed=4, **SHAPE, **changes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    save_model(model, tmp_path / "model")
    check_close(sharded_logits(tmp_path / "model", 2)[0], logits_of(model.fuse()))


@pytest.mark.parametrize("route", ["attention", "mlp", "block"])
def test_routers_agree(tmp_path: Path, route: Any) -> None:
    mixture = MixtureOfDepths(route, (0, 1), 0.5)
    model = tiny_model(seed=4, mixture_of_depths=mixture, **SHAPE)
    for layer in routed_layers(model):
        torch.nn.init.normal_(layer.router.weight, std=1.0)
    save_model(model, tmp_path / "model")
    check_close(sharded_logits(tmp_path / "model", 2)[0], logits_of(model.fuse()))


def test_each_token_goes_through_its_adapter(tmp_path: Path) -> None:
    folder, adapters = write(tmp_path / "model", format="int4"), [tmp_path / "a", tmp_path / "b"]
    for seed, (adapter, rank) in enumerate(zip(adapters, (2, 5), strict=True)):
        write_adapter(folder, adapter, LoraConfig(rank=rank), seed)
    slots = torch.tensor([0, 1, -1] * 3, dtype=torch.int32)
    whole = load_model(folder)
    expected = logits_of(whole.fuse(load_adapters(whole, adapters)), slots)
    check_close(sharded_logits(folder, 2, adapters, slots)[1], expected)


def write_adapter(base: Path, folder: Path, config: LoraConfig, seed: int) -> None:
    model = load_model(base)
    attach_lora(model, config, seed=seed)
    for layer in adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora.b, std=0.3)
    save_adapter(model, folder, config)


def test_adapters_that_cannot_be_split_or_do_not_fit(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    write_adapter(folder, tmp_path / "dora", LoraConfig(rank=2, dora=True), 0)
    with pytest.raises(AdapterError, match=r"dora is a DoRA adapter; such a one is not served by several ranks\.$"):
        sharded_logits(folder, 2, [tmp_path / "dora"])
    write_adapter(write(tmp_path / "other", intermediate_size=160), tmp_path / "misfit", LoraConfig(rank=2), 0)
    with pytest.raises(AdapterError, match=r"with 160 inputs and 64 outputs; this model's has 256 and 64\.$"):
        sharded_logits(folder, 2, [tmp_path / "misfit"])


@pytest.mark.parametrize("format", ["none", "nf4", "int4"])
def test_each_rank_holds_its_part_of_the_bytes(tmp_path: Path, format: str) -> None:
    folder = write(tmp_path / "model", format=format, num_kv_heads=8)
    whole = weight_bytes(load_model(folder))
    parts = in_ranks(4, lambda group: weight_bytes(load_model(folder, layout=Split(group, load_config(folder)))))
    assert max(parts) < 1.12 * whole / 4


def weight_bytes(model: Transformer) -> int:
    tensors = [*model.parameters(), *(tensor for _, tensor in quantized_tensors(model))]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize(
    ("count", "changes", "reason"),
    [
        (3, {}, "3 does not divide the 4 attention heads; sizes that do are 2, 4"),
        (4, {"num_query_heads": 12, "num_kv_heads": 6}, "4 neither divides the 6 KV heads nor is a multiple of them; "),
        (4, {"intermediate_size": 162}, "4 does not divide the 162 neurons of an MLP; sizes that do are 2"),
        (4, {"vocab_size": 6}, "4 leaves a rank without any of the 6 tokens; sizes that do are 2"),
        (2, {"family": "olmo2"}, "2 cannot split the attention of olmo2, which norms all heads together; this model "),
    ],
)
def test_a_size_that_does_not_divide_is_one_sentence(count: int, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MeshError, match=f"^tensor_parallel_size {reason}"):
        check_split(tiny_config(**changes), count)


def test_quantized_weights_are_split_at_borders_of_groups(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", format="int4", intermediate_size=160)
    with pytest.raises(CheckpointError) as told:
        sharded_logits(folder, 2)
    assert str(told.value) == (
        "model.layers.0.mlp.down_proj.weight cannot be split over ranks: groups of 32 weights do not divide the 80 "
        "that a rank takes of a row; fewer ranks take more, and weights that were quantized with weights.group: 16 can "
        "be split so."
    )


def test_weights_are_not_replaced_in_one_rank(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    group = Group(0, 2)
    model = load_model(folder, layout=Split(group, load_config(folder)))
    with pytest.raises(ValueError, match="weights cannot be replaced where several ranks share a model"):
        model.update_weights({})
