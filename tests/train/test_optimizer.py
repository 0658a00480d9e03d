"""Optimizers: what their states take, that they resume exactly, and that 8 bits train as well as 32."""

import logging
from pathlib import Path
from typing import get_args

import pytest
import torch

from model.training_memory import SMALLEST_IN_8_BITS
from tests.tiny import tiny_model
from tests.train.test_loop import Calls, stop
from tests.train.toy import adapted_model, toy_config, toy_trainer, weights_hash
from train.config import OptimizerName
from train.optimizer import AdamW, make_optimizer, named_moments
from train.tracking import read_metrics


@pytest.mark.parametrize("optimizer", [name for name in get_args(OptimizerName) if name != "adamw"])
def test_a_resumed_run_is_the_same_run(optimizer: str, tmp_path: Path) -> None:
    straight = toy_trainer(tmp_path / "straight", optimizer=optimizer)
    straight.train()
    first = toy_trainer(tmp_path / "parts", optimizer=optimizer, objective=Calls({9: stop}))
    assert first.train().interrupted
    second = toy_trainer(tmp_path / "parts", optimizer=optimizer, model=tiny_model(seed=77))
    second.train()
    assert weights_hash(second.model) == weights_hash(straight.model)
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("straight", "parts")]
    assert lines[0] == lines[1]


def test_8_bit_moments_train_as_well_as_fp32_ones(tmp_path: Path) -> None:
    losses = {}
    for name in ("adamw", "adamw_8bit"):
        toy_trainer(tmp_path / name, optimizer=name, tokens=60 * 128).train()
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")]
    assert losses["adamw"] != losses["adamw_8bit"]
    assert sum(losses["adamw"][-10:]) < 0.9 * sum(losses["adamw"][:10])
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], rel=0.02)


def test_large_tensors_take_two_bytes_an_element_and_small_ones_keep_fp32(tmp_path: Path) -> None:
    model = tiny_model()
    trainer = toy_trainer(tmp_path, model=model, optimizer="adamw_8bit", tokens=128)
    trainer.train()
    moments = named_moments(model, trainer.optimizer)
    for name, parameter in model.named_parameters():
        stored = sum(tensor.nbytes for kind, tensor in moments.items() if kind.endswith(f".{name}"))
        each = 8 if parameter.numel() < SMALLEST_IN_8_BITS else 2 + 8 / 256
        assert stored / parameter.numel() == pytest.approx(each, rel=0.02), name
    assert {tensor.dtype for tensor in moments.values()} == {torch.uint8, torch.float32}


def test_on_a_cpu_paged_moments_are_ordinary_ones_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for eight_bit in ("", "_8bit"):
        with caplog.at_level(logging.INFO):
            trainers = [
                toy_trainer(tmp_path / f"{kind}{eight_bit}", optimizer=f"{kind}{eight_bit}")
                for kind in ("adamw", "paged_adamw")
            ]
        assert f"Without a GPU paged_adamw{eight_bit} is adamw{eight_bit}: moments" in caplog.text
        for trainer in trainers:
            trainer.train()
        assert weights_hash(trainers[0].model) == weights_hash(trainers[1].model)


def test_moments_of_other_bits_are_refused(tmp_path: Path) -> None:
    toy_trainer(tmp_path, objective=Calls({5: stop})).train()
    with pytest.raises(ValueError, match="of a run with optimizer=adamw; this one has optimizer=adamw_8bit"):
        toy_trainer(tmp_path, optimizer="adamw_8bit").train()
    toy_trainer(tmp_path, optimizer="paged_adamw").train()  # where they lie makes no difference


def test_lora_plus_gives_b_its_own_rate(tmp_path: Path) -> None:
    model = adapted_model()
    optimizer = make_optimizer(model, toy_config(learning_rate_ratio=16.0))
    names = {parameter: name for name, parameter in model.named_parameters()}
    rates = {names[p]: group["rate"] for group in optimizer.param_groups for p in group["params"]}
    assert rates == {name: 16.0 if name.endswith(".b") else 1.0 for name in names.values() if ".lora." in name}
    # Adam's first update moves every weight with a gradient by the learning rate; A has none while B is zero.
    trainer = toy_trainer(tmp_path, model=model, tokens=128, learning_rate=1e-4, learning_rate_ratio=16.0,
                          weight_decay=0.0, warmup_fraction=0.0, schedule="constant")  # fmt: skip
    trainer.train()
    moved = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if name.endswith(".lora.b")])
    assert moved.abs().median().item() == pytest.approx(16e-4, rel=1e-2)


def test_norms_are_not_decayed() -> None:
    model = tiny_model()
    optimizer = make_optimizer(model, toy_config(optimizer="adamw_8bit"))
    assert isinstance(optimizer, AdamW)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all(decays[p] == (0.01 if p.dim() > 1 else 0.0) for p in model.parameters())
