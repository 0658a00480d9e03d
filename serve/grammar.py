"""What an output must be, said as data that both processes read: grammars, and what they are compiled to.

A grammar is a text in Lark as llguidance has it (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md),
in which a JSON schema or a regular expression may stand as a rule. `SamplingParams.grammar` takes it. The output then
holds nothing but what the grammar describes, and ends where the grammar may.

Compiling is bounded in size, though not in time: `serve/http/grammar_check.py` tries those that strangers write.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

if TYPE_CHECKING:
    import numpy as np

    from model.text.tokenizer import Tokenizer

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,100}"
"""Between the parts of JSON. Indented as usual it is far shorter; without an end, weak models never write the next."""
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""llguidance's own but for the states, each of which takes 1 to 2 KiB, and errors that repeat the grammar."""
OPTIONS = re.compile(r"^[ \t]*%llguidance[ \t]*(\{.*\})[ \t]*$", re.MULTILINE)

Schema = Mapping[str, Any] | bool


class GrammarError(RuntimeError):
    """A grammar that, midway, needs more than its limits; one sentence."""


def json_rule(schema: Schema | str, *, whitespace: str | None = WHITESPACE) -> str:
    """JSON that a schema describes (a mapping, or its text), properties in the schema's order, as part of a grammar.

    whitespace: regular expression of what may stand between the parts; None: nothing. ValueError for what is no schema;
    keywords that are not enforced are refused when the grammar is compiled.
    """
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise ValueError(f"the JSON schema is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("the JSON schema nests too deep") from None
    if isinstance(found, bool):
        found = {} if found else {"anyOf": []}
    if not isinstance(found, Mapping):
        raise ValueError("the JSON schema is not an object")
    settings: dict[str, Any] = {"lenient": False, "coerce_one_of": False, "json_allow_general_unicode_escapes": True}
    settings |= {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
    return f"%json {json.dumps({**found, 'x-guidance': settings})}"


def json_grammar(schema: Schema | str, *, whitespace: str | None = WHITESPACE) -> str:
    """All of the output is JSON that a schema describes, as `json_rule` has it."""
    return f"start: {json_rule(schema, whitespace=whitespace)}"


def json_object_grammar(*, whitespace: str | None = WHITESPACE) -> str:
    """Any JSON object."""
    return json_grammar({"type": "object"}, whitespace=whitespace)


def regex_grammar(pattern: str) -> str:
    """All of the output is what a regular expression of Rust's matches (no look-around); `\\d` is 0 to 9."""
    escaped = regex_to_lark(pattern, use_ascii="d")
    return f"start: /{escaped}/"


def choice_grammar(choices: Iterable[str]) -> str:
    """One of several texts."""
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def context_free_grammar(text: str) -> str:
    """A grammar in Lark, or in the GBNF of llama.cpp (`root ::= …`). ValueError for GBNF that cannot be read."""
    if "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # a parser of its own, which raises anything
        raise ValueError(f"the grammar cannot be read: {first_sentence(str(error))}") from None


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a model writes with."""

    spellings: list[bytes]
    """Of everything that the model scores; padding has none."""
    special_token_ids: list[int]
    eos_token_ids: list[int]

    @classmethod
    def of(cls, tokenizer: "Tokenizer", *, num_scores: int, eos_token_ids: Iterable[int]) -> "Vocabulary":
        """`num_scores`: what the model scores at a position, tokens and padding. ValueError without an end token."""
        ends, spelled = list(eos_token_ids), tokenizer.token_bytes()
        if not ends:
            raise ValueError("this model has no end-of-sequence token, with which an output of a grammar could end")
        return cls([spelled[token] for token in range(num_scores)], list(tokenizer.control_tokens), ends)


class GrammarCompiler:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = LLTokenizer(cast(TokenizerWrapper, _Tokens(vocabulary)), eos_token=vocabulary.eos_token_ids)

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of an output, warm. ValueError with one sentence for what cannot be compiled."""
        matcher = LLMatcher(self._tokens, without_forcing(grammar), log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be used: {first_sentence(matcher.get_error())}")
        return matcher


class _Tokens:
    """A vocabulary as llguidance asks for it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids = vocabulary.spellings, vocabulary.special_token_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError("grammars that force no tokens need no tokenizer")


def without_forcing(grammar: str) -> str:
    """The grammar, which allows every spelling in tokens of what it allows.

    llguidance would else force the tokenizer's own spelling, and ask it for that in the middle of a step.
    """
    options: dict[str, Any] = {}
    for found in OPTIONS.findall(grammar):
        try:
            options |= json.loads(found)
        except ValueError:
            raise ValueError("the grammar cannot be used: what follows %llguidance is not JSON") from None
    return f"{OPTIONS.sub('', grammar)}\n%llguidance {json.dumps(options | {'no_forcing': True})}"


def fill(matcher: LLMatcher, row: "np.ndarray") -> None:
    """Write which tokens may come next: a bit each, the lowest of the first word for token 0, `row [words]` int32."""
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


def first_sentence(message: str) -> str:
    """What is wrong, of an error message of several lines with pictures in it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (told or lines or ["it is refused without a reason"])[0][:300]
