"""The metadata of a GGUF file that hold a tokenizer, from a Hugging Face folder: the inverse of `gguf_tokenizer.py`.

What GGUF has no word for is refused: it names rules of splitting text instead of spelling them, and derives the merges
of SentencePiece's kind from scores.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from model.files.safe_io import read_json_object
from model.text.gguf_tokenizer import (
    BYTE,
    CONTROL,
    GPT2_WORDS,
    NORMAL,
    NORMALIZED_TO_NFC,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WHOLE_WORDS_FIRST,
    WORD_RULES,
    GGUFError,
    merges_from_scores,
    padding_token,
)
from model.text.tokenizer import Tokenizer, TokenizerError

ENDS = ("eos", "eot", "eom")
SPACE = "▁"


def tokenizer_metadata(folder: str | Path, num_rows: int) -> dict[str, Any]:
    """Every `tokenizer.` field for a model with so many rows of embeddings; GGUFError for what GGUF cannot hold.

    Raises TokenizerError as `Tokenizer.load` does.
    """
    tokenizer, raw = Tokenizer.load(folder), read_json_object(Path(folder) / "tokenizer.json", TokenizerError)
    if raw["model"].get("type", "BPE") != "BPE":
        raise GGUFError(f"The tokenizer is of the kind {raw['model']['type']}; GGUF files of this export hold BPE.")
    if any(raw["model"].get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        raise GGUFError("The tokenizer has a dropout, prefix or suffix of words, which GGUF cannot hold.")
    tokens, types = _tokens(tokenizer, raw, num_rows)
    lists = {"tokens": tokens, "token_type": types}
    parts = _sentencepiece_parts(raw, tokens, types) if raw["model"].get("byte_fallback") else _byte_level_parts(raw)
    fields = {**parts, **lists, **_special_tokens(tokenizer)}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()} | _templates(tokenizer)


def _tokens(tokenizer: Tokenizer, raw: Mapping[str, Any], num_rows: int) -> tuple[list[str], list[int]]:
    """Spelling and type of each row; rows without a token are padding."""
    # A control token without a row is of no use: Gemma's text models have one for images.
    control = tokenizer.control_tokens
    added = {
        token["id"]: token
        for token in raw.get("added_tokens") or []
        if token["id"] < num_rows or token["id"] not in control
    }
    for token in added.values():
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise GGUFError(f"The token {token['content']!r} takes the spaces beside it, which GGUF cannot say.")
    spelled = {index: token for token, index in raw["model"]["vocab"].items()}
    spelled |= {index: token["content"] for index, token in added.items()}
    if (last := max(spelled)) >= num_rows:
        raise GGUFError(f"The tokenizer's token {last} has no row in the embeddings, which have {num_rows}.")
    tokens = [spelled.get(row, padding_token(row)) for row in range(num_rows)]
    types = [NORMAL if row in spelled else UNUSED for row in range(num_rows)]
    for index in added:
        types[index] = USER_DEFINED
    for index in control.keys() & added.keys():
        types[index] = CONTROL
    return tokens, types


def _byte_level_parts(raw: Mapping[str, Any]) -> dict[str, Any]:
    model = raw["model"]
    words, normalizer = _word_patterns(raw.get("pre_tokenizer")), raw.get("normalizer")
    nfc = normalizer is not None and normalizer["type"] == "NFC"
    for rule, patterns in WORD_RULES.items():
        whole_first, normalized = rule in WHOLE_WORDS_FIRST, rule in NORMALIZED_TO_NFC
        if (patterns, whole_first, normalized) == (words, bool(model.get("ignore_merges")), nfc):
            break
    else:
        raise GGUFError("The tokenizer splits text into words by a rule that llama.cpp has no name for.")
    if normalizer is not None and not nfc:
        raise GGUFError(f"The tokenizer normalizes text by {normalizer['type']}, which GGUF cannot say.")
    return {"model": "gpt2", "pre": rule, "merges": [" ".join(pair) for pair in _merges(model)]}


def _word_patterns(splitter: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """The chain of expressions as `WORD_RULES` has it; None where it is anything else."""
    steps = [] if splitter is None else splitter.get("pretokenizers", [splitter])
    patterns = [_step_pattern(step) for step in steps]
    if None in patterns or not any(step["type"] == "ByteLevel" for step in steps):
        return None
    return tuple(pattern for pattern in patterns if pattern)


def _step_pattern(step: Mapping[str, Any]) -> str | None:
    """The expression by which one step splits, "" where it does not; None for a step that no expression tells."""
    if step["type"] == "Digits":
        return r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
    if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
        return GPT2_WORDS if step.get("use_regex", True) else ""
    if step["type"] == "Split" and (step["behavior"], bool(step.get("invert"))) in (
        ("Isolated", False),
        ("Removed", True),
    ):
        return step["pattern"].get("Regex")
    return None


def _sentencepiece_parts(raw: Mapping[str, Any], tokens: Sequence[str], types: list[int]) -> dict[str, Any]:
    """Marks bytes and the unknown token in `types`, too."""
    model = raw["model"]
    bytes_ = {f"<0x{byte:02X}>" for byte in range(256)}
    for index, token in enumerate(tokens):
        if token in bytes_:
            types[index] = BYTE
    fields: dict[str, Any] = {"model": "llama", "add_space_prefix": _prefixes_space(raw)}
    if (unknown := model.get("unk_token")) is not None:
        fields["unknown_token_id"] = tokens.index(unknown)
        types[tokens.index(unknown)] = UNKNOWN
    merges = _merges(model)
    made = list(dict.fromkeys("".join(pair) for pair in merges))
    ranks = {token: -float(rank) for rank, token in enumerate(made)}
    scores = [ranks.get(token, -float(len(made))) for token in tokens]
    first, rest = _leading_runs(
        merges, {token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED}
    )
    follows = [pair for pair in merges_from_scores(model["vocab"], scores, types) if "".join(pair) not in first]
    if _grouped(follows) != _grouped(rest):
        raise GGUFError("The tokenizer's merges do not follow from an order of its tokens, which is all that GGUF has.")
    return fields | {"scores": scores}


def _leading_runs(merges: Sequence[Sequence[str]], user_defined: set[str]) -> tuple[set[str], Sequence[Sequence[str]]]:
    """The tokens that repeat one character, if merges begin with those, and the merges behind them.

    Their lengths come in any order: from the left a run grows to the longest in each.
    """
    runs = list(takewhile(lambda pair: "".join(pair) in user_defined and len({*pair[0], *pair[1]}) == 1, merges))
    return {"".join(pair) for pair in runs}, merges[len(runs) :]


def _grouped(merges: Iterable[Sequence[str]]) -> list[tuple[str, set[tuple[str, ...]]]]:
    """Tokens in the order in which they are formed, with the pairs that form each."""
    return [(token, {tuple(pair) for pair in pairs}) for token, pairs in groupby(merges, key="".join)]


def _prefixes_space(raw: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text; GGUFError for other rules than SentencePiece's."""
    splitter, normalizer = raw.get("pre_tokenizer"), raw.get("normalizer")
    if normalizer is None and splitter is not None and splitter["type"] == "Metaspace" and not splitter.get("split"):
        return splitter.get("prepend_scheme") != "never"
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    kinds = [step["type"] for step in steps]
    # Gemma splits at spaces after it has replaced all of them.
    splits = splitter is not None and (splitter["type"], splitter.get("pattern")) != ("Split", {"String": " "})
    if splits or kinds not in (["Replace"], ["Prepend", "Replace"]):
        raise GGUFError("The tokenizer treats spaces by a rule that GGUF cannot say.")
    return len(kinds) == 2


def _merges(model: Mapping[str, Any]) -> list[Sequence[str]]:
    """Older files have `"a b"`, newer ones `["a", "b"]`."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]


def _special_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    bos, own_end = tokenizer.bos_token_id, tokenizer.special_tokens.get("eos_token")
    ends = sorted(tokenizer.eos_token_ids, key=lambda index: tokenizer.control_tokens.get(index) != own_end)
    if not 1 <= len(ends) <= len(ENDS):
        raise GGUFError(f"The model has {len(ends)} tokens that end a text; a GGUF file holds 1 to {len(ENDS)}.")
    begins = tokenizer.encode("", add_special_tokens=True)
    if begins not in ([], [bos]):
        raise GGUFError("The tokenizer adds more to a text than its beginning-of-text token, which GGUF cannot say.")
    fields: dict[str, Any] = {f"{name}_token_id": index for name, index in zip(ENDS, ends, strict=False)}
    unknown = tokenizer.special_tokens.get("unk_token")
    fields["unknown_token_id"] = next(
        (row for row, token in tokenizer.control_tokens.items() if token == unknown), None
    )
    fields |= {"add_bos_token": bool(begins), "bos_token_id": bos, "padding_token_id": tokenizer.pad_token_id}
    return {name: value for name, value in fields.items() if value is not None}


def _templates(tokenizer: Tokenizer) -> dict[str, str]:
    return {
        "tokenizer.chat_template" + ("" if name == "default" else f".{name}"): template.source
        for name, template in tokenizer.templates.items()
    }
