"""A server of a real model whose device fails for good at a chosen token: as a GPU after an assert in a kernel.

As a program it is `python -m serve`, or, started by that, its engine process.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from serve.config import EngineConfig
from serve.engine import engine as engine_module
from serve.engine import process
from serve.engine.engine import Engine
from serve.engine.loading import load_models
from serve.http.options import add_serve_arguments, options_from_arguments
from serve.http.server import run_server
from serve.messages import Ready
from tests.serve.toys import CountingModel

FATAL_TOKEN = 511


class FailingModel(CountingModel):
    """Runs on a device that fails at the fatal token; then whatever is launched fails too."""

    has_failed = False
    num_launched_after = 0

    def __call__(self, tokens: Tensor, *rest: Any, **more: Any) -> Tensor:
        self.num_launched_after += self.has_failed
        self.has_failed |= bool((tokens == FATAL_TOKEN).any())
        self.synchronize()
        return super().__call__(tokens, *rest, **more)

    def synchronize(self, device: torch.device | None = None) -> None:
        """Stands in for `torch.cuda.synchronize`."""
        if self.has_failed:
            raise RuntimeError("CUDA error: device-side assert triggered")


def on_failing_device(engine: Engine) -> Engine:
    """Lets an engine wait for its model's device as for a GPU."""
    engine.device = torch.device("cuda")
    return engine


def load(config: EngineConfig) -> tuple[Engine, Ready]:
    models = load_models(config)
    model = FailingModel(models.target)
    torch.cuda.synchronize = model.synchronize
    engine_module.load_models = lambda config: replace(models, target=model)  # type: ignore[assignment]
    engine, ready = process.load(config)
    return on_failing_device(engine), ready


def main() -> int:
    if "--socket" in sys.argv:
        return process.main(load)
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return run_server(options_from_arguments(parser.parse_args()), engine_command=(sys.executable, __file__))


if __name__ == "__main__":
    raise SystemExit(main())
