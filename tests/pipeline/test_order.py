"""Stages one after another on a tiny teacher: each takes what the one before made, and what comes out is served."""

import json
from pathlib import Path

import pytest

from model.checkpoint import load_config, load_model
from pipeline.processes import Processes
from pipeline.recipe import load_recipe
from pipeline.result import Result
from pipeline.run import run_recipe
from pipeline.run_folder import RunFolder
from serve.llm import LLM
from serve.sampling_params import SamplingParams
from tests.pipeline.tiny_run import RECIPE, write_teacher, write_text
from tests.tiny import full_logits

TRAINING = {
    "data": "text",
    "tokens": "512",
    "batch_tokens": 256,
    "micro_batch_tokens": 128,
    "precision": "fp32",
    "held_out_tokens": 256,
}
SPEED = {"context_tokens": 24, "new_tokens": 3, "batch_sizes": [1]}
NARROW = {"kv_heads": 1, "calibration_tokens": "512", "long_context": SPEED}
ROUTED = {"least_important": 2, "calibration_tokens": "1k", "speed": SPEED | {"prefill_tokens": 40}}


def run(home: Path, stages: list[dict[str, dict]], served: str) -> list[Result]:
    write_teacher(home / "teacher", layers=4)
    write_text(home / "text")
    overrides = [
        f"stages={json.dumps([{kind: TRAINING | settings} for stage in stages for kind, settings in stage.items()])}",
        f"serve={{model: {served}}}",
        f"models.teacher.from={home / 'teacher'}",
        f"data.text.source={home / 'text'}",
    ]
    recipe = load_recipe(RECIPE, overrides)
    return run_recipe(recipe, RunFolder(home / "run"), cache=home / "cache", processes=Processes())


def check_serving(folder: Path) -> None:
    model, prompt = load_model(folder), list(range(3, 50))
    engine = LLM(str(folder), dtype="float32", num_pages=32, max_num_seqs=2, max_num_batched_tokens=16)
    answer = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].choices[0]
    tokens = list(prompt)
    for _ in range(8):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    assert answer.token_ids == tokens[len(prompt) :]


@pytest.mark.parametrize("first", ["gqa", "mod"])
def test_one_stage_takes_what_another_made(tmp_path: Path, first: str) -> None:
    settings = {"gqa": NARROW, "mod": ROUTED}
    second = "mod" if first == "gqa" else "gqa"
    stages = [
        {first: settings[first] | {"model": "teacher", "out": "one"}},
        {second: settings[second] | {"model": "one", "out": "both"}},
        {"distill": {"teacher": "teacher", "student": {"from": "both", "layers": 3}, "out": "student"}},
    ]
    results = run(tmp_path, stages, "student")
    assert [result.kind for result in results] == ["teacher", first, second, "distill"]
    assert all(result.parity is not None and result.parity.passed for result in results[1:])
    config = load_config(tmp_path / "run" / "03-distill" / "model")
    assert config.num_layers == 3 and config.num_kv_heads == 1 and config.mixture_of_depths is not None
    check_serving(tmp_path / "run" / "03-distill" / "model")
