"""The comparison of quantization, with our side standing in for the peer's as well."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.quantize import __main__ as driver
from bench.quantize import potstill, seeds
from model.files.checkpoint import load_model, save_model
from model.quantized import quantized_layers
from pipeline.measure.quality import HeldOut
from pipeline.recipe import load_recipe, parse_recipe, recipe_to_yaml
from tests.tiny import tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(tiny_model(intermediate_size=128), tmp_path / "model")
    return tmp_path / "model"


def tokens(count: int) -> list[int]:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def run_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: dict[str, Any]
) -> dict[str, Any]:
    path = Path(f"{case['out']}.json")
    path.write_text(json.dumps(case))
    monkeypatch.setattr(sys, "argv", ["potstill", str(path)])
    potstill.main()
    cost = json.loads(capsys.readouterr().out.splitlines()[-1])
    return cost | {"peak_bytes": 1}  # this process had that much memory before


def test_equal_sides_are_equally_good(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run_side(interpreter: str, side: str, case: dict[str, Any]) -> dict[str, Any]:
        ran.append((interpreter, side))
        return run_ours(monkeypatch, capsys, case)

    monkeypatch.setattr(driver, "run_side", run_side)
    documents = [tokens(200), tokens(90)]
    case = {"model": str(model), "documents": documents, "scratch": str(tmp_path), **driver.SETTINGS}
    held_out = HeldOut((replace(potstill.batch_of(tokens(80)), num_bytes=80),))
    against = held_out, held_out.states(load_model(model))
    interpreters = {"potstill": "one", "llm_compressor": "other"}
    found = driver.compare("gptq", interpreters, case, against)
    assert ran == [("one", "bench.quantize.potstill"), ("other", "bench.quantize.llm_compressor")]
    assert found["ratio_kl"] == 1 and all(side["kl"]["value"] > 0 for side in found["sides"].values())
    written = quantized_layers(load_model(tmp_path / "potstill-gptq"))
    assert len(written) == 14 and {layer.format.group for layer in written.values()} == {64}  # type: ignore[attr-defined]


def test_a_peer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.quantize"])
    with pytest.raises(SystemExit, match=r"no llmcompressor; python -m venv .* --peer"):
        driver.main()


def test_another_seed_changes_the_text_alone() -> None:
    recipe = load_recipe(seeds.RECIPE)
    seeded = seeds.with_seed(recipe, 3, None)
    assert parse_recipe(recipe_to_yaml(seeded)) == seeded and seeded.name == "quantize-seed-3"
    assert seeded.data == {"text": replace(recipe.data["text"], seed=3)}
    (_, plain), (_, best), (_, awq), *eights = seeded.stages
    assert {plain.method, *plain.compare} == {"gptq", "round"}
    assert awq == replace(plain, method="awq", compare=(), out=seeds.AWQ)
    assert [one.out for _, one in eights] == [*seeds.EIGHTS]
    assert all(stage in recipe.stages for stage in (("quantize", best), *eights))
    assert ("quantize", replace(plain, compare=())) not in recipe.stages
