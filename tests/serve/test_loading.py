"""How many KV pages an engine takes of a GPU's memory, with a stand-in for the GPU; and weights as options ask."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.quantize.round_to_nearest import quantize_folder
from model.cost import visible_list_bytes
from model.files.checkpoint import load_model, save_model
from model.formats.compressed_tensors import Int4, Int6, Int8
from model.formats.ggml import Ggml
from model.quantized import round_activations
from model.transformer import Transformer
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.engine import loading
from serve.engine.graph_shapes import BYTES_PER_GRAPH, captured_sizes, captured_token_counts
from serve.engine.kv_cache import PAGE_SIZE
from serve.engine.loading import Models, choose_max_model_len, count_pages, load_models, most_draft_tokens
from serve.engine.tables import Tables
from tests.serve.test_routed import routed_model
from tests.serve.toys import toy_tokenizer
from tests.tiny import full_logits, tiny_model

GIB = 2**30
FP32 = torch.float32


def test_what_torch_keeps_of_freed_weights_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"bytes": 2 * GIB}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.update(bytes=6 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free["bytes"], 8 * GIB))
    models = replace(Models(tiny_model(), toy_tokenizer()), device=torch.device("cuda"))
    bytes_per_token = models.kv_bytes_per_token(models.dtype)
    config = EngineConfig("", gpu_memory_utilization=0.9)
    num_graphs = len(captured_sizes(config.max_num_seqs)) + len(captured_token_counts(config.max_num_batched_tokens))
    left = 0.9 * 8 * GIB - 2 * GIB - BYTES_PER_GRAPH * num_graphs
    pages = count_pages(config, models, bytes_per_token)
    assert left - 0.2 * GIB < pages * PAGE_SIZE * bytes_per_token < left


@pytest.mark.parametrize(("max_model_len", "total"), [(1000, 8 * GIB), (None, 8 * GIB), (None, 2**27)])
def test_lists_of_visible_slots_fit_beside_the_pages(
    max_model_len: int | None, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long sequences may be: as the options say, as the model allows, or as all pages hold."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total, total))
    monkeypatch.setattr(loading, "_free_gpu_bytes", lambda config, models: total)
    routed = routed_model("block")
    models = replace(Models(routed, toy_tokenizer(), routed), device=torch.device("cuda"))
    config, page_bytes = EngineConfig("", max_model_len=max_model_len), PAGE_SIZE * models.kv_bytes_per_token(FP32)
    pages = count_pages(config, models, models.kv_bytes_per_token(FP32))
    most = choose_max_model_len(config, routed.config, pages) + most_draft_tokens(config, models)
    tables = Tables(1 + config.max_num_seqs, most, torch.device("meta"))
    lists = 2 * visible_list_bytes(routed.config, rows=tables.num_rows, tokens=tables.most_tokens)
    assert lists > 0 and total - 2 * page_bytes - 0.05 * lists < pages * page_bytes + lists <= total


def test_eight_bits_hold_more_tokens_in_the_same_memory() -> None:
    """A head of d numbers takes d + 4 bytes beside 4 d in fp32, whether the target's or the draft's."""
    models = Models(tiny_model(), toy_tokenizer(), tiny_model(num_layers=1))
    plain, packed = (models.kv_bytes_per_token(dtype) for dtype in (torch.float32, torch.int8))
    head_dim = models.target.config.head_dim
    assert packed * 4 * head_dim == plain * (head_dim + 4)
    pages = [count_pages(EngineConfig("", kv_cache_bytes=2**20), models, size) for size in (plain, packed)]
    assert pages == [2**20 // (PAGE_SIZE * size) for size in (plain, packed)]


def folder_of(path: Path, format: Any, **changes: Any) -> str:
    save_model(tiny_model(**changes), path / "dense")
    quantize_folder(path / "dense", path / "model", format, overrides={"lm_head": format})
    toy_tokenizer().save(path / "model")
    return str(path / "model")


@pytest.mark.parametrize("format", [Int4(), Int6(32), Int8(), Ggml("Q8_0")], ids=str)
def test_activations_are_rounded_in_all_products(format: Any, tmp_path: Path) -> None:
    """The engine's scores are those of rounded activations; not to the bit, since the order of sums may turn one."""
    folder = folder_of(tmp_path, format)
    prompt, params = list(range(3, 23)), SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    (answer,) = LLM(folder, dtype="float32", num_pages=16, activations="int8").generate([prompt], params)
    tokens = [*prompt, *answer.choices[0].token_ids]
    entries = [*answer.prompt_logprobs[1:], *answer.choices[0].logprobs]

    def scores(model: Transformer) -> Tensor:
        after = torch.tensor(tokens[1:])[:, None]
        return full_logits(model, tokens)[:-1].log_softmax(-1).gather(1, after)[:, 0]

    rounded = load_model(folder)
    round_activations(rounded)
    expected, plain = scores(rounded), scores(load_model(folder))
    ours = torch.tensor([entry.logprob for entry in entries])
    assert (ours - expected).norm() < 0.3 * (expected - plain).norm()


def test_what_cannot_round_activations_is_said(tmp_path: Path) -> None:
    odd = folder_of(tmp_path / "odd", Int4(8), hidden_size=40, intermediate_size=80)
    with pytest.raises(ValueError, match=r"32 do not divide 40 activations\. Leave activations at auto\.$"):
        load_models(EngineConfig(odd, activations="int8"))
    with pytest.raises(ValueError, match="has none"):
        load_models(EngineConfig(folder_of(tmp_path, Int8()).replace("model", "dense"), activations="int8"))
