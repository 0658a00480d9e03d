"""Depth pruning: importance against its definition, and pruned models against models that skip the same layers."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.prune.depth import block_influence, keep_layers, perplexity_increase, prune_depth
from model.attention import PackedAttention
from model.families.registry import FAMILIES
from model.transformer import Transformer
from tests.ranks import in_ranks
from tests.tiny import full_logits, tiny_model

TOKENS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@dataclass
class PackedText:
    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    labels: Tensor


def batches() -> list[PackedText]:
    """The same forty tokens as two documents of one batch and one of another."""
    tokens = torch.tensor(TOKENS)
    labels = tokens.roll(-1)
    labels[[9, 24, 39]] = -100
    first = PackedText(tokens[:25], torch.arange(25), torch.tensor([0, 10, 25], dtype=torch.int32), labels[:25])
    first.positions[10:] -= 10
    second = PackedText(tokens[25:], torch.arange(15), torch.tensor([0, 15], dtype=torch.int32), labels[25:])
    return [first, second]


Measure = Callable[..., list[float]]
DOCUMENTS = [TOKENS[:10], TOKENS[10:25], TOKENS[25:]]


def drop(model: Transformer, *layers: int) -> Transformer:
    """The same model with these layers taken out by hand, the oracle for pruning."""
    kept = [layer for number, layer in enumerate(model.model.layers) if number not in layers]
    model.model.layers = nn.ModuleList(kept)
    return model


def hidden_of(model: Transformer) -> Tensor:
    """Final hidden states of all documents, each run alone."""
    found = []
    for document in DOCUMENTS:
        attention = PackedAttention(model.config, torch.tensor([0, len(document)], dtype=torch.int32))
        with torch.no_grad():
            found.append(model(torch.tensor(document), torch.arange(len(document)), attention))
    return torch.cat(found)


def mean_nll(model: Transformer) -> float:
    logits = torch.cat([full_logits(model, document)[:-1] for document in DOCUMENTS])
    return F.cross_entropy(logits, torch.tensor([token for document in DOCUMENTS for token in document[1:]])).item()


def test_block_influence_is_the_turn_of_the_residual_stream() -> None:
    # A model cut off after n layers shows the stream there: the final norm has weights of one, so it keeps directions.
    cut_off = [drop(tiny_model(seed=1, num_layers=4), *range(count, 4)) for count in range(5)]
    streams = [hidden_of(model) for model in cut_off]
    expected = [1 - F.cosine_similarity(streams[n], streams[n + 1], dim=-1).mean().item() for n in range(4)]
    assert block_influence(tiny_model(seed=1, num_layers=4), batches()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_perplexity_increase_is_that_of_the_model_without_the_layer(family: str) -> None:
    model = tiny_model(family, seed=1, num_layers=4)
    base = math.exp(mean_nll(model))
    expected = [math.exp(mean_nll(drop(tiny_model(family, seed=1, num_layers=4), layer))) - base for layer in range(4)]
    assert perplexity_increase(model, batches()) == pytest.approx(expected, rel=1e-3)
    untouched = tiny_model(family, seed=1, num_layers=4)
    assert torch.equal(hidden_of(model), hidden_of(untouched)), "measuring changed the model"


@pytest.mark.parametrize("measure", [block_influence, perplexity_increase])
def test_processes_with_a_part_of_the_text_each_measure_what_one_does(measure: Measure) -> None:
    """One of the three has no text."""
    model, text = tiny_model(seed=1, num_layers=4), batches()
    one = measure(model, text)
    for many in in_ranks(3, lambda group: measure(copy.deepcopy(model), text[group.index :: 3], group)):
        assert many == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("measure", [block_influence, perplexity_increase])
def test_a_layer_that_does_nothing_is_the_least_important(measure: Measure) -> None:
    model = tiny_model(seed=1, num_layers=4)
    idle = model.model.layers[2]
    idle.self_attn.o_proj.weight.data.zero_()
    idle.mlp.down_proj.weight.data.zero_()
    importance = measure(model, batches())
    assert importance[2] == pytest.approx(0, abs=1e-5) and min(importance[:2] + importance[3:]) > 1e-3
    keep = keep_layers(importance, 3)
    assert keep == (0, 1, 3)
    torch.testing.assert_close(full_logits(prune_depth(model, keep), TOKENS), full_logits(model, TOKENS))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
def test_a_pruned_model_computes_what_the_kept_layers_compute(family: str, tied: bool) -> None:
    changes = {"num_layers": 5, "tie_word_embeddings": tied}
    if family == "mistral":
        changes["windows"] = (3, None, 7, 12, None)
    model = tiny_model(family, seed=1, **changes)
    pruned = prune_depth(model, (1, 2, 4))
    # Taking layers out by hand leaves their numbers alone, so that each still finds its own window and rope setting.
    oracle = drop(tiny_model(family, seed=1, **changes), 0, 3)
    assert torch.equal(full_logits(pruned, TOKENS), full_logits(oracle, TOKENS))
    assert pruned.config.windows == tuple(model.config.windows[layer] for layer in (1, 2, 4))
    assert pruned.config.rope_layers == tuple(model.config.rope_layers[layer] for layer in (1, 2, 4))
    assert sum(parameter.numel() for parameter in pruned.parameters()) == pruned.config.num_parameters()


def test_a_pruned_model_shares_nothing_with_its_origin() -> None:
    model = tiny_model(seed=1, num_layers=3)
    before = full_logits(model, TOKENS)
    pruned = prune_depth(model, (0, 2))
    with torch.no_grad():
        for parameter in pruned.parameters():
            parameter.add_(1.0)
    assert torch.equal(full_logits(model, TOKENS), before)
    assert all(parameter.requires_grad for parameter in pruned.parameters())


def test_the_most_important_layers_stay_in_order() -> None:
    assert keep_layers([0.5, 0.1, 0.9, 0.3], 2) == (0, 2)
    assert keep_layers([0.5, 0.5, 0.5], 2) == (0, 1)
    assert keep_layers([0.5, 0.1], 2) == (0, 1)


@pytest.mark.parametrize("count", [0, 3])
def test_an_impossible_number_of_layers_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"cannot keep {count} of 2 layers"):
        keep_layers([0.5, 0.1], count)


@pytest.mark.parametrize("keep", [(), (1, 0), (0, 0), (0, 2), (-1,)])
def test_impossible_layers_are_refused(keep: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending indices from 0 to 1"):
        prune_depth(tiny_model(), keep)
