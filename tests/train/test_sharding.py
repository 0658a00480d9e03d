"""Training by shards: processes over gloo that hold a part each train as one that has all, and resume one another."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from model.lora import LoraConfig
from model.training_memory import Setup
from tests import trials
from tests.forked import end_of, ranks
from tests.train import memory_process, sharded_process
from tests.train.sharded_process import BY_THREES, CASES, run
from train.config import TrainingConfig
from train.tracking import read_metrics

HANDED_ON = ("8 bits", "gqa", "qlora")
DIVIDED = ("distill", "gqa")
PLACES = {
    "groups": ("distill", "qlora"),
    "down": HANDED_ON,
    "up": HANDED_ON,
    "parts": DIVIDED,
    "halves": DIVIDED,
    "layers": ("distill", "gqa", "mod", "qlora"),
    "fewer": ("gqa", "qlora"),
    "odd": tuple(BY_THREES)[: trials.trials(1, 4)],
}
"""Of what `folder` makes besides the cases by one process and by four: each in some place, and in each place one."""
TRIED = trials.covering((place, name) for place, names in PLACES.items() for name in names)

MANY_LAYERS = 12
LAYERS = trials.trials(8, MANY_LAYERS)
"""Of models whose memory is measured: of small parts of few layers the process itself would be much."""

pytestmark = pytest.mark.slow


def can_be(name: str, processes: int, sizes: str) -> bool:
    """Whether a way to train knows such a mesh."""
    setup = memory_process.SETUPS[name](memory_process.BRIEF)
    if "x" in sizes and setup.routed:
        return False
    return not (setup.whole_documents and ("x" in sizes or "t" in sizes)) and not (setup.rounding and "t" in sizes)


def together(processes: int, module: ModuleType, folder: Path, *words: object) -> None:
    log = folder / "log"
    with ranks(processes, module.main, folder, *words, log=log) as started:
        assert not any(end_of(started)), log.read_text()[-3000:]


def tried_in(*places: str) -> list[tuple[str, str]]:
    return [row for row in TRIED if row[0] in places]


def names_in(place: str) -> list[str]:
    return [name for _, name in tried_in(place)]


STOPS = {("down", "4"): "/2", ("down", "2"): "/4", ("fewer", "2t2"): "/2", ("fewer", "1t2"): "/4", ("odd", "2"): "/3"}


def jobs_in(**sizes: str) -> list[str]:
    """Of each place by this mesh."""
    return [
        f"{mesh}/{place}/{name}{STOPS.get((place, mesh), '')}"
        for place, mesh in sizes.items()
        for name in names_in(place)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of each case, and four: in one group, or in two that hold the same; and checkpoints.

    `down` is begun by four, goes on with two and ends alone; `up` is begun alone and ends with four, `odd` by two and
    ends with three. In `layers` four divide each layer among two, and in `fewer`, which they begin, two go on that do
    the same.
    """
    folder = tmp_path_factory.mktemp("sharded")
    for name in (*CASES, *names_in("odd")):
        run(folder / "one", name)
    for name in names_in("up"):
        run(folder / "up", name, stop=3)
    jobs = [f"4/four/{name}" for name in CASES]
    together(
        4,
        sharded_process,
        folder,
        *jobs,
        *jobs_in(groups="2", down="4", up="4", parts="2x2", layers="2t2", fewer="2t2"),
    )
    together(2, sharded_process, folder, *jobs_in(down="2", odd="2", halves="1x2", fewer="1t2"))
    together(3, sharded_process, folder, *jobs_in(odd="3"))
    for place in ("down", "fewer"):
        for name in names_in(place):
            run(folder / place, name)
    return folder


def check(folder: Path, place: str, name: str, *, odd: float = 0.0) -> None:
    """The log of one process to 1e-5, and its weights but for the part `odd` of them."""
    one, many = (read_metrics(folder / where / name / "metrics.jsonl") for where in ("one", place))
    assert len(one) == len(many) > 6
    for expected, line in zip(one, many, strict=True):
        assert line == pytest.approx(expected, rel=1e-5)
    weights = [load_file(folder / where / name / "weights.safetensors") for where in ("one", place)]
    assert weights[0].keys() == weights[1].keys()
    # Where a last bit moves a moment of 8 bits to the next code, its weight takes another step.
    closeness = {"rtol": 1e-2, "atol": 5e-4} if name == "8 bits" else {"rtol": 1e-3, "atol": 1e-5}
    differ = [~torch.isclose(weights[1][key], expected, **closeness) for key, expected in weights[0].items()]
    assert sum(int(one.sum()) for one in differ) <= odd * sum(one.numel() for one in differ)


@pytest.mark.parametrize("name", CASES)
def test_four_processes_train_as_one(name: str, folder: Path) -> None:
    check(folder, "four", name)


@pytest.mark.parametrize("name", names_in("groups"))
def test_so_do_two_groups_of_two(name: str, folder: Path) -> None:
    check(folder, "groups", name)


@pytest.mark.parametrize(("place", "name"), tried_in("halves", "parts"))
def test_processes_that_have_a_part_of_the_tokens_each_train_as_one(place: str, name: str, folder: Path) -> None:
    check(folder, place, name)


@pytest.mark.parametrize(("place", "name"), tried_in("layers", "fewer"))
def test_processes_that_have_a_part_of_each_layer_train_as_one(place: str, name: str, folder: Path) -> None:
    """Products are sums in another order; in fp64 gradients are the same (tests/train/test_parts.py).

    Adam's first step is g / (|g| + ε) of the rate. Of `distill`, and of `mod`, two first gradients are about ε, far
    below the terms that they are sums of, so rounding leaves another number on each side: those two weights differ.
    """
    check(folder, place, name, odd=1e-4)


def test_a_process_of_four_holds_a_quarter_of_a_frozen_base_and_of_its_adapter_and_moments(folder: Path) -> None:
    (one,) = (json.loads(path.read_text()) for path in (folder / "one" / "qlora").glob("held-*.json"))
    four = [json.loads(path.read_text()) for path in (folder / "four" / "qlora").glob("held-*.json")]
    assert len(four) == 4 and max(sum(held.values()) for held in four) <= 0.35 * sum(one.values())
    config = TrainingConfig(tokens=256, batch_tokens=256, micro_batch_tokens=32, precision="fp32")
    setup = Setup(CASES["qlora"].model().config, config, adapter=LoraConfig(rank=6), quantization="nf4", on_gpu=False)
    for held, shards in ((one, 1), (max(four, key=lambda held: held["weights"]), 4)):
        planned = replace(setup, processes=shards, shards=shards).memory()
        assert planned.weights + planned.adapters == pytest.approx(held["weights"], rel=0.05)
        assert planned.optimizer == pytest.approx(held["moments"], rel=0.05)


@pytest.mark.parametrize(("place", "name"), tried_in("down", "up", "odd"))
def test_a_checkpoint_resumes_on_another_number_of_processes(place: str, name: str, folder: Path) -> None:
    check(folder, place, name)


def measured(
    folder: Path, processes: int, sizes: str, names: Sequence[str], layers: int = LAYERS
) -> list[dict[str, dict[str, int]]]:
    """The peaks of a step in each process: weights, gradients, moments, and all that it needs besides.

    Each is what is planned, and so are the weights.
    """
    together(processes, memory_process, folder, sizes, layers, *names)
    found = [json.loads((folder / f"{processes}-{rank}.json").read_text()) for rank in range(processes)]
    misses = [
        f"{name} in process {rank}: {part} {process[name][part]:,}, not {process[name][truth]:,}"
        for name in names
        for rank, process in enumerate(found)
        for part, truth, closeness in (("weights", "loaded", 1e-3), ("planned", "peak", 0.1))
        if process[name][part] != pytest.approx(process[name][truth], rel=closeness)
    ]
    assert not misses, "\n".join(misses)
    return found


def test_a_process_of_four_takes_a_third_and_what_is_planned(tmp_path: Path) -> None:
    names = ("language", "distill")[: trials.trials(1, 2)]
    (alone,), four = (measured(tmp_path, processes, str(processes), names, MANY_LAYERS) for processes in (1, 4))
    for name in names:
        assert max(process[name]["peak"] for process in four) <= 0.35 * alone[name]["peak"]


# Sizes of the mesh: over how many processes to shard, among how many to divide tokens (x), or each layer (t). Two that
# hold the same have no gradients twice, once where they travel from; nor has one of two parts, with several of them.
BRIEFLY = ((2, "2", "qlora"), (2, "1x2", "long"), (2, "1t2", "qlora"))

MESHES = ((1, "1"), (2, "1"), (2, "2"), (2, "1x2"), (4, "4"), (4, "2"), (4, "2x2"), (2, "1t2"), (4, "2t2"), (4, "1t2"))
IN_FULL = [(*mesh, name) for mesh in MESHES for name in memory_process.SETUPS if can_be(name, *mesh)]


@pytest.mark.parametrize(("processes", "sizes", "name"), IN_FULL if trials.in_full else BRIEFLY)
def test_every_way_to_train_takes_what_is_planned(processes: int, sizes: str, name: str, tmp_path: Path) -> None:
    measured(tmp_path, processes, sizes, [name])
