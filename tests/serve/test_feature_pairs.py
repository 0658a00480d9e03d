"""Every feature beside every other: random requests on random engines give what each gives alone on a plain one.

What breaks engines in practice is a rare pair: speculation and penalties, prefix cache and preemption, abort and fork.
"""

import random
from itertools import product
from typing import Any

import pytest

from model.transformer import Transformer
from serve.grammar import json_grammar
from serve.outputs import RequestOutput
from serve.sampling_params import SamplingParams
from tests.serve.test_speculation import noisy_twin
from tests.serve.toys import VOCAB_SIZE, drain, join, make_engine
from tests.tiny import tiny_model
from tests.trials import covering

NUM_REQUESTS = 28
ANSWER = {
    "type": "array",
    "items": {"anyOf": [{"type": "string", "maxLength": 9}, {"enum": [True, None]}]},
    "maxItems": 6,
}


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3, head_dim=64)  # of heads that C attends to, so that passes are captured


def random_params(random_: random.Random, number: int) -> SamplingParams:
    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if random_.random() < 0.3 else otherwise

    # A grammar alone says where an output may end.
    grammar = sometimes(json_grammar(ANSWER, whitespace=None), None)
    return SamplingParams(
        temperature=random_.choice([0.0, 0.7, 1.2]),
        seed=number,
        top_k=sometimes(30, 0),
        top_p=sometimes(0.8, 1.0),
        min_p=sometimes(0.02, 0.0),
        repetition_penalty=sometimes(1.2, 1.0),
        presence_penalty=sometimes(0.5, 0.0),
        frequency_penalty=sometimes(0.3, 0.0),
        logit_bias=sometimes({5: 2.0, 300: -5.0}, {}),
        stop=sometimes(("a", "qx"), ()),
        stop_token_ids=sometimes((77, 78, 79), ()),
        max_tokens=random_.randint(6, 40),
        min_tokens=sometimes(6, 0) if grammar is None else 0,
        ignore_eos=sometimes(True, False) if grammar is None else False,
        grammar=grammar,
        n=sometimes(3, 1),
        logprobs=sometimes(2, None),
        prompt_logprobs=sometimes(1, None),
    )


def random_requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    random_ = random.Random(seed)
    shared = [random_.randrange(2, VOCAB_SIZE) for _ in range(40)]
    requests = []
    for number in range(NUM_REQUESTS):
        tail = [random_.randrange(2, VOCAB_SIZE) for _ in range(random_.randint(1, 20))]
        requests.append((random_.choice([[], shared[:16], shared]) + tail, random_params(random_, number)))
    return requests


def essence(output: RequestOutput) -> tuple:
    """What must not depend on anything but the request itself."""
    return (output.new_token_ids, output.new_text, output.finish_reason, output.stop_reason)


def scores(output: RequestOutput) -> list[float]:
    entries = [*(output.prompt_logprobs or []), *(output.logprobs or [])]
    return [0.0 if entry is None else entry.logprob for entry in entries]


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, int], RequestOutput]:
    model = tiny_model(seed=3, head_dim=64)
    model.can_be_captured = False
    outputs: dict[tuple[str, int], RequestOutput] = {}
    for number, (prompt, params) in enumerate(random_requests(1)):
        engine = make_engine(model, max_num_batched_tokens=256, enable_prefix_caching=False)
        engine.add_request(str(number), prompt, params)
        outputs |= drain(engine)
    return outputs


DRAFTS = [(None, None), ("twin", 3), ("twin", None), ("sharing", 3), ("ngram", 2)]
SWITCHES = list(product([True, False], [True, False], [300, 11]))
"""Steps overlap, prefixes are cached, pages."""


def with_switches() -> list[Any]:
    """Each draft with and without overlap; in full with every pair of positions, and all three over two drafts.

    Graphs are captured where steps overlap, as they do beside them on a GPU.
    """
    halves = [[one for one in SWITCHES if (one[0] + one[1] + (one[2] == 300)) % 2 == half] for half in (0, 1)]
    rows = [(*draft, *switches) for number, draft in enumerate(DRAFTS) for switches in halves[number % 2]]
    tried = covering(rows, lambda row: enumerate((row[:3], *row[3:])))
    return [pytest.param(*row, marks=[pytest.mark.eager] * (not row[2])) for row in tried]


@pytest.mark.parametrize(("draft", "num_drafts", "overlapped", "caching", "num_pages"), with_switches())
def test_requests_do_not_notice_each_other(
    model: Transformer,
    expected: dict[tuple[str, int], RequestOutput],
    draft: str | None,
    num_drafts: int | None,
    overlapped: bool,
    caching: bool,
    num_pages: int,
) -> None:
    random_ = random.Random(repr((draft, num_drafts, caching, num_pages)))
    engine = make_engine(
        model,
        noisy_twin(model) if draft in ("twin", "sharing") else draft,
        share_cache=draft == "sharing",
        num_speculative_tokens=num_drafts,
        num_pages=num_pages,
        max_model_len=110,
        max_num_batched_tokens=random_.choice([9, 33]),
        enable_prefix_caching=caching,
    )
    engine.max_pending = int(overlapped)
    requests = list(enumerate(random_requests(1)))
    random_.shuffle(requests)
    aborted: set[str] = set()
    joined: dict[tuple[str, int], RequestOutput] = {}
    while requests or engine.has_work():
        if requests and random_.random() < 0.4:
            number, (prompt, params) = requests.pop()
            engine.add_request(str(number), prompt, params, priority=random_.choice([0, 0, -1]))
        if random_.random() < 0.03 and engine.scheduler.running:
            victim = random_.choice(engine.scheduler.running).request_id
            engine.abort(victim)
            aborted.add(victim)
        for output in engine.step():
            join(joined, output)
    assert engine.cache.num_used == 0
    assert joined.keys() == expected.keys()
    for key, output in joined.items():
        if output.finish_reason == "abort":
            tokens = expected[key].new_token_ids
            assert key[0] in aborted and output.new_token_ids == tokens[: output.num_output_tokens]
        else:
            assert essence(output) == essence(expected[key])
            assert scores(output) == pytest.approx(scores(expected[key]), abs=1e-3)
    assert sum(output.finish_reason != "abort" for output in joined.values()) > NUM_REQUESTS // 2
