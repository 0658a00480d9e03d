"""Which formats the served model has for tools and thoughts, as options say or its chat template shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serve.http.requests import TOOL_VARIABLES
from serve.http.tools.calls import ToolParser
from serve.http.tools.reasoning import ReasoningFormat
from serve.http.tools.registry import AUTO, NONE, REASONING_FORMATS, TOOL_PARSERS

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer

PROBE = "potstill_probe"


@dataclass(frozen=True)
class Formats:
    """What the answers of one model may hold besides content."""

    tools: type[ToolParser] | None = None
    reasoning: ReasoningFormat | None = None
    shows_tools: bool = False
    """Whether the chat template shows tools to the model."""
    control_token_ids: Mapping[str, int] = field(default_factory=dict)
    """The model's control tokens, by spelling."""

    def shown_token_ids(self, parser: type[ToolParser] | None) -> tuple[int, ...]:
        """Control tokens by which the formats are told, so that text must have them."""
        calls = parser.control_tokens if parser else ()
        thoughts = (self.reasoning.open, self.reasoning.close) if self.reasoning else ()
        return tuple(self.control_token_ids[name] for name in (*calls, *thoughts) if name in self.control_token_ids)


def formats_of(tokenizer: "Tokenizer", tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> Formats:
    """The formats by these names; for AUTO what the chat template suits, if anything."""
    template = template_source(tokenizer)
    suiting = [name for name, parser in TOOL_PARSERS.items() if parser.suits(template)]
    thinking = [name for name, tags in REASONING_FORMATS.items() if tags.close in template]
    return Formats(
        TOOL_PARSERS.get(chosen(tool_parser, suiting)),
        REASONING_FORMATS.get(chosen(reasoning_parser, thinking)),
        shows_tools(tokenizer),
        {spelling: index for index, spelling in tokenizer.control_tokens.items()},
    )


def chosen(name: str, guesses: Sequence[str]) -> str:
    """`name`, or for AUTO the first guess."""
    return name if name != AUTO else next(iter(guesses), NONE)


def template_source(tokenizer: "Tokenizer") -> str:
    """The chat template that conversations with tools go through; "" where there is none."""
    templates = tokenizer.templates
    found = templates.get("tool_use") or templates.get("default")
    return "" if found is None else found.source


def shows_tools(tokenizer: "Tokenizer") -> bool:
    """Whether a conversation with a tool shows its name to the model."""
    tool = {"type": "function", "function": {"name": PROBE, "description": "", "parameters": {"type": "object"}}}
    messages, variables = [{"role": "user", "content": "Hello"}], {name: [tool] for name in TOOL_VARIABLES}
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables)
    except ValueError:
        return False
    return PROBE in text
