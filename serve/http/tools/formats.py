"""Which formats the served model has for tools and thoughts, as options say or its chat template shows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serve.http.requests import TOOL_VARIABLES, Tool
from serve.http.tools.answer import Answer
from serve.http.tools.calls import ToolParser
from serve.http.tools.reasoning import ReasoningFormat, ReasoningParser
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

    def answer(self, tools: Sequence[Tool] | None, *, thinks: bool, one_call: bool) -> Answer:
        """What takes one choice apart. `tools`: those that it may call; `thinks`: it begins amid thoughts."""
        parser = self.tools(signatures(tools)) if tools and self.tools else None
        thoughts = ReasoningParser(self.reasoning, inside=thinks) if self.reasoning else None
        return Answer(thoughts, parser, one_call=one_call)

    def shown_token_ids(self, *, with_tools: bool) -> tuple[int, ...]:
        """Control tokens by which the format is told, so that text must have them."""
        calls = self.tools.control_tokens if self.tools and with_tools else ()
        thoughts = (self.reasoning.open, self.reasoning.close) if self.reasoning else ()
        return tuple(self.control_token_ids[name] for name in (*calls, *thoughts) if name in self.control_token_ids)


def signatures(tools: Iterable[Tool]) -> dict[str, list[str]]:
    """The names of each tool's parameters."""
    schemas = {tool.function.name: (tool.function.parameters or {}).get("properties") for tool in tools}
    return {name: list(properties) if isinstance(properties, dict) else [] for name, properties in schemas.items()}


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
