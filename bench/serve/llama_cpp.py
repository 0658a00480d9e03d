"""llama.cpp's own server, from the wheel `xllamacpp`, in a process of its own."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

SEQUENCE_TOKENS = 512
"""The longest sequence, prompt and answer."""


def check_installed() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        raise SystemExit("llama.cpp comes from the wheel xllamacpp: pip install xllamacpp.")


def instructions() -> str:
    """Those of the processor that the wheel is built for, and what else it is built with, in its own words."""
    import xllamacpp

    return str(xllamacpp.get_system_info()).strip()


@contextmanager
def running_llama_cpp(path: Path, *, sequences: int, threads: int) -> Iterator[tuple[str, int]]:
    """Serves a GGUF file on a free loopback port for as long as the context is open. Yields (host, port)."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(str(path), sequences, threads, theirs), daemon=True)
    server.start()
    theirs.close()
    try:
        address = urlsplit(ours.recv())
        yield str(address.hostname), int(address.port or 0)
    finally:
        server.terminate()
        server.join()


def _serve(path: str, sequences: int, threads: int, connection: Connection) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.verbosity = path, 0, 0
    params.n_parallel, params.n_ctx = sequences, sequences * SEQUENCE_TOKENS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    connection.send(server.listening_address)
    while True:
        connection.recv()  # until this process is ended
