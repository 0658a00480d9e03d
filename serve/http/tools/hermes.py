"""Hermes, Qwen2.5, Qwen3 and others: <tool_call>{"name": …, "arguments": {…}}</tool_call>, once for each call.

SmolLM2 writes a list between the tags. The last closing tag may be missing.
"""

from serve.http.tools.calls import CallForm, ToolParser
from serve.http.tools.pieces import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """JSON between tags."""

    name = "hermes"
    template_signs = (OPEN,)
    control_tokens = (OPEN, CLOSE)
    form = CallForm(before=(OPEN, "\n"), after=("\n", CLOSE))

    @classmethod
    def suits(cls, template: str) -> bool:
        """Qwen3-Coder has the same tags around another format."""
        return super().suits(template) and "<function=" not in template

    def _read(self) -> Steps[None]:
        while (yield from self._until(OPEN)):
            yield from self._attempt(self._read_tagged())

    def _read_tagged(self) -> Steps[None]:
        """What stands behind an opening tag."""
        yield from self._read_calls()
        yield from self._read_end(CLOSE)
