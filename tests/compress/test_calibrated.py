"""Quantizing a model layer by layer on text."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.lora import inject
from compress.quantize.calibrated import QuantizedLayerReport, quantize_layers
from compress.quantize.methods import METHODS, Method
from compress.quantize.round_to_nearest import QuantizationError, quantize_model
from compress.residual_stream import ResidualStream, layers_of
from model.collectives import ALONE, Group
from model.config import MixtureOfDepths
from model.families.registry import FAMILIES
from model.files.checkpoint import open_layerwise, save_model
from model.formats.base import WeightFormat
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Int4, Int8
from model.lora import LoraConfig
from model.quantized import quantized_layers, quantized_tensors
from model.transformer import Transformer
from tests.compress.conversions import TOKENS, texts
from tests.ranks import in_ranks
from tests.tiny import full_logits, tiny_model

TEXT = [*texts(300, 200), *texts(400, 100)]
FORMAT = Int4(32)


def quantized(model: Transformer, method: Method, format: WeightFormat[Any] = FORMAT) -> Transformer:
    return quantize_layers(copy.deepcopy(model), TEXT, lambda _: format, method)


def same(model: Transformer, other: Transformer) -> bool:
    pairs = zip(quantized_tensors(model), quantized_tensors(other), strict=True)
    parameters = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return all(one[0] == two[0] and torch.equal(one[1], two[1]) for one, two in [*pairs, *parameters])


@pytest.mark.parametrize("format", [Int4(32), Int4(16, False), Int8(), NF4()])
def test_plain_rounding_is_that_of_each_layer_for_itself(format: WeightFormat[Any]) -> None:
    model = tiny_model()
    assert same(quantized(model, METHODS["round"], format), quantize_model(copy.deepcopy(model), format))


def errors_of(model: Transformer, method: Method) -> float:
    """Relative squared errors of all projections, added up."""
    reports: list[QuantizedLayerReport] = []
    quantize_layers(copy.deepcopy(model), TEXT, lambda _: FORMAT, method, on_layer=reports.append)
    return sum(error for report in reports for error in report.errors.values())


def test_methods_err_less_than_rounding() -> None:
    model = tiny_model()
    plain = errors_of(model, METHODS["round"])
    found = {name: errors_of(model, method) / plain for name, method in METHODS.items() if name != "autoround"}
    assert found["weighted"] < 0.9 and found["awq"] < 0.9, found
    assert found["gptq"] < 0.8 and found["awq+gptq"] < 0.8, found


@pytest.mark.parametrize("name", ["qep+gptq", "awq+gptq"])
def test_processes_with_a_part_of_the_text_each_round_as_one_with_all(name: str) -> None:
    """Sums of moments have another order, which puts a few weights on the other side of a step, and later weights make
    up for these. One process has no text.
    """
    model, method = tiny_model(), METHODS[name]

    def rounded(group: Group) -> tuple[Transformer, list[float]]:
        own, reports = copy.deepcopy(model), list[QuantizedLayerReport]()
        quantize_layers(
            own, TEXT[:2][group.index :: group.count], lambda _: FORMAT, method, group=group, on_layer=reports.append
        )
        return own, [error for report in reports for error in report.errors.values()]

    (one, errors), *many = rounded(ALONE), *in_ranks(3, rounded)
    assert all(same(many[0][0], other) and many[0][1] == found for other, found in many[1:])
    assert many[0][1] == pytest.approx(errors, rel=0.05)
    first, other = (quantized_layers(layers_of(model)[0]) for model in (one, many[0][0]))
    for name in ("self_attn.q_proj", "self_attn.v_proj"):
        near = torch.isclose(first[name].weight.dequantize(), other[name].weight.dequantize(), rtol=1e-4)
        assert near.float().mean() > 0.98, name


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_gptq_errs_less_than_rounding_in_every_family(family: str) -> None:
    model = tiny_model(family)
    assert errors_of(model, METHODS["gptq"]) < 0.9 * errors_of(model, METHODS["round"])


def test_each_layer_sees_what_the_quantized_ones_make_of_the_text() -> None:
    """The second layer's result is that of a model whose first layer was quantized before, on that model's streams."""
    model = tiny_model()
    reports: list[QuantizedLayerReport] = []
    whole = quantize_layers(copy.deepcopy(model), TEXT, lambda _: FORMAT, METHODS["gptq"], on_layer=reports.append)
    first = copy.deepcopy(model)
    quantize_layers(first, TEXT, lambda name: FORMAT if ".0." in name else None, METHODS["gptq"])
    assert len(quantized_layers(first)) == 7
    # A weight of the second layer, by definition from the inputs that `first` gives it.
    stream_inputs = []
    for text in TEXT:
        stream = ResidualStream(first, text)
        stream.pass_on(layers_of(first)[0])
        stream_inputs.append(stream.normed(layers_of(first)[1]))
    x = torch.cat(stream_inputs)
    weight = model.model.layers[1].self_attn.k_proj.weight
    name = "model.layers.1.self_attn.k_proj"
    error = (x @ (weight - quantized_layers(whole)[name].weight.dequantize()).T).square().sum()
    expected = float((error / (x @ weight.T).square().sum()).detach())
    assert reports[1].errors[name] == pytest.approx(expected, rel=1e-3)


def test_o_proj_is_rounded_for_what_quantized_q_k_and_v_give() -> None:
    """Alone it comes out otherwise."""
    model, name = tiny_model(), "model.layers.0.self_attn.o_proj"
    alone = quantize_layers(copy.deepcopy(model), TEXT, lambda n: FORMAT if n == name else None, METHODS["gptq"])
    together = quantized(model, METHODS["gptq"])
    codes = [quantized_layers(one)[name].weight.codes for one in (alone, together)]
    assert not torch.equal(*codes)


def test_a_report_comes_behind_each_layer() -> None:
    reports: list[QuantizedLayerReport] = []
    quantize_layers(tiny_model(), TEXT, lambda _: FORMAT, METHODS["weighted"], on_layer=reports.append)
    assert [report.number for report in reports] == [0, 1]
    assert all(len(report.errors) == 7 and report.seconds > 0 for report in reports)
    assert all(1e-4 < error < 0.1 for report in reports for error in report.errors.values())


@pytest.mark.parametrize("method", ["gptq", "qep+gptq", "awq+gptq", "smoothquant", "autoround"])
def test_a_break_between_layers_changes_nothing(method: str) -> None:
    class Broken(Exception):
        pass

    def stop(report: QuantizedLayerReport) -> None:
        if report.number == 0:
            raise Broken

    def restore(number: int) -> bool:
        if number == 0:
            model.model.layers[0] = broken.model.layers[0]
        return number == 0

    model, chosen = tiny_model(), replace(METHODS[method], iterations=5)
    broken, whole = copy.deepcopy(model), quantized(model, chosen)
    with pytest.raises(Broken):
        quantize_layers(broken, TEXT, lambda _: FORMAT, chosen, on_layer=stop)
    quantize_layers(model, TEXT, lambda _: FORMAT, chosen, restore=restore)
    assert same(model, whole)


def test_a_folder_in_shards_is_quantized_layer_by_layer(tmp_path: Path) -> None:
    """Each layer is read before it is used, and not earlier; what comes out is what a model in memory gives."""
    dense = tiny_model()
    save_model(dense, tmp_path, max_shard_bytes=200_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model, load_layer = open_layerwise(tmp_path)
    waiting: list[bool] = []

    def done(report: QuantizedLayerReport) -> None:
        waiting.append(all(p.is_meta for layer in model.model.layers[report.number + 1 :] for p in layer.parameters()))

    quantize_layers(model, TEXT, lambda _: FORMAT, METHODS["awq+gptq"], load_layer=load_layer, on_layer=done)
    assert waiting == [True, True]
    assert same(model, quantized(dense, METHODS["awq+gptq"]))


def test_layers_have_the_formats_chosen_for_them() -> None:
    def choose(name: str) -> WeightFormat[Any] | None:
        if name.endswith("down_proj"):
            return Int8()
        return None if ".0." in name else FORMAT

    model = tiny_model()
    mixed = quantize_layers(copy.deepcopy(model), TEXT, choose, METHODS["awq+gptq"])
    formats = {name: layer.format for name, layer in quantized_layers(mixed).items()}
    assert formats == {
        name: choose(name) for name in quantized_layers(quantized(model, METHODS["round"])) if choose(name)
    }


@pytest.mark.parametrize("route", ["block", "attention", "mlp"])
def test_layers_with_routers_learn_from_the_tokens_that_pass(route: str) -> None:
    routed = MixtureOfDepths(layers=(1,), capacity=0.5, thresholds=(0.0,), route=route)
    model = tiny_model(mixture_of_depths=routed)
    assert errors_of(model, METHODS["gptq"]) < 0.8 * errors_of(model, METHODS["round"])


def test_a_layer_that_no_token_passes_is_refused() -> None:
    routed = MixtureOfDepths(layers=(1,), capacity=0.5, thresholds=(100.0,), route="block")
    with pytest.raises(QuantizationError, match=r"No token .* passes model.layers.1.self_attn.q_proj"):
        quantized(tiny_model(mixture_of_depths=routed), METHODS["gptq"])


def test_what_does_not_fit_is_refused_before_work_begins() -> None:
    model = tiny_model()
    before = full_logits(model, TOKENS)
    for format, method, message in (
        (Int4(48), "weighted", r"q_proj cannot be quantized: .*groups of 48 do not divide rows of 64"),
        (NF4(), "gptq", "levels cannot be chosen"),
    ):
        with pytest.raises(QuantizationError, match=message):
            quantize_layers(model, TEXT, lambda _, format=format: format, METHODS[method])
    with pytest.raises(QuantizationError, match=r"calibration text has 50 tokens; at least 128"):
        quantize_layers(model, texts(30, 20), lambda _: FORMAT, METHODS["gptq"])
    assert torch.equal(full_logits(model, TOKENS), before)
    with pytest.raises(QuantizationError, match="quantized already"):
        quantized(quantize_model(copy.deepcopy(model), FORMAT), METHODS["gptq"])
    inject(model, LoraConfig(rank=2))
    with pytest.raises(QuantizationError, match="merge it before"):
        quantized(model, METHODS["gptq"])


def test_weights_that_are_not_finite_are_refused() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.inf
    with pytest.raises(QuantizationError, match=r"model.layers.1.mlp.up_proj"):
        quantized(model, METHODS["round"])
