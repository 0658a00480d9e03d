"""Grammars of strangers are compiled in a process of their own before the engine sees them.

It is `serve/http/grammar_process.py`, and starts with the first grammar. What was found is remembered, so that a schema
that comes with every request is tried once.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from serve.grammar import Vocabulary
from serve.http.engine_process import ROOT
from serve.http.errors import invalid, unavailable
from serve.http.grammar_process import Tried, Try
from serve.http.structured_outputs import Grammar
from serve.messages import LENGTH

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer

COMMAND = (sys.executable, "-P", "-m", "serve.http.grammar_process")
MAX_KEPT = 1024
"""Grammars whose results are remembered."""
MAX_AT_ONCE = 4
log = logging.getLogger("potstill.server")


class GrammarChecker:
    """Says which grammars can be used. `close` ends its process."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._found: OrderedDict[bytes, str | None] = OrderedDict()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Tried]] = {}
        self._num_tried = 0
        self._starting = asyncio.Lock()
        self._room = asyncio.Semaphore(MAX_AT_ONCE)

    async def check(self, grammar: Grammar) -> None:
        """ApiError 400 naming the field for a grammar that cannot be used; 503 when that cannot be found out."""
        key = hashlib.sha256(grammar.text.encode()).digest()
        if key not in self._found:
            self._found[key] = (await self._try(grammar.text)).reason
        self._found.move_to_end(key)
        reason = self._found[key]
        while len(self._found) > MAX_KEPT:
            self._found.popitem(last=False)
        if reason is not None:
            raise invalid(f"{grammar.field}: {reason}", grammar.field)

    async def lark(self, grammar: Grammar) -> str:
        """What is written in GBNF. ApiError as in `check`."""
        tried = await self._try(grammar.text, is_gbnf=True)
        if tried.reason is not None:
            raise invalid(f"{grammar.field}: {tried.reason}", grammar.field)
        return tried.lark

    async def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def _try(self, grammar: str, *, is_gbnf: bool = False) -> Tried:
        async with self._room:
            process = await self._running()
            self._num_tried += 1
            number = self._num_tried
            answer = self._waiting[number] = asyncio.get_running_loop().create_future()
            try:
                _send(process, Try(number, grammar, is_gbnf))
                return await answer
            finally:
                del self._waiting[number]

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = await self._start()
            return self._process

    async def _start(self) -> asyncio.subprocess.Process:
        tokenizer = self._tokenizer
        vocabulary = await asyncio.to_thread(
            lambda: Vocabulary.of(
                tokenizer, num_scores=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids or (0,)
            )
        )
        path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=pipe, stdout=pipe, env=os.environ | {"PYTHONPATH": path}
        )
        self._reading = asyncio.create_task(self._read(process))
        _send(process, vocabulary)
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand out answers until the process ends; who still waits is told then."""
        if process.stdout is None:
            return
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                tried = msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Tried)
                if (answer := self._waiting.get(tried.number)) is not None and not answer.done():
                    answer.set_result(tried)
        await process.wait()
        for answer in self._waiting.values():
            if not answer.done():
                log.error("the process that tries grammars ended with code %s", process.returncode)
                answer.set_exception(unavailable("the grammar could not be tried; send it again", "grammar_not_tried"))


def _send(process: asyncio.subprocess.Process, message: Vocabulary | Try) -> None:
    if process.stdin is not None:
        body = msgspec.msgpack.encode(message)
        process.stdin.write(LENGTH.pack(len(body)) + body)
