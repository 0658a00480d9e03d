"""Random schemas: every answer that ended by itself is valid by `jsonschema`, and what was valid is unchanged."""

import json
import random
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from model.transformer import Transformer
from serve.engine.engine import Engine
from serve.grammar import json_grammar
from serve.outputs import RequestOutput
from serve.sampling_params import SamplingParams
from tests.serve.schemas import REAL, random_schema, written
from tests.serve.test_speculation import noisy_twin
from tests.serve.toys import EOS, VOCAB_SIZE, drain, make_engine, toy_tokenizer
from tests.tiny import tiny_config, tiny_model
from tests.trials import trials

NUM_SCHEMAS = trials(50, 200)
TOKENIZER = toy_tokenizer()
ROOM = {"max_model_len": 512, "num_pages": 300, "max_num_seqs": 32, "max_num_batched_tokens": 256}


def schemas() -> list[dict[str, Any]]:
    random_ = random.Random(20)
    return [*REAL, *(random_schema(random_)[0] for _ in range(NUM_SCHEMAS - len(REAL)))]


def answers(engine: Engine, seed: int) -> list[RequestOutput]:
    """One answer to each schema: greedy, seeded and free ones in turn, all in one queue."""
    random_ = random.Random(seed)
    for number, schema in enumerate(schemas()):
        prompt = [random_.randrange(2, VOCAB_SIZE) for _ in range(random_.randint(1, 9))]
        how = [{"temperature": 0.0}, {"seed": number}, {}][number % 3]
        grammar = json_grammar(schema, whitespace=None if number % 4 else " ")
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=400, grammar=grammar, **how))
    outputs = drain(engine)
    return [outputs[str(number), 0] for number in range(NUM_SCHEMAS)]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3)


@pytest.mark.parametrize(
    "draft", [None, pytest.param("twin", marks=pytest.mark.slow), pytest.param("ngram", marks=pytest.mark.eager)]
)
def test_every_answer_that_ended_by_itself_is_valid(model: Transformer, draft: str | None) -> None:
    options: dict[str, Any] = ROOM | ({"num_speculative_tokens": 3} if draft else {})
    engine = make_engine(model, noisy_twin(model) if draft == "twin" else draft, **options)
    ended = 0
    for schema, output in zip(schemas(), answers(engine, seed=1), strict=True):
        if output.finish_reason == "length":
            continue
        assert output.finish_reason == "stop" and output.new_token_ids[-1] == EOS
        ended += 1
        jsonschema.validate(json.loads(output.new_text), schema, format_checker=jsonschema.FormatChecker())
    assert ended > 0.9 * NUM_SCHEMAS
    if draft:
        assert engine.stats().num_accepted_tokens > 0


class Reciter:
    """A model that wants to say one text behind a prompt of one token, whatever it was made to say before."""

    can_be_captured = False

    def __init__(self, *, slips: bool = False) -> None:
        """`slips`: at every fifth place it wants to say something else, as a draft does."""
        self.config = tiny_config(num_layers=0, vocab_size=VOCAB_SIZE)
        self.slips = slips
        self.text: list[int] = []

    def __call__(self, tokens: Tensor, positions: Tensor, attention: object, *, adapters: object = None) -> Tensor:
        return positions[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        places = hidden[:, 0].long()
        wanted = torch.tensor([*self.text, *[EOS] * 600])[places]
        if self.slips:
            wanted = torch.where(places % 5 == 4, (wanted + places) % VOCAB_SIZE, wanted)
        return torch.nn.functional.one_hot(wanted, VOCAB_SIZE).float()


def spelled(random_: random.Random, text: str) -> list[int]:
    """Tokens of a text, in any spelling: letters alone, or joined to words."""
    tokens = {spelling: token for token in range(2, VOCAB_SIZE) if (spelling := TOKENIZER.token_bytes()[token])}
    rest, found = text.encode(), []
    while rest:
        size = max(size for size in (1, random_.randint(1, 3)) if rest[:size] in tokens)
        found.append(tokens[rest[:size]])
        rest = rest[size:]
    return found


@pytest.mark.eager  # nothing captures a reciter
@pytest.mark.parametrize("draft", [pytest.param(None, marks=pytest.mark.slow), "slips", "ngram"])
def test_what_would_have_been_valid_anyway_is_said_unchanged(draft: str | None) -> None:
    random_, target, drafting = random.Random(5), Reciter(), Reciter(slips=True)
    options: dict[str, Any] = ROOM | ({"num_speculative_tokens": 4} if draft else {})
    engine = make_engine(target, drafting if draft == "slips" else draft, **options)
    for number in range(NUM_SCHEMAS):
        schema, make = random_schema(random_)
        text = written(random_, make())
        target.text = drafting.text = spelled(random_, text)
        params = SamplingParams(temperature=0.0, max_tokens=500, grammar=json_grammar(schema))
        engine.add_request(str(number), [2], params)
        output = drain(engine)[str(number), 0]
        assert output.new_token_ids == [*target.text, EOS], (schema, text, output.new_text)
        assert output.new_text == text and output.finish_reason == "stop"
    if draft:
        assert engine.stats().num_accepted_tokens > 0


@pytest.mark.eager
def test_what_is_invalid_is_turned_at_the_first_token_that_cannot_go_on() -> None:
    target = Reciter()
    engine = make_engine(target, **ROOM)
    target.text = TOKENIZER.encode('{"a": 12, "b": "no"}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["b"]}
    engine.add_request("0", [2], SamplingParams(temperature=0.0, max_tokens=60, grammar=json_grammar(schema)))
    assert drain(engine)["0", 0].new_text.startswith('{"a": 12, "b": ')
