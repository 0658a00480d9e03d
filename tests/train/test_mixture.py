"""Several weighted sources: weights met in every stretch, each source read evenly, resumable from two numbers."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.recipe import RecipeError, parse_recipe, recipe_to_yaml
from tests.model.tiny_tokenizers import our_tokenizer
from tests.train.toy import documents
from tests.trials import trials
from train.data import DataConfig, PreparedData, load_cache, prepare
from train.mixture import Mixture, document_order, epoch_order
from train.sampler import Sampler, shuffled
from train.sources import Part, open_source

RECIPE = """
name: mixed
models: {base: {from: x}}
data: {both: {mix: [{source: a.jsonl, weight: 3, chat: true}, {source: python-stdlib}], sequence_length: 64}}
stages: [{sft: {model: base, data: both, tokens: 1k}}]
"""
SIZES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=4)


def shuffle(count: int, name: str, number: int) -> np.ndarray:
    return shuffled(count, seed=f"7/{name}", epoch=number)


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, data=st.data())
def test_weights_are_met_and_every_source_is_read_evenly(sizes: list[list[int]], data: st.DataObject) -> None:
    """Of each source, after any number of epochs: its part of the tokens but for one piece; pieces equally often."""
    weights = np.array(data.draw(st.lists(st.floats(0.05, 20), min_size=len(sizes), max_size=len(sizes))))
    lengths = np.concatenate(sizes).astype(np.int64)
    sources = np.repeat(np.arange(len(sizes)), [len(part) for part in sizes])
    epochs = [epoch_order(lengths, sources, weights, epoch=epoch, shuffle=shuffle) for epoch in range(4)]
    for stop in range(1, 5):
        seen = np.concatenate(epochs[:stop])
        for source, part in enumerate(sizes):
            mine = seen[sources[seen] == source]
            wanted = weights[source] / weights.sum() * lengths.sum() * stop
            assert -1e-6 < lengths[mine].sum() - wanted < max(part) + 1e-6
            times = np.bincount(mine, minlength=len(lengths))[sources == source]
            assert times.max() - times.min() <= 1


def mixed_sampler(weights: tuple[float, ...] = (3.0, 1.0), seed: int = 0) -> Sampler:
    toy = documents([5, 40, 17, 70, 2, 33, 1, 90, 26, 11])
    parts = np.array([0, 1, 1, 0, 0, 1, 0, 1, 1, 1], dtype=np.int32)
    mixture = Mixture(parts, np.array(weights))
    return Sampler(replace(toy, mixture=mixture), sequence_length=16, micro_batch_tokens=48, seed=seed)


@settings(max_examples=trials(40, 300), deadline=None)
@given(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=8), st.integers(0, 40))
def test_any_split_and_any_resume_give_the_same_order(seed: int, takes: list[int], stop: int) -> None:
    straight = [numbers.tolist() for numbers in mixed_sampler(seed=seed).take(sum(takes) + stop)]
    in_parts, resumed = mixed_sampler(seed=seed), mixed_sampler(seed=seed)
    found = [numbers.tolist() for count in takes for numbers in in_parts.take(count)]
    resumed.load_state_dict(json.loads(json.dumps(in_parts.state_dict())))
    assert found + [numbers.tolist() for numbers in resumed.take(stop)] == straight


def test_sources_are_shuffled_together() -> None:
    """In the middle of an epoch of many pieces its weights hold too: a binomial test, at five standard deviations."""
    lengths, sources = np.full(4000, 8), np.repeat([0, 1], [1000, 3000])
    order = epoch_order(lengths, sources, np.array([1.0, 1.0]), epoch=3, shuffle=shuffle)
    for part in np.array_split(sources[order], 8):
        assert abs(part.mean() - 0.5) < 5 * np.sqrt(0.25 / len(part))


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, data=st.data())
def test_any_beginning_holds_the_sources_in_their_weights(sizes: list[list[int]], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.05, 20), min_size=len(sizes), max_size=len(sizes)))
    order = list(document_order([np.array(part) for part in sizes], weights))
    assert Counter(order) == Counter((part, n) for part, length in enumerate(sizes) for n in range(len(length)))
    assert all([n for part, n in order if part == one] == list(range(len(sizes[one]))) for one in range(len(sizes)))
    done = np.zeros(len(sizes))
    for part, number in order:
        done[part] += sizes[part][number]
        lasting = [one for one in range(len(sizes)) if done[one] < sum(sizes[one])]
        # No source that still has documents lies behind another by more than its next document.
        for one in lasting:
            read = sum(1 for p, _ in order[: order.index((part, number)) + 1] if p == one)
            assert (done[one] + sizes[one][read]) / weights[one] >= done[part] / weights[part] - 1e-6


CHAT = [
    {"messages": [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": f"It is {number}."}]}
    for number in range(40)
]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHAT))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"text {n} " * 20}) + "\n" for n in range(30)))
    parts = (Part(str(tmp_path / "chat.jsonl"), weight=3.0), Part(str(tmp_path / "text.jsonl")))
    return DataConfig(mix=parts, held_out=0.3, sequence_length=32)


def build(config: DataConfig, folder: Path) -> PreparedData:
    return prepare(config, our_tokenizer(template="chatml"), folder / "cache", progress=False)


def test_a_mixture_holds_the_documents_and_labels_of_its_parts(config: DataConfig, tmp_path: Path) -> None:
    mixed, parts = build(config, tmp_path), [build(part, tmp_path) for part in config.parts()]
    for split in ("train", "held_out"):
        whole, alone = getattr(mixed, split), [getattr(part, split) for part in parts]
        assert whole.mixture.weights.tolist() == [3.0, 1.0]
        for number, part in enumerate(alone):
            mine = np.flatnonzero(whole.mixture.parts == number)
            assert len(mine) == part.num_documents
            for ours, theirs in enumerate(mine):
                here, there = (slice(d.offsets[n], d.offsets[n + 1]) for d, n in ((whole, theirs), (part, ours)))
                assert whole.tokens[here].tolist() == part.tokens[there].tolist()
                mask = np.ones(there.stop - there.start) if part.labels_mask is None else part.labels_mask[there]
                assert whole.labels_mask[here].tolist() == mask.tolist()
        assert whole.num_bytes == sum(part.num_bytes for part in alone)
        assert set(whole.mixture.parts[:20].tolist()) == {0, 1}, "what is measured first is some of each"


def test_other_weights_are_other_data_and_nothing_is_tokenized_again(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(config, tmp_path)
    monkeypatch.setattr("train.encoding._encode", lambda *_: pytest.fail("tokenized again"))
    assert build(config, tmp_path).train.digest == first.train.digest
    other = replace(config, mix=(config.mix[0], replace(config.mix[1], weight=2.0)))
    assert build(other, tmp_path).train.digest != first.train.digest


def test_a_damaged_mixture_is_built_again(config: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    digest = build(config, tmp_path).train.digest
    (path,) = (tmp_path / "cache").glob("*/train.parts")
    path.write_bytes(b"\x05" + path.read_bytes()[1:])
    assert build(config, tmp_path).train.digest == digest
    assert "train.parts has been altered" in caplog.text
    load_cache(path.parent, "mixed")


def test_documents_of_a_mixture_come_as_their_weights_say(config: DataConfig) -> None:
    source = open_source(config)
    found = [isinstance(document.content, str) for document in source.documents()]
    assert len(found) == 70 and sum(found[:40]) == 10 and not source.learns_all
    assert source.fingerprint != open_source(replace(config, mix=config.mix[::-1])).fingerprint


def test_a_recipe_mixes(tmp_path: Path) -> None:
    recipe = parse_recipe(RECIPE)
    assert [(part.source, part.weight, part.chat) for part in recipe.data["both"].mix] == [
        ("a.jsonl", 3.0, True),
        ("python-stdlib", 1.0, False),
    ]
    assert hash(recipe.data["both"]) and parse_recipe(recipe_to_yaml(recipe)) == recipe


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.both.source=b.jsonl", "data.both.source stands beside mix; it belongs to each source in that list."),
        ("data.both.chat=true", "data.both.chat stands beside mix"),
        ("data.both.mix=[]", "data.both.source is missing; name one, or several as a list in `mix`."),
        ("data.both.mix.0.weight=0", "data.both.mix.0.weight is 0"),
        ("data.both.mix.0.wieght=2", "data.both.mix.0 has the unknown key 'wieght'. Did you mean 'weight'?"),
        ("data.both.mix=[{weight: 2}]", "data.both.mix.0.source is missing."),
        ("data.both.mix=a.jsonl", "data.both.mix must be a list"),
    ],
)
def test_what_is_wrong_with_a_mixture_is_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(RECIPE, [override])
    assert sentence in str(caught.value)


def test_files_of_a_mixture_are_named(config: DataConfig, tmp_path: Path) -> None:
    missing: Any = replace(config, mix=(*config.mix, Part(str(tmp_path / "none.jsonl"))))
    with pytest.raises(ValueError, match=r"none.jsonl' does not exist on this machine"):
        build(missing, tmp_path)
