"""The process that tries grammars of strangers: `python -m serve.http.grammar_process`, started by the HTTP process.

A compiler of grammars is bounded in size but not in time, and some text crashes it. So each grammar is compiled in a
fork of this process, which the system ends when it takes too much of either time or memory; nobody else notices. The
same goes for what reads GBNF, which becomes Lark here.

Frames as in serve/messages.py. First comes the vocabulary, then one `Try` for each grammar; `Tried` answers it, in any
order. Ends when standard input does.
"""

import contextlib
import os
import resource
import selectors
import signal
import sys
from dataclasses import dataclass, field

import msgspec

from serve.grammar import GrammarCompiler, Vocabulary, context_free_grammar
from serve.messages import LENGTH

PROCESSOR_S, WALL_S = 1.0, 10.0
"""What one grammar may take to compile: of a processor, and altogether on a machine with other work."""
MEMORY_BYTES = 2**29
"""What it may allocate."""
REFUSED = 3
"""How a fork ends that says why a grammar cannot be used."""


class Try(msgspec.Struct, frozen=True):
    """A grammar to compile, or to write in Lark."""

    number: int
    grammar: str
    is_gbnf: bool = False


class Tried(msgspec.Struct, frozen=True):
    """What became of a grammar: no reason, or one sentence why it cannot be used."""

    number: int
    reason: str | None
    lark: str = ""
    """Of one in GBNF."""


@dataclass
class Attempt:
    """A fork at work."""

    number: int
    pid: int
    pipe: int
    """Where it writes its reason, if it has any, or Lark."""
    said: bytearray = field(default_factory=bytearray)

    def end(self) -> Tried:
        """Its result, once the pipe is closed."""
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM):
            return Tried(self.number, f"the grammar takes more than {PROCESSOR_S:g} s to compile")
        said = self.said.decode(errors="replace")
        if status == 0:
            return Tried(self.number, None, said)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == REFUSED:
            return Tried(self.number, said)
        return Tried(self.number, "the grammar is too large or too deep to compile")


def attempt(compiler: GrammarCompiler, wanted: Try) -> Attempt:
    """Compile a grammar in a fork."""
    pipe, out = os.pipe()
    pid = os.fork()
    if pid:
        os.close(out)
        return Attempt(wanted.number, pid, pipe)
    status = 1
    try:
        _limit()
        with contextlib.suppress(MemoryError):
            status = _compile(compiler, wanted, out)
    finally:
        os._exit(status)


def _limit() -> None:
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    if sys.platform == "linux":  # others neither say here what a process holds nor keep to such a limit
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # where a crash would tell of itself


def _compile(compiler: GrammarCompiler, wanted: Try, out: int) -> int:
    try:
        if wanted.is_gbnf:
            os.write(out, context_free_grammar(wanted.grammar).encode())
        else:
            compiler.compile(wanted.grammar)
    except ValueError as error:
        os.write(out, str(error).encode(errors="replace")[:2000])
        return REFUSED
    return 0


def read_frame(source: int) -> bytes | None:
    """One frame's body; None at the end."""

    def read(size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            if not (part := os.read(source, size - len(data))):
                return None
            data += part
        return bytes(data)

    head = read(LENGTH.size)
    return None if head is None else read(*LENGTH.unpack(head))


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the HTTP process says when to leave
    source, sink = sys.stdin.fileno(), sys.stdout.fileno()
    first = read_frame(source)
    if first is None:
        return 0
    compiler = GrammarCompiler(msgspec.msgpack.decode(first, type=Vocabulary))
    selector = selectors.DefaultSelector()
    selector.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            running: Attempt | None = key.data
            if running is None:
                if (body := read_frame(source)) is None:
                    return 0
                started = attempt(compiler, msgspec.msgpack.decode(body, type=Try))
                selector.register(started.pipe, selectors.EVENT_READ, started)
            elif part := os.read(running.pipe, 4096):
                running.said += part
            else:
                selector.unregister(running.pipe)
                body = msgspec.msgpack.encode(running.end())
                os.write(sink, LENGTH.pack(len(body)) + body)


if __name__ == "__main__":
    raise SystemExit(main())
