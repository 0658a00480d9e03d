"""Adapters that come and go while an engine runs: each request answers as the merged model that it asked for alone."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.lora import merge
from model.files.adapter import CONFIG_NAME, WEIGHTS_NAME, load_adapter
from model.formats.bitsandbytes import NF4
from model.fused_adapters import AdapterRoom
from model.lora import LoraConfig
from model.transformer import Transformer
from serve.engine import engine as engine_module
from serve.engine.engine import Engine
from serve.outputs import RequestOutput
from tests.model.test_fused_adapters import save_adapters
from tests.serve.recorded_graphs import recorded_graphs
from tests.serve.toys import drain, greedy, greedy_oracle, join, make_engine, random_prompts
from tests.tiny import tiny_model

CONFIGS = (
    LoraConfig(rank=4, alpha=8),
    LoraConfig(rank=7, rslora=True, targets=("model.layers.1.*",)),
    LoraConfig(rank=2, alpha=4, targets=("q_proj", "down_proj")),
    LoraConfig(rank=3, alpha=9, targets=("v_proj", "gate_proj")),
)
PROMPTS = random_prompts(12, seed=5, low=4, high=30)
NUM_OUTPUT = 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return list(map(str, save_adapters(tmp_path_factory.mktemp("adapters"), tiny_model(), CONFIGS)))


def with_room(*, max_loras: int = 2, **options: Any) -> Engine:
    draft = options.pop("draft", None)
    options = {"enable_lora": True, "max_loras": max_loras, "max_lora_rank": 7} | options
    return make_engine(tiny_model().fuse(AdapterRoom(max_loras, 7)), draft, **options)


def load(engine: Engine, name: str, folder: str) -> None:
    engine.adapters.add(name, engine.adapters.read(folder))


def merged(folder: str | None) -> Transformer:
    model = tiny_model()
    if folder is None:
        return model
    load_adapter(model, folder)
    return merge(model, dtype=torch.float32)


@cache
def expected(folder: str | None, number: int) -> list[int]:
    """What the merged model answers to a prompt."""
    return greedy_oracle(merged(folder), PROMPTS[number], NUM_OUTPUT)


@pytest.mark.parametrize(
    ("draft", "graphs", "overlapped"),
    [(None, False, False), ("ngram", False, True), ("ngram", True, False), (None, True, True)],
)
def test_a_mixed_batch_answers_as_merged_models_while_adapters_come_and_go(
    folders: list[str], draft: str | None, graphs: bool, overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "graphs_on", lambda device: recorded_graphs() if graphs else None)
    engine = with_room(draft=draft, num_speculative_tokens=2 if draft else None, max_num_seqs=5)
    engine.max_pending = int(overlapped)
    wanted: dict[str, str | None] = {}

    def ask(*requests: tuple[str | None, int | None]) -> None:
        for name, number in requests:
            request_id = str(len(wanted))
            wanted[request_id] = None if number is None else folders[number]
            engine.add_request(request_id, PROMPTS[len(wanted) - 1], greedy(NUM_OUTPUT), adapter=name)

    outputs: dict[tuple[str, int], RequestOutput] = {}

    def steps(count: int) -> None:
        for _ in range(count):
            for output in engine.step():
                join(outputs, output)

    def preempt() -> None:
        for sequence in engine.scheduler.running[1:]:
            engine.scheduler.preempt(sequence)

    load(engine, "a", folders[0])
    load(engine, "b", folders[1])
    ask(("a", 0), (None, None), ("b", 1), ("a", 0))
    steps(4)
    preempt()
    engine.adapters.remove("b")  # the request that waits keeps it
    load(engine, "a", folders[2])  # those that run keep theirs
    ask(("a", 2), ("a", 2), (None, None))
    steps(6)
    preempt()
    load(engine, "d", folders[3])
    ask(("d", 3), ("a", 2), (None, None), ("d", 3))
    while engine.has_work():
        steps(1)
    assert engine.cache.num_used == 0
    for request_id, folder in wanted.items():
        assert outputs[request_id, 0].new_token_ids == expected(folder, int(request_id)), f"{request_id} of {folder}"


def test_the_adapters_say_different_things(folders: list[str]) -> None:
    """Else the test above would prove nothing."""
    said = [expected(folder, 0) for folder in (None, *folders)]
    assert len(set(map(tuple, said))) == len(said)


def test_slots_of_quantized_layers_serve_as_fused_adapters_do(folders: list[str]) -> None:
    from compress.quantize.round_to_nearest import quantize_model
    from model.files.adapter import load_adapters

    def base() -> Transformer:
        return quantize_model(tiny_model(), NF4(True))

    model = base()
    fixed = make_engine(model.fuse(load_adapters(model, folders[:2])), adapters=dict(zip("ab", folders, strict=False)))
    moving = make_engine(base().fuse(AdapterRoom(2, 7)), enable_lora=True, max_loras=2, max_lora_rank=7)
    for name, folder in zip("ab", folders, strict=False):
        load(moving, name, folder)
    answers = []
    for engine in (fixed, moving):
        for name, prompt in zip("ab", PROMPTS, strict=False):
            engine.add_request(name, prompt, greedy(NUM_OUTPUT), adapter=name)
        answers.append({key: output.new_token_ids for key, output in drain(engine).items()})
    assert answers[0] == answers[1]


def test_an_old_and_a_new_adapter_of_one_name_share_no_cached_prefix(folders: list[str]) -> None:
    engine = with_room()
    prompt = random_prompts(1, low=50, high=51)[0]

    def num_cached() -> int:
        engine.add_request("r", prompt, greedy(2), adapter="a")
        return drain(engine)["r", 0].num_cached_tokens

    load(engine, "a", folders[0])
    assert [num_cached(), num_cached()] == [0, 48]
    load(engine, "a", folders[1])
    assert [num_cached(), num_cached()] == [0, 48]
    engine.adapters.remove("a")
    load(engine, "a", folders[1])
    assert num_cached() == 0


def test_behind_a_request_that_waits_for_a_slot_only_those_without_adapter_go_on(folders: list[str]) -> None:
    engine = with_room(max_loras=1)
    for name, folder in zip("ab", folders, strict=False):
        load(engine, name, folder)
    for request_id, name in (("a1", "a"), ("b", "b"), ("a2", "a"), ("base", None)):
        engine.add_request(request_id, PROMPTS[0], greedy(4 if request_id == "base" else 8), adapter=name)
    ends = []
    while engine.has_work():
        ends += [output.request_id for output in engine.step() if output.finished]
    assert ends == ["base", "a1", "b", "a2"]


def test_a_request_that_comes_back_to_its_row_finds_its_adapter_in_another_slot(
    folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the row held of before, which captured steps read, named the old slot."""
    monkeypatch.setattr(engine_module, "graphs_on", lambda device: recorded_graphs())
    engine = with_room(max_loras=3)
    for name, folder in zip("abcd", folders, strict=True):
        load(engine, name, folder)
    outputs: dict[tuple[str, int], RequestOutput] = {}

    def ask(request_id: str, adapter: str | None, *, priority: int = 0) -> None:
        engine.add_request(request_id, PROMPTS[0], greedy(NUM_OUTPUT), adapter=adapter, priority=priority)

    def step() -> None:
        for output in engine.step():
            join(outputs, output)

    for request_id, adapter in (("a", "a"), ("b", "b"), ("base", None), ("c", "c")):
        ask(request_id, adapter)
    step()
    step()
    sequence = next(running for running in engine.scheduler.running if running.request_id == "a")
    row, slot = sequence.batch_row, sequence.adapter_slot
    engine.scheduler.preempt(sequence)
    engine.abort("base")
    ask("d", "d", priority=-1)  # takes the row of "base" and the slot of "a"
    step()
    engine.abort("b")
    ask("another base", None, priority=-1)  # takes the row of "b"
    step()
    assert sequence.batch_row == row and sequence.adapter_slot != slot
    while engine.has_work():
        step()
    for request_id, folder in (("a", folders[0]), ("c", folders[2]), ("d", folders[3]), ("another base", None)):
        assert outputs[request_id, 0].new_token_ids == expected(folder, 0), request_id


def test_the_slot_used_longest_ago_makes_room(folders: list[str]) -> None:
    engine = with_room(max_loras=2)
    loaded = {}
    for name, folder in zip("abc", folders, strict=False):
        load(engine, name, folder)
        loaded[name] = engine.adapters.find(name)
    for name in ("a", "b", "a", "c"):
        engine.add_request(name, PROMPTS[0], greedy(2), adapter=name)
        drain(engine)
    assert [adapter is not None and adapter.slot >= 0 for adapter in loaded.values()] == [True, False, True]


# What cannot be loaded


def edit_config(**fields: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG_NAME).read_text())
        (folder / CONFIG_NAME).write_text(json.dumps(config | fields))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_NAME)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_NAME)

    return edit


def first(tensors: dict[str, torch.Tensor], end: str = "lora_A.weight") -> str:
    return min(key for key in tensors if key.endswith(end))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no configuration": (lambda folder: (folder / CONFIG_NAME).unlink(), "adapter_config.json does not exist"),
    "no weights": (lambda folder: (folder / WEIGHTS_NAME).unlink(), "adapter_model.safetensors does not exist"),
    "half a file": (
        lambda folder: (folder / WEIGHTS_NAME).write_bytes((folder / WEIGHTS_NAME).read_bytes()[:-9]),
        "is not a valid safetensors file",
    ),
    "no JSON": (lambda folder: (folder / CONFIG_NAME).write_text("{"), "is not valid JSON"),
    "deep JSON": (lambda folder: (folder / CONFIG_NAME).write_text("[" * 100_000), "is not valid JSON"),
    "a list": (lambda folder: (folder / CONFIG_NAME).write_text("[]"), "must hold a JSON object"),
    "huge configuration": (lambda folder: (folder / CONFIG_NAME).write_text(" " * (2 << 20)), "the largest that fits"),
    "huge weights": (
        edit_tensors(lambda tensors: tensors.update(x=torch.zeros(3_000_000))),
        "the largest that fits this model",
    ),
    "infinite rank": (edit_config(r=float("inf")), "describes no adapter"),
    "rank as text": (edit_config(r="four"), "describes no adapter"),
    "alpha is no number": (edit_config(lora_alpha=float("nan")), "alpha is nan"),
    "another method": (edit_config(peft_type="IA3"), "only 'LORA' can be read"),
    "another rank": (edit_config(r=5), "says r = 5"),
    "a key of something else": (edit_tensors(lambda t: t.update(evil=torch.zeros(1))), "no part of a LoRA adapter"),
    "one factor": (edit_tensors(lambda t: t.pop(first(t))), "only one of the two factors"),
    "not finite": (edit_tensors(lambda t: t[first(t)].fill_(float("nan"))), "values that are not finite"),
    "a layer too many": (
        edit_tensors(lambda t: t.update({key.replace(".0.", ".9."): t[key].clone() for key in list(t)})),
        "no linear layer of this model's decoder",
    ),
    "narrower": (
        edit_tensors(lambda t: t.update({first(t): t[first(t)][:, :-1].contiguous()})),
        "with 159 inputs and 64 outputs; this model's has 160 and 64",
    ),
}


@pytest.fixture(scope="module")
def loaded(folders: list[str]) -> Engine:
    engine = with_room()
    load(engine, "a", folders[0])
    return engine


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_one_sentence(kind: str, loaded: Engine, tmp_path: Path) -> None:
    damage, sentence = BROKEN[kind]
    (folder,) = save_adapters(tmp_path, tiny_model(), CONFIGS[:1])
    damage(folder)
    with pytest.raises(ValueError, match=sentence) as caught:
        loaded.adapters.read(str(folder))
    assert "\n" not in str(caught.value)


def test_what_slots_cannot_hold_is_refused(loaded: Engine, tmp_path: Path) -> None:
    configs = LoraConfig(rank=8), LoraConfig(rank=2, dora=True), LoraConfig(rank=2, targets=("lm_head",))
    refusals = "has rank 8; the most that fits here is 7", "is a DoRA adapter", "adapts lm_head, which is no linear"
    for folder, refusal in zip(save_adapters(tmp_path, tiny_model(), configs), refusals, strict=True):
        with pytest.raises(ValueError, match=refusal):
            loaded.adapters.read(str(folder))
    assert loaded.adapters.names == ["a"]


def test_an_engine_without_room_loads_nothing(folders: list[str]) -> None:
    with pytest.raises(ValueError, match="started with enable_lora"):
        make_engine(tiny_model()).adapters.read(folders[0])
