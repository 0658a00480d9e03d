"""Width pruning against transformers: importances from its own hooks, and models that it opens or masks itself."""

import copy
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.prune.width import KeptWidth, WidthImportance, keep_width, prune_width, width_importance
from model.config import ConfigError
from model.files.checkpoint import load_model, save_model
from model.transformer import Transformer
from tests.compress.test_depth import PackedText, batches
from tests.model.test_families import TOKENS, their_logits, their_model
from tests.ranks import in_ranks
from tests.tiny import full_logits, tiny_config, tiny_model

STARTS = [0, 17, 48]
"""The tokens as two sequences."""
CUTS = {
    "heads": {"heads": 2},
    "mlp": {"mlp": 20},
    "hidden": {"hidden": 24},
    "all": {"heads": 2, "mlp": 20, "hidden": 18},
    "odd": {"heads": 2, "hidden": 17},
}
FAMILIES = ["llama-tied", "llama-biases", "mistral", "qwen2-tied", "qwen3", "smollm3-windows"]


def text() -> list[PackedText]:
    """Both sequences in one batch."""
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(STARTS)])
    return [PackedText(TOKENS, positions, torch.tensor(STARTS, dtype=torch.int32), TOKENS.roll(-1))]


def watched(model: Any) -> dict[str, list[Tensor]]:
    """What transformers' own modules take in and give out, in fp64 by sequence, as `MODULE.in` and `MODULE.out`."""
    found: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Any:
        def hook(_: Any, given: tuple[Tensor], made: Tensor) -> None:
            found.setdefault(f"{name}.in", []).append(given[0][0].double())
            if isinstance(made, Tensor):
                found.setdefault(f"{name}.out", []).append(made[0].double())

        return hook

    names = ("o_proj", "down_proj", "layernorm", "model.norm")
    hooks = [
        module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name.endswith(names)
    ]
    with torch.no_grad():
        for start, stop in pairwise(STARTS):
            model(TOKENS[None, start:stop])
    for hook in hooks:
        hook.remove()
    return found


def size(sequences: list[Tensor]) -> Tensor:
    """Mean over a sequence, L2 over sequences."""
    return torch.stack([x.abs().mean(0) for x in sequences]).norm(dim=0)


def by_hand(model: Any) -> WidthImportance:
    """The published formulas on what was watched."""
    seen, layers = watched(model), range(model.config.num_hidden_layers)
    heads = [size(seen[f"model.layers.{n}.self_attn.o_proj.in"]) for n in layers]
    norms = [f"model.layers.{n}.{which}_layernorm" for n in layers for which in ("input", "post_attention")]
    channels = [size(seen[f"{name}.out"]) for name in norms]
    powers = []
    for name in [*norms, "model.norm"]:
        x = torch.cat(seen[f"{name}.in"])
        powers.append((x.square() / x.square().mean(-1, keepdim=True)).mean(0))
    return WidthImportance(
        torch.stack([x.unflatten(0, (model.config.num_attention_heads, -1)).norm(dim=-1) for x in heads]),
        torch.stack([size(seen[f"model.layers.{n}.mlp.down_proj.in"]) for n in layers]),
        torch.stack([channels[2 * n] + channels[2 * n + 1] for n in layers]),
        torch.stack(powers),
    )


def mask(model: Any, kept: KeptWidth) -> None:
    """Makes transformers' whole model compute what the kept part alone does.

    Channels without a writer stay zero, and do not change a norm whose mean and eps are of the kept ones.
    """
    config = model.config
    gone = torch.ones(config.hidden_size, dtype=torch.bool)
    gone[kept.channels] = False
    part, d = (~gone).double().mean(), model.model.layers[0].self_attn.head_dim
    with torch.no_grad():
        model.model.embed_tokens.weight[:, gone] = 0
        norms = [model.model.norm]
        for number, layer in enumerate(model.model.layers):
            heads, neurons = torch.zeros(config.num_attention_heads), torch.zeros(config.intermediate_size)
            heads[kept.heads[number]] = neurons[kept.neurons[number]] = 1
            layer.self_attn.o_proj.weight.mul_(heads.repeat_interleave(d))
            layer.mlp.down_proj.weight.mul_(neurons)
            for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
                writer.weight[gone] = 0
                if writer.bias is not None:
                    writer.bias[gone] = 0
            norms[-1:-1] = [layer.input_layernorm, layer.post_attention_layernorm]
        for norm, scale in zip(norms, kept.norm_scales, strict=True):
            norm.weight.copy_(norm.weight.double() * scale * part.sqrt())
            norm.variance_epsilon *= float(part)


def opened(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def test_processes_with_a_part_of_the_text_each_measure_what_one_does() -> None:
    """One of the three has no text."""
    model = tiny_model()
    one = width_importance(model, batches())
    for many in in_ranks(3, lambda group: width_importance(copy.deepcopy(model), batches()[group.index :: 3], group)):
        for found, expected in zip(many, one, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("family", "cut"), [*product(FAMILIES, list(CUTS)[:4]), ("llama-tied", "odd")])
def test_a_narrow_model_computes_what_its_kept_parts_compute(family: str, cut: str, tmp_path: Path) -> None:
    theirs = their_model(family)
    theirs.save_pretrained(tmp_path / "whole")
    model = load_model(tmp_path / "whole")
    importance = width_importance(model, text())
    for found, expected in zip(importance, by_hand(theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    narrow = model.config.narrow(**CUTS[cut])
    kept = keep_width(importance, model.config, narrow)
    pruned = prune_width(model, kept, narrow)
    assert sum(parameter.numel() for parameter in pruned.parameters()) == narrow.num_parameters()
    mask(theirs, kept)
    expected = their_logits(theirs)
    ours = full_logits(pruned, TOKENS.tolist())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    save_model(pruned, tmp_path / "narrow")
    torch.testing.assert_close(their_logits(opened(tmp_path / "narrow")), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(full_logits(load_model(tmp_path / "narrow"), TOKENS.tolist()), ours)


def test_what_is_kept_is_what_is_largest() -> None:
    config = tiny_config(num_layers=2, num_query_heads=6, num_kv_heads=2)
    heads = torch.tensor([[1.0, 9, 8, 7, 2, 3], [5, 5, 5, 1, 1, 2]])
    neurons = torch.arange(160.0).expand(2, -1)
    channels = torch.stack([torch.arange(64.0), torch.zeros(64)])
    channels[1, 3] = 1_000
    powers = torch.arange(1.0, 65).expand(5, -1)
    narrow = config.narrow(heads=4, mlp=3, hidden=2)
    kept = keep_width(WidthImportance(heads, neurons, channels, powers), config, narrow)
    assert kept.heads.tolist() == [[1, 2, 3, 5], [0, 1, 3, 5]], "two of each group of three, the earlier of equals"
    assert kept.neurons.tolist() == [[157, 158, 159]] * 2
    assert kept.channels.tolist() == [3, 63], "by the sum over layers"
    torch.testing.assert_close(kept.norm_scales, torch.tensor([((4 + 64) / 2) ** 0.5] * 5))


def test_heads_of_their_own_go_with_their_keys_and_values() -> None:
    """Zeroing what a multi-head layer keeps nothing of changes nothing; its KV heads are fewer."""
    model = tiny_model(num_query_heads=4, num_kv_heads=4, head_dim=16, seed=3)
    with torch.no_grad():
        for layer, idle in zip(model.model.layers, (1, 2), strict=True):
            layer.self_attn.v_proj.weight[16 * idle : 16 * (idle + 1)] = 0
    narrow = model.config.narrow(heads=3)
    assert narrow.num_kv_heads == 3
    kept = keep_width(width_importance(model, text()), model.config, narrow)
    assert kept.heads.tolist() == [[0, 2, 3], [0, 1, 3]]
    tokens = TOKENS.tolist()
    torch.testing.assert_close(full_logits(prune_width(model, kept, narrow), tokens), full_logits(model, tokens))


def test_layers_of_their_own_heads_and_of_groups_in_one_model() -> None:
    model = tiny_model(layer_kv_heads=(4, 2), num_kv_heads=4)
    narrow = model.config.narrow(heads=2)
    assert narrow.kv_heads == (2, 2)
    kept = keep_width(width_importance(model, text()), model.config, narrow)
    assert kept.heads[1, 0] < 2 <= kept.heads[1, 1], "one of each group"
    assert full_logits(prune_width(model, kept, narrow), [5, 6]).isfinite().all()


def test_importances_of_some_layers_are_their_own() -> None:
    importance = width_importance(tiny_model(num_layers=3), text())
    part = importance.of_layers((0, 2))
    assert torch.equal(part.heads, importance.heads[[0, 2]]) and torch.equal(part.channels, importance.channels[[0, 2]])
    assert torch.equal(part.powers, importance.powers[[0, 1, 4, 5, 6]])


def test_a_norm_gives_channels_the_size_that_they_had() -> None:
    """Whatever channels leave, what the first norm gives to the others keeps its mean square."""
    model = tiny_model(seed=2)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(torch.logspace(-1, 1, 64))
    narrow = model.config.narrow(hidden=16)
    kept = keep_width(width_importance(model, text()), model.config, narrow)

    def normed(whole: Transformer) -> Tensor:
        return whole.model.layers[0].input_layernorm.add(whole.model.embed_tokens(TOKENS), None)[0]

    before, after = normed(model)[:, kept.channels], normed(prune_width(model, kept, narrow))
    torch.testing.assert_close(after.square().mean(), before.square().mean(), rtol=1e-3, atol=0)  # eps is not scaled


def test_a_pruned_model_shares_nothing_with_its_origin() -> None:
    model = tiny_model()
    before = full_logits(model, [3, 4, 5])
    narrow = model.config.narrow(hidden=32)
    pruned = prune_width(model, keep_width(width_importance(model, text()), model.config, narrow), narrow)
    with torch.no_grad():
        for parameter in pruned.parameters():
            parameter.add_(1.0)
    assert torch.equal(full_logits(model, [3, 4, 5]), before)
    assert all(parameter.requires_grad for parameter in pruned.parameters())


def test_a_llama_whose_heads_do_not_divide_its_channels_becomes_a_mistral() -> None:
    narrow = tiny_config(num_query_heads=6, num_kv_heads=2).narrow(heads=4, hidden=62)
    assert narrow.family == "mistral" and narrow.windows == (None, None)
    with pytest.raises(ConfigError, match="hidden is 62; with biases it must be a multiple of the 4 heads"):
        tiny_config(num_query_heads=6, num_kv_heads=2, mlp_bias=True).narrow(heads=4, hidden=62)


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [
        ({"heads": 3}, "heads is 3; it must be a multiple of the model's 2 KV heads"),
        ({"heads": 8}, "heads is 8, but the model has 4"),
        ({"mlp": 161}, "mlp is 161, but the model has 160"),
        ({"hidden": 0}, "hidden is 0, but the model has 64"),
    ],
)
def test_an_impossible_width_is_refused(cut: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tiny_config().narrow(**cut)
