"""Which formats of tool calls and thoughts there are, by the names that options have for them."""

from serve.http.tools.calls import ToolParser
from serve.http.tools.hermes import HermesParser
from serve.http.tools.llama3 import Llama3Parser
from serve.http.tools.mistral import MistralParser
from serve.http.tools.python_calls import PythonParser
from serve.http.tools.reasoning import ReasoningFormat
from serve.http.tools.smollm3 import SmolLM3Parser

AUTO, NONE = "auto", "none"
"""In place of a name: what the chat template suits; no format."""

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    parser.name: parser for parser in (MistralParser, PythonParser, Llama3Parser, SmolLM3Parser, HermesParser)
}
"""A template that suits several is for the first of them."""

REASONING_FORMATS = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", opens_itself=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
"""By vLLM's names."""
