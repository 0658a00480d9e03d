"""An engine whose answers are written down: in answers.json of the model folder, by what the prompt says last.

The answer is tokenized as a template's text is, so spellings of control tokens are those, and comes a token a step.
"""

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from model.text.detokenizer import StreamDecoder
from model.text.tokenizer import Tokenizer
from serve.config import EngineConfig
from serve.engine.process import main
from serve.outputs import RequestOutput
from tests.serve.scripted_engine import Scripted, ScriptedEngine, load


class QuotingEngine(ScriptedEngine):
    """Answers each prompt with the entry whose key stands last in it."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._tokenizer = Tokenizer.load(config.model)
        self._answers: dict[str, str] = json.loads((Path(config.model) / "answers.json").read_text())
        self._running: dict[str, tuple[list[int], StreamDecoder]] = {}

    def _token(self, request: Scripted) -> list[RequestOutput]:
        if request.num_output == 0:
            self._running[request.request_id] = self._begin(request)
        tokens, decoder = self._running[request.request_id]
        token = tokens[request.num_output]
        request.num_output += 1
        number, text = request.num_output, decoder.push([token])
        is_last, is_cut = number == len(tokens), number == request.params.max_tokens
        if is_last:
            request.num_output = request.params.max_tokens  # the queue knows by this that it has ended
        return [
            RequestOutput(
                request.request_id,
                index,
                new_token_ids=[token],
                new_text=text + (decoder.flush() if is_last or is_cut else ""),
                finish_reason="stop" if is_last else "length" if is_cut else None,
                num_prompt_tokens=len(request.prompt),
                num_output_tokens=number,
            )
            for index in range(request.params.n)
        ]

    def _begin(self, request: Scripted) -> tuple[list[int], StreamDecoder]:
        prompt = self._tokenizer.decode(request.prompt, skip_special_tokens=False)
        answer = self._answers[max(self._answers, key=prompt.rfind)]
        params = request.params
        decoder = StreamDecoder(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown_special_tokens=params.shown_special_tokens,
            continues=True,
        )
        return self._tokenizer.encode(answer, allow_special=True), decoder


if __name__ == "__main__":
    raise SystemExit(main(functools.partial(load, kind=QuotingEngine), prepare=lambda: None))
