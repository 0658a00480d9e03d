"""A server whose processes leak: `python tests/serve/leaking_server.py KIND MODEL ...`, else as `python -m serve`.

What a soak has to find. The engine process, which is started by the first, runs this file too.
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from serve.engine import process
from serve.http.options import add_serve_arguments, options_from_arguments
from serve.http.server import run_server

LEAKS = ("memory", "files", "threads")
LEAKING = (__file__,)
EVERY_S, BYTES = 2.0, 2**17
"""Some 4 MiB a minute, or 30 files or threads."""


def leak(kind: str) -> None:
    """For ever, in a thread of its own."""
    kept: list[object] = []
    while True:
        if kind == "memory":
            kept.append(b"\1" * BYTES)
        elif kind == "files":
            kept.append(os.open(os.devnull, os.O_RDONLY))
        else:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        time.sleep(EVERY_S)


def main() -> int:
    kind = sys.argv.pop(1)
    threading.Thread(target=leak, args=(kind,), daemon=True).start()
    if "--socket" in sys.argv:
        return process.main()
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return run_server(options_from_arguments(parser.parse_args()), engine_command=(sys.executable, __file__, kind))


if __name__ == "__main__":
    raise SystemExit(main())
