"""Stages one after another on a tiny teacher: each takes what the one before made, and what comes out is served."""

from pathlib import Path
from typing import Any

import pytest
import torch

from model.files.checkpoint import is_quantized, load_config, load_model
from model.lora import adapted_layers
from model.routed import routed_layers
from pipeline.results import Result
from serve.llm import LLM
from serve.sampling_params import SamplingParams
from tests.pipeline.tiny_run import run_stages
from tests.serve.http_server import running_server
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
SETTINGS: dict[str, dict[str, Any]] = {
    "gqa": {"kv_heads": 1, "calibration_tokens": "512", "long_context": SPEED},
    "mod": {"least_important": 2, "calibration_tokens": "1k", "speed": SPEED | {"prefill_tokens": 40}},
    "distill": {"teacher": "teacher"},
    "qlora": {"adapter": {"rank": 4, "alpha": 8, "dropout": 0.0}, "learning_rate": 2e-2},
}


def run(home: Path, kinds: list[str], **more: dict[str, Any]) -> list[Result]:
    """The stages in this order, each on the result of the one before; `more` adds to the settings of a kind."""
    stages: list[dict[str, object]] = []
    parent = "teacher"
    for kind in kinds:
        origin = {"student": {"from": parent, "layers": 3}} if kind == "distill" else {"model": parent}
        stages.append({kind: TRAINING | SETTINGS[kind] | more.get(kind, {}) | origin | {"out": f"after-{kind}"}})
        parent = f"after-{kind}"
    results = run_stages(home, *stages, serve=parent, layers=4)
    assert [result.kind for result in results] == ["import_model", *kinds]
    assert all(result.parity is not None and result.parity.passed for result in results[1:])
    return results


def last_model(home: Path) -> Path:
    return sorted((home / "run").glob("[0-9]*"))[-1] / "model"


def check_serving(folder: Path) -> None:
    model, prompt = load_model(folder, dtype=torch.float32), list(range(3, 50))
    engine = LLM(str(folder), dtype="float32", num_pages=32, max_num_seqs=2, max_num_batched_tokens=16)
    answer = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].choices[0]
    tokens = list(prompt)
    for _ in range(8):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    assert answer.token_ids == tokens[len(prompt) :]


@pytest.mark.parametrize("first", ["gqa", "mod"])
def test_one_stage_takes_what_another_made(tmp_path: Path, first: str) -> None:
    run(tmp_path, [first, "mod" if first == "gqa" else "gqa", "distill"])
    config = load_config(last_model(tmp_path))
    assert config.num_layers == 3 and config.num_kv_heads == 1 and config.mixture_of_depths is not None
    check_serving(last_model(tmp_path))


def test_all_of_them_and_the_result_over_http(tmp_path: Path) -> None:
    """A narrow, routed, shallow base in NF4 with its adapter: log-probabilities from the server and from the model."""
    run(tmp_path, ["gqa", "mod", "distill", "qlora"])
    folder = last_model(tmp_path)
    model, tokens = load_model(folder, dtype=torch.float32), list(range(3, 75))
    assert is_quantized(folder) and model.config.num_kv_heads == 1 and model.config.num_layers == 3
    assert routed_layers(model) and len(adapted_layers(model)) == 7 * 3, "routers carry no adapter"
    check_serving(folder)
    options = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--max-model-len", "256", "--served-model-name", "own"]
    with running_server(folder, tmp_path / "log", *options) as server:
        answer = server.client().completions.create(
            model="own", prompt=tokens, echo=True, logprobs=1, max_tokens=1, temperature=0
        )
    got: Any = answer.choices[0].logprobs
    expected = full_logits(model, tokens).log_softmax(-1)
    chosen = expected[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert got.token_logprobs[1 : len(tokens)] == pytest.approx(chosen.tolist(), rel=1e-3)


def test_an_adapter_comes_first_where_it_is_merged(tmp_path: Path) -> None:
    run(tmp_path, ["qlora", "mod", "gqa"], qlora={"publish": "merged", "max_merge_kl": 1.0}, gqa={"train": "adapters"})
    config = load_config(last_model(tmp_path))
    assert config.num_kv_heads == 1 and config.mixture_of_depths is not None
    check_serving(last_model(tmp_path))


def test_an_adapter_is_trained_under_the_rule_by_which_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers and thresholds are the base's, set once after quantization; no token is chosen by looking at others."""
    run(tmp_path, ["mod"])
    monkeypatch.setattr("train.objectives.ExpertChoice", lambda *_: pytest.fail("routed by expert choice"))
    before = load_model(tmp_path / "run" / "01-mod" / "model")
    run(tmp_path, ["mod", "qlora"], qlora={"evaluate_every_tokens": 256})
    base, model = tmp_path / "run" / "02-qlora" / "base", load_model(last_model(tmp_path))
    known, ours = load_config(base).mixture_of_depths, model.config.mixture_of_depths
    assert known == ours and known != before.config.mixture_of_depths
    for layer, original in zip(routed_layers(model), routed_layers(before), strict=True):
        assert torch.equal(layer.router.weight, original.router.weight)
