"""Figures of models that no process holds whole: those of one process, with a part of the memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.lora import inject
from compress.mod import add_routers, set_thresholds
from compress.quantize.round_to_nearest import quantize_model
from model.config import MixtureOfDepths
from model.files.adapter import save_adapter
from model.files.checkpoint import save_model
from model.formats.bitsandbytes import NF4
from model.lora import LoraConfig, adapted_layers
from model.transformer import Transformer
from tests.forked import end_of, ranks
from tests.pipeline import shared_process
from tests.tiny import tiny_model

PROCESSES = 2
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_layers": 8, "num_query_heads": 8, "head_dim": 64}
"""Of so many layers that one of them, and the embeddings, are little."""


def dense() -> Transformer:
    return tiny_model(seed=1, **WIDE)


def routed() -> Transformer:
    model = add_routers(dense(), MixtureOfDepths("block", (1, 3), 0.5))
    set_thresholds(model, (0.0, -1.0))
    return model


def quantized() -> Transformer:
    model = dense()
    quantize_model(model, NF4())
    return model


def write_adapted(folder: Path) -> None:
    """An adapter that does something, beside its base."""
    model, config = quantized(), LoraConfig(rank=4)
    save_model(model, folder / "base")
    inject(model, config, seed=1)
    for layer in adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora.b, std=0.05)
    save_adapter(model, folder, config, base="base")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """By one process, and by each of several."""
    folder = tmp_path_factory.mktemp("shared")
    models = {"dense": dense, "routed": routed, "quantized": quantized}
    save_model(tiny_model(seed=2, **WIDE), folder / "reference")
    for name, make in models.items():
        save_model(make(), folder / name)
    write_adapted(folder / "adapted")
    found = []
    for count in (1, PROCESSES):
        log = folder / "log"
        with ranks(count, shared_process.main, folder, *models, "adapted", "shortened", log=log) as started:
            assert not any(end_of(started)), log.read_text()[-3000:]
        found.append([json.loads((folder / f"{count}-{rank}.json").read_text()) for rank in range(count)])
    return found


@pytest.mark.parametrize("name", ["dense", "routed", "quantized", "adapted", "shortened"])
def test_quality_in_shards_is_that_of_one_process(name: str, measured: list[list[dict[str, Any]]]) -> None:
    """A process has its share and a layer."""
    (one,), many = measured
    for process in many:
        assert process[name]["quality"]["tokens"] == one[name]["quality"]["tokens"]
        for figure in ("nll", "kl", "agreement", "acceptance"):
            assert process[name]["quality"][figure] == pytest.approx(one[name]["quality"][figure], rel=1e-6, abs=1e-9)
        assert process[name]["held"] < 0.61 * one[name]["held"]
        assert process[name]["loading"] < 0.65 * one[name]["loading"]


def test_a_quantized_model_whose_layers_are_divided_says_the_same(measured: list[list[dict[str, Any]]]) -> None:
    (one,), many = measured
    for process in many:
        assert process["divided"]["nll"]["value"] == pytest.approx(one["divided"]["nll"]["value"], rel=1e-5)


@pytest.mark.parametrize("how", ["read", "drawn", "dense base", "base", "base of loftq"])
def test_what_is_trained_is_made_in_the_shards_that_train_it(how: str, measured: list[list[dict[str, Any]]]) -> None:
    """No process ever has more than its share and a layer; together they have what one process has, to the bit.

    Weights that one process takes as files hold them are mapped, so that they are not its own until they are touched.
    """
    (one,), many = measured
    whole = max(one[how]["peak"], one[how]["held"])
    assert many[0][how]["weights"] == one[how]["weights"]
    for process in many:
        assert process[how]["frozen"] == one[how]["frozen"]
        assert process[how]["held"] < 0.61 * one[how]["held"] and process[how]["peak"] < 0.65 * whole
