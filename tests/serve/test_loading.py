"""How many KV pages an engine takes of a GPU's memory, with a stand-in for the GPU."""

from dataclasses import replace

import pytest
import torch

from serve.config import EngineConfig
from serve.engine.kv_cache import PAGE_SIZE
from serve.engine.loading import Models, count_pages
from tests.serve.toys import toy_tokenizer
from tests.tiny import tiny_model

GIB = 2**30


def test_what_torch_keeps_of_freed_weights_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"bytes": 2 * GIB}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.update(bytes=6 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free["bytes"], 8 * GIB))
    models = replace(Models(tiny_model(), toy_tokenizer()), device=torch.device("cuda"))
    bytes_per_token = models.kv_bytes_per_token(models.dtype)
    pages = count_pages(EngineConfig("", gpu_memory_utilization=0.9), models, bytes_per_token)
    assert 5.0 * GIB < pages * PAGE_SIZE * bytes_per_token < 0.9 * 8 * GIB - 2 * GIB


def test_eight_bits_hold_more_tokens_in_the_same_memory() -> None:
    """A head of d numbers takes d + 4 bytes beside 4 d in fp32, whether the target's or the draft's."""
    models = Models(tiny_model(), toy_tokenizer(), tiny_model(num_layers=1))
    plain, packed = (models.kv_bytes_per_token(dtype) for dtype in (torch.float32, torch.int8))
    head_dim = models.target.config.head_dim
    assert packed * 4 * head_dim == plain * (head_dim + 4)
    pages = [count_pages(EngineConfig("", kv_cache_bytes=2**20), models, size) for size in (plain, packed)]
    assert pages == [2**20 // (PAGE_SIZE * size) for size in (plain, packed)]
