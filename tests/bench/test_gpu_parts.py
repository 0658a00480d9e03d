"""The parts of a GPU hour on a CPU: they run, their arithmetic holds, they need nothing that a GPU machine lacks."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.common import DEVICE, DTYPE, RESULTS
from bench.gpu import kernels, peers
from bench.gpu.__main__ import main
from bench.gpu.engine import TINY, Sized, decode_name, decode_rounds, engine_of, prefill_name, sizes_of
from bench.gpu.figures import Figure
from bench.gpu.parts import PARTS
from bench.gpu.serving import Mix, mix_of, offline_name, percentile
from bench.gpu.speculation import pair
from bench.gpu.task import Skipped, Task, need
from bench.kernels import cases as table
from bench.models import random_model, shaped
from model.attention import PackedAttention

ROOT = Path(__file__).resolve().parents[2]
MISSING = (
    "msgspec", "starlette", "uvicorn", "datasets", "wandb", "omegaconf", "gguf", "bitsandbytes", "openai", "xllamacpp",
    "compressed_tensors",
)  # fmt: skip
"""What the project has and a GPU machine with torch, transformers and peft may not have."""


def files_in(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kind_of_part_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the parts of kernels two; tests/bench/test_kernel_bench.py has them all. And what 1B does, 8B does too, and
    INT4 what NF4 does. Started again by the command, nothing is done again."""
    twins = [name for name in PARTS if name.endswith("-8b") and name.replace("-8b", "-1b") in PARTS]
    twins += [name for name in PARTS if name.endswith("-int4") and name.replace("-int4", "-nf4") in PARTS]
    kinds = [name for name in PARTS if not name.startswith(("correct-", "kernels-")) and name not in twins]
    before = files_in(RESULTS)
    here = [sys.executable, "-m", "tests.bench.gpu_hour_here", str(tmp_path), "correct-fused", "kernels-fused", *kinds]
    done = subprocess.run(here, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    [path] = tmp_path.glob("gpu-*.json")
    found = json.loads(path.read_text())
    assert len(found["parts"]) == len(kinds) + 2
    for name, part in found["parts"].items():
        assert part["status"] == "done" or part["reason"].startswith("needs "), (name, part)
        assert part["figures"] or part["status"] == "skipped", name
    rows = {row["name"]: row for row in found["table"]}
    assert rows["fused: right"]["ratio"] == 1.0 and rows["fused, worst shape"]["part"] == "kernels-fused"
    assert rows[decode_name("1B", "bf16", 1)]["best_peer"] == "transformers", "peers are measured under our names"
    assert rows[offline_name("1B")]["best_peer"] == rows[prefill_name("1B", 40)]["best_peer"] == "transformers"
    assert rows[decode_name("8B", "nf4", 1)]["roofline"] > 0
    alone, beside = (decode_name("1B", "bf16", batch) for batch in (1, 3))
    for name in (alone, beside, f"{alone}, no graphs"):
        assert rows[name]["ours"] > 0 and rows[name]["roofline"] > 0
    assert main(["--tiny", "--out", str(tmp_path), "--parts", "peaks,decode-1b"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 parts are done already" in said and "tiny models and shapes" in said
    assert files_in(RESULTS) == before, "a dry run leaves no result"


def test_the_parts_import_nothing_that_a_gpu_machine_lacks() -> None:
    modules = {part.measure.partition(":")[0] for part in PARTS.values()}
    program = f"""
import importlib, importlib.abc, os, sys
os.environ["TRITON_INTERPRET"] = "1"
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {MISSING!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without())
for name in {sorted({*modules, "bench.gpu.hour", "bench.kernels.cases", "bench.common"})!r}:
    importlib.import_module(name)
from bench.gpu.checks import marked_files
for path in marked_files():
    importlib.import_module(".".join(path.relative_to({str(ROOT)!r}).with_suffix("").parts))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_needs_more_says_so() -> None:
    need("json", "torch")
    with pytest.raises(Skipped, match="needs no_such_package, nor_this"):
        need("json", "no_such_package", "nor_this")
    lacking = {module for part in PARTS.values() for module in part.needs} & set(MISSING)
    assert lacking == {"msgspec", "omegaconf", "starlette", "uvicorn", "bitsandbytes"}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """One that knows the machine's rates."""
    rates = [Figure("copy", "GB/s", 2.0).to_plain(), Figure("bf16 product", "TFLOP/s", 0.5).to_plain()]
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "peaks.json").write_text(json.dumps({"figures": rates}))
    return Task(str(tmp_path), tiny=True, seconds=60.0)


def test_a_step_is_bound_by_bytes_or_by_operations(task: Task) -> None:
    config = shaped(TINY)
    model = random_model(config, DTYPE, torch.device(DEVICE))
    weights = sum(parameter.numel() for parameter in model.parameters()) - model.model.embed_tokens.weight.numel()
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    sized, size = Sized(model, task.measured("peaks")), DTYPE.itemsize
    # Three sequences behind 50 tokens each: all weights, and two vectors a token, head and layer.
    keys = 4 * 2 * 2 * 16 * 150
    assert sized.floor_s(3, 3, 150) == pytest.approx(size * (weights + keys) / 2e9)
    # A prompt of 4,000: two operations a weight and token, scores and their sums, and one row of the head.
    operations = 2 * 4000 * (matrices - 512 * 64) + 2 * 512 * 64 + 2 * 2 * 4 * 64 * 4000 * 2000
    assert sized.floor_s(4000, 1, 4000 * 2000) == pytest.approx(operations / 0.5e12)
    assert Sized(random_model(config, DTYPE, torch.device(DEVICE)), {}).floor_s(3, 3, 150) is None


def test_decoding_is_counted_step_by_step(task: Task) -> None:
    target, draft = pair(sizes_of(task, "8B"), added=0.0)
    engine = engine_of(target, draft=draft, tokens=200, batch=2)
    for decoded in decode_rounds(engine, 2, prompt=10, steps=3):
        assert decoded.reports == 6 and decoded.tokens >= 6 and decoded.seconds > 0
        assert decoded.tokens <= decoded.reports + decoded.drafted
    assert not engine.has_work()


def test_layers_that_add_nothing_leave_the_draft_right(task: Task) -> None:
    tokens, cu_seqlens = torch.arange(2, 22), torch.tensor([0, 20], dtype=torch.int32)
    for added, is_same in ((0.0, True), (1.0, False)):
        models = pair(sizes_of(task, "8B"), added)
        attended = [PackedAttention(model.config, cu_seqlens) for model in models]
        with torch.no_grad():
            target, draft = (
                model.logits(model(tokens, torch.arange(20), attention)).argmax(-1)
                for model, attention in zip(models, attended, strict=True)
            )
        assert torch.equal(target, draft) == is_same


def test_shapes_are_measured_anew_only_when_asked_for(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    [fused] = [group for group in table.PARTS["fused"].groups if group.candidates is table.GATE]
    monkeypatch.setitem(table.PARTS, "fused", table.Part("", fused))
    seeds = []
    for again in (False, False, True):
        assert [one.name for one in kernels.beside_peers(replace(task, again=again), "fused")][
            -1
        ] == "fused, worst shape"
        cases = json.loads((task.folder / "kernels" / "fused.json").read_text())["cases"]
        seeds.append({case["seed"] for case in cases})
    assert seeds[0] == seeds[1] and not seeds[1] & seeds[2]


def measured(role: str, seconds: float, ours: float, **more: Any) -> dict[str, Any]:
    found = {"status": "measured", "role": role, "median_s": seconds, "times_ours": seconds / ours}
    return found | {"tflop_per_s": 1 / seconds, "roofline_fraction": 0.002 / seconds, **more}


def case(name: str, ours: float, cublas: float, rows: int) -> dict[str, Any]:
    candidates = {"potstill": measured("ours", ours, ours), "cublas": measured("peer", cublas, ours)}
    candidates["two calls"] = measured("baseline", 9 * ours, ours)
    shape = {"rows": rows}
    return {"name": name, "shape": shape, "bytes": 1e9, "bound": "compute", "candidates": candidates}


def test_a_part_of_kernels_is_its_worst_shape_and_that_of_each_goal() -> None:
    cases = [case("a", 0.004, 0.008, 64), case("b", 0.010, 0.005, 64), case("c", 0.004, 0.004, 256)]
    wrong = case("d", 0.004, 0.001, 64)
    wrong["candidates"]["potstill"] = {"status": "red", "role": "ours"}
    figures = {one.name: one for one in kernels.figures_of({"part": "quantized_nf4", "cases": [*cases, wrong]})}
    worst, at_64, at_256 = (
        figures[name] for name in ("quantized_nf4, worst shape", "nf4, 64 rows, over bf16", "nf4, 256 rows, over bf16")
    )
    assert worst.note == at_64.note == "b" and at_256.note == "c"
    assert at_64.ours == 100.0 and at_64.peers == pytest.approx({"cublas": 200.0}) and at_64.ratio() == 0.5
    assert at_64.roofline == pytest.approx(500.0) and set(at_64.references) == {"two calls"}
    assert at_256.ratio() == pytest.approx(1 / 0.95)
    assert "nf4, 1 row, over bitsandbytes" not in figures, "what was not measured is no row"


def test_memory_of_a_loss_must_be_less_than_its_share() -> None:
    shape = {"tokens": 8192, "vocabulary": 131_072, "kind": "forward_kl"}
    candidates = {
        "potstill": measured("ours", 1.0, 1.0, peak_bytes=2e9),
        "dense": measured("peer", 3.0, 1.0, peak_bytes=10e9, times_our_peak=5.0),
    }
    part = {"name": "x", "shape": shape, "bytes": 1e9, "bound": "compute", "candidates": candidates}
    figures = {one.name: one for one in kernels.figures_of({"part": "losses_distillation", "cases": [part]})}
    memory = figures["distillation, 8k x 128k, memory of dense"]
    assert memory.ours == 2.0 and memory.goal() == pytest.approx(1.5) and memory.ratio() == pytest.approx(0.75)


def test_vllm_is_asked_for_the_same_and_answers_under_our_names(monkeypatch: pytest.MonkeyPatch, task: Task) -> None:
    asked: list[tuple[int, int, int]] = []

    class Engine:
        def __init__(self, *, model: str, max_model_len: int, **options: Any) -> None:
            assert json.loads(Path(model, "config.json").read_text())["num_hidden_layers"] == TINY["num_layers"]
            assert options["load_format"] == "dummy" and options["skip_tokenizer_init"] and max_model_len >= 104

        def generate(self, prompts: list[dict[str, list[int]]], params: list[Any], use_tqdm: bool) -> None:
            assert len(prompts) == len(params) and all(one.ignore_eos for one in params)
            asked.append((len(prompts), len(prompts[0]["prompt_token_ids"]), sum(one.max_tokens for one in params)))

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=SimpleNamespace))
    figures = list(peers.vllm(task, "8B"))
    sizes, mix = sizes_of(task, "8B"), mix_of(task)
    names = [decode_name("8B", "bf16", batch) for batch in sizes.batches]
    assert [one.name for one in figures] == [*names, prefill_name("8B", 40), offline_name("8B")]
    assert all(one.ours is None and set(one.peers) == {"vllm"} for one in figures)
    assert (3, 20, 3 * 5) in asked and (3, 20, 3) in asked and (1, 40, 1) in asked
    assert asked[-1][0] == mix.count


def test_requests_of_a_mix_are_the_same_each_time() -> None:
    mix = Mix(50, 3, 9)
    requests = mix.requests(100)
    assert requests == mix.requests(100) and len(requests) == 50
    sizes = {size for prompt, wanted in requests for size in (len(prompt), wanted)}
    assert sizes == set(range(3, 10))
    assert percentile([float(n) for n in range(101)], 99) == 99.0
