"""Llama 3.1 to 3.3: {"name": …, "parameters": {…}} in place of an answer, or behind <|python_tag|>; ";" between calls.

Without the tag nothing but its members tells a call from content, so there it must name a tool of the request.
"""

from serve.http.tools.calls import CallForm, ToolParser
from serve.http.tools.pieces import Steps

TAG = "<|python_tag|>"


class Llama3Parser(ToolParser):
    """JSON alone."""

    name = "llama3_json"
    template_signs = (TAG, '"parameters": dictionary of argument name')
    control_tokens = (TAG,)
    form = CallForm(between="; ", arguments="parameters")

    def _read(self) -> Steps[None]:
        if (yield from self._skip_space()) == "{":
            yield from self._attempt(self._read_calls(known=True))
        else:
            self._at = self._kept
        while (yield from self._until(TAG)):
            yield from self._attempt(self._read_calls())
