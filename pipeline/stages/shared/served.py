"""A model behind an OpenAI-compatible server: what it says of a text, and what it answers.

Requests are sent side by side, since such a server batches them. One that finds it busy, restarting or out
of reach is sent again after longer and longer pauses; then the stage fails, which loses nothing that it has kept.
"""

import contextlib
import http.client
import json
import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np

from model.text.tokenizer import Tokenizer
from pipeline.errors import StageFailed, UserError
from pipeline.stages.shared.config import Server

log = logging.getLogger(__name__)

AT_ONCE = 16
ANSWER_S = 600.0
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Before a request is sent again."""
PASSING = (408, 425, 429)
"""Refusals that say nothing against the request; so do those from 500 on."""
FOREIGN = 0.1
"""Tokens of a text that may read differently elsewhere: servers do not agree on how parts of characters are shown."""

Listed = Mapping[int, float]
"""Log-probabilities of some tokens."""


class ServedModel:
    """The client of one model."""

    def __init__(self, server: Server) -> None:
        self.server, self._news = server, ""

    def listed(
        self, texts: Mapping[int, np.ndarray], top: int, tokenizer: Tokenizer
    ) -> Iterator[tuple[int, list[Listed]]]:
        """Of each text's tokens but the first, what is listed in their place; texts by number, as they come.

        The `top` most probable tokens and the text's own. Raises UserError where the model does not number its tokens
        as the `tokenizer` does, or the server lists none by number.
        """
        settings = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top}
        bodies = {number: {"prompt": tokens.tolist(), **settings} for number, tokens in texts.items()}
        for number, choice in self._choices("completions", bodies):
            places = choice.get("prompt_logprobs") or []
            if len(places) != len(texts[number]):
                raise UserError(
                    f"The server at {self.server.url} lists no prompt_logprobs; vLLM and `potstill serve` do."
                )
            self._check_vocabulary(texts[number][1:].tolist(), places[1:], tokenizer)
            yield (
                number,
                [{int(token): entry["logprob"] for token, entry in place.items()} for place in places[1:]],
            )

    def answers(self, requests: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[int, str, int, bool]]:
        """Of chat requests by number: the text, its tokens, and whether it ended by itself; as they come."""
        for number, choice in self._choices("chat/completions", requests):
            yield number, choice["message"]["content"] or "", choice["tokens"], choice["finish_reason"] == "stop"

    def _check_vocabulary(self, tokens: list[int], places: list[dict[str, Any]], tokenizer: Tokenizer) -> None:
        spelled = [(token, place[str(token)].get("decoded_token")) for token, place in zip(tokens, places, strict=True)]
        bytes_of = tokenizer.token_bytes()
        pairs = [(token, bytes_of[token].decode("utf-8", "replace"), theirs) for token, theirs in spelled]
        known = [pair for pair in pairs if pair[1].strip() and "\ufffd" not in pair[1] and pair[2] is not None]
        foreign = [pair for pair in known if pair[1].strip() != pair[2].strip()]
        if len(foreign) > FOREIGN * len(known):
            token, ours, theirs = foreign[0]
            raise UserError(
                f"{self.server.model} at {self.server.url} has another tokenizer: token {token} is {theirs!r} there "
                f"and {ours!r} here; they must be equal."
            )

    # --- HTTP --------------------------------------------------------------------------------------------------------

    def _choices(self, route: str, bodies: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The one choice of each answer, with the number of its `tokens`, as they come."""
        stopped = threading.Event()
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            asked = {pool.submit(self._ask, route, body, stopped): number for number, body in bodies.items()}
            for future in as_completed(asked):
                answer = future.result()
                yield asked.pop(future), answer["choices"][0] | {"tokens": answer["usage"]["completion_tokens"]}
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)

    def _ask(self, route: str, body: Mapping[str, Any], stopped: threading.Event) -> dict[str, Any]:
        """One answer. Raises UserError for a request that is refused, StageFailed when all pauses are over."""
        for pause in (*PAUSES_S, None):
            try:
                return self._post(route, body)
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                reason = reason_of(error)
                if isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in PASSING:
                    raise UserError(f"The server at {self.server.url} refuses {self.server.model}: {reason}") from None
            if pause is None or stopped.is_set():
                break
            self._warn(f"{self.server.url} does not answer ({reason}); asking again in {pause:g} s")
            stopped.wait(pause)
        raise StageFailed(
            f"the server at {self.server.url} does not answer any more ({reason}); what it has said is kept, and the "
            "same command goes on from there"
        )

    def _warn(self, news: str) -> None:
        """Once for all requests that wait."""
        if news != self._news:
            self._news = news
            log.warning(news)

    def _post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        content = json.dumps({"model": self.server.model, **body}).encode()
        url = f"{self.server.url.rstrip('/')}/{route}"
        with urllib.request.urlopen(urllib.request.Request(url, content, headers), timeout=ANSWER_S) as answer:
            return json.load(answer)


def reason_of(error: Exception) -> str:
    """In a few words; of a refusal, what the server says."""
    if isinstance(error, urllib.error.HTTPError):
        said = error.read().decode("utf-8", "replace")
        with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
            said = json.loads(said)["error"]["message"]
        return f"{error.code}, {' '.join(str(said).split())[:200]}"
    return " ".join(str(getattr(error, "reason", error)).split())[:200] or type(error).__name__
