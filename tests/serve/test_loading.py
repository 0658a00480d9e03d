"""How many KV pages an engine takes of a GPU's memory, with a stand-in for the GPU."""

from dataclasses import replace

import pytest
import torch

from serve.config import EngineConfig
from serve.engine.loading import Models, count_pages
from tests.serve.toys import toy_tokenizer
from tests.tiny import tiny_model

GIB = 2**30


def test_what_torch_keeps_of_freed_weights_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"bytes": 2 * GIB}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.update(bytes=6 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free["bytes"], 8 * GIB))
    models = replace(Models(tiny_model(), toy_tokenizer()), device=torch.device("cuda"))
    pages = count_pages(EngineConfig("", gpu_memory_utilization=0.9), models)
    assert 5.0 * GIB < pages * models.page_bytes < 0.9 * 8 * GIB - 2 * GIB
