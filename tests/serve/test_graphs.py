"""Steps that are captured and replayed, on a stand-in for CUDA graphs that watches what they do.

`pytest --recorded-graphs tests/serve` runs all tests of the engine so as well; here is what they cannot show.
"""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.quantize.round_to_nearest import quantize_model
from kernels.common.cuda_graph import MOST_FAILURES, Graphs
from model.config import MixtureOfDepths
from model.files.adapter import load_adapters
from model.formats.bitsandbytes import NF4
from model.kv_format import choose_kv_format
from model.passes import Pass, run_pass
from model.transformer import Transformer
from serve.engine import engine as engine_module
from serve.engine.drafts.ngram import NgramDraft
from serve.engine.engine import Engine
from serve.engine.graph_shapes import End, captured_sizes
from serve.engine.warm_up import warm_up
from serve.outputs import RequestOutput
from serve.sampling_params import SamplingParams
from tests.compare import check_close
from tests.interpreted import interpreted, needs_triton
from tests.model.test_fused_adapters import save_adapters
from tests.serve.conftest import ENGINES, names_reached
from tests.serve.recorded_graphs import CaptureViolation, RecordedGraph, _watched, counted, recorded_graphs
from tests.serve.test_routed import routed_model
from tests.serve.test_speculation import noisy_twin
from tests.serve.toys import drain, generate, greedy, greedy_oracle, join, make_engine, random_prompts
from tests.tiny import tiny_model
from tests.trials import covering

pytestmark = pytest.mark.eager
PROMPTS = random_prompts(6, seed=1)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_query_heads": 2, "num_kv_heads": 1}
ONE_LAYER = SMALL | {"num_layers": 1}
"""The kernels of a layer are those of all."""


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "graphs_on", lambda device: recorded_graphs())


def test_what_makes_engines_runs_again_with_the_option() -> None:
    """As the suite's command finds out: by what a test calls, in functions within it too."""
    within = test_lists_of_visible_slots_follow_sequences_through_captured_steps
    for makes_one in (test_replayed_steps_say_what_full_passes_say, within):
        assert "make_engine" in names_reached(makes_one)
    assert ENGINES.isdisjoint(names_reached(test_the_stand_in_notices_the_host))


def mixed_params(max_tokens: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1, "top_p": 0.9, "repetition_penalty": 1.3, "min_tokens": 4},
        {"temperature": 0.0, "presence_penalty": 1.5, "logit_bias": {7: 3.0, 9: -4.0}},
        {"seed": 2, "logprobs": 2},
    ]
    return [SamplingParams(max_tokens=max_tokens, **kinds[n % len(kinds)]) for n in range(len(PROMPTS))]


def test_replayed_steps_say_what_full_passes_say() -> None:
    model = tiny_model(seed=3)
    engine = make_engine(model)
    assert generate(engine, PROMPTS, greedy(20)) == [greedy_oracle(model, prompt, 20) for prompt in PROMPTS]
    counts = engine.graphs._pool  # type: ignore[union-attr]
    assert counts["captures"] <= 4 and counts["replays"] > 15  # 8, 4, 2 sequences and one


@pytest.mark.parametrize(("is_routed", "draft"), covering(product([False, True], [None, "equal", "ngram"])))
def test_the_kernels_of_a_gpu_are_captured(is_routed: bool, draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the interpreter, whose kernels launch as a GPU's do; nothing in their wrappers may change or be read."""
    model = routed_model("block", **SMALL) if is_routed else tiny_model(seed=3, **ONE_LAYER)
    source = {None: None, "equal": model, "ngram": "ngram"}[draft]
    params = [
        SamplingParams(**{**vars(p), "max_tokens": 9 if draft else 6, "ignore_eos": True}) for p in mixed_params(9)[:3]
    ]
    with monkeypatch.context() as eager:
        eager.setattr(engine_module, "graphs_on", lambda device: None)
        expected = generate(make_engine(model), [prompt[:5] for prompt in PROMPTS[:3]], params)
    engine = make_engine(model, source, num_speculative_tokens=2 if source else None, num_pages=64)
    if isinstance(engine.draft, NgramDraft):
        engine.draft.reads_counts = False
    with interpreted():
        assert generate(engine, [prompt[:5] for prompt in PROMPTS[:3]], params) == expected
    assert engine.graphs._pool["replays"] > 2 and not engine.graphs.num_failures  # type: ignore[union-attr]


def test_lists_of_visible_slots_follow_sequences_through_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pages are shared, copied and given to others, too; what was listed for those who had them is not read."""
    mixture = MixtureOfDepths("attention", (1,), 0.5, gate_range=0.5)
    model = tiny_model(seed=3, mixture_of_depths=mixture, **SMALL)
    options = {"num_pages": 7, "max_model_len": 80, "max_num_seqs": 3}
    shared, params = PROMPTS[0][:3] * 12, {"temperature": 0.0, "max_tokens": 14, "ignore_eos": True}
    requests = [([*shared, 5], {"n": 2, "temperature": 1.0, "seed": 4}), ([*shared, 9], {}), (shared[:7], {})]

    def outputs() -> dict:
        engine = make_engine(model, **options)
        for number, (prompt, changes) in enumerate(requests):
            engine.add_request(str(number), prompt, SamplingParams(**params | changes))
            engine.step()
        found = {key: output.new_token_ids for key, output in drain(engine).items()}
        assert engine.stats().num_preemptions and engine.stats().prefix_cache_hits
        return found

    with monkeypatch.context() as eager:
        eager.setattr(engine_module, "graphs_on", lambda device: None)
        expected = outputs()
    with interpreted():
        assert outputs() == expected


@pytest.mark.parametrize(
    ("route", "weights"),
    covering([("attention", "nf4"), ("attention", "adapters"), ("mlp", "adapters"), ("block", "none")]),
)
def test_a_long_prompt_waits_for_no_routed_layer(route: str, weights: str, tmp_path: Path) -> None:
    """Nothing is read back of a prompt that is longer than what is computed whole, and its unused rows do no harm."""
    mixture = MixtureOfDepths(route, (1,), 0.5, gate_range=0.5)  # type: ignore[arg-type]
    tokens, length = torch.arange(300) * 7 % 512, torch.tensor([0, 300], dtype=torch.int32)
    pages, tables = (torch.arange(n, dtype=torch.int32) for n in (300, 19))
    listing = torch.zeros(2, 1, dtype=torch.int32)
    step = Pass(tokens, pages.long(), pages.long(), tables[None], length, length[1:], None, listing)
    folders: list[Path] = []
    if weights == "adapters":
        folders = save_adapters(tmp_path, tiny_model(seed=3, mixture_of_depths=mixture, **SMALL))
        step = step._replace(adapters=torch.arange(300, dtype=torch.int32) % 3 - 1)

    def served() -> Callable[[], tuple[torch.Tensor]]:
        model = tiny_model(seed=3, mixture_of_depths=mixture, **SMALL)
        model = quantize_model(model, NF4()) if weights == "nf4" else model
        model = model.fuse(load_adapters(model, folders))
        cache = choose_kv_format("auto", torch.float32).allocate(model.config, 19, 16, torch.device("cpu"))
        return lambda: (run_pass(model, cache, step),)

    with torch.inference_mode():
        with interpreted():
            (ours,), _ = _watched(served())
        (expected,) = served()()
    check_close(ours, expected.double())


@pytest.mark.parametrize("is_interpreted", [False, True])
def test_drafts_that_are_verified_by_rejection_are_captured_to_their_end(is_interpreted: bool) -> None:
    """Nothing is launched behind their graphs, a greedy one's among them; beside a request with a seed drawing is."""
    model, twin = (tiny_model(seed=3, **ONE_LAYER) for _ in range(2))
    engine = make_engine(model, twin, num_speculative_tokens=2, num_pages=64)
    kinds: list[dict[str, Any]] = [{"presence_penalty": 0.5}, {}, {"temperature": 0.0}]
    params = [SamplingParams(max_tokens=9, ignore_eos=True, **kind) for kind in kinds]
    prompts = [prompt[:5] for prompt in PROMPTS[:3]]

    def captured_ends() -> set[End]:
        engine.graphs.forget()  # type: ignore[union-attr]
        assert generate(engine, prompts, params)[2] == greedy_oracle(model, prompts[2], 9)
        return {key[1].end for key, captured in engine.graphs._captured.items() if captured}  # type: ignore

    with interpreted() if is_interpreted else nullcontext():
        assert captured_ends() == {End.REJECTION, End.DRAFT_FOR_REJECTION}
        params[0] = SamplingParams(max_tokens=9, ignore_eos=True, seed=1)
        assert captured_ends() == {End.LOGITS}
    assert engine.stats().num_accepted_tokens > 8


def test_captured_passes_read_a_draft_that_is_swapped_in_amid_requests() -> None:
    """As `--watch-draft` does: a better draft, then a random one, in the memory that the captures read."""
    model = tiny_model(seed=3)
    engine = make_engine(model, noisy_twin(model), num_speculative_tokens=3)
    draft, graphs = engine.draft.runner.model, engine.graphs  # type: ignore[union-attr]
    expected = [greedy_oracle(model, prompt, 24) for prompt in PROMPTS[:4]]

    def share_of_accepted(swapped_in: Transformer) -> float:
        for number, prompt in enumerate(PROMPTS[:4]):
            engine.add_request(str(number), prompt, greedy(24))
        joined: dict[tuple[str, int], RequestOutput] = {}
        for number in range(40):
            if number == 3:
                engine.update_draft_weights(dict(swapped_in.named_parameters()))
                before = engine.stats()
            for output in engine.step():
                join(joined, output)
        assert [joined[str(number), 0].new_token_ids for number in range(4)] == expected
        after = engine.stats()
        num_drafted = after.num_draft_tokens - before.num_draft_tokens
        return (after.num_accepted_tokens - before.num_accepted_tokens) / num_drafted

    assert 0 < share_of_accepted(noisy_twin(model)) < 1
    captured, places = dict(graphs._captured), [p.data_ptr() for p in draft.parameters()]
    with counted(graphs) as counts:
        assert share_of_accepted(model) == 1
        assert share_of_accepted(tiny_model(seed=9)) < 0.1
    assert counts["replays"] > counts["captures"]
    assert [p.data_ptr() for p in draft.parameters()] == places
    assert all(graphs._captured[key] is graph for key, graph in captured.items() if graph)


def test_no_step_moves_what_the_one_before_has_found() -> None:
    """Steps are launched before the one before them has been read: what that found is on its way by then."""
    model = tiny_model(seed=3)
    engine = make_engine(model)
    engine.max_pending = 1
    assert generate(engine, PROMPTS, greedy(20)) == [greedy_oracle(model, prompt, 20) for prompt in PROMPTS]


def test_a_step_that_cannot_be_captured_is_launched_as_before(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(RecordedGraph):
        def capture(self, run: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    model = tiny_model(seed=3)
    engine = make_engine(model)
    engine.graphs._kind = Refusing  # type: ignore[union-attr]
    assert generate(engine, PROMPTS, greedy(20)) == [greedy_oracle(model, prompt, 20) for prompt in PROMPTS]
    assert engine.stats().num_graph_failures == MOST_FAILURES and engine.stats().num_graphs == 0
    assert sum("could not be captured" in record.message for record in caplog.records) == MOST_FAILURES


def test_the_stand_in_notices_what_a_graph_would_freeze() -> None:
    x, decided = torch.arange(4.0), {"factor": 2.0, "rows": 4}
    for change in ({"factor": 3.0}, {"rows": 3}):
        graphs, own = Graphs(RecordedGraph, {}), dict(decided)
        for _ in range(3):
            graphs.run("key", lambda own=own: (x[: own["rows"]] * own["factor"],))
        own |= change
        with pytest.raises(CaptureViolation, match="call"):
            graphs.run("key", lambda own=own: (x[: own["rows"]] * own["factor"],))


HOST: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: bool(x.sum()),
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "index": lambda x: [5, 6][x.long().sum() - 3],
    "nonzero": lambda x: x.nonzero(),
    "tensor": lambda x: torch.tensor([1.0]),
    "as_tensor": lambda x: torch.as_tensor([1.0]),
    "from_numpy": lambda x: torch.from_numpy(np.ones(3)),
    "frombuffer": lambda x: torch.frombuffer(bytearray(4), dtype=torch.float32),
}


@pytest.mark.parametrize("name", HOST)
def test_the_stand_in_notices_the_host(name: str) -> None:
    graphs, x, is_read = Graphs(RecordedGraph, {}), torch.ones(3), [False]

    def work() -> tuple[torch.Tensor]:
        if is_read[0]:
            HOST[name](x)
        return (x + 1,)

    for _ in range(3):
        graphs.run("key", work)
    is_read[0] = True
    with pytest.raises(CaptureViolation, match=r"the host|looks at numbers"):
        graphs.run("key", work)


def test_the_stand_in_computes_once_what_is_captured_and_replayed() -> None:
    counts, graphs = torch.zeros(3), Graphs(RecordedGraph, {})
    for number in range(1, 5):
        graphs.run("key", lambda: (counts.add_(1).clone(),))
        assert counts.tolist() == [number] * 3


def test_after_a_failure_tables_are_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device knows of pages may be half written."""
    model = tiny_model(seed=3)
    engine, launch, steps = make_engine(model), Engine.launch_pass, []

    def failing(self: Engine, work: Any) -> Any:
        steps.append(len(work))
        if len(steps) == 8:
            self.tables.pages.fill_(0)
            raise RuntimeError("once")
        return launch(self, work)

    monkeypatch.setattr(Engine, "launch_pass", failing)
    assert generate(engine, PROMPTS, greedy(20)) == [greedy_oracle(model, prompt, 20) for prompt in PROMPTS]


def test_who_is_computed_again_does_not_go_on_from_the_step_before() -> None:
    """Not even in chunks of one token, which look like decoding."""
    model = tiny_model(seed=3)
    engine = make_engine(model, max_num_seqs=1, max_num_batched_tokens=1)
    engine.add_request("r", PROMPTS[0], greedy(9))
    for _ in range(len(PROMPTS[0]) + 4):
        engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    assert drain(engine)[("r", 0)].new_token_ids == greedy_oracle(model, PROMPTS[0], 9)[5:]


def test_shared_pages_that_are_copied_are_told() -> None:
    model = tiny_model(seed=3)
    expected = generate(make_engine(model), [PROMPTS[0]], SamplingParams(seed=4, max_tokens=20, ignore_eos=True))
    engine = make_engine(model)
    engine.add_request("r", PROMPTS[0], SamplingParams(seed=4, max_tokens=20, ignore_eos=True, n=3))
    assert drain(engine)[("r", 0)].new_token_ids == expected[0]


@needs_triton
def test_prompts_and_plain_decoding_are_captured_before_the_first_request() -> None:
    engine = make_engine(tiny_model(seed=3), max_num_seqs=20)
    warm_up(engine)
    graphs = engine.graphs
    assert graphs is not None and captured_sizes(20) == [24, 16, 8, 4, 2, 1]
    with counted(graphs) as counts:
        generate(engine, PROMPTS * 3, greedy(20))
    assert counts["captures"] == 0 and counts["replays"] >= 21


@needs_triton
def test_nobody_notices_the_warm_up() -> None:
    model = tiny_model(seed=3)
    engine = make_engine(model)
    warm_up(engine)
    assert generate(engine, PROMPTS, greedy(9)) == [greedy_oracle(model, prompt, 9) for prompt in PROMPTS]
