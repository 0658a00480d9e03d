"""Held-out quality: what all batches together give, in one pass with a reference as in one without."""

import copy
import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from compress.mod import RandomRouting, add_routers
from compress.quantize.round_to_nearest import quantize_model
from model.collectives import Group
from model.config import MixtureOfDepths
from model.files.checkpoint import save_model
from model.formats.base import WeightFormat
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Int4
from pipeline.measure.quality import ALONE, HeldOut, describe_base, describe_model, load_published
from pipeline.results import Quality
from tests.ranks import in_ranks
from tests.serve.toys import drain, greedy, make_engine
from tests.tiny import tiny_model
from train.evaluate import compare, mean_nll
from train.packing import Batch


def batch(seed: int, length: int, num_bytes: int) -> Batch:
    tokens = torch.randint(512, (length,), generator=torch.Generator().manual_seed(seed))
    labels = torch.cat((tokens[1:], torch.tensor([-100])))
    return Batch(
        tokens, torch.arange(length), torch.tensor([0, length], dtype=torch.int32), labels, length - 1, num_bytes
    )


HELD_OUT = HeldOut((batch(1, 30, 100), batch(2, 50, 120), batch(3, 20, 90)))


@pytest.mark.parametrize("with_reference", [False, True])
def test_the_figures_are_those_of_all_batches_together(with_reference: bool) -> None:
    model, reference = tiny_model(seed=1), tiny_model(seed=2)
    states = HELD_OUT.states(reference)
    quality = HELD_OUT.quality(model, states if with_reference else None)
    nll, tokens, num_bytes = mean_nll(model, HELD_OUT.batches), 97, 310
    assert quality.tokens == tokens
    assert quality.nll.value == pytest.approx(nll, rel=1e-6)
    assert quality.perplexity == pytest.approx(math.exp(nll), rel=1e-5)
    assert quality.bits_per_byte.value == pytest.approx(nll * tokens / math.log(2) / num_bytes, rel=1e-6)
    assert quality.nll.margin and quality.bits_per_byte.margin
    if not with_reference:
        assert quality.kl is quality.agreement is quality.acceptance is None
        return
    assert HELD_OUT.quality_of(states) == HELD_OUT.quality(reference)
    both = compare(model, states, HELD_OUT.batches)
    assert quality.kl and quality.agreement and quality.acceptance
    assert quality.kl.value == pytest.approx(both.kl, rel=1e-5)
    assert quality.agreement.value == pytest.approx(both.agreement)
    assert quality.acceptance.value == pytest.approx(both.acceptance, rel=1e-5)


def test_one_process_says_how_much_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model, alone = tiny_model(), HeldOut(HELD_OUT.batches[:1])
    monkeypatch.setattr("train.progress.LOG_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, logger="train.progress"):
        for measure in (HELD_OUT.states, HELD_OUT.quality, lambda m: HELD_OUT.quality(m, HELD_OUT.states(m))):
            caplog.clear()
            measure(model)
            shares = [said.partition("%")[0] for said in caplog.messages[-3:]]
            assert shares == ["measuring: 33", "measuring: 66", "measuring: 100"]
        caplog.clear()
        alone.quality(model)  # there is nothing to wait for
        monkeypatch.setenv("RANK", "1")
        HELD_OUT.quality(model)
        assert not caplog.messages


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_give_the_figures_of_one_to_the_bit(processes: int) -> None:
    """Three batches, so that some have fewer than others; whom random routing lets pass included."""
    mixture = MixtureOfDepths("block", (1,), 0.5)
    routed = add_routers(tiny_model(seed=1), mixture)

    def figures(group: Group) -> list[Quality]:
        held_out, reference = replace(HELD_OUT, group=group), tiny_model(seed=2)
        states, at_random = held_out.states(reference), partial(RandomRouting, {1: 0.5})
        assert len(states.hidden) == math.ceil(3 / group.count)
        found = [held_out.quality(copy.deepcopy(routed), states, routing=at_random), held_out.quality_of(states)]
        return [*found, held_out.quality(reference), held_out.alone.quality(reference)]

    one = figures(ALONE)
    assert one[0] != HELD_OUT.quality(routed, HELD_OUT.states(tiny_model(seed=2)))
    assert in_ranks(processes, figures) == [one] * processes


@pytest.mark.parametrize(("name", "scale"), [("int8", None), ("fp8", None), ("fp8", 0.01)])
def test_what_a_cache_in_eight_bits_costs(name: str, scale: float | None) -> None:
    """KL from the model's own distribution, over pages as the engine's, which gives the same log-probabilities."""
    model = tiny_model(seed=1)
    if scale is not None:
        scales = torch.full((model.config.num_kv_heads,), scale)
        model.cache_scales = [(scales, scales)] * model.config.num_layers
    states = HELD_OUT.states(model)
    plain, cached = (HELD_OUT.quality(model, states, kv_cache_dtype=kept) for kept in ("auto", name))
    assert plain.kl and cached.kl and plain.kl.value < 1e-6 < 1e-4 < cached.kl.value < 0.1
    engine = make_engine(model, kv_cache_dtype=name)
    for number, one in enumerate(HELD_OUT.batches):
        engine.add_request(str(number), one.tokens.tolist(), greedy(1, prompt_logprobs=1))
    entries = [entry for output in drain(engine).values() for entry in output.prompt_logprobs or () if entry]
    assert len(entries) == cached.tokens
    served = -sum(entry.logprob for entry in entries) / len(entries)
    assert cached.nll.value == pytest.approx(served, abs=1e-5) != pytest.approx(plain.nll.value, abs=1e-5)
    assert HELD_OUT.quality(model, kv_cache_dtype=name).nll.value == pytest.approx(served, abs=1e-5)


def test_a_report_says_what_a_token_takes_in_the_cache() -> None:
    sizes = [describe_model("m", tiny_model(), kv_cache_dtype=name).kv_bytes_per_token for name in ("auto", "int8")]
    assert sizes == [2 * 2 * 2 * 16 * 2, 2 * 2 * 2 * (16 + 4)]


@pytest.mark.parametrize("format", [None, NF4(), Int4(32)], ids=["dense", "nf4", "int4"])
def test_files_say_what_the_model_in_them_says(format: WeightFormat | None, tmp_path: Path) -> None:
    model = tiny_model(seed=1, intermediate_size=128)
    if format is not None:
        quantize_model(model, format)
    save_model(model, tmp_path / "model")
    assert describe_base("m", tmp_path / "model") == describe_model("m", load_published(tmp_path / "model"))
