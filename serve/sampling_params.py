"""What a client may ask of sampling, with the bounds of every field."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_SEED = 2**63 - 1
Pooling = Literal["mean", "last"]
MAX_GRAMMAR_BYTES = 256 * 1024
GREEDY_BELOW = 1e-5
"""Temperatures below are 0, as in vLLM: logits divided by them are no numbers."""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. Names and meanings follow vLLM and OpenAI; the defaults sample from the model itself.

    The distribution of a token is built in this order: `min_tokens` mask, `logit_bias`, repetition, frequency and
    presence penalty, `grammar`, `allowed_token_ids` and `bad_words`, temperature, then `top_k`, `top_p` and `min_p`
    cut its tail.
    """

    temperature: float = 1.0
    """0 is greedy (argmax), and so is less than 1e-5; otherwise the logits are divided by it."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches top_p, in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least min_p times the largest probability, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of every token seen in prompt or output, in [0.01, 100]; 1 is off."""
    presence_penalty: float = 0.0
    """Subtract from the logit of every token that the output holds, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtract from a token's logit once for every time the output holds it, in [-2, 2]."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    seed: int | None = None
    """Same seed, same random draws; when tokens may differ all the same, says serve/engine/sampling.py."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings; a single string or a list is taken too."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends with any of these tokens; its text is not shown."""
    include_stop_str_in_output: bool = False
    """Show the stop string, or the text of the token, that ended generation."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""
    shown_special_tokens: tuple[int, ...] = ()
    """Control tokens that stay in it all the same, such as those that begin a tool call."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be emitted; None: all."""
    bad_words: tuple[str, ...] = ()
    """The token that would complete one of these words, as the tokenizer spells it at the beginning of a text or behind
    a space, has probability 0, unless nothing else is allowed."""
    grammar: str | None = None
    """What the output must be, as `serve.grammar` writes it of a JSON schema, a regular expression, a list of choices.
    It ends where the grammar may, or at a stop condition."""
    max_tokens: int = 16
    """Most output tokens of each choice."""
    min_tokens: int = 0
    """No stop condition but max_tokens applies before this many output tokens."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    n: int = 1
    """Number of independent choices; the prompt is computed once."""
    logprobs: int | None = None
    """Also report the log-probability of each output token and of this many most probable ones (model distribution,
    before penalties and temperature)."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""
    store: bool = False
    """Consent to storing prompt and answer for training, where the engine stores any (serve/engine/labels.py)."""
    pooling: Pooling | None = None
    """Also report the prompt's embedding: the mean of its hidden states behind the final norm, or the last of them."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = (value,)
            object.__setattr__(self, name, tuple(value or ()))
        if isinstance(self.temperature, float) and 0 < self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def cuts_tail(self) -> bool:
        """Whether the least likely tokens are left out, by how many or how likely the others are."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusts_all_scores(self) -> bool:
        """Whether at every position more than the model's scores decides which tokens are likely."""
        return self.has_penalties or bool(self.logit_bias)

    @property
    def adjusts_scores(self) -> bool:
        """Whether at any position more than the model's scores decides which tokens are likely."""
        return self.adjusts_all_scores or self.min_tokens > 0

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError, naming the field, when a value is out of bounds for a vocabulary of `vocab_size` tokens."""
        _require_number("temperature", self.temperature, 0.0, 100.0)
        _require_integer("top_k", self.top_k, 0, None)
        _require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_integer("max_tokens", self.max_tokens, 1, None)
        _require_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _require_integer("n", self.n, 1, None)
        if self.seed is not None:
            _require_integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {value!r}")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _require_integer(name, value, 0, vocab_size)
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise ValueError(f"{name} must hold non-empty strings, not {text!r}")
        for name in ("stop_token_ids", "allowed_token_ids", "shown_special_tokens"):
            for token in getattr(self, name) or ():
                _require_integer(name, token, 0, vocab_size - 1)
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids must name at least one token")
        self._check_grammar()
        for token, bias in self.logit_bias.items():
            _require_integer("logit_bias token id", token, 0, vocab_size - 1)
            _require_number(f"logit_bias[{token}]", bias, -100.0, 100.0)

    def _check_grammar(self) -> None:
        if self.grammar is None:
            return
        if not isinstance(self.grammar, str) or len(self.grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"grammar must be a text of at most {MAX_GRAMMAR_BYTES} bytes")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise ValueError(f"{name} does not go with a grammar, which alone says where an output may end")


def _require_integer(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bounds}, not {value}")


def _require_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high or (open_low and value == low):
        raise ValueError(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], not {value:g}")
