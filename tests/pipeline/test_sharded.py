"""The stages that train, by processes that hold a part of the models each: as accelerate's shipped files ask for it.

What one process makes, 2 and 4 make too, over gloo; whichever of them is killed, the same command goes on to the same
weights.
"""

import importlib
import json
import os
import random
import signal
import sys
import time
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from model.lazy import LazyModel
from model.quantized import quantized_layers
from model.transformer import Transformer
from pipeline.cli import main
from pipeline.errors import RunInterrupted
from pipeline.measure import quality
from pipeline.stages.base import read_result
from pipeline.stages.precompute import run as precompute
from pipeline.stages.quantize import run as quantize
from pipeline.stages.shared import models
from tests import trials
from tests.compare import relative_rms
from tests.forked import end_of, ranks
from tests.model.test_mesh import launched
from tests.pipeline.test_dpo import make_pairs
from tests.pipeline.tiny_run import RECIPE, ROOT, run_stages, write_teacher, write_text
from tests.trials import covering
from train.tracking import read_metrics

pytestmark = pytest.mark.slow

TRAINING = {
    "data": "text",
    "tokens": "2k",
    "batch_tokens": 512,
    "micro_batch_tokens": 128,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "held_out_tokens": 512,
    "evaluate_every_tokens": "1k",
}
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "query_heads": 4, "kv_heads": 2}
BRIEF = {"new_tokens": 2, "context_tokens": 8, "batch_sizes": [1]}
STAGES = {
    "gqa": {"model": "teacher", "kv_heads": 1, "method": "subspace+refit", "long_context": BRIEF, "out": "narrow"},
    "mod": {"model": "teacher", "layers": [1], "speed": {"prefill_tokens": 8, **BRIEF}, "out": "routed"},
    "distill": {"teacher": "teacher", "student": {"from": "teacher", "layers": 2}, "out": "student"},
    "pretrain": {"tokenizer": "teacher", "architecture": SHAPE, "out": "fresh"},
    "sft": {"model": "teacher", "out": "tuned"},
    "qlora": {"model": "student", "adapter": {"rank": 4, "dropout": 0.1}, "learning_rate": 2e-2, "out": "adapted"},
}
# Whoever has a part of the tokens draws other numbers for dropout; routers and parts of documents exclude each other.
WITHOUT_CHANCE = {"qlora": STAGES["qlora"] | {"model": "teacher", "adapter": {"rank": 4, "dropout": 0.0}}}
DIVIDED = {name: STAGES[name] for name in ("gqa", "distill")} | WITHOUT_CHANCE
BY_LAYERS = {"distill": STAGES["distill"]}
KILLED = {"distill": STAGES["distill"] | {"checkpoint_every_s": 0, "tokens": "6k"}}
SIZES = ("parameters", "weight_bytes", "kv_bytes_per_token")
"""Of a model, in a report."""
NARROWER = {"from": "teacher", "layers": 2, "mlp": 32}
IN_SHARDS_OF_TWO = ("fsdp", "--num_processes", "2")
BY_LAYERS_OF_TWO = (
    "fsdp_tensor",
    *("--num_processes", "2", "--parallelism_config_dp_shard_size", "1", "--parallelism_config_tp_size", "2"),
)


def stages(wanted: dict[str, dict]) -> list[dict[str, dict]]:
    return [{name: TRAINING | settings} for name, settings in wanted.items()]


def arguments(home: Path, folder: str, wanted: dict[str, dict], teacher: str = "teacher") -> list[str]:
    last = list(wanted.values())[-1]["out"]
    words = ["run", str(RECIPE), f"stages={json.dumps(stages(wanted))}", f"serve={{model: {last}}}"]
    words += [f"models.teacher.from={home / teacher}", f"data.text.source={home / 'text'}"]
    return [*words, "--folder", str(home / folder), "--cache", str(home / "cache")]


def environment(file: str, *words: str) -> dict[str, str]:
    """Of processes that accelerate would start by this file, were there GPUs."""
    asked = {
        name: value for name, value in launched(file, *words).items() if name not in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    }
    return asked | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def forked(words: list[str], processes: int, variables: dict[str, str]) -> None:
    """So many processes, as torchrun starts them; test_launch.py has it start some itself."""
    with TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with ranks(processes, main, words, log=log, environment=variables) as started:
            assert not any(end_of(started, 400)), log.read_text()[-9000:]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process has run all stages."""
    home = tmp_path_factory.mktemp("sharded")
    write_teacher(home / "teacher")
    write_text(home / "text")
    run_stages(home, *stages(STAGES), serve="adapted", folder="one")
    return home


FILES = {
    "multi_gpu": (2, ("--num_processes", "2")),
    "fsdp": (2, ("--num_processes", "2")),
    "multi_node_fsdp": (4, ("--num_processes", "4", "--parallelism_config_dp_shard_size", "2")),
}


TRIED = covering(product(FILES, STAGES))


def stages_by(file: str) -> dict[str, dict]:
    """In their order, and what one of them goes on with."""
    wanted = {name for other, name in TRIED if other == file}
    wanted |= {"distill"} if "qlora" in wanted else set()
    return {name: settings for name, settings in STAGES.items() if name in wanted}


@pytest.mark.parametrize("file", FILES)
def test_a_launch_file_makes_what_one_process_makes(file: str, home: Path) -> None:
    (processes, words), wanted = FILES[file], stages_by(file)
    forked(arguments(home, file, wanted), processes, environment(file, *words))
    for name in wanted:
        check(home / "one", home / file, name)


def counting(words: list[str], folder: Path) -> int:
    """A run that writes down who has made models whole in this process: a kind of stage, or a module."""
    makers: list[str] = []

    def counted(module: Any, name: str, maker: str = "") -> None:
        make = getattr(module, name)

        def count(*given: Any, **how: Any) -> Any:
            makers.append(maker or Path(sys._getframe(1).f_code.co_filename).parent.name)
            return make(*given, **how)

        setattr(module, name, count)

    counted(LazyModel, "made")
    for module in (models, quality):
        counted(module, "load_model", module.__name__.rpartition(".")[2])
    code = main(words)
    (folder / f"makers-{os.environ['RANK']}.json").write_text(json.dumps(makers))
    return code


def test_no_process_makes_a_model_whole(home: Path) -> None:
    """Calibration and parity have a layer at a time, and what conversion makes is measured and trained in shards."""
    changes: dict[str, dict] = {
        "gqa": {"compare": ["mean"], "compare_tokens": 512},
        "mod": {"train": "adapters"},
        "distill": {"student": NARROWER},
        "qlora": {"model": "routed"},
    }
    wanted = {name: stage | {"tokens": "1k"} | changes.get(name, {}) for name, stage in STAGES.items()}
    words, folder = arguments(home, "counted", wanted), home / "counted"
    with ranks(2, counting, words, folder, log=home / "log", environment=environment(*IN_SHARDS_OF_TWO)) as started:
        assert not any(end_of(started, 400)), (home / "log").read_text()[-9000:]
    makers = [json.loads((folder / f"makers-{rank}.json").read_text()) for rank in range(2)]
    assert makers == [[], []]


def test_so_does_one_that_divides_tokens(home: Path) -> None:
    """Two parts of each micro-batch, and two of the weights besides."""
    run_stages(home, *stages(WITHOUT_CHANCE), serve="adapted", folder="without chance")
    words = ("--num_processes", "4", "--parallelism_config_dp_shard_size", "2", "--parallelism_config_cp_size", "2")
    forked(arguments(home, "divided", DIVIDED), 4, environment("fsdp_context", *words))
    for name in DIVIDED:
        check(home / ("without chance" if name in WITHOUT_CHANCE else "one"), home / "divided", name)


def test_one_that_divides_layers_makes_about_the_same(home: Path) -> None:
    """To the rounding of a teacher in bf16, whose products are sums of rounded parts; tests/train has it in fp32."""
    forked(arguments(home, "layers", BY_LAYERS), 2, environment(*BY_LAYERS_OF_TWO))
    one, many = (next((home / folder).glob("??-distill")) for folder in ("one", "layers"))
    losses = [
        [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line] for folder in (one, many)
    ]
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-2)
    for expected, model in zip(*(read_result(folder).models for folder in (one, many)), strict=True):  # type: ignore
        assert model.quality.tokens == expected.quality.tokens
        assert model.quality.nll.value == pytest.approx(expected.quality.nll.value, rel=1e-3)
        assert [getattr(model, size) for size in SIZES] == [getattr(expected, size) for size in SIZES]


PREFERRED = {
    "dpo": {"model": "teacher", "adapter": {"rank": 4}, "gate": {"min_reward_accuracy": 0.01}, "out": "preferred"},
    "evaluate": {"model": "preferred", "against": "teacher", "data": "prose", "held_out_tokens": 512},
}


def test_pairs_and_an_evaluation_give_what_one_process_finds(tmp_path: Path) -> None:
    """Of an adapter beside its base, both of which are measured in shards."""
    write_teacher(tmp_path / "teacher")
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, make_pairs(64, seed=0))))
    evaluate = PREFERRED["evaluate"] | {"speed": {"batch_sizes": []}}
    asked = [{"dpo": TRAINING | PREFERRED["dpo"] | {"micro_batch_tokens": 256}}, {"evaluate": evaluate}]
    words = ["run", str(RECIPE), f"stages={json.dumps(asked)}", "serve={model: preferred}"]
    words += [f"models.teacher.from={tmp_path / 'teacher'}", f"data.text.source={tmp_path / 'text.jsonl'}"]
    prose = {"source": str(write_text(tmp_path / "text")), "sequence_length": 64, "held_out": 0.2}
    words += [
        f"data.prose={json.dumps(prose)}",
        "data.text.preference=true",
        "data.text.chat=true",
        "data.text.max_documents=null",
    ]
    words += ["--cache", str(tmp_path / "cache"), "--folder"]
    for folder, processes in (("one", 1), ("many", 2)):
        forked([*words, str(tmp_path / folder)], processes, environment(*IN_SHARDS_OF_TWO) if processes > 1 else {})
    for stage in ("01-dpo", "02-evaluate"):
        one, many = (read_result(tmp_path / folder / stage) for folder in ("one", "many"))
        for expected, model in zip(one.models, many.models, strict=True):  # type: ignore[union-attr]
            assert model.quality.nll.value == pytest.approx(expected.quality.nll.value, rel=1e-3)
            assert [getattr(model, size) for size in SIZES] == [getattr(expected, size) for size in SIZES]
    pairs = [read_result(tmp_path / folder / "01-dpo").details.held_out for folder in ("one", "many")]  # type: ignore
    assert pairs[0].pairs == pairs[1].pairs > 4
    assert pairs[1].nll_before == pytest.approx(pairs[0].nll_before, rel=1e-5)
    assert pairs[1].nll == pytest.approx(pairs[0].nll, rel=1e-2)


def test_beside_a_base_in_nf4_it_makes_what_one_process_makes(home: Path) -> None:
    """Of which no block of 64 weights is cut.

    Adam divides small gradients by themselves, so that rounding may show in one of the matrices: they are compared
    together.
    """
    write_teacher(home / "wide", hidden_size=64, intermediate_size=128, head_dim=32)
    run_stages(home, *stages(WITHOUT_CHANCE), serve="adapted", teacher=home / "wide", folder="wide alone")
    forked(arguments(home, "wide layers", WITHOUT_CHANCE, "wide"), 2, environment(*BY_LAYERS_OF_TWO))
    weights = check_measured(home / "wide alone", home / "wide layers", "qlora")
    actual, expected = (torch.cat([pair[side].flatten() for pair in weights.values()]) for side in (0, 1))
    assert relative_rms(actual, expected) < 5e-5


def storing(words: list[str], makers: Path, stopped: int) -> int:
    """A run with many shards, as `counting`; the process of that rank is asked to stop while it writes its first."""
    precompute.SHARD_TOKENS, precompute.BATCH_TOKENS, write = 500, 256, precompute.write_shard

    def stops(*given: Any) -> None:
        write(*given)
        if os.environ["RANK"] == str(stopped):
            os.kill(os.getpid(), signal.SIGTERM)

    precompute.write_shard = stops
    return counting(words, makers)


def test_a_teacher_in_shards_stores_what_one_process_stores(home: Path, tmp_path: Path) -> None:
    """To the bit, also behind a stop, which one of two processes hears and both obey; shards do not come out even."""
    stage = [{"precompute": {"model": "teacher", "data": "text"}}]
    words = ["run", str(RECIPE), f"stages={json.dumps(stage)}", "serve={model: teacher}", "--cache", str(tmp_path)]
    words += [f"models.teacher.from={home / 'teacher'}", f"data.text.source={home / 'text'}", "--folder"]

    def run(folder: str, processes: int, variables: dict[str, str], stopped: int) -> list[int | None]:
        log, given = tmp_path / "log", [*words, str(tmp_path / folder)]
        with ranks(processes, storing, given, tmp_path, stopped, log=log, environment=variables) as started:
            return end_of(started)

    assert run("one", 1, {}, -1) == [0]
    variables = environment(*IN_SHARDS_OF_TWO)
    assert run("many", 2, variables, 1) == [RunInterrupted.exit_code] * 2
    begun = len(list((tmp_path / "many" / "01-precompute" / "shards").glob("*.safetensors")))
    assert run("many", 2, variables, -1) == [0, 0]
    assert all(not json.loads((tmp_path / f"makers-{rank}.json").read_text()) for rank in range(2))
    stored = [
        {path.name: path.read_bytes() for path in (tmp_path / folder / "01-precompute" / "data").iterdir()}
        for folder in ("one", "many")
    ]
    shards = [name for name in stored[0] if name.endswith(".safetensors")]
    assert 0 < begun < len(shards) and len(shards) % 2
    assert all(stored[1][name] == stored[0][name] for name in shards)


ROUNDED = {
    "plain": {"compare": ["gptq"], "kv_cache": "fp8-static"},
    "routed": {},
    "with a budget": {"average_bits": 7.5, "calibration_tokens": "1k"},
    "recovered": {"tokens": "1k", "learning_rate": 1e-3, "train": "scales"},
    "recovered by updates": {"tokens": "1k", "learning_rate": 1e-3, "train": "low_rank"},
}


def has_matrices(layer: torch.nn.Module) -> bool:
    """Whether a layer is whole in this process."""
    matrices = [one for one in layer.parameters() if one.dim() > 1 and len(one) > 1]  # a router has one row
    whole = [one for one in matrices if not isinstance(one, DTensor)]
    rounded = [one for one in quantized_layers(layer).values() if one.packed is None and one._weight is not None]
    held = [tensor for one in rounded for tensor in one.format.tensors(one.weight).values()]
    return any(one.device.type != "meta" and one.untyped_storage().nbytes() >= one.nbytes for one in (*whole, *held))


def rounding(words: list[str], folder: Path) -> int:
    """A run that writes down how many layers there are in this process, at most, where another is to come."""
    most, opened, load_layer = [0], quantize.open_layerwise, quantize.load_layer

    def count(model: Transformer) -> None:
        most.append(sum(has_matrices(layer) for layer in model.model.layers.children()))

    def watched(*given: Any, **how: Any) -> Any:
        model, load = opened(*given, **how)

        def counted(number: int) -> None:
            count(model)
            load(number)

        return model, counted

    def counted_too(model: Transformer, *given: Any) -> None:
        count(model)
        load_layer(model, *given)

    quantize.open_layerwise, quantize.load_layer = watched, counted_too
    code = main(words)
    (folder / f"most-{os.environ['RANK']}.json").write_text(json.dumps(max(most)))
    return code


@pytest.mark.parametrize("how", ROUNDED)
def test_rounding_in_shards_makes_what_one_process_makes(how: str, home: Path, tmp_path: Path) -> None:
    """By a method whose rounding needs no text, so that the order of sums is not in it.

    Layers are there one at a time, but for the main process, which publishes what was not trained.
    """
    stage = {"model": "teacher", "method": "round", "weights": {"format": "int4", "group": 16}, "out": "small"}
    stage |= {name: TRAINING[name] for name in ("data", "batch_tokens", "micro_batch_tokens", "precision")}
    stage |= {"calibration_tokens": "512", "held_out_tokens": 512, **ROUNDED[how]}
    words = ["run", str(RECIPE), f"stages={json.dumps([{'quantize': stage}])}", "serve={model: small}"]
    parent = next((home / "one").glob("??-mod")) / "model" if how == "routed" else home / "teacher"
    words += [f"models.teacher.from={parent}", f"data.text.source={home / 'text'}"]
    words += ["--cache", str(home / "cache"), "--folder"]
    forked([*words, str(tmp_path / "one")], 1, {"OMP_NUM_THREADS": "1"})
    given, variables = [*words, str(tmp_path / "many")], environment(*IN_SHARDS_OF_TWO)
    with ranks(2, rounding, given, tmp_path, log=tmp_path / "log", environment=variables) as started:
        assert not any(end_of(started, 400)), (tmp_path / "log").read_text()[-9000:]
    most = [json.loads((tmp_path / f"most-{rank}.json").read_text()) for rank in range(2)]
    assert most == ([0, 0] if "recovered" in how else [2, 0])
    one, many = (read_result(tmp_path / folder / "01-quantize") for folder in ("one", "many"))
    for expected, model in zip(one.models, many.models, strict=True):  # type: ignore[union-attr]
        assert model.quality.nll.value == pytest.approx(expected.quality.nll.value, rel=1e-5)
        assert [getattr(model, size) for size in SIZES] == [getattr(expected, size) for size in SIZES]
    costs = [[(cost.name, cost.enlarged, cost.nats) for cost in result.details.costs] for result in (one, many)]  # type: ignore[union-attr]
    assert bool(costs[0]) == ("budget" in how)
    for expected, cost in zip(*costs, strict=True):
        assert cost == (*expected[:2], pytest.approx(expected[2], rel=1e-3))
    files = [tmp_path / folder / "01-quantize" / "model" / "model.safetensors" for folder in ("one", "many")]
    weights = [load_file(file) for file in files]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-2, atol=1e-5)


def check(one: Path, many: Path, name: str) -> None:
    """As `check_measured`, and each of its weights."""
    for key, (actual, expected) in check_measured(one, many, name).items():
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-5, msg=f"{name}: {key}")


def check_measured(one: Path, many: Path, name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The losses of one process in the stage of this name to 1e-5, and what is measured; the weights of both."""
    one, many = (next(folder.glob(f"??-{name}")) for folder in (one, many))
    logs = read_metrics(one / "metrics.jsonl"), read_metrics(many / "metrics.jsonl")
    assert len(logs[0]) == len(logs[1]) > 4
    for expected, line in zip(*logs, strict=True):
        losses = {key: line[key] for key in line if not key.startswith("held_out") and key != "passing_1"}
        assert losses == pytest.approx({key: expected[key] for key in losses}, rel=1e-5), name
    measured = [[model.quality for model in read_result(folder).models] for folder in (one, many)]  # type: ignore
    assert all(measured[0])
    sizes = [[getattr(m, size) for m in read_result(folder).models for size in SIZES] for folder in (one, many)]  # type: ignore
    assert sizes[0] == sizes[1], name
    for expected, found in zip(*measured, strict=True):
        assert found.tokens == expected.tokens
        assert found.nll.value == pytest.approx(expected.nll.value, rel=1e-3), name
        assert (found.kl is None) == (expected.kl is None)
    published = [next((folder / "model").glob("*model.safetensors")) for folder in (one, many)]
    weights = [load_file(path) for path in published]
    assert weights[0].keys() == weights[1].keys()
    if name not in ("qlora", "mod"):  # an adapter has another file, and thresholds are numbers in it
        first, second = (json.loads((folder / "model" / "config.json").read_text()) for folder in (one, many))
        assert first == second
    return {key: (weights[1][key], tensor) for key, tensor in weights[0].items()}


@pytest.mark.parametrize("launch", [IN_SHARDS_OF_TWO, BY_LAYERS_OF_TWO], ids=["shards", "layers"])
def test_whichever_process_is_killed_the_same_command_goes_on_to_the_same_weights(
    launch: tuple[str, ...], home: Path, tmp_path: Path
) -> None:
    variables, killed = environment(*launch), tmp_path / "killed"
    forked(arguments(home, str(tmp_path / "straight"), KILLED), 2, variables)
    words, lines = arguments(home, str(killed), KILLED), killed / "01-distill" / "metrics.jsonl"
    moments = random.Random(0)
    for rank, count in ((1, 2), (0, 7)):
        with ranks(2, main, words, log=home / "log", environment=variables) as started:
            deadline = time.monotonic() + 120
            while len(read_metrics(lines)) < count:
                assert time.monotonic() < deadline and started[0].is_alive(), "training does not get on"
                time.sleep(0.02)
            time.sleep(moments.uniform(0.0, 0.2))
            started[rank].kill()
            assert all(end_of(started))
    forked(words, 2, variables)
    straight = tmp_path / "straight" / "01-distill"
    assert lines.read_text() == (straight / "metrics.jsonl").read_text()
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (straight, lines.parent)]
    assert weights[0] == weights[1]


CALIBRATED = {
    "gqa": ({}, {"compress.gqa._add_moments": 40, "compress.refit._refit": 2}),
    "mod": ({}, {"compress.token_costs._batch_costs": 3, "compress.token_costs._fit": 1, "compress.mod._joined": 1}),
    "distill": ({"student": NARROWER}, {"compress.prune.depth._trace": 3, "compress.prune.width._squared_means": 20}),
}
"""Of each kind that passes text before it trains, its settings, and which call in which number is somebody's last."""


def dying(words: list[str], rank: int, function: str, number: int) -> int:
    """A run of which this process kills itself in that call, if it has this rank."""
    module, _, name = function.rpartition(".")
    place, left = importlib.import_module(module), number
    original = getattr(place, name)

    def counted(*given: Any, **how: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given, **how)

    setattr(place, name, counted)
    return main(words)


@pytest.mark.skipif(not trials.in_full, reason="tried with --all-trials")
@pytest.mark.parametrize("kind", CALIBRATED)
def test_so_it_does_where_one_is_killed_amid_calibration(kind: str, home: Path, tmp_path: Path) -> None:
    changes, calls = CALIBRATED[kind]
    wanted, variables = {kind: STAGES[kind] | {"tokens": "1k"} | changes}, environment(*IN_SHARDS_OF_TWO)
    forked(arguments(home, str(tmp_path / "straight"), wanted), 2, variables)
    words = arguments(home, str(tmp_path / "killed"), wanted)
    for number, (function, last) in enumerate(calls.items()):
        rank = number % 2
        with ranks(2, dying, words, rank, function, last, log=tmp_path / "log", environment=variables) as started:
            assert end_of(started)[rank] == -signal.SIGKILL, function
    assert not list((tmp_path / "killed").glob("*/metrics.jsonl"))
    forked(words, 2, variables)
    stages = [tmp_path / folder / f"01-{kind}" for folder in ("straight", "killed")]
    for name in ("metrics.jsonl", "model/model.safetensors", "model/config.json"):
        assert (stages[0] / name).read_bytes() == (stages[1] / name).read_bytes(), name
