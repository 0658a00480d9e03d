"""Adapters on a frozen base: trained, saved and resumed alone, and its activations are not kept."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compress.lora import inject
from compress.quantize.round_to_nearest import quantize_model
from model.formats.bitsandbytes import NF4
from model.lora import LoraConfig
from model.transformer import Transformer
from tests.tiny import tiny_model
from tests.train.test_loop import Calls, stop
from tests.train.toy import STEPS, adapted_model, batch_of, random_sequences, toy_trainer, weights_hash
from train.objectives import LanguageModelling
from train.tracking import read_metrics


def test_only_the_adapter_is_trained_and_saved(tmp_path: Path) -> None:
    model, untouched = adapted_model(), adapted_model()
    trainer = toy_trainer(tmp_path, model=model)
    trainer.train()
    adapter = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(adapter) == 12 and all(".lora." in name for name in adapter)
    before = dict(untouched.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in adapter), name
        assert parameter.grad is None
    folder = tmp_path / "checkpoints" / f"step-{STEPS:08d}"
    assert load_file(folder / "model.safetensors").keys() == adapter
    moments = load_file(folder / "optimizer.safetensors").keys()
    assert moments == {f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in adapter}


def test_the_norm_that_is_clipped_is_that_of_the_adapter(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, model=adapted_model(dropout=0.0), tokens=128)
    trainer.train()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    model = adapted_model(dropout=0.0)
    total, labels = 0.0, 0
    for numbers in toy_trainer(tmp_path / "again", model=adapted_model(), tokens=128).sampler.take(2):
        batch = trainer.sampler.batch(numbers)
        output = LanguageModelling()(model, batch)
        output.loss_sum.backward()
        labels += batch.num_labels
    total = sum(p.grad.square().sum().item() for p in model.parameters() if p.requires_grad)
    assert line["gradient_norm"] == pytest.approx(total**0.5 / labels, rel=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_resumed_run_draws_the_same_dropout(checkpointing: bool, tmp_path: Path) -> None:
    settings = {"activation_checkpointing": checkpointing, "optimizer": "paged_adamw_8bit"}
    straight = toy_trainer(tmp_path / "straight", model=adapted_model(), **settings)
    straight.train()
    toy_trainer(tmp_path / "parts", model=adapted_model(), objective=Calls({9: stop}), **settings).train()
    resumed = toy_trainer(tmp_path / "parts", model=adapted_model(seed=5), **settings)
    resumed.train()
    assert weights_hash(resumed.model) == weights_hash(straight.model)
    without = toy_trainer(tmp_path / "without", model=adapted_model(dropout=0.0), **settings)
    without.train()
    assert weights_hash(without.model) != weights_hash(straight.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recomputed_activations_give_the_same_gradients(dtype: torch.dtype, tmp_path: Path) -> None:
    """With frozen embeddings no input of a layer needs a gradient, and dropout must fall on the same places again."""
    plain, recomputed = (
        toy_trainer(tmp_path / str(on), model=adapted_model(dtype=dtype), activation_checkpointing=on)
        for on in (False, True)
    )
    plain.train()
    recomputed.train()
    assert weights_hash(plain.model) == weights_hash(recomputed.model)


def saved_bytes(*, frozen: bool, checkpointing: bool) -> int:
    """Bytes that a forward pass keeps for its backward pass, weights left out."""
    model = adapted_model(dropout=0.0, num_layers=8) if frozen else tiny_model(num_layers=8)
    model.train()
    model.activation_checkpointing = checkpointing
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = batch_of(random_sequences(200, 56))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        LanguageModelling()(model, batch).loss_sum.backward()
    return sum(kept.values())


def test_checkpointing_keeps_the_layers_inputs_alone() -> None:
    everything, inputs = (saved_bytes(frozen=True, checkpointing=on) for on in (False, True))
    assert inputs < everything / 4
    assert everything < saved_bytes(frozen=False, checkpointing=False)


def test_the_base_of_a_checkpoint_must_be_the_same(tmp_path: Path) -> None:
    toy_trainer(tmp_path, model=adapted_model(), objective=Calls({5: stop})).train()
    with pytest.raises(ValueError, match="is of a run on another base: the frozen weights differ"):
        toy_trainer(tmp_path, model=adapted_model(base=2)).train()


@pytest.mark.parametrize("double", [True, False])
def test_so_must_be_the_codes_of_a_quantized_base(double: bool, tmp_path: Path) -> None:
    """Two bases that differ in the codes of a single layer, and in nothing that is a parameter."""

    def quantized(scale: float = 1.0) -> Transformer:
        model = tiny_model(seed=1)
        with torch.no_grad():
            model.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(scale)
        quantize_model(model, NF4(double))
        inject(model, LoraConfig(rank=2))
        return model

    toy_trainer(tmp_path, model=quantized(), objective=Calls({5: stop})).train()
    with pytest.raises(ValueError, match="is of a run on another base: the frozen weights differ") as refusal:
        toy_trainer(tmp_path, model=quantized(-1.0)).train()
    assert "\n" not in str(refusal.value)
    assert toy_trainer(tmp_path, model=quantized()).train().steps == STEPS


def test_a_model_without_anything_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to train: every parameter is frozen"):
        toy_trainer(tmp_path, model=tiny_model().requires_grad_(False))


def test_adapters_must_be_fp32_but_their_base_need_not(tmp_path: Path) -> None:
    model = adapted_model(dtype=torch.bfloat16)
    toy_trainer(tmp_path / "one", model=model, tokens=128, precision="bf16").train()
    with pytest.raises(ValueError, match=r"lora.a is torch.bfloat16; load the model as float32"):
        toy_trainer(tmp_path / "two", model=model.to(torch.bfloat16))
