"""`python -m serve` with the scripted engine in place of the real one, or the quoting one where its answers stand."""

import argparse
import sys
from pathlib import Path

from serve.http.options import add_serve_arguments, options_from_arguments
from serve.http.server import run_server


def main() -> int:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    options = options_from_arguments(parser.parse_args())
    quotes = (Path(options.engine.model) / "answers.json").exists()
    engine = (sys.executable, str(Path(__file__).with_name("quoting_engine.py" if quotes else "scripted_engine.py")))
    return run_server(options, engine_command=engine)
