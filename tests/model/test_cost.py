"""The arithmetic of serving: what each GPU holds of a model, and the least time of a step."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.models import LLAMA_8B, shaped
from model.collectives import Group
from model.cost import GPUS, Gpu, OnGpus, Roofline, Served, flops_per_token, kv_bytes_per_token, weight_bytes
from model.files.checkpoint import load_config, load_model
from model.formats.registry import format_named
from model.linear import Linear
from model.mesh import MeshError
from model.tensor_parallel import WHOLE, Split
from model.transformer import Transformer
from tests.model.test_tensor_parallel import SHAPE, write
from tests.tiny import tiny_config

GPU = Gpu("of round numbers", 1 << 30, 1e9, 1e12, 1e8)
BF16 = torch.bfloat16


@pytest.mark.parametrize(("family", "format"), [("llama", "none"), ("llama", "int4"), ("mixtral", "none")])
def test_weights_are_those_of_the_rank_that_loads_most(family: str, format: str, tmp_path: Path) -> None:
    changes = {"intermediate_size": 160} if family == "mixtral" else {}
    folder = write(tmp_path / "model", family, format=format, **changes)
    kind, config = format_named(format), load_config(folder)
    with torch.device("meta"):
        modules = Transformer(config).model.named_modules(prefix="model")
    formats = {name: kind for name, layer in modules if kind is not None and isinstance(layer, Linear)}
    for tensor, pipeline in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)):
        held = []
        for index in range(pipeline):
            is_split = tensor * pipeline > 1
            layout = Split(Group(0, tensor), config, Group(index, pipeline)) if is_split else WHOLE
            held.append(weight_bytes(load_model(folder, layout=layout), BF16))
        assert OnGpus(Served(config, formats), tensor, pipeline).weights == max(held)


def test_keys_and_values_are_shared_out_as_far_as_there_are_heads() -> None:
    config = tiny_config(**SHAPE)
    served, whole = Served(config), kv_bytes_per_token(config, BF16)
    assert config.num_kv_heads == 2
    assert [OnGpus(served, count).kv_bytes_per_token for count in (1, 2, 4)] == [whole, whole // 2, whole // 2]
    assert OnGpus(served, 2, 2).kv_bytes_per_token == whole // 4


def test_gpus_that_do_not_divide_a_model_are_refused_in_one_sentence() -> None:
    with pytest.raises(MeshError, match="tensor_parallel_size 3 does not divide the 4 attention heads"):
        OnGpus(Served(tiny_config()), 3)
    with pytest.raises(MeshError, match="pipeline_parallel_size 3 is more than the 2 layers"):
        OnGpus(Served(tiny_config()), 1, 3)


def test_a_token_alone_takes_the_reading_of_weights_and_of_its_keys() -> None:
    config = tiny_config(tie_word_embeddings=False)
    placed = OnGpus(Served(config))
    embeddings = 2 * config.vocab_size * config.hidden_size
    read = placed.weights - embeddings + 100 * kv_bytes_per_token(config, BF16)
    assert Roofline(placed, GPU).step_s([(99, 1)], rows=1) == pytest.approx(read / GPU.bytes_per_s)
    tied = OnGpus(Served(tiny_config(tie_word_embeddings=True)))
    assert tied.read_bytes(1) == tied.weights == placed.weights - embeddings


def test_a_long_prompt_takes_its_operations() -> None:
    config, slow = tiny_config(tie_word_embeddings=False), Gpu("slow", 1 << 30, 1e15, 1e9, 1e15)
    head = 2 * config.vocab_size * config.hidden_size
    least = 1000 * flops_per_token(config, 1001) + head  # of n tokens each sees (n + 1) / 2
    assert Roofline(OnGpus(Served(config)), slow).step_s([(0, 1000)], rows=1) == pytest.approx(least / slow.flop_per_s)


def test_layers_with_a_window_read_no_more_keys_than_it_has() -> None:
    config = tiny_config("gemma3_text", num_layers=4)
    read = {context: Roofline(OnGpus(Served(config)), GPU).tpot_s(1, context) for context in (12, 1012)}
    heads = config.num_kv_heads * 2 * config.head_dim * BF16.itemsize
    assert config.windows == (12, None) * 2
    assert read[1012] - read[12] == pytest.approx(1000 * 2 * heads / GPU.bytes_per_s)


def test_few_tokens_read_few_experts() -> None:
    config = tiny_config("mixtral")
    placed, experts = OnGpus(Served(config)), config.experts
    assert experts is not None
    one = 2 * 3 * config.hidden_size * experts.intermediate_size * len(experts.layers)
    assert placed.read_bytes(10_000) - placed.read_bytes(1) == pytest.approx(
        (experts.num_experts - experts.experts_per_token) * one
    )


def test_several_gpus_read_their_parts_at_once_and_pass_on_what_they_have() -> None:
    config = tiny_config(num_query_heads=8, num_kv_heads=8, head_dim=8, vocab_size=512)
    rows, free = 4, Gpu("without links", 1 << 30, 1e9, 1e12, math.inf)
    alone, shared, staged = (Roofline(OnGpus(Served(config), *size), free) for size in ((1, 1), (4, 1), (1, 2)))
    norms = 2 * config.hidden_size * (2 * config.num_layers + 1)
    parts = (alone.tpot_s(rows, 500) - norms / 1e9) / 4 + norms / 1e9
    assert shared.tpot_s(rows, 500) == pytest.approx(parts)
    assert staged.tpot_s(2 * rows - 1, 500) == pytest.approx(alone.tpot_s(rows, 500), rel=0.01), "two steps at once"
    summed = 2 * config.hidden_size * (2 * config.num_layers + 1) * 2 * 3 / 4 + 2 * config.vocab_size * 3 / 4
    linked = Roofline(OnGpus(Served(config), 4), GPU)
    assert linked.tpot_s(rows, 500) - shared.tpot_s(rows, 500) == pytest.approx(rows * summed / GPU.link_bytes_per_s)


CHUNKS = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 600)), min_size=1, max_size=6)


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral"])
@settings(deadline=None, max_examples=50)
@given(chunks=CHUNKS, more=st.tuples(st.integers(0, 4000), st.integers(1, 600)))
def test_more_work_never_takes_less_and_one_step_never_more_than_two(
    family: str, chunks: list[tuple[int, int]], more: tuple[int, int]
) -> None:
    roofline = Roofline(OnGpus(Served(tiny_config(family))), GPU)
    step, other = roofline.step_s(chunks, rows=len(chunks)), roofline.step_s([more], rows=1)
    both = roofline.step_s([*chunks, more], rows=len(chunks) + 1)
    assert max(step, other) * (1 - 1e-9) <= both <= (step + other) * (1 + 1e-9)


def test_a_prompt_longer_than_the_budget_takes_several_steps() -> None:
    roofline = Roofline(OnGpus(Served(tiny_config())), GPUS["h100"])
    parts = [roofline.step_s([(start, number)], rows=rows) for start, number, rows in ((0, 64, 0), (64, 36, 1))]
    assert roofline.ttft_s(100, budget=64) == pytest.approx(sum(parts))
    assert roofline.ttft_s(64, budget=64) == roofline.step_s([(0, 64)], rows=1)


def test_llama_8b_has_the_least_times_that_others_compute() -> None:
    """158 tokens/s of SGLang alone on an H100 (EAGLE-3's paper) are 71 % of what its memory allows."""
    placed = OnGpus(Served(shaped(LLAMA_8B)))
    assert 158 * Roofline(placed, GPUS["h100"]).tpot_s(1, 128) == pytest.approx(0.71, abs=0.01)
    copying = replace(GPUS["h200"], bytes_per_s=4.3e12)  # as fast as it was seen to copy
    assert 1 / Roofline(placed, copying).tpot_s(1, 1) == pytest.approx(286, rel=0.01)


@pytest.mark.parametrize("name", GPUS)
def test_more_bytes_take_longer_on_every_gpu(name: str) -> None:
    small, large = (
        Roofline(OnGpus(Served(tiny_config(num_layers=count))), GPUS[name]).tpot_s(1, 100) for count in (2, 4)
    )
    assert 0 < small < large
