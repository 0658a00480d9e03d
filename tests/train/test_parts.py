"""Layers that ranks divide: their gradients, put together, are those of the whole model, in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.lora import inject
from compress.mod import add_routers
from compress.quantize.round_to_nearest import quantize_model
from model.collectives import Group
from model.config import MixtureOfDepths
from model.formats.bitsandbytes import NF4
from model.lora import LoraConfig
from model.mesh import Mesh, MeshError
from model.tensor_parallel import LAYERS
from model.transformer import Transformer
from tests.ranks import in_ranks
from tests.tiny import tiny_model
from tests.train.toy import documents, toy_pairs
from train.config import Loss, TrainingConfig
from train.data import TokenizedDocuments
from train.objectives import Distillation, LanguageModelling, Objective, RoutedTraining, RoutingConfig
from train.packing import Batch, held_out_batches
from train.parallel import check_processes
from train.parts import Parts

NARROW = {"num_query_heads": 4, "num_kv_heads": 1, "tie_word_embeddings": True}
WIDE = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 32, "intermediate_size": 128}
GRADIENTS = dict[str, Tensor]


def model_of(family: str, **changes: Any) -> Transformer:
    """Whose vectors are no ones and zeros."""
    model = tiny_model(family, seed=1, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return model


def adapted() -> Transformer:
    model = tiny_model(seed=1, **WIDE)
    quantize_model(model, NF4())
    inject(model, LoraConfig(rank=6), seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith(".lora.b"):
            parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    return model


MODELS = {
    "norms of heads": lambda: model_of("qwen3"),
    "biases": lambda: model_of("qwen2", qkv_bias=True, output_bias=True, mlp_bias=True),
    "norms behind, soft caps": lambda: model_of("gemma2"),
    "one KV head": lambda: model_of("llama", **NARROW),
    "an adapter": adapted,
    "routers": lambda: add_routers(model_of("llama"), MixtureOfDepths("block", (1,), capacity=0.5)),
}


def objective(name: str) -> Objective:
    if name == "one KV head":
        return Distillation(model_of("llama", num_layers=3), Loss(hidden_weight=0.5))
    return RoutedTraining(LanguageModelling(), RoutingConfig(0.5)) if name == "routers" else LanguageModelling()


def batch() -> Batch:
    """29 tokens, which no number of ranks divides."""
    (found,) = held_out_batches(documents([17, 14], seed=3), sequence_length=32, batch_tokens=64, max_tokens=64)
    assert len(found.tokens) == 29
    return found


def gradients(name: str, group: Group) -> tuple[float, GRADIENTS]:
    """Of the whole loss, whatever the rank computes of it."""
    torch.manual_seed(0)
    model, asked, over = MODELS[name]().double(), objective(name), batch()
    taught = [asked.teacher.double()] if isinstance(asked, Distillation) else []
    parts = [Parts(one, group) for one in (model, *taught)]
    for part, one in zip(parts, (model, *taught), strict=True):
        for number in range(len(one.model.layers)):
            part.take(one, number)
        part.connect(one)
    part, output = parts[0], asked(model, over if group.count == 1 else over.losses_among(group), 1.0)
    output.loss_sum.backward()
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    part.sum_shared(trained)
    for key, parameter in trained.items():
        if not key.startswith(LAYERS):
            group.sum(parameter.grad.mul_(part.weight(key)))
    loss = group.sum(output.loss_sum.detach().clone()).item()
    return loss, {key: part.joined(key, parameter.grad) for key, parameter in trained.items()}


# Blocks of 64 weights are not cut.
COUNTS = [(name, count) for name in MODELS for count in (2, 4) if (name, count) != ("an adapter", 4)]


@pytest.mark.parametrize(("name", "count"), COUNTS)
def test_gradients_are_those_of_the_whole_model(name: str, count: int) -> None:
    expected, whole = gradients(name, Group(0, 1))
    for loss, found in in_ranks(count, lambda group: gradients(name, group)):
        assert loss == pytest.approx(expected, rel=1e-8)
        assert found.keys() == whole.keys()
        for key, gradient in whole.items():
            torch.testing.assert_close(found[key], gradient, rtol=0, atol=1e-12 * gradient.abs().max().item())


def rounded() -> Transformer:
    from compress.quantize.qat import train_through_rounding
    from model.formats.compressed_tensors import Int4

    model = quantize_model(tiny_model(), Int4(32))
    train_through_rounding(model, "scales")
    return model


def dora() -> Transformer:
    model = tiny_model()
    inject(model, LoraConfig(rank=2, dora=True), seed=1)
    return model


@pytest.mark.parametrize(
    ("model", "data", "size", "sentence"),
    [
        (tiny_model, documents([9]), 3, "tp_size 3 does not divide the 4 attention heads; shard over more processes"),
        (lambda: tiny_model("mixtral"), documents([9]), 2, "tp_size 2 does not divide the experts of a model that is"),
        (lambda: tiny_model("phi3"), documents([9]), 2, "tp_size 2 does not divide the joined projections of phi3"),
        (dora, documents([9]), 2, "tp_size 2 cuts the rows whose norms DoRA divides by; shard over"),
        (rounded, documents([9]), 2, "tp_size 2 cuts weights whose rounding is trained, which needs them whole"),
        (tiny_model, toy_pairs(), 2, "tp_size 2. divides losses, but pairs of answers need whole documents"),
    ],
)
def test_what_cannot_be_divided_is_one_sentence(model: Any, data: TokenizedDocuments, size: int, sentence: str) -> None:
    config = TrainingConfig(tokens=256, batch_tokens=256, micro_batch_tokens=32, precision="fp32")
    with pytest.raises(MeshError, match=sentence) as caught:
        check_processes(model(), data, config, Mesh(1, 1, tensor=size), size)
    assert "\n" not in str(caught.value)
