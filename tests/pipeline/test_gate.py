"""Gates refuse what is bad, whatever made it bad, and let through what is good."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pipeline.measure.parity
from compress.quantize.round_to_nearest import quantize_folder
from model.files.checkpoint import save_model
from model.formats.compressed_tensors import Int4, Int8
from model.transformer import Transformer
from pipeline.measure.gates import check_gate, describe, estimate
from pipeline.measure.parity import PARITY_TOLERANCE, check_parity
from pipeline.measure.quality import HeldOut
from pipeline.results import Estimate, Parity, Quality
from pipeline.stages.shared.config import Gate
from tests.forked import end_of, ranks
from tests.memory import peak_resident_bytes, return_what_is_freed
from tests.pipeline.tiny_run import TinyRun
from tests.serve.toys import toy_tokenizer
from tests.tiny import tiny_model
from train.packing import Batch


def batches(count: int = 12, length: int = 24) -> tuple[Batch, ...]:
    """Random text of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 512, (count, length + 1), generator=generator)
    positions, ends = torch.arange(length), torch.tensor([0, length], dtype=torch.int32)
    return tuple(Batch(row[:-1], positions, ends, row[1:], num_labels=length, num_bytes=2 * length) for row in tokens)


def nudged(model: Transformer, size: float) -> Transformer:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


def zero_a_layer(model: Transformer) -> None:
    model.model.layers[1].mlp.down_proj.weight.zero_()


def swap_layers(model: Transformer) -> None:
    first, second = (dict(model.model.layers[index].named_parameters()) for index in (0, 1))
    for name in first:
        kept = first[name].clone()
        first[name].copy_(second[name])
        second[name].copy_(kept)


def roll_the_vocabulary(model: Transformer) -> None:
    model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.roll(1, dims=0))


def mix_up_heads(model: Transformer) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.copy_(weight.roll(16, dims=0))


def scale_a_norm(model: Transformer) -> None:
    model.model.norm.weight.mul_(1.5)


def add_noise(model: Transformer) -> None:
    nudged(model, 0.3)


@pytest.mark.parametrize(
    "sabotage", [zero_a_layer, swap_layers, roll_the_vocabulary, mix_up_heads, scale_a_norm, add_noise]
)
def test_six_sabotaged_students_are_refused_and_the_good_one_is_not(sabotage: Callable[[Transformer], None]) -> None:
    held_out = HeldOut(batches())
    reference = held_out.states(tiny_model())
    gate = Gate(max_kl=0.02, min_acceptance=0.93, min_agreement=0.85)
    good = nudged(tiny_model(), 0.01)
    assert all(check.passed for check in check_gate(gate, held_out.quality(good, reference)))
    with torch.no_grad():
        sabotage(good)
    checks = check_gate(gate, held_out.quality(good, reference))
    assert sum(not check.passed for check in checks) >= 2, [describe(check) for check in checks]


def test_quality_that_is_not_finite_fails_every_bound() -> None:
    broken = Quality(
        tokens=1, nll=Estimate(math.nan, None), perplexity=math.nan, bits_per_byte=Estimate(math.nan, None),
        kl=Estimate(math.nan, math.nan), agreement=Estimate(math.nan, None), acceptance=Estimate(math.nan, None),
    )  # fmt: skip
    gate = Gate(max_kl=1e9, max_kl_ratio=1e9, min_acceptance=0.0, min_agreement=0.0, max_bits_per_byte=1e9)
    before = Quality(1, Estimate(1, None), 3.0, Estimate(1, None), kl=Estimate(9.0, None))
    checks = check_gate(gate, broken, before)
    assert len(checks) == 5 and not any(check.passed for check in checks)


@pytest.mark.parametrize(("margin", "passed"), [(None, True), (0.05, True), (0.2, False)])
def test_a_bound_holds_only_when_the_whole_interval_keeps_it(margin: float | None, passed: bool) -> None:
    quality = Quality(10, Estimate(1, None), 3.0, Estimate(1, None), Estimate(0.4, margin), None, Estimate(0.6, margin))
    upper, lower = check_gate(Gate(max_kl=0.5, min_acceptance=0.5), quality)
    assert (upper.passed, lower.passed) == (passed, passed)
    before = Quality(10, Estimate(1, None), 3.0, Estimate(1, None), Estimate(2.0, None))
    (ratio,) = check_gate(Gate(max_kl_ratio=0.25), quality, before)
    assert ratio.value == pytest.approx(0.2) and ratio.passed == passed


def test_the_interval_covers_the_truth_95_times_in_100() -> None:
    generator = random.Random(0)
    covered = 0
    for _ in range(2_000):
        weights = [generator.choice((50, 100, 150)) for _ in range(24)]
        means = [2.0 + generator.gauss(0, 1) / math.sqrt(weight) for weight in weights]
        found = estimate(means, weights)
        covered += found.low <= 2.0 <= found.high
    assert 0.92 < covered / 2_000 < 0.97


def test_one_batch_has_no_interval() -> None:
    assert estimate([1.5], [10]) == Estimate(1.5, None)


def test_quality_is_the_same_in_any_batches() -> None:
    import dataclasses

    one = batches()
    joined = Batch(
        tokens=torch.cat([batch.tokens for batch in one]),
        positions=torch.cat([batch.positions for batch in one]),
        cu_seqlens=torch.arange(0, 24 * 13, 24, dtype=torch.int32),
        labels=torch.cat([batch.labels for batch in one]),
        num_labels=24 * 12,
        num_bytes=48 * 12,
    )
    student, teacher = nudged(tiny_model(), 0.05), tiny_model()
    qualities = [HeldOut(found).quality(student, HeldOut(found).states(teacher)) for found in (one, (joined,))]
    for field in dataclasses.fields(Quality):
        values = [getattr(quality, field.name) for quality in qualities]
        numbers = [value.value if isinstance(value, Estimate) else value for value in values]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5), field.name


def change_what_the_trainer_reads(
    number: int, change: Callable[[Any], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a layer, once it has its weights."""
    honest = pipeline.measure.parity.log_probabilities

    def changed(model: Any, prompts: list[list[int]]) -> list[Tensor]:
        model.model.layers.then(lambda layer, name: change(layer) if name == f"layers.{number}" else None, "layers")
        return honest(model, prompts)

    monkeypatch.setattr(pipeline.measure.parity, "log_probabilities", changed)


@pytest.mark.parametrize(("factor", "passes"), [(1 + 1e-6, True), (1.5, False)], ids=["last bits", "other weights"])
def test_parity_of_rounded_activations_is_held_in_the_mean(
    factor: float, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What differs in its last bit is rounded to another step here and there, which is no fault of the server's."""
    save_model(tiny_model(), tmp_path / "dense")
    quantize_folder(tmp_path / "dense", tmp_path / "model", Int8.with_options(activations=True))
    toy_tokenizer().save(tmp_path / "model")
    change_what_the_trainer_reads(0, lambda layer: layer.input_layernorm.weight.mul_(factor), monkeypatch)
    parity = check_parity(tmp_path / "model", batches(), "cpu")
    assert parity.mean_difference is not None and parity.passed == passes
    assert parity.max_difference > PARITY_TOLERANCE, "nothing was rounded to another step"


@pytest.mark.parametrize(
    "format", [Int8.with_options(activations=True), Int4.with_options(group=64, activations=True)], ids=["int8", "int4"]
)
def test_trainer_and_server_have_the_same_bits_where_activations_are_rounded(format: Any, tmp_path: Path) -> None:
    """On the CPU: one last bit, of a cosine or a norm, would be rounded to another step somewhere."""
    save_model(tiny_model(intermediate_size=192), tmp_path / "dense")
    quantize_folder(tmp_path / "dense", tmp_path / "model", format)
    toy_tokenizer().save(tmp_path / "model")
    parity = check_parity(tmp_path / "model", batches(length=90), "cpu")
    assert parity.max_difference == 0 and parity.same_top == 1, parity


def peak_of_parity(folder: Path, found: Path) -> None:
    return_what_is_freed()
    check_parity(folder, batches(), "cpu")  # what is made once, such as kernels
    parity = list[Parity]()
    peak = peak_resident_bytes(lambda: parity.append(check_parity(folder, batches(), "cpu")))
    found.write_text(json.dumps({"passed": parity[0].passed, "peak": peak}))


def test_parity_takes_a_layer_at_a_time(tmp_path: Path) -> None:
    model = tiny_model(num_layers=24, hidden_size=256, intermediate_size=768)
    save_model(model, tmp_path)
    toy_tokenizer().save(tmp_path)
    with ranks(1, peak_of_parity, tmp_path, tmp_path / "found.json", log=tmp_path / "log") as started:
        assert not any(end_of(started)), (tmp_path / "log").read_text()[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["passed"] and found["peak"] < 0.4 * sum(p.nbytes for p in model.model.layers.parameters())


def test_parity_notices_a_server_with_other_weights(finished_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished_run.folder.path / "01-distill" / "model"
    text = tuple(Batch(one.tokens % 320, one.positions, one.cu_seqlens, one.labels, 24) for one in batches())
    assert check_parity(folder, text, "cpu").passed
    change_what_the_trainer_reads(1, lambda layer: layer.self_attn.v_proj.weight.mul_(1.01), monkeypatch)
    parity = check_parity(folder, text, "cpu")
    assert not parity.passed and parity.max_difference > parity.tolerance
