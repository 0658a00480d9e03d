"""From one document to token ids and what is learnt of them, and to the windows in which it is measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.files.labels import LabelledDocument
from model.text.tokenizer import Tokenizer
from train.rows import Completion, Continuation, Learnt, Preference
from train.sources import Document


@dataclass(frozen=True)
class Encoded:
    """A document as token ids; `mask` is None where every token may be a label."""

    ids: np.ndarray
    mask: np.ndarray | None
    num_bytes: int

    def beginning(self, tokens: int) -> "Encoded":
        """What a sequence of so many tokens holds of it; its bytes are not counted anew."""
        return replace(self, ids=self.ids[:tokens], mask=None if self.mask is None else self.mask[:tokens])


def encode_document(document: Document, tokenizer: Tokenizer) -> list[Encoded]:
    """One document, or the two of a pair."""
    content = document.content
    try:
        return [_encode(part, tokenizer) for part in (content if isinstance(content, Preference) else (content,))]
    except ValueError as reason:
        raise ValueError(f"{document.where}: {reason}") from None


def _encode(content: Learnt, tokenizer: Tokenizer) -> Encoded:
    """Text ends with the tokenizer's end-of-text token; a conversation ends as its template ends it."""
    if isinstance(content, str):
        ids = _ended(tokenizer.encode(content, add_special_tokens=True), tokenizer)
        return Encoded(np.array(ids, dtype=np.int32), None, len(content.encode()))
    if isinstance(content, Completion):
        return _encode_completion(content, tokenizer)
    if "default" not in tokenizer.templates:
        raise ValueError(
            "the model has no chat template to write conversations in; give it one in the recipe, as in "
            "`models: {NAME: {from: …, chat_template: chatml}}`"
        )
    asked, answered = content if isinstance(content, Continuation) else ([], content)
    ids, mask = tokenizer.assistant_mask([*asked, *answered])
    if asked:  # earlier answers stand there to be read, not learnt
        before = tokenizer.chat_token_ids(asked, add_generation_prompt=True)
        if ids[: len(before)] != before:
            raise ValueError("the chat template renders the prompt otherwise once a completion follows it")
        mask = [0] * len(before) + mask[len(before) :]
    spoken = [m["content"] for m in answered if m["role"] == "assistant" and isinstance(m["content"], str)]
    num_bytes = sum(len(text.encode()) for text in spoken)
    return Encoded(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8), num_bytes)


def _encode_completion(content: Completion, tokenizer: Tokenizer) -> Encoded:
    """One text; the end of it is learnt too."""
    ids, mask = tokenizer.completion_mask(*content)
    ended = _ended(ids, tokenizer)
    mask += [1] * (len(ended) - len(ids))
    return Encoded(np.array(ended, dtype=np.int32), np.array(mask, dtype=np.uint8), len(content.completion.encode()))


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """With the end-of-text token, if the tokenizer has one, once."""
    if tokenizer.eos_token_ids and (not ids or ids[-1] not in tokenizer.eos_token_ids):
        return [*ids, tokenizer.eos_token_ids[0]]
    return ids


def held_out_windows(
    documents: Sequence[Encoded], sequence_length: int, tokenizer: Tokenizer
) -> list[tuple[int, Encoded]]:
    """Windows with their numbers in their document; of a pair the first of each answer, or none."""
    if len(documents) == 1:
        return list(enumerate(_cut_windows(documents[0], sequence_length, tokenizer)))
    beginnings = [one.beginning(sequence_length + 1) for one in documents]
    windows = [_cut_windows(one, sequence_length, tokenizer) for one in beginnings]
    return [(0, window) for (window,) in windows] if all(windows) else []


def _cut_windows(document: Encoded, sequence_length: int, tokenizer: Tokenizer) -> list[Encoded]:
    """Windows overlap by one token: the last label of one is the first context of the next."""
    bytes_of = tokenizer.token_bytes(skip_special_tokens=True)
    windows = []
    for start in range(0, max(len(document.ids) - 1, 0), sequence_length):
        ids = document.ids[start : start + sequence_length + 1]
        mask = None if document.mask is None else document.mask[start : start + sequence_length + 1]
        labels = ids[1:] if mask is None else ids[1:][mask[1:] == 1]
        if len(labels):
            windows.append(Encoded(ids, mask, sum(len(bytes_of[i]) for i in labels.tolist())))
    return windows


def encode_labelled(document: LabelledDocument, tokenizer: Tokenizer) -> Encoded:
    """Labels are the tokens of which it is known what the model would have said."""
    mask, bytes_of = np.zeros(len(document.tokens), dtype=np.uint8), tokenizer.token_bytes(skip_special_tokens=True)
    mask[document.positions + 1] = 1
    num_bytes = sum(len(bytes_of[token]) for token in document.tokens[document.positions + 1].tolist())
    return Encoded(document.tokens, mask, num_bytes)
