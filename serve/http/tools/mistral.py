"""Mistral: [TOOL_CALLS] [{"name": …, "arguments": {…}}, …], and since tokenizer v11 [TOOL_CALLS]name[ARGS]{…} for each.

Its templates refuse ids of calls that are not nine letters and digits.
"""

from serve.http.tools.calls import CallForm, NoCall, ToolParser
from serve.http.tools.pieces import Steps

TAG, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(ToolParser):
    """Both of Mistral's formats."""

    name = "mistral"
    template_signs = (TAG,)
    control_tokens = (TAG, CALL_ID, ARGS)
    form = CallForm(begin=(TAG, " ["), between=", ", end=("]",))
    call_id_length = 9

    def _read(self) -> Steps[None]:
        while (yield from self._until(TAG)):
            listed = (yield from self._skip_space()) in ("[", "{")
            yield from self._attempt(self._read_calls() if listed else self._read_named())

    def _read_named(self) -> Steps[None]:
        """name[ARGS]{…}, perhaps with an id, which no client has seen, in between."""
        name = yield from self._read_word()
        if (yield from self._try(CALL_ID)):
            yield from self._read_word()
        yield from self._try(ARGS)
        if (yield from self._skip_space()) != "{":
            raise NoCall
        self._announce(name)
        yield from self._give_arguments()
