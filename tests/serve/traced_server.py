"""`python -m serve` with the scripted engine; at its end it prints the files of serve/ that it entered for a client.

What runs from a connection's beginning to its response's last byte counts, in all threads. The files are the last line
on standard output.
"""

import argparse
import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from serve.http.options import add_serve_arguments, options_from_arguments
from serve.http.server import run_server

ROOT = Path(__file__).resolve().parents[2]


class Trace:
    """A profiling function: which files are entered between a connection's beginning and its response's last byte."""

    def __init__(self) -> None:
        self.entered: set[str] = set()
        self._is_open = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if not path.startswith(str(ROOT / "serve")):
            return
        if event == "call" and (self._is_open or name == "connection_made"):
            self._is_open = True
            self.entered.add(str(Path(path).relative_to(ROOT)))
        elif event == "return" and name == "on_response_complete":
            self._is_open = False


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    engine = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")))
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    code = run_server(options_from_arguments(parser.parse_args()), engine_command=engine)
    print(json.dumps(sorted(trace.entered)))
    raise SystemExit(code)
