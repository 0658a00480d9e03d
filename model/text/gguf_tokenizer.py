"""A Hugging Face tokenizer from the metadata of a GGUF file.

GGUF keeps the vocabulary, the merges or scores, a type for each token, and only the *name* of the rule that splits text
into words before merging (`tokenizer.ggml.pre`). The table below holds those rules.
"""

from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # entries of tokenizer.ggml.token_type

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Each rule is a chain of regular expressions: every match of one becomes a word that the next may split further.
WORD_RULES: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (GPT2_WORDS,),
    "smollm": (r"\p{N}", GPT2_WORDS),
    "starcoder": (r"\p{N}", GPT2_WORDS),
    "refact": (r"\p{N}", GPT2_WORDS),
    "llama-bpe": (LLAMA3_WORDS,),
    "smaug-bpe": (LLAMA3_WORDS,),
    "dbrx": (LLAMA3_WORDS,),
    "qwen2": (QWEN2_WORDS,),
    "deepseek-r1-qwen": (QWEN2_WORDS,),
    "tekken": (TEKKEN_WORDS,),
}
# A word that is in the vocabulary as a whole is one token, whatever the merges say.
WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")
# Rules whose models start every text with the beginning-of-text token unless the file says otherwise.
BEGINS_BY_DEFAULT = ("llama-bpe", "tekken")
NORMALIZED_TO_NFC = ("qwen2", "deepseek-r1-qwen")


class GGUFError(ValueError):
    """A GGUF file that cannot be imported faithfully; the sentence names the field or the tensor."""


def padding_token(row: int) -> str:
    """What llama.cpp's converter calls a row of the embeddings that no token has; its type is UNUSED."""
    return f"[PAD{row}]"


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """The contents of tokenizer.json."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise GGUFError(f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama'.")
    parts = _byte_level_parts(metadata) if kind == "gpt2" else _sentencepiece_parts(metadata)
    tokens, types = _field(metadata, "tokens"), _field(metadata, "token_type")
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[index] == CONTROL,
        }
        for index in range(len(tokens))
        if types[index] in (CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _post_processor(metadata),
        **parts,
    }


def tokenizer_config(metadata: dict[str, Any], max_length: int) -> dict[str, Any]:
    """The contents of tokenizer_config.json; `max_length` in tokens."""
    tokens = _field(metadata, "tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(metadata),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{name}_token"] = tokens[index]
    return config


def special_token_ids(metadata: dict[str, Any]) -> tuple[int | None, list[int], int | None]:
    """Ids of the beginning-of-text token, of all tokens that end a text or a turn, and of padding."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return (
        metadata.get("tokenizer.ggml.bos_token_id"),
        list(dict.fromkeys(index for index in ends if index is not None)),
        metadata.get("tokenizer.ggml.padding_token_id"),
    )


def chat_template(metadata: dict[str, Any]) -> str | None:
    return metadata.get("tokenizer.chat_template")


def _field(metadata: dict[str, Any], name: str) -> Any:
    try:
        return metadata[f"tokenizer.ggml.{name}"]
    except KeyError:
        raise GGUFError(f"The GGUF metadata has no tokenizer.ggml.{name}.") from None


def _byte_level_parts(metadata: dict[str, Any]) -> dict[str, Any]:
    rule = metadata.get("tokenizer.ggml.pre", "default")
    if rule not in WORD_RULES:
        raise GGUFError(f"tokenizer.ggml.pre is {rule!r}; supported are {', '.join(WORD_RULES)}.")
    splits = [
        {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
        for words in WORD_RULES[rule]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if rule in NORMALIZED_TO_NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule in WHOLE_WORDS_FIRST,
            "vocab": _vocabulary(metadata),
            "merges": [_merge_pair(merge) for merge in _field(metadata, "merges")],
        },
    }


def _sentencepiece_parts(metadata: dict[str, Any]) -> dict[str, Any]:
    prefixes = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixes:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    vocabulary = _vocabulary(metadata)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces] if prefixes else [spaces],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else _field(metadata, "tokens")[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges_from_scores(vocabulary, _field(metadata, "scores"), _field(metadata, "token_type")),
        },
    }


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    """Ids by token; rows that only pad the embeddings are none."""
    tokens, types = _field(metadata, "tokens"), _field(metadata, "token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        double = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise GGUFError(f"tokenizer.ggml.tokens lists {double!r} twice.")
    for row, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind == UNUSED and token == padding_token(row):
            del vocabulary[token]
    return vocabulary


def _merge_pair(merge: str) -> list[str]:
    """`"Ġ t"` -> `["Ġ", "t"]`; the first character belongs to the left part even when it is a space."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise GGUFError(f"tokenizer.ggml.merges holds {merge!r}, which is not a pair.")
    return [merge[:cut], merge[cut + 1 :]]


def merges_from_scores(vocabulary: dict[str, int], scores: list[float], types: list[int]) -> list[list[str]]:
    """SentencePiece merges whichever neighbours form the token of the highest score; BPE wants those pairs in order.

    Only tokens of text form: text that spells a control token must not merge into it. Of one score the longest comes
    first, so that runs of spaces grow from the left, as llama.cpp joins them.
    """
    ranked = []
    for token, index in vocabulary.items():
        if types[index] not in (NORMAL, USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], -len(token), index, left, right, [token[:cut], token[cut:]]))
    return [pair for *_, pair in sorted(ranked)]


def _adds_bos(metadata: dict[str, Any]) -> bool:
    by_default = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in BEGINS_BY_DEFAULT
    return bool(metadata.get("tokenizer.ggml.add_bos_token", by_default))


def _post_processor(metadata: dict[str, Any]) -> dict[str, Any] | None:
    """What `add_special_tokens` adds: the beginning-of-text token, where the model expects one."""
    index = metadata.get("tokenizer.ggml.bos_token_id")
    if index is None or not _adds_bos(metadata):
        return None
    bos = _field(metadata, "tokens")[index]
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": bos, "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }
