"""Stage `gqa` on a tiny teacher: what it publishes, compares, reports, and how it goes on after an interruption."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.files.artifact import open_artifact
from model.files.checkpoint import load_model
from model.lora import adapted_layers
from pipeline.errors import UserError
from pipeline.report.page import render
from pipeline.results import Result
from pipeline.run_folder import RunFolder
from tests.compare import check_close
from tests.pipeline.tiny_run import run_stages
from tests.tiny import full_logits

STAGE = {
    "model": "teacher",
    "kv_heads": 1,
    "method": "subspace+refit",
    "compare": ["mean", "subspace", "subspace+refit"],
    "compare_tokens": "512",
    "calibration_tokens": "512",
    "data": "text",
    "tokens": "2k",
    "batch_tokens": 256,
    "micro_batch_tokens": 128,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "held_out_tokens": 512,
    "long_context": {"context_tokens": 40, "new_tokens": 4, "batch_sizes": [1, 2], "cache_gib": 0.01},
    "out": "narrow",
}


def run(home: Path, **changes: object) -> list[Result]:
    return run_stages(home, {"gqa": STAGE | changes}, serve="narrow")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    home = tmp_path_factory.mktemp("gqa")
    return home, run(home)[-1]


def test_it_publishes_a_model_with_fewer_heads_that_transformers_reads(finished: tuple[Path, Result]) -> None:
    home, result = finished
    folder = home / "run" / "01-gqa" / "model"
    assert open_artifact(folder).digest == result.output
    model = load_model(folder, dtype=torch.float32)
    assert model.config.num_kv_heads == 1
    tokens = list(range(3, 60))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        check_close(full_logits(model, tokens), theirs(torch.tensor([tokens])).logits[0], dtype=torch.float16)


def served_pages(folder: Path) -> tuple[int, int]:
    """What the engine has for the same memory: its number of pages, and the bytes that they take."""
    from serve.llm import LLM

    engine = LLM(str(folder), dtype="float32", kv_cache_bytes=49_152, max_model_len=64).engine
    return engine.num_pages, sum(tensor.nbytes for tensor in engine.runner.pages.tensors())


def greedy(folder: Path, prompt: list[int], new_tokens: int) -> list[int]:
    """As the trainer's model continues, one forward over the whole text a token."""
    model, tokens = load_model(folder, dtype=torch.float32), list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_the_engine_serves_it_in_half_the_bytes_with_the_same_words(finished: tuple[Path, Result]) -> None:
    from serve.llm import LLM
    from serve.sampling_params import SamplingParams

    home, _ = finished
    before, after = (home / "run" / stage / "model" for stage in ("00-teacher", "01-gqa"))
    (few, few_bytes), (many, many_bytes) = served_pages(before), served_pages(after)
    assert many == 2 * few and few_bytes == many_bytes
    prompt = list(range(5, 30))
    (answer,) = LLM(str(after), dtype="float32", max_model_len=64, num_pages=8).generate(
        [prompt], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    )
    assert list(answer.choices[0].token_ids) == greedy(after, prompt, 12)


def test_each_layer_may_have_its_own_number(tmp_path: Path) -> None:
    """Trained, published, and served like any other; transformers says that it cannot read it."""
    result = run(tmp_path, kv_heads=[1, 2, 1], tokens=512, compare=[], loss={"kind": "cross_entropy"})[-1]
    folder = tmp_path / "run" / "01-gqa" / "model"
    assert open_artifact(folder).digest == result.output
    assert result.parity is not None and result.parity.passed
    teacher, _, narrow = result.models
    assert narrow.kv_bytes_per_token * 6 == teacher.kv_bytes_per_token * 4
    assert [len(groups) for groups in result.details.groups] == [1, 2, 1]
    (few, _), (many, many_bytes) = served_pages(tmp_path / "run" / "00-teacher" / "model"), served_pages(folder)
    assert many == few * 6 // 4 and many_bytes == 49_152
    assert "Only potstill reads it" in (folder / "README.md").read_text()
    with pytest.raises(Exception, match="num_key_value_heads"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_adapters_recover_it_too_and_end_merged(tmp_path: Path) -> None:
    result = run(tmp_path, train="adapters", adapter_rank=4, compare=[])[-1]
    _, before, after = (row.quality for row in result.models)
    assert before and after and after.nll.value < before.nll.value
    folder = tmp_path / "run" / "01-gqa" / "model"
    assert not adapted_layers(load_model(folder)) and not (folder / "adapter_config.json").exists()
    assert result.models[-1].parameters == load_model(folder).config.num_parameters()


def test_it_says_what_was_lost_and_what_came_back(finished: tuple[Path, Result]) -> None:
    _, result = finished
    assert result.parity is not None and result.parity.passed
    parent, before, after = (row.quality for row in result.models)
    assert parent and before and after and before.kl and after.kl
    assert after.kl.value < before.kl.value
    teacher, _, narrow = result.models
    assert narrow.kv_bytes_per_token * 2 == teacher.kv_bytes_per_token
    compared = {row.method: row for row in result.details.compared}
    assert list(compared) == ["mean", "subspace", "subspace+refit"]
    for row in compared.values():
        assert row.uptrained.kl.value < row.converted.kl.value
    assert compared["subspace+refit"].converted.kl.value == pytest.approx(before.kl.value)
    lost = [row.converted.kl.value for row in compared.values()]
    assert lost == sorted(lost, reverse=True)
    fewer, more = result.details.capacity.sequences
    assert more in (2 * fewer, 2 * fewer + 1)
    speeds = result.details.decoding.tokens_per_s
    assert list(speeds) == ["teacher", "narrow"] and all(set(points) == {"1", "2"} for points in speeds.values())


def test_the_report_shows_methods_groups_and_speeds(finished: tuple[Path, Result]) -> None:
    home, result = finished
    page = (home / "run" / "report.html").read_text()
    rows = result.details.compared
    (best, name), (second, other), _ = sorted((row.converted.nll.value, row.method) for row in rows)
    told = (f"Right after conversion {name} is best, {second - best:.3f} below {other}.", "GiB of cache")
    for text in ("Grouped KV heads", "loss, converted", "Which heads share", "Decoding, 2 at once", *told):
        assert text in page
    assert render(RunFolder(home / "run").recipe(), [], {}).count("Grouped KV heads") == 0
    assert result.kind == "gqa"


def test_an_interrupted_calibration_goes_on_with_the_same_result(
    finished: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pipeline.stages.gqa.run as stage

    real, calls = stage.plan_layer, []

    def stumbling(*arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)  # type: ignore[arg-type]

    home = tmp_path
    monkeypatch.setattr(stage, "plan_layer", stumbling)
    with pytest.raises(KeyboardInterrupt):
        run(home)
    assert len(list((home / "run" / "01-gqa" / "plans").glob("*.safetensors"))) == 1
    result = run(home)[-1]
    assert len(calls) == 2 + 1 + 2 * 2
    expected = (finished[0] / "run" / "01-gqa" / "model" / "model.safetensors").read_bytes()
    assert (home / "run" / "01-gqa" / "model" / "model.safetensors").read_bytes() == expected
    assert result.passed


def test_an_impossible_number_of_heads_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gqa: kv_heads is 3; .* can be grouped into 1, 2\."):
        run(tmp_path, kv_heads=3)
