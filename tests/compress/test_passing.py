"""Models that are never whole: what is found on them, and made of them, is that of whole ones, to the bit."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.gqa import group_kv_heads, grouped, head_moments
from compress.lora import inject
from compress.mod import add_routers, calibrate, measure_selections, routed
from compress.prune.depth import block_influence, perplexity_increase, prune_depth, shortened
from compress.prune.width import keep_width, narrowed, prune_width, width_importance
from compress.quantize.round_to_nearest import quantize_model
from compress.quantize.sensitivity import rounding_costs
from compress.refit import refit_outputs
from compress.token_costs import skipping_costs
from model.config import MixtureOfDepths
from model.files.adapter import BASE_NAME, save_adapter
from model.files.checkpoint import CheckpointError, load_model, save_model
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Int4, Int8
from model.fused_adapters import AdapterRoom
from model.lazy import LazyModel, open_published, passing, passing_copy
from model.lora import LoraConfig, LoraError, adapted_layers, detach_lora
from model.routed import routed_layers
from model.transformer import Transformer
from tests.compress.conversions import TOKENS, Text, plans_for, texts
from tests.memory import peak_bytes
from tests.tiny import full_logits, tiny_model

TEXT = [*texts(40, 25), *texts(30)]
LAYERS, MIXTURE = 8, MixtureOfDepths("block", (1, 3), 0.5)
Measure = Callable[[Transformer, list[Text]], Any]


def moments(model: Transformer, text: list[Text]) -> list[Any]:
    return [vars(found) for found in head_moments(model, text, [2] * model.config.num_layers) if found is not None]


def refitted(model: Transformer, text: list[Text]) -> dict[str, Tensor]:
    """Towards a parent of other weights, as whole as the model."""
    parent = LazyModel.of(tiny_model("qwen2", seed=2, num_layers=LAYERS))
    return refit_outputs(model, parent.passing() if is_passing(model) else parent.made(), text)


def is_passing(model: Transformer) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def thresholds(model: Transformer, text: list[Text]) -> tuple[float, ...]:
    calibrate(model, text)
    return model.config.mixture_of_depths.thresholds  # type: ignore[union-attr]


rounded = partial(rounding_costs, candidates=[Int4(32), Int8()])
MEASURES: dict[str, Measure] = {
    "head moments": moments,
    "refitted outputs": refitted,
    "influence": block_influence,
    "perplexity": perplexity_increase,
    "width": lambda model, text: width_importance(model, text)._asdict(),
    "costs of rounding": lambda model, text: {name: [*found.values()] for name, found in rounded(model, text).items()},
    **{f"costs of {route}": partial(skipping_costs, route=route) for route in ("block", "attention", "mlp")},
}
OF_ROUTERS: dict[str, Measure] = {"thresholds": thresholds, "selections": measure_selections}


def parent(**sizes: int) -> LazyModel:
    return LazyModel.of(tiny_model("qwen2", seed=1, num_layers=LAYERS, **sizes))


def with_routers(**sizes: int) -> LazyModel:
    model = routed(parent(**sizes), MIXTURE)
    fresh = torch.randn(1, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    return model.with_weights({f"model.layers.{layer}.router.weight": fresh for layer in MIXTURE.layers})


def with_routers_made() -> Transformer:
    return with_routers().made()


@pytest.mark.parametrize("name", [*MEASURES, *OF_ROUTERS])
def test_what_a_text_says_of_it(name: str) -> None:
    measure, model = (MEASURES | OF_ROUTERS)[name], with_routers() if name in OF_ROUTERS else parent()
    passing = model.passing()
    found, expected = measure(passing, TEXT), measure(model.made(), TEXT)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert is_passing(passing), "nothing stays in memory"


@pytest.mark.parametrize("name", [*MEASURES, *OF_ROUTERS])
def test_it_takes_a_layer_at_a_time(name: str) -> None:
    """Of weights that are much beside what a short text makes; two models are refitted together.

    What rounding costs is reckoned with sums as wide as the layer.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 768}
    measure, make = (MEASURES | OF_ROUTERS)[name], with_routers if name in OF_ROUTERS else parent
    model, text = make(**sizes), texts(8)
    if name == "refitted outputs":
        model, measure = parent(**sizes), lambda own, text: refit_outputs(own, model.passing(), text)
    passing = model.passing()
    whole = sum(make().nbytes for key, make in model.weights.items() if "layers" in key)
    allowed = {"refitted outputs": 0.6, "costs of rounding": 0.45}.get(name, 0.35)
    assert peak_bytes(lambda: measure(passing, text)) < allowed * whole


def conversions(model: Transformer) -> dict[str, tuple[Transformer, Callable[[LazyModel], LazyModel]]]:
    """Of a model: what is made of it in memory, and of one that is read a weight at a time."""
    plans, keep = plans_for(model, 1, "subspace"), (0, 2, 5)
    narrow = model.config.narrow(heads=2, mlp=96, hidden=48)
    width = keep_width(width_importance(model, TEXT), model.config, narrow)
    return {
        "gqa": (group_kv_heads(model, plans), lambda one: grouped(one, plans)),
        "depth": (prune_depth(model, keep), lambda one: shortened(one, keep)),
        "width": (prune_width(model, width, narrow), lambda one: narrowed(one, width, narrow)),
        "mod": (add_routers(model, MIXTURE), lambda one: routed(one, MIXTURE)),
    }


@pytest.mark.parametrize("name", ["gqa", "depth", "width", "mod"])
def test_what_is_made_of_a_folder(name: str, tmp_path: Path) -> None:
    save_model(tiny_model("qwen2", seed=1, num_layers=LAYERS), tmp_path / "parent", dtype=torch.bfloat16)
    expected, convert = conversions(load_model(tmp_path / "parent"))[name]
    lazy = convert(LazyModel.of_folder(tmp_path / "parent"))
    opened, make_layer = lazy.opened()
    for number in range(lazy.config.num_layers):
        make_layer(number)
    for model in (lazy.made(), opened):
        assert model.config == expected.config and not model.training
        weights = dict(model.named_parameters())
        assert weights.keys() == dict(expected.named_parameters()).keys()
        for key, weight in expected.named_parameters():
            assert torch.equal(weights[key], weight), key


def adapted() -> Transformer:
    """An adapter that does something, beside a quantized base."""
    model = quantize_model(tiny_model(seed=1, num_layers=LAYERS, intermediate_size=128), NF4())
    inject(model, LoraConfig(rank=4, targets=("*_proj", "lm_head")), seed=1)
    for layer in adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora.b, std=0.05)
    return model


@pytest.mark.parametrize("make", [adapted, with_routers_made], ids=["adapter", "routers"])
def test_a_model_in_memory_is_asked_by_copies_of_its_layers(make: Callable[[], Transformer]) -> None:
    """What is found on them, such as thresholds, it does not take over."""
    model = make()
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    expected = copy.deepcopy(model).to(torch.bfloat16)
    passing = passing_copy(model, lambda part: part.to(torch.bfloat16))
    for form in (expected, passing):
        if model.config.mixture_of_depths is not None:
            calibrate(form, TEXT)
    assert torch.equal(full_logits(passing, TOKENS), full_logits(expected, TOKENS))
    assert passing.config == expected.config
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())
    assert all(layer.threshold == 0 for layer in routed_layers(model))


def saved(name: str, folder: Path) -> Path:
    """A published model of that kind."""
    model = MODELS[name]()
    if not adapted_layers(model):
        save_model(model, folder)
        return folder
    base, adapter = MODELS[name](), LoraConfig(rank=4, targets=("*_proj", "lm_head"))
    detach_lora(base)
    save_model(base, folder / BASE_NAME)
    save_adapter(model, folder, adapter, base=BASE_NAME)
    return folder


MODELS: dict[str, Callable[[], Transformer]] = {
    "dense": lambda: tiny_model("qwen2", seed=1),
    "INT4": lambda: quantize_model(tiny_model(seed=1, intermediate_size=128), Int4(32, symmetric=False)),
    "adapter": adapted,
    "routers": with_routers_made,
    "experts": lambda: tiny_model("mixtral", seed=1),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_passes_text_as_it_is_trained_and_as_it_is_served(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path)
    whole, by_layers = load_model(folder), passing(*open_published(folder, torch.float32, "cpu"))
    for _ in range(2):
        assert torch.equal(full_logits(by_layers, TOKENS), full_logits(whole, TOKENS))
        assert is_passing(by_layers)
    whole.fuse()
    by_layers.fuse()
    for _ in range(2):
        assert torch.equal(full_logits(by_layers, TOKENS), full_logits(whole, TOKENS))
        assert is_passing(by_layers) and not by_layers.can_be_captured


def test_requests_cannot_choose_among_adapters_of_layers_that_come_one_at_a_time() -> None:
    with pytest.raises(LoraError, match="layers come one at a time, so requests cannot choose among adapters"):
        parent().passing().fuse(AdapterRoom(2, 4))


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    save_model(tiny_model(num_layers=1), tmp_path / "parent")
    (tmp_path / "parent" / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(CheckpointError):
        LazyModel.of_folder(tmp_path / "parent")
