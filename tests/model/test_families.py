"""Every family against transformers: the same logits from their folder here, and from our folder there."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.quantize.round_to_nearest import quantize_folder
from model.files.checkpoint import load_config, load_model, save_model
from model.formats.compressed_tensors import Int4
from tests.compare import relative_rms
from tests.tiny import full_logits
from tests.train.toy import batch_of
from train.objectives import hidden_states

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 16}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "mistral": ("mistral", {"sliding_window": 8, "tie_word_embeddings": False}),
    "mistral-tied-no-window": ("mistral", {"sliding_window": None, "tie_word_embeddings": True, "head_dim": 4}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": False}),
    "qwen3-tied-wide-heads": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "smollm3-tied": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3-windows": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": ("olmo2", {"tie_word_embeddings": False}),
    "olmo2-biases-tied": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "phi3": ("phi3", {"tie_word_embeddings": False, "sliding_window": 8}),
    "phi3-tied-partial": ("phi3", {"tie_word_embeddings": True, "partial_rotary_factor": 0.5}),
    "phi3-partial-longrope": (
        "phi3",
        {
            "head_dim": 16,
            "hidden_size": 64,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 4.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-own-layers": (
        "gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 12,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3-old-names": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "rope_theta": 5e3,
            "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    "mixtral-tied-window": (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 8, "tie_word_embeddings": True},
    ),
    "qwen2-moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False}),
    "qwen2-moe-windows": (
        "qwen2_moe",
        EXPERTS
        | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 2, "qkv_bias": False}
        | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3-moe": ("qwen3_moe", EXPERTS | {"head_dim": 8, "norm_topk_prob": True}),
    "qwen3-moe-some-layers": (
        "qwen3_moe",
        EXPERTS
        | {"head_dim": 16, "mlp_only_layers": [1], "attention_bias": True, "tie_word_embeddings": True}
        | {"use_sliding_window": True, "sliding_window": 8},
    ),
    "granite-tied-biases": (
        "granite",
        {"logits_scaling": 0.5, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
}
TOKENS = torch.randint(3, 96, (48,), generator=torch.Generator().manual_seed(5))


def their_model(name: str, **sizes: Any) -> Any:
    """A transformers model with every parameter random, biases and norms included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, fields = FAMILIES[name]
    config = AutoConfig.for_model(family, **(SIZES | fields | sizes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            around = 1.0 if "norm" in parameter_name else 0.0
            parameter.copy_(around + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def their_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


@pytest.mark.parametrize("sharded", [False, True], ids=["one-file", "shards"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers_in_both_directions(name: str, sharded: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = their_model(name)
    expected = their_logits(theirs)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB" if sharded else "5GB")
    ours = load_model(tmp_path / "theirs")
    torch.testing.assert_close(full_logits(ours, TOKENS.tolist()), expected, atol=1e-4, rtol=0)

    save_model(ours, tmp_path / "ours", max_shard_bytes=20_000 if sharded else 5_000_000_000)
    assert (len(list((tmp_path / "ours").glob("*.safetensors"))) > 1) == sharded
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    assert again.dtype == torch.float32
    torch.testing.assert_close(their_logits(again), expected, atol=1e-4, rtol=0)
    assert load_config(tmp_path / "ours") == ours.config


def test_streams_behind_the_layers_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = their_model("llama")
    theirs.save_pretrained(tmp_path)
    ours, states = load_model(tmp_path), list[torch.Tensor]()
    with torch.no_grad():
        expected = theirs(TOKENS[None], output_hidden_states=True).hidden_states
        hidden_states(ours, batch_of([TOKENS.tolist()]), states=states)
    assert len(states) == ours.config.num_layers
    for mine, other in zip(states[:-1], expected[1:-1], strict=True):  # theirs end with the normed last one
        torch.testing.assert_close(mine, other[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.model.norm.add(states[-1], None)[0], expected[-1][0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["mistral", "qwen2-windows", "smollm3-windows", "gemma2", "gemma3"])
def test_the_window_is_shorter_than_the_text(name: str, tmp_path: Path) -> None:
    """Guards the oracle: without windows, the logits of these models would differ."""
    from dataclasses import replace

    their_model(name).save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    with_windows = full_logits(ours, TOKENS.tolist())
    ours.config = replace(ours.config, windows=(None,) * 3)
    assert (with_windows - full_logits(ours, TOKENS.tolist())).abs().max() > 0.1


@pytest.mark.parametrize("cap", ["attention_soft_cap", "logit_soft_cap"])
def test_what_is_capped_goes_beyond_the_cap(cap: str, tmp_path: Path) -> None:
    """Guards the oracle: without caps, the logits of this model would differ."""
    from dataclasses import replace

    their_model("gemma2").save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    capped = full_logits(ours, TOKENS.tolist())
    ours.config = replace(ours.config, **{cap: None})
    assert (capped - full_logits(ours, TOKENS.tolist())).abs().max() > 0.1


@pytest.mark.parametrize(
    "name",
    ["phi3", "gemma2", "gemma3", "granite", "olmo2", "mixtral", "qwen2-moe", "qwen3-moe", "qwen3-moe-some-layers"],
)
def test_each_family_in_four_bits_opens_in_transformers(name: str, tmp_path: Path) -> None:
    """Which layers are rounded, and that routers are not, is said as others understand it. Experts are bf16 there."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    their_model(name, intermediate_size=64).save_pretrained(tmp_path / "dense")
    quantize_folder(tmp_path / "dense", tmp_path / "small", Int4(group=16))
    ours = load_model(tmp_path / "small", dtype=torch.float32)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "small", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    largest = 1e-4 if ours.config.experts is None else 2e-2
    assert relative_rms(full_logits(ours, TOKENS.tolist()), their_logits(theirs)) < largest
