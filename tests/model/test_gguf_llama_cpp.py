"""llama.cpp opens what we export, and computes, tokenizes and formats as we do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.quantize.round_to_nearest import quantize_folder
from model.files.checkpoint import load_model
from model.formats.gguf.blocks import BLOCK_TYPES
from model.formats.gguf.reader import import_gguf, import_gguf_blocks
from model.formats.gguf.writer import export_gguf
from model.formats.registry import format_named
from model.text.gguf_tokenizer import tokenizer_json
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from tests import trials
from tests.model import tiny_tokenizers
from tests.model.llama_cpp import LlamaCpp, dequantize, half_gelu, opened, quantize, rounded_activations
from tests.model.test_gguf import (
    WORDS,
    byte_level_metadata,
    gemma_tokenizer,
    sentencepiece_metadata,
    write_model,
)
from tests.model.test_gguf_blocks import weights
from tests.model.test_gguf_export import LLAMA3, LONGROPE, model_folder, teacher_file
from tests.tiny import full_logits

PROMPTS = torch.randint(7, 500, (5, 12), generator=torch.Generator().manual_seed(15)).tolist()
TRIPLES = [prompt[start : start + 3] for prompt in PROMPTS for start in range(0, 12, 3)]
TEXTS = (tiny_tokenizers.TEXT[:600], "12345 don't I'LL\n\n  x <|im_end|>", "世界 👩‍💻\t½ ① naïve ", "")
RUNS = ("a  b   c" + 11 * " " + "d\n\n\n  e", 8 * " ", "  a", " a ▁▁b")
TEACHER_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time",
    "import json\n",
    "Water boils at",
)
ENDS = [0, 2, 4]
"""Tokens of the tiny tokenizer that llama.cpp takes for ends by their spelling, and never says when it ignores them."""
FILE_TYPES = ("q8_0", "q6_k", "q4_k_m", "q4_1", "q4_0")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-rope-scaled": (
        "llama",
        {"tie_word_embeddings": True, "rope_scaling": LLAMA3, "rope_theta": 5e5, "head_dim": 64},
    ),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-biases": ("llama", {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"windows": (None, None)}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-linear": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "gemma2": ("gemma2", {}),
    "granite": ("granite", {}),
    "granite-biases": ("granite", {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "phi3-longrope": ("phi3", {"rope_scaling": LONGROPE, "rotary_factor": 0.75}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
}


def next_log_probs(model: Transformer, prompt: list[int]) -> Tensor:
    return full_logits(model, prompt)[-1].log_softmax(-1)


def greedy(model: Transformer, prompt: list[int], num_tokens: int) -> list[int]:
    """Without ends, a full forward pass for each token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = full_logits(model, tokens)[-1]
        logits[ENDS] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def after_triples(file: Path) -> Tensor:
    """llama.cpp's distributions of what follows each of TRIPLES, [20, 512]."""
    with opened(file) as theirs:
        return torch.stack([theirs.log_probs(prompt, 512) for prompt in TRIPLES])


def kl(theirs: Tensor, model: Transformer) -> Tensor:
    """KL(llama.cpp ‖ ours) after each of TRIPLES, nats."""
    ours = torch.stack([next_log_probs(model, prompt) for prompt in TRIPLES])
    return (theirs.exp() * (theirs - ours)).sum(-1)


@pytest.mark.parametrize(("family", "changes"), MODELS.values(), ids=MODELS)
def test_llama_cpp_computes_the_same(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_folder(tmp_path / "folder", family, unlike_vectors=True, **changes)
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf", type="f32")
    with opened(tmp_path / "model.gguf") as theirs, half_gelu(monkeypatch):
        for prompt in PROMPTS:
            expected = next_log_probs(model, prompt)
            torch.testing.assert_close(theirs.log_probs(prompt, 512), expected, atol=1e-3, rtol=0)
            assert theirs.greedy(prompt, 16) == greedy(model, prompt, 16)


def test_greedy_text_of_the_bf16_file_is_ours(tmp_path: Path) -> None:
    model_folder(tmp_path / "folder", dtype=torch.bfloat16)
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf")
    model = load_model(tmp_path / "folder", dtype=torch.float32)
    with opened(tmp_path / "model.gguf") as theirs:
        for prompt in PROMPTS:
            assert theirs.greedy(prompt, 16) == greedy(model, prompt, 16)


@pytest.mark.slow
def test_greedy_text_of_the_real_teacher_is_ours(tmp_path: Path) -> None:
    import_gguf(teacher_file(), tmp_path / "folder")
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf")
    model, tokenizer = load_model(tmp_path / "folder", dtype=torch.float32), Tokenizer.load(tmp_path / "folder")
    with opened(tmp_path / "model.gguf") as theirs:
        for text in TEACHER_PROMPTS:
            prompt = tokenizer.encode(text)
            said = theirs.greedy(prompt, 12)
            ours = full_logits(model, [*prompt, *said[:-1]])[len(prompt) - 1 :].argmax(dim=-1)
            assert said == ours.tolist(), text


@pytest.mark.parametrize("type", FILE_TYPES)
def test_llama_cpp_reads_our_quantized_weights(type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It rounds activations to 8 bits, with large blocks in groups of 256: with the same rounding nothing else differs.

    Where sums in another order round a number up and not down, a step of rounding remains: hence the median. Q4_0 it
    rearranges, and then rounds for it in a way of its own.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.1} if "_k" in type else {}
    original = model_folder(tmp_path / "folder", **sizes)
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf", type=type)
    import_gguf_blocks(tmp_path / "model.gguf", tmp_path / "again")
    theirs, again = after_triples(tmp_path / "model.gguf"), load_model(tmp_path / "again")
    near, far = kl(theirs, again), kl(theirs, original)
    assert near.mean() < (4e-3 if "_k" in type else 2e-3)
    assert far.mean() > {"q8_0": 3, "q6_k": 3}.get(type, 20) * near.mean()
    with rounded_activations(monkeypatch):
        found = kl(theirs, again)
        first = torch.stack([next_log_probs(again, prompt).argmax() for prompt in TRIPLES])
    assert found.mean() < 2e-3 and (first == theirs.argmax(1)).float().mean() >= 0.99
    assert found.median() < (0.9 if type == "q4_0" else 0.01) * near.median()


@pytest.mark.parametrize("type", FILE_TYPES)
def test_llama_cpp_computes_the_same_of_quantized_weights_in_fp32(type: str, tmp_path: Path) -> None:
    """Of the weights that blocks stand for, which are its own to the bit, with activations as they are."""
    sizes = {"hidden_size": 256, "intermediate_size": 256} if "_k" in type else {}
    model_folder(tmp_path / "folder", **sizes)
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf", type=type)
    import_gguf_blocks(tmp_path / "model.gguf", tmp_path / "blocks")
    import_gguf(tmp_path / "model.gguf", tmp_path / "dense", dtype=torch.float32)
    export_gguf(tmp_path / "dense", tmp_path / "dense.gguf", type="f32")
    found = kl(after_triples(tmp_path / "dense.gguf"), load_model(tmp_path / "blocks"))
    assert found.max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("type", [None, *FILE_TYPES] if trials.in_full else [None])
def test_llama_cpp_computes_the_same_of_the_real_teachers_blocks_in_fp32(type: str | None, tmp_path: Path) -> None:
    """As they are in its file, or of another type. Far below a KL of 2e-3: rounding activations, llama.cpp is not so
    near to itself (bench/quantize/agreement.py)."""
    file = teacher_file()
    if type is not None:
        import_gguf(file, tmp_path / "folder")
        file = tmp_path / "model.gguf"
        export_gguf(tmp_path / "folder", file, type=type)
    import_gguf_blocks(file, tmp_path / "blocks")
    import_gguf(file, tmp_path / "dense", dtype=torch.float32)
    export_gguf(tmp_path / "dense", tmp_path / "dense.gguf", type="f32")
    model, tokenizer = load_model(tmp_path / "blocks", dtype=torch.float32), Tokenizer.load(tmp_path / "blocks")
    with opened(tmp_path / "dense.gguf") as theirs:
        for text in TEACHER_PROMPTS:
            prompt = tokenizer.encode(text)
            found, ours = theirs.log_probs(prompt, model.config.vocab_size), next_log_probs(model, prompt)
            assert found.argmax() == ours.argmax(), text
            assert (ours.exp() * (ours - found.log_softmax(-1))).sum().abs() < 1e-5, text


@pytest.mark.parametrize("symmetric", [True, False])
def test_llama_cpp_reads_levels_that_a_method_chose(symmetric: bool, tmp_path: Path) -> None:
    model_folder(tmp_path / "folder", intermediate_size=128, initializer_range=0.1)
    formats = format_named("int4", group=64, symmetric=symmetric), {"embed_tokens": format_named("int8")}
    quantize_folder(tmp_path / "folder", tmp_path / "small", formats[0], overrides=formats[1])
    Tokenizer.load(tmp_path / "folder").save(tmp_path / "small")
    export_gguf(tmp_path / "small", tmp_path / "model.gguf", type="blocks")
    theirs = after_triples(tmp_path / "model.gguf")
    near, far = (kl(theirs, load_model(tmp_path / name)).mean() for name in ("small", "folder"))
    assert near < 2e-3 and far > 20 * near


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_those_of_llama_cpps_quantizer(name: str) -> None:
    """The searches of the large types sum in another order, and so find another grid for a few blocks."""
    theirs = quantize(name, weights()).view(-1, BLOCK_TYPES[name].num_bytes)
    ours = BLOCK_TYPES[name].quantize(weights()).view(theirs.shape)
    assert (ours != theirs).any(1).float().mean() <= (0.05 if name.endswith("_K") else 0)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_stand_for_what_llama_cpp_makes_of_them(name: str) -> None:
    stored = BLOCK_TYPES[name].quantize(weights())
    assert torch.equal(BLOCK_TYPES[name].unpack(stored).dequantize(), dequantize(name, stored))


# Tokenizers


def assert_tokenizes_alike(theirs: LlamaCpp, ours: Tokenizer) -> None:
    for text in TEXTS:
        assert theirs.tokenize(text) == ours.encode(text)
        assert theirs.tokenize(text, add_special=True) == ours.encode(text, add_special_tokens=True)
        assert theirs.tokenize(text, parse_special=True) == ours.encode(text, allow_special=True)


def test_llama_cpp_tokenizes_and_formats_alike(tmp_path: Path) -> None:
    model_folder(tmp_path / "folder")
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf")
    ours = Tokenizer.load(tmp_path / "folder")
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "What is a potstill?"}]
    with opened(tmp_path / "model.gguf") as theirs:
        assert_tokenizes_alike(theirs, ours)
        assert theirs.apply_template(messages) == ours.apply_chat_template(messages, add_generation_prompt=True)


@pytest.mark.parametrize("rule", [rule for rule in WORDS if rule != "default"])
def test_llama_cpp_splits_text_by_the_rule_that_we_name(rule: str, tmp_path: Path) -> None:
    model_folder(tmp_path / "folder")
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    Tokenizer(json.dumps(tokenizer_json(byte_level_metadata(rule))), config=settings).save(tmp_path / "folder")
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf")
    with opened(tmp_path / "model.gguf") as theirs:
        assert_tokenizes_alike(theirs, Tokenizer.load(tmp_path / "folder"))


def test_llama_cpp_follows_our_scores(tmp_path: Path) -> None:
    model_folder(tmp_path / "folder", vocab_size=720, eos_token_ids=(4,))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<|endoftext|>"}
    Tokenizer(json.dumps(tokenizer_json(sentencepiece_metadata())), config=settings).save(tmp_path / "folder")
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf")
    with opened(tmp_path / "model.gguf") as theirs:
        assert_tokenizes_alike(theirs, Tokenizer.load(tmp_path / "folder"))


def test_llama_cpp_joins_spaces_as_gemmas_tokenizer(tmp_path: Path) -> None:
    raw = gemma_tokenizer()
    model_folder(tmp_path / "folder", vocab_size=raw["added_tokens"][-1]["id"], eos_token_ids=(4,))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<|endoftext|>"}
    Tokenizer(json.dumps(raw), config=settings).save(tmp_path / "folder")
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf")
    import_gguf(tmp_path / "model.gguf", tmp_path / "again")
    ours, again = (Tokenizer.load(tmp_path / name) for name in ("folder", "again"))
    with opened(tmp_path / "model.gguf") as theirs:
        assert_tokenizes_alike(theirs, ours)
        for text in RUNS:
            assert theirs.tokenize(text) == ours.encode(text) == again.encode(text)
    assert not any(piece in ours.encode(RUNS[1]) for piece in ours.encode(" "))


@pytest.mark.parametrize("rule", ["refact", "dbrx"])
def test_llama_cpp_splits_by_the_names_in_files_of_granite_and_olmo(rule: str, tmp_path: Path) -> None:
    """Export calls these rules by other names. No row is without a token."""
    write_model(tmp_path / "model.gguf", "llama", rule=rule, vocab_size=501)
    import_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    with opened(tmp_path / "model.gguf") as theirs:
        for text in TEXTS:
            assert theirs.tokenize(text) == Tokenizer.load(tmp_path / "folder").encode(text)
