"""GGUF import. Files are written here as llama.cpp's converter does; transformers' own GGUF loading is the oracle."""

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import MODEL_ARCH

from kernels.attention.rotary import rope_frequencies
from model.config_fields import ConfigError
from model.experts_config import MixtureOfExperts
from model.files.checkpoint import load_model
from model.formats.gguf.reader import gguf_config, import_gguf
from model.text.gguf_tokenizer import GGUFError, tokenizer_json
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from tests.model import tiny_tokenizers
from tests.tiny import full_logits, tiny_model

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "smollm3": MODEL_ARCH.SMOLLM3,
}
TOKENS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(5)).tolist()
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEMPLATE = "{{ messages[0].content }}"


AS_IN_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "smollm3": {"num_layers": 4, "rope_layers": (True, True, True, False), "windows": (None,) * 4},
    "gemma3_text": {
        "num_layers": 6,
        "windows": (*(12,) * 5, None),
        "attention_scale": 0.25,
        "tie_word_embeddings": True,
    },
    "gemma2": {"attention_scale": 0.25, "tie_word_embeddings": True},
    "qwen3_moe": {"experts": MixtureOfExperts((0, 1), 5, 2, 96, normalizes=True)},
    "qwen2_moe": {"experts": MixtureOfExperts((0, 1), 5, 2, 96, normalizes=False, shared_intermediate_size=64)},
}
"""What llama.cpp takes for granted of a family."""


def tiny(family: str, *, unlike_vectors: bool = False, **changes: Any) -> Transformer:
    """Half of the tiny model's rows rotate, so that a wrong order of rows shows.

    `unlike_vectors`: so does a norm or bias in the place of another.
    """
    model = tiny_model(family, **AS_IN_LLAMA_CPP.get(family, {}) | changes)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for weight in model.parameters():
            if unlike_vectors and weight.ndim == 1:  # in steps that sums with 1 keep
                weight += torch.randint(-512, 512, weight.shape, generator=generator) / 1024
    return model


def byte_level_metadata(rule: str = "smollm") -> dict[str, Any]:
    raw = json.loads(tiny_tokenizers.byte_level_json())
    vocabulary = raw["model"]["vocab"] | {token["content"]: token["id"] for token in raw["added_tokens"]}
    kinds = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in raw["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in raw["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def model_metadata(model: Transformer, arch: str) -> dict[str, Any]:
    config = model.config
    return {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_query_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": np.float32(config.rms_norm_eps),
        f"{arch}.rope.freq_base": np.float32(config.rope_theta),
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.vocab_size": config.vocab_size,
    }


def tensors_of(model: Transformer, arch: str) -> dict[str, np.ndarray]:
    """Weights under llama.cpp's names, which the gguf library knows, with q and k in llama.cpp's order of rows."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[arch], model.config.num_layers)
    found = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if arch in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            halves = weight.view(-1, 2, model.config.head_dim // 2, *weight.shape[1:])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = weight.numpy()
    return found


def write_gguf(
    path: Path,
    arch: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    kind: gguf.GGMLQuantizationType | None = None,
) -> None:
    writer = gguf.GGUFWriter(path, arch)
    for name, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, np.float32):
            writer.add_float32(name, float(value))
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        else:
            writer.add_uint32(name, value)
    for name, tensor in tensors.items():
        if kind is None or tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(
    path: Path, family: str, *, kind: gguf.GGMLQuantizationType | None = None, rule: str = "smollm", **changes: Any
) -> Transformer:
    model = tiny(family, unlike_vectors=True, **changes)
    write_gguf(
        path, family, model_metadata(model, family) | byte_level_metadata(rule), tensors_of(model, family), kind=kind
    )
    return model


# Weights and configuration


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_model_survives_the_way_through_gguf(family: str, tied: bool, tmp_path: Path) -> None:
    original = write_model(tmp_path / "model.gguf", family, tie_word_embeddings=tied)
    import_gguf(tmp_path / "model.gguf", tmp_path / "folder", dtype=torch.float32)
    imported = load_model(tmp_path / "folder")
    for name, parameter in original.named_parameters():
        assert torch.equal(imported.get_parameter(name), parameter), name
    assert imported.config.tie_word_embeddings is tied
    assert imported.config.rope_layers == original.config.rope_layers
    assert imported.config.rms_norm_eps == original.config.rms_norm_eps
    assert (imported.config.bos_token_id, imported.config.eos_token_ids, imported.config.pad_token_id) == (3, (2,), 0)
    assert torch.equal(full_logits(imported, TOKENS), full_logits(original, TOKENS))


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", None), ("llama", "Q8_0"), ("llama", "Q4_1"), ("llama", "F16"), ("qwen2", "Q5_0"), ("qwen3", "BF16")],
)
def test_weights_equal_transformers(family: str, kind: str | None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantization = None if kind is None else gguf.GGMLQuantizationType[kind]
    # transformers takes Qwen3's usual head size whatever the file says.
    write_model(tmp_path / "model.gguf", family, kind=quantization, head_dim=128 if family == "qwen3" else 16)
    import_gguf(tmp_path / "model.gguf", tmp_path / "folder", dtype=torch.float32)
    ours = load_model(tmp_path / "folder")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    state = theirs.state_dict()
    for name, parameter in ours.named_parameters():
        assert torch.equal(state[name], parameter), name
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(full_logits(ours, TOKENS), expected, atol=1e-4, rtol=0)


def test_bf16_is_the_default(tmp_path: Path) -> None:
    original = write_model(tmp_path / "model.gguf", "llama")
    import_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    imported = load_model(tmp_path / "folder", dtype="auto")
    assert imported.dtype == torch.bfloat16
    assert torch.equal(imported.head_weight, original.head_weight.bfloat16())


def test_rope_divisors_become_llama3_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny("llama", rope_theta=500_000.0, head_dim=64, rope_scaling=scaling)
    divisors = rope_frequencies(64, 500_000.0, None) / rope_frequencies(64, 500_000.0, scaling)
    tensors = tensors_of(model, "llama") | {"rope_freqs.weight": divisors.numpy()}
    metadata = model_metadata(model, "llama") | byte_level_metadata()
    write_gguf(tmp_path / "model.gguf", "llama", metadata, tensors)
    import_gguf(tmp_path / "model.gguf", tmp_path / "folder", dtype=torch.float32)
    assert load_model(tmp_path / "folder").config.rope_scaling == scaling

    wrong = [json.dumps(scaling | {"factor": one}) for one in (0, "x", True)]
    for stated in ("no JSON", "[" * 100_000, "[]", '{"factor": 32}', *wrong):
        write_gguf(tmp_path / "stated.gguf", "llama", metadata | {"potstill.rope_scaling": stated}, tensors)
        with pytest.raises(GGUFError, match=r"potstill.rope_scaling is .*; it must be JSON with positive numbers"):
            import_gguf(tmp_path / "stated.gguf", tmp_path / "stated")

    tensors["rope_freqs.weight"] = np.linspace(1, 8, 32, dtype=np.float32)
    write_gguf(tmp_path / "other.gguf", "llama", metadata, tensors)
    with pytest.raises(GGUFError, match=r"rope_freqs.weight does not follow"):
        import_gguf(tmp_path / "other.gguf", tmp_path / "other")


def test_longrope(tmp_path: Path) -> None:
    """As llama.cpp's converter writes it: no type, but what cosines are multiplied by."""
    short, long = [1.0, 1.1, 1.3, 1.7, 2.5, 4.0, 5.0, 8.0], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.5, 64.0]
    length = {"phi3.rope.scaling.original_context_length": 64}
    model = tiny("phi3", max_position_embeddings=4096)
    metadata = model_metadata(model, "phi3") | byte_level_metadata() | length
    factors = {
        "rope_factors_short.weight": np.array(short, dtype=np.float32),
        "rope_factors_long.weight": np.array(long, dtype=np.float32),
    }
    tensors = {"token_embd.weight": model.model.embed_tokens.weight.detach().numpy()} | factors

    def scaling(metadata: dict[str, Any], tensors: dict[str, Any]) -> Any:
        write_gguf(tmp_path / "model.gguf", "phi3", metadata, tensors)
        return gguf_config(tmp_path / "model.gguf").rope_scaling

    expected = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 64,
    }
    magnitude = "phi3.rope.scaling.attn_factor"
    assert scaling(metadata, tensors) == expected
    assert scaling(metadata | {magnitude: np.float32(1.4142135)}, tensors) == expected, "sqrt(1 + log(64) / log(64))"
    assert scaling(metadata | {magnitude: np.float32(1.19)}, tensors) == expected | {"attention_factor": 1.19}

    for wrong, sentence in (
        ({"phi3.rope.scaling.original_context_length": 1}, "original_context_length is 1; it must be 2 or more"),
        ({magnitude: np.float32(-1)}, r"attn_factor is -1.0; it must be a positive number"),
    ):
        with pytest.raises(GGUFError, match=sentence):
            scaling(metadata | wrong, tensors)
    for name in factors:
        with pytest.raises(GGUFError, match=f"has LongRoPE but no tensor {name}"):
            scaling(metadata, {other: tensor for other, tensor in tensors.items() if other != name})
    with pytest.raises(ConfigError, match="longrope needs a long_factor of 8 positive numbers"):
        scaling(metadata, tensors | {"rope_factors_long.weight": np.array(long[:-1], dtype=np.float32)})


def test_linear_rope_scaling(tmp_path: Path) -> None:
    model = tiny("llama")
    metadata = model_metadata(model, "llama") | byte_level_metadata()
    metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": np.float32(4.0)}
    write_gguf(tmp_path / "model.gguf", "llama", metadata, tensors_of(model, "llama"))
    import_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    assert load_model(tmp_path / "folder").config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"llama.expert_count": 8}, "no llama.expert_used_count"),
        ({"general.architecture": "qwen2", "qwen2.expert_count": 8}, "'qwen2' with experts; supported are llama"),
        ({"llama.block_count": None}, "no llama.block_count"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count differs"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'"),
        ({"tokenizer.ggml.pre": "martian"}, "tokenizer.ggml.pre is 'martian'; supported are default, gpt-2, smollm"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        (
            {"tokenizer.ggml.tokens": ["x"] * 513, "tokenizer.ggml.token_type": [NORMAL] * 513},
            r"lists 513 tokens for 512 rows of token_embd.weight",
        ),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab', which is not a pair"),
    ],
)
def test_unsupported_metadata_is_named(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model = tiny("llama")
    metadata = model_metadata(model, "llama") | byte_level_metadata() | changes
    metadata = {name: value for name, value in metadata.items() if value is not None}
    write_gguf(tmp_path / "model.gguf", "llama", metadata, tensors_of(model, "llama"))
    with pytest.raises(GGUFError, match=sentence):
        import_gguf(tmp_path / "model.gguf", tmp_path / "folder")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"blk.1.ffn_up.weight": None}, "lacks the tensor that becomes model.layers.1.mlp.up_proj.weight"),
        ({"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}, "holds blk.0.attn_q_norm.weight, which a llama model"),
        (
            {"blk.0.ffn_gate_exps.weight": np.ones((2, 2), np.float32)},
            "holds blk.0.ffn_gate_exps.weight, which a llama",
        ),
        ({"token_embd.weight": None}, "no tensor token_embd.weight"),
    ],
)
def test_wrong_tensors_are_named(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model = tiny("llama")
    tensors = {k: v for k, v in (tensors_of(model, "llama") | changes).items() if v is not None}
    write_gguf(tmp_path / "model.gguf", "llama", model_metadata(model, "llama") | byte_level_metadata(), tensors)
    with pytest.raises(GGUFError, match=sentence):
        import_gguf(tmp_path / "model.gguf", tmp_path / "folder")


def test_files_that_are_not_gguf_are_named(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "llama")
    whole = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "unknown.gguf").write_bytes(whole.replace(b"llama", b"klama"))
    with pytest.raises(GGUFError, match=r"general.architecture is 'klama'; supported are llama, smollm3, qwen2, qwen3"):
        import_gguf(tmp_path / "unknown.gguf", tmp_path / "folder")
    for size in (0, 3, 20, 1000, len(whole) // 2, len(whole) - 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(GGUFError, match=r"cut.gguf is not a valid GGUF file"):
            import_gguf(tmp_path / "cut.gguf", tmp_path / "folder")
    with pytest.raises(GGUFError, match="does not exist"):
        import_gguf(tmp_path / "missing.gguf", tmp_path / "folder")


# Tokenizers


def test_a_byte_level_tokenizer_survives(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "llama")
    import_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    imported, original = Tokenizer.load(tmp_path / "folder"), tiny_tokenizers.our_tokenizer()
    for text in (tiny_tokenizers.TEXT, "12345 don't\n\n  x <|im_end|> <think>", "世界 👩‍💻\t½ ① \u00a0 "):
        assert imported.encode(text) == original.encode(text)
        assert imported.encode(text, allow_special=True) == original.encode(text, allow_special=True)
        assert imported.decode(imported.encode(text)) == text
    assert imported.control_tokens == original.control_tokens
    assert (imported.bos_token_id, imported.eos_token_ids, imported.pad_token_id) == (3, (2,), 0)
    assert imported.apply_chat_template([{"content": "hi"}], add_generation_prompt=True) == "hi"


def test_an_imported_folder_opens_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_model(tmp_path / "model.gguf", "llama")
    import_gguf(tmp_path / "model.gguf", tmp_path / "folder", dtype=torch.float32)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "folder"), Tokenizer.load(tmp_path / "folder")
    assert theirs.encode("Hello 12 <|im_end|>") == ours.encode("Hello 12 <|im_end|>", allow_special=True)
    assert theirs.apply_chat_template([{"content": "hi", "role": "user"}], tokenize=False) == "hi"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "folder").generation_config.eos_token_id == 2


SAMPLE = "I'LL it's 12345 ½x  go\n\n  (a+b)==C; naïve 世界"
WORDS = {
    "gpt-2": "I|'|LL| it|'s| 12345| ½|x| | go|\n\n | (|a|+|b|)==|C|;| naïve| 世界",
    "smollm": "I|'|LL| it|'s| |1|2|3|4|5| |½|x| | go|\n\n | (|a|+|b|)==|C|;| naïve| 世界",
    "llama-bpe": "I|'LL| it|'s| |123|45| |½|x| | go|\n\n| | (|a|+b|)==|C|;| naïve| 世界",
    "qwen2": "I|'LL| it|'s| |1|2|3|4|5| |½|x| | go|\n\n| | (|a|+b|)==|C|;| naïve| 世界",
    "tekken": "I|'LL| it|'s| |1|2|3|4|5| |½|x| | go|\n\n| | (|a|+b|)==|C|;| naïve| 世界",
    "default": "I|'|LL| it|'|s| |123|45| |½|x| | go|\n\n  |(|a|+|b|)==|C|;| naïve| 世界",
}


@pytest.mark.parametrize("rule", WORDS)
def test_text_is_split_into_words_by_the_named_rule(rule: str) -> None:
    from tokenizers import Tokenizer as Library

    library = Library.from_str(json.dumps(tokenizer_json(byte_level_metadata(rule))))
    words = [SAMPLE[start:stop] for _, (start, stop) in library.pre_tokenizer.pre_tokenize_str(SAMPLE)]
    assert "|".join(words) == WORDS[rule]


@pytest.mark.parametrize(("rule", "flag", "added"), [("llama-bpe", None, True), ("llama-bpe", False, False)])
def test_the_beginning_of_text_is_added_where_the_model_expects_it(rule: str, flag: bool | None, added: bool) -> None:
    metadata = byte_level_metadata(rule)
    if flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = flag
    tokenizer = Tokenizer(json.dumps(tokenizer_json(metadata)))
    assert (tokenizer.encode("hi", add_special_tokens=True)[0] == 3) is added
    assert tokenizer.encode("hi")[0] != 3


def sentencepiece_metadata() -> dict[str, Any]:
    raw = json.loads(tiny_tokenizers.sentencepiece_json("prepend"))
    vocabulary = raw["model"]["vocab"]
    kinds = {token["content"]: CONTROL for token in raw["added_tokens"]} | {"<|endoftext|>": UNKNOWN}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [BYTE if t.startswith("<0x") else kinds.get(t, NORMAL) for t in tokens],
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def gemma_tokenizer() -> dict[str, Any]:
    """tokenizer.json as Gemma's: no space before a text, runs of spaces and lines as tokens, one token has no row."""
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    tokens, scores, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    for run in ("▁▁", "▁▁▁", "▁▁▁▁", "\n\n"):
        if run not in tokens:
            tokens, scores, types = [*tokens, run], [*scores, 0.0], [*types, NORMAL]
        scores[tokens.index(run)], types[tokens.index(run)] = 1.0, USER_DEFINED
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": types}
    raw = tokenizer_json(metadata)
    image = {**raw["added_tokens"][0], "id": len(tokens), "content": "<image>"}
    raw["added_tokens"].append(image | {"special": True})
    spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return raw | {"pre_tokenizer": spaces}


def sentencepiece_reference(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's algorithm, literally: join the neighbours whose token scores highest, the leftmost first."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ordinary = {token: index for index, token in enumerate(tokens) if types[index] == NORMAL}
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(metadata["tokenizer.ggml.scores"][ordinary[a + b]], -at, at)
                  for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ordinary]  # fmt: skip
        if not joined:
            break
        _, _, at = max(joined)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids = []
    for piece in pieces:
        byte_ids = [tokens.index(f"<0x{byte:02X}>") for byte in piece.encode()]
        ids += [ordinary[piece]] if piece in ordinary else byte_ids
    return ids


def test_a_sentencepiece_tokenizer_follows_its_scores() -> None:
    metadata = sentencepiece_metadata()
    tokenizer = Tokenizer(json.dumps(tokenizer_json(metadata)))
    for text in (
        "Hello world",
        "  def f(self):",
        "naïve 世界 👩‍💻",
        "</s> <s> [INST]",
        tiny_tokenizers.TEXT[2000:2400],
    ):
        assert tokenizer.encode(text) == sentencepiece_reference(metadata, text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a</s>", allow_special=True) == [*tokenizer.encode("a"), 4]
    assert tokenizer.encode("a", add_special_tokens=True)[0] == 3


def test_ordinary_tokens_never_merge_into_a_control_token() -> None:
    """Even where both halves of its spelling are tokens."""
    metadata = sentencepiece_metadata()
    for piece in ("</", "s>"):
        metadata["tokenizer.ggml.tokens"].append(piece)
        metadata["tokenizer.ggml.scores"].append(-0.5)
        metadata["tokenizer.ggml.token_type"].append(NORMAL)
    tokenizer = Tokenizer(json.dumps(tokenizer_json(metadata)))
    assert 4 not in tokenizer.encode("</s>")
    assert tokenizer.encode("</s>", allow_special=True)[-1] == 4


def test_a_token_listed_twice_is_refused() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"][300] = metadata["tokenizer.ggml.tokens"][200]
    with pytest.raises(GGUFError, match="twice"):
        tokenizer_json(metadata)
