"""Grammars: what they allow, how they are refused, and that every answer of one fits, whoever drafts."""

import json
from typing import Any

import pytest

from model.transformer import Transformer
from serve.grammar import (
    GrammarCompiler,
    Vocabulary,
    choice_grammar,
    context_free_grammar,
    json_grammar,
    json_object_grammar,
    json_rule,
    regex_grammar,
)
from serve.sampling_params import SamplingParams
from tests.serve.test_speculation import noisy_twin
from tests.serve.toys import EOS, VOCAB_SIZE, drain, make_engine, random_prompts, toy_tokenizer
from tests.tiny import tiny_model

TOKENIZER = toy_tokenizer()
COMPILER = GrammarCompiler(Vocabulary.of(TOKENIZER, num_scores=VOCAB_SIZE, eos_token_ids=(EOS,)))
PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None]}}, "required": ["a"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", 3]}, "maxItems": 3},
        "is_new": {"type": "boolean"},
    },
    "required": ["name", "tags", "is_new"],
    "additionalProperties": False,
}


def accepts(grammar: str, text: str) -> bool:
    """Whether a whole text is of the grammar, token by token."""
    matcher = COMPILER.compile(grammar)
    ids = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (json_grammar(PAIR), '{"a": -1, "b": null}', '{"b": null, "a": -1}'),
        (json_grammar(json.dumps(PAIR)), '{"a":1,"z":[{}]}', '{"a":1.5}'),
        (json_grammar(PAIR, whitespace=None), '{"a":1}', '{"a": 1}'),
        (json_grammar(PAIR, whitespace=" "), '{"a": 1}', '{"a":\n1}'),
        (json_grammar(True), "[1, null]", "[1, nul]"),
        (json_grammar({"type": "string", "maxLength": 2}), '"\\u00e9é"', '"abc"'),
        (json_object_grammar(), '{"x": [1,\n  {}]}', "[1]"),
        (regex_grammar(r"a/b\d+|c"), "a/b12", "a/b1٣"),
        (regex_grammar("a\nb"), "a\nb", "a b"),
        (choice_grammar(['say "a"\\\n', "é"]), 'say "a"\\\n', "say"),
        (choice_grammar(["yes", "no"]), "no", "yesno"),
        (context_free_grammar('start: "(" start ")" | "x"'), "((x))", "((x)"),
        (context_free_grammar('root ::= "(" root ")" | "x"'), "((x))", "((x)"),
        (f'start: "<a>" call "</a>"\ncall: {json_rule(PAIR)}', '<a>{"a": 1}</a>', '<a>{"a": "b"}</a>'),
        ('%llguidance {"no_forcing": false}\nstart: "abc"', "abc", "ab"),
    ],
)
def test_a_grammar_is_what_it_says(grammar: str, good: str, bad: str) -> None:
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (json_grammar({"type": "strin"}), "Invalid type: strin"),
        (json_grammar(False), "Unsatisfiable"),
        (json_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (json_grammar({"not": {}, "x-guidance": {"lenient": True}}), "not"),
        (json_grammar({"type": "string", "format": "colour"}), "colour"),
        (json_grammar({"$ref": "http://example.com/schema"}), "example.com"),
        (regex_grammar("(("), "unclosed group"),
        (regex_grammar("(?=a)b"), "look-around"),
        (context_free_grammar("start: foo"), 'unknown name: "foo"'),
        ("%llguidance {no}\nstart: /a/", "not JSON"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_in_one_sentence(grammar: str, reason: str) -> None:
    with pytest.raises(ValueError, match="the grammar cannot be used: ") as caught:
        COMPILER.compile(grammar)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("schema", ["{", "3", '"a"'])
def test_what_is_no_schema_is_refused(schema: str) -> None:
    with pytest.raises(ValueError, match="the JSON schema is not"):
        json_grammar(schema)


def test_all_spellings_in_tokens_are_allowed() -> None:
    """llguidance by itself forces the tokenizer's own, which another text of the model's might not have been."""
    spellings = TOKENIZER.token_bytes()
    letters, word = TOKENIZER.encode("ab"), [n for n in range(VOCAB_SIZE) if spellings[n] == b"ab"]
    assert len(letters) == 2 and len(word) == 1
    for ids in ([*letters, *word], [*word, *letters]):
        assert COMPILER.compile('start: "abab"').try_consume_tokens(ids) == len(ids)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3)


@pytest.mark.parametrize("draft", [None, "twin", "ngram"])
def test_every_choice_is_of_its_grammar(model: Transformer, draft: str | None) -> None:
    """Greedy, seeded and free requests, several choices, prefixes shared, pages scarce, company without a grammar."""
    options: dict[str, Any] = {"num_speculative_tokens": 3} if draft else {}
    engine = make_engine(model, noisy_twin(model) if draft == "twin" else draft, num_pages=24, **options)
    grammar = json_grammar(SCHEMA, whitespace=None)
    for number, prompt in enumerate(random_prompts(8, seed=2)):
        own = [{"temperature": 0.0}, {"seed": number}, {"n": 3}, {}][number % 4]
        fits = {} if number == 3 else {"grammar": grammar}
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=90, **own, **fits))
    outputs = drain(engine)
    texts = [output.new_text for (request, _), output in outputs.items() if request != "3"]
    assert {output.finish_reason for (request, _), output in outputs.items() if request != "3"} == {"stop"}
    assert len(texts) == 11 and len(set(texts)) > 5
    for text in texts:
        answer = json.loads(text)
        assert list(answer) == ["name", "tags", "is_new"]
        assert len(answer["name"]) <= 6 and answer["is_new"] in (True, False)
        assert len(answer["tags"]) <= 3 and all(tag in ("a", "bb", 3) for tag in answer["tags"])
    if draft:
        assert engine.stats().num_draft_tokens > 0
    assert not engine.requests.have_masks
