"""Stage `mod` on a tiny teacher: what it publishes, measures and reports, and that it goes on where it stopped."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import UNSET

from model.files.artifact import open_artifact
from model.files.checkpoint import load_config, load_model
from model.transformer import Transformer
from pipeline.errors import UserError
from pipeline.report.page import render
from pipeline.results import Result
from pipeline.run_folder import RunFolder
from pipeline.stages.mod.report import sections
from serve.llm import LLM
from serve.sampling_params import SamplingParams
from tests.pipeline.tiny_run import run_stages
from tests.tiny import full_logits

STAGE = {
    "model": "teacher",
    "route": "block",
    "layers": [1, 2],
    "capacity": 0.5,
    "calibration_tokens": "2k",
    "data": "text",
    "tokens": "3k",
    "batch_tokens": 256,
    "micro_batch_tokens": 128,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "held_out_tokens": 512,
    "speed": {"prefill_tokens": 64, "context_tokens": 40, "new_tokens": 4, "batch_sizes": [1, 2]},
    "out": "routed",
}


def run(home: Path, *more: dict[str, object], **changes: object) -> list[Result]:
    return run_stages(home, {"mod": STAGE | changes}, *more, serve="routed", layers=4)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    home = tmp_path_factory.mktemp("mod")
    return home, run(home)[-1]


def test_it_publishes_a_routed_model_that_is_served_as_it_was_measured(finished: tuple[Path, Result]) -> None:
    home, result = finished
    folder = home / "run" / "01-mod" / "model"
    assert open_artifact(folder).digest == result.output
    assert result.parity is not None and result.parity.passed
    mixture = load_config(folder).mixture_of_depths
    assert mixture is not None and mixture.layers == (1, 2) and mixture.thresholds != (0.0, 0.0)
    model, prompt = load_model(folder), list(range(3, 60))
    served = LLM(str(folder), dtype="float32", num_pages=32).generate(
        [prompt], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    )
    tokens = list(prompt)
    for _ in range(8):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    assert served[0].choices[0].token_ids == tokens[len(prompt) :]


def test_it_says_what_was_lost_and_what_is_saved(finished: tuple[Path, Result]) -> None:
    _, result = finished
    parent, before, after = (row.quality for row in result.models)
    assert parent and before and after and before.kl and after.kl
    assert after.kl.value < before.kl.value
    details = result.details
    assert all(share == pytest.approx(0.5, abs=0.15) for share in details.realised)
    flops = details.flops
    assert flops.executed < flops.parent and flops.executed / flops.target < 1.1
    assert details.random.trained.nll.value > after.nll.value
    assert list(details.speeds.prefill) == ["teacher", "routed"]
    assert all(set(points) == {"1", "2"} for points in details.speeds.decoding.values())
    (section,) = sections([result], {})
    (table,) = section.tables
    assert [row[0] for row in table.rows] == [
        "teacher", "converted", "converted, at random", "routed, trained", "routed, at random",
    ]  # fmt: skip


def test_ways_to_route_stand_side_by_side(finished: tuple[Path, Result]) -> None:
    _, result = finished
    assert "Ways to route" not in [section.title for section in sections([result], {})]
    (table,) = sections([result] * 2, {})[0].tables
    head, line = table.head, table.rows[0]
    parent, _, after = (row.quality for row in result.models)
    assert parent and after
    assert len(head) == len(line) and line[:4] == ["routed", "block of 2 layers", "full", f"{after.nll.value:.3f}"]
    assert float(line[4].removesuffix(" %")) == pytest.approx((after.nll.value / parent.nll.value - 1) * 100, abs=0.05)
    speeds = result.details.speeds
    by_clock = [points["2"] for points in speeds.decoding.values()]
    assert line[-1] == f"{by_clock[1] / by_clock[0]:.2f}× (2 at once)"
    untimed = replace(result, details=replace(result.details, speeds=UNSET))
    assert list(sections([untimed] * 2, {})[0].tables[0].rows[0][-2:]) == ["–", "–"]


def test_the_report_shows_who_skips_what(finished: tuple[Path, Result]) -> None:
    home, result = finished
    page = (home / "run" / "report.html").read_text()
    for text in ("Mixture of depths", "By the clock", "Who passes where", "of 2 routed layers", "Prefill of 64 tokens"):
        assert text in page
    assert render(RunFolder(home / "run").recipe(), [], {}).count("Mixture of depths") == 0
    rows = result.details.picture.selected
    assert len(rows) == 2 and {len(row) for row in rows} == {len(result.details.picture.tokens)}


def test_an_interrupted_stage_goes_on_with_the_same_result(
    finished: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pipeline.stages.mod.run as stage

    def stumbling(*arguments: object, **options: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stage.RecoveryStage, "train", stumbling)
        run(tmp_path)
    monkeypatch.setattr(stage, "skipping_costs", lambda *_: pytest.fail("estimated again"))
    assert run(tmp_path)[-1].passed
    names = [home / "run" / "01-mod" / "model" / "model.safetensors" for home in (finished[0], tmp_path)]
    assert names[0].read_bytes() == names[1].read_bytes()


@pytest.mark.parametrize("what", ["router", "adapters"])
def test_less_than_everything_can_be_trained(tmp_path: Path, what: str) -> None:
    """Routers alone leave the rest as it was; adapters end up merged into the projections."""
    run(tmp_path, train=what, layers=[], least_important=1, route="attention", tokens="512", adapter_rank=2)
    model: Transformer = load_model(tmp_path / "run" / "01-mod" / "model")
    parent = load_model(tmp_path / "teacher").to(torch.bfloat16).float()
    assert model.config.mixture_of_depths is not None and len(model.config.mixture_of_depths.layers) == 1
    changed = {name for name, weight in parent.named_parameters() if not torch.equal(weight, model.get_parameter(name))}
    assert changed == {name for name in dict(parent.named_parameters()) if what == "adapters" and "_proj" in name}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layers": [1, 4]}, "mod: teacher has 4 layers, 0 to 3"),
        ({"layers": [], "every": 9}, "every is 9"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path: Path, changes: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run(tmp_path, **changes)


def test_a_routed_model_is_not_routed_again(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already has routers"):
        run(tmp_path, {"mod": STAGE | {"model": "routed", "out": "twice"}}, tokens="512")
