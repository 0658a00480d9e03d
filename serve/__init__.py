"""Serving: continuous batching, paged KV cache, exact speculation, an HTTP server. See serve/README.md.

`from serve import LLM, SamplingParams` loads torch only when LLM is touched.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "LLM": "serve.llm",
    "Generation": "serve.llm",
    "Choice": "serve.llm",
    "SamplingParams": "serve.sampling_params",
    "EngineConfig": "serve.config",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'serve' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
