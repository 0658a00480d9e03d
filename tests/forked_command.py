"""The command `potstill` for scripts: each time it is called a process is forked that need not import anything.

What stands on the script's PATH hands its arguments, folder, variables and streams to the tests' process over a socket,
and ends as the fork does.
"""

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

from pipeline.cli import main
from tests.forked import CONTEXT, take_over
from tests.serve.forked_server import fork_engines

LARGEST = 2**17
PROGRAM = """#!{python} -SE
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
    asked.connect({address!r})
    socket.send_fds(asked, [json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
    pid = int(asked.recv(20))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    code = int(asked.recv(20))
sys.exit(code)
"""


@contextmanager
def potstill_in(folder: Path) -> Iterator[Path]:
    """A folder for PATH, made in this one, where `potstill` is while the context is open."""
    program, address = folder / "bin" / "potstill", str(folder / "socket")
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        Thread(target=_listen, args=(listener,), daemon=True).start()
        yield program.parent
        listener.shutdown(socket.SHUT_RDWR)


def _listen(listener: socket.socket) -> None:
    try:
        while True:
            Thread(target=_answer, args=(listener.accept()[0],), daemon=True).start()
    except OSError:
        """The context is closed."""


def _answer(asked: socket.socket) -> None:
    with asked:
        message, files, _, _ = socket.recv_fds(asked, LARGEST, 3)
        streams = [Connection(file) for file in files]
        process = CONTEXT.Process(target=_run, args=(*json.loads(message), streams))
        process.start()
        for stream in streams:
            stream.close()
        asked.send(str(process.pid).encode())
        process.join()
        asked.send(str(process.exitcode).encode())


def _run(words: list[str], folder: str, environment: dict[str, str], streams: list[Connection]) -> None:
    take_over(environment, folder, streams)
    fork_engines()
    sys.exit(main(words))
