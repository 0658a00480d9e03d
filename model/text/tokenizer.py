"""The tokenizer of a model folder: text to ids, ids to text, conversations to ids.

Reads what Hugging Face tools write: tokenizer.json, tokenizer_config.json, special_tokens_map.json,
generation_config.json, chat_template.jinja and additional_chat_templates/.

User text never becomes control: `encode` spells "<|im_end|>" in ordinary tokens, and `chat_token_ids` takes control
tokens only from the template.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from model.config_fields import check_token_ids, shown
from model.files.safe_io import read_json_object, sync_file, write_json, write_text
from model.text.chat_template import ChatTemplate, ChatTemplateError, ControlTokens, HiddenText
from model.text.detokenizer import DecodingRule, StreamDecoder, TokenBytes
from model.text.token_bound import TokenBound

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEMPLATE_NAME, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"

Message = Mapping[str, Any]
Token = tuple[int, int, int]
"""An id, and the span of characters that it stands for."""


class TokenizerError(ValueError):
    """A tokenizer that cannot be read, or text that cannot be encoded."""


class Tokenizer:
    """Encodes and decodes; safe to use from several threads."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        config: Mapping[str, Any] | None = None,
        templates: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """`config`: contents of tokenizer_config.json; `templates`: chat templates by name, "default" the main one.

        `eos_token_ids`: ids that end a text besides the config's eos_token.
        """
        self.config = dict(config or {})
        self.special_tokens = {
            name: _spelling(name, self.config[name]) for name in SPECIAL_NAMES if self.config.get(name) is not None
        }
        self._json = tokenizer_json
        # As the file says: spellings of control tokens become control tokens. Only templates are encoded with it.
        self._control = self._build(tokenizer_json)
        added = self._control.get_added_tokens_decoder()
        self.control_tokens = {index: token.content for index, token in added.items() if token.special}
        self._plain = self._build(tokenizer_json)
        self._plain.encode_special_tokens = True
        rule = DecodingRule.from_json(json.loads(tokenizer_json).get("decoder"))
        self.drops_first_space = rule.drops_first_space
        self._all_bytes = TokenBytes(self._control.id_to_token, rule)
        self._visible_bytes = TokenBytes(self._control.id_to_token, rule, hidden=self.control_tokens)
        self.bos_token_id = self._id_of("bos_token")
        self.pad_token_id = self._id_of("pad_token")
        eos = self._id_of("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if eos is None else [eos])]))
        self.templates = {name: ChatTemplate(text, self.special_tokens) for name, text in (templates or {}).items()}

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Opens a model folder. Raises TokenizerError naming the file that is missing or damaged."""
        folder = Path(folder)
        try:
            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            raise TokenizerError(f"{folder} has no tokenizer.json.") from None
        config = {
            **_read_optional(folder / "special_tokens_map.json"),
            **_read_optional(folder / "tokenizer_config.json"),
        }
        eos = _read_optional(folder / "generation_config.json").get("eos_token_id")
        check_token_ids("eos_token_id", eos, "generation_config.json")
        return cls(
            text,
            config=config,
            templates=_read_templates(folder, config.pop("chat_template", None)),
            eos_token_ids=eos if isinstance(eos, list) else [] if eos is None else [eos],
        )

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the chat templates, as transformers reads them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "tokenizer.json", self._json)
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | self.config)
        for name, template in self.templates.items():
            path = folder / (TEMPLATE_NAME if name == "default" else f"{MORE_TEMPLATES}/{name}.jinja")
            path.parent.mkdir(exist_ok=True)
            write_text(path, template.source)
        sync_file(folder)

    def shortened(self, vocab_size: int) -> "Tokenizer":
        """The same with its first `vocab_size` tokens only: what was one token is then several.

        Byte-pair merges come in order of their use, so the tokens that stay are the most common ones. Raises
        TokenizerError where ids do not follow the order of the merges.
        """
        raw = json.loads(self._json)
        vocabulary, merges = raw["model"].get("vocab") or {}, raw["model"].get("merges") or []
        first_made = len(vocabulary) - len(merges)
        made = [
            vocabulary.get(merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)) for merge in merges
        ]
        last_control = max(self._control.get_added_tokens_decoder(), default=-1)
        if not merges or made != list(range(first_made, len(vocabulary))) or last_control >= first_made:
            raise TokenizerError("Only a byte-pair tokenizer whose ids follow its merges can be shortened.")
        if not first_made < vocab_size <= len(vocabulary):
            raise TokenizerError(f"vocab_size is {vocab_size:,}; it can be {first_made + 1:,} to {len(vocabulary):,}.")
        raw["model"]["vocab"] = {token: index for token, index in vocabulary.items() if index < vocab_size}
        raw["model"]["merges"] = merges[: vocab_size - first_made]
        templates = {name: template.source for name, template in self.templates.items()}
        return Tokenizer(json.dumps(raw), config=self.config, templates=templates, eos_token_ids=self.eos_token_ids)

    def with_chat_template(self, source: str, *, ends_with: int | None = None) -> "Tokenizer":
        """The same with this template instead of its own ones, and one more end-of-text token.

        Raises ChatTemplateError for a template that is not valid.
        """
        ends = [*self.eos_token_ids, *([] if ends_with is None else [ends_with])]
        return Tokenizer(self._json, config=self.config, templates={"default": source}, eos_token_ids=ends)

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer; a model may have more rows in its embeddings."""
        return self._control.get_vocab_size(with_added_tokens=True)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides how text and conversations are encoded."""
        parts = [self._json, json.dumps(self.special_tokens, sort_keys=True)]
        parts += [f"{name}\0{template.source}" for name, template in sorted(self.templates.items())]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = False, allow_special: bool = False) -> list[int]:
        """Ids of `text`.

        add_special_tokens: also what the model expects around a text, such as the beginning-of-text token.
        allow_special: spellings of control tokens become control tokens; only for text that no user wrote.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens, allow_special=allow_special)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = False, allow_special: bool = False
    ) -> list[list[int]]:
        """`encode` of many texts, in parallel."""
        engine = self._control if allow_special else self._plain
        try:
            encodings = engine.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError):
            raise TokenizerError("Only valid Unicode text can be encoded: no lone surrogates, no bytes.") from None
        return [encoding.ids for encoding in encodings]

    def least_tokens(self, text: str) -> int:
        """`encode` of this text, or of a rendered conversation, gives at least so many; 0 where nothing is known."""
        return 0 if self._bound is None else self._bound.least(text)

    @cached_property
    def _bound(self) -> TokenBound | None:
        ids = self._control.get_vocab(with_added_tokens=True).values()
        return TokenBound.of(json.loads(self._json), [self._all_bytes[index] for index in ids])

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become replacement characters."""
        decoder = StreamDecoder(self, skip_special_tokens=skip_special_tokens)
        return decoder.push(ids) + decoder.flush()

    def token_bytes(self, *, skip_special_tokens: bool = False) -> TokenBytes:
        """The bytes that each token stands for, by id; for control tokens none with `skip_special_tokens`."""
        return self._visible_bytes if skip_special_tokens else self._all_bytes

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text that the template makes of a conversation; to encode one, use `chat_token_ids`."""
        hidden, given = self._hide(messages, tools, variables)
        template = self._template(tools)
        return hidden.restore(template.render(**given, add_generation_prompt=add_generation_prompt).text)

    def chat_token_ids(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of a conversation. Control tokens come from the template; in messages they are ordinary text.

        `variables` are further names that the template may read. Raises ChatTemplateError when it refuses them.
        """
        hidden, given = self._hide(messages, tools, variables)
        rendered = self._template(tools).render(**given, add_generation_prompt=add_generation_prompt)
        return [index for index, _, _ in self._encode_rendered(rendered.text, hidden)]

    def assistant_mask(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[list[int], list[int]]:
        """Ids of a conversation, and 1 for each token that the assistant wrote, 0 for the others.

        The assistant's are the tokens inside the template's generation blocks. Without such blocks they are what each
        assistant message adds after its generation prompt, its end-of-turn tokens included. A last message with
        `prefix` set is unfinished: the tokens end where its text does.
        """
        hidden, given = self._hide(messages, tools, variables)
        template = self._template(tools)
        rendered = template.render(**given, add_generation_prompt=False)
        spans = rendered.generated
        if not template.marks_generation:
            ends = [self.control_tokens[index] for index in self.eos_token_ids if index in self.control_tokens]
            spans = _added_spans(template, given, rendered.text, ends)
        tokens = self._encode_rendered(rendered.text, hidden)
        if messages and messages[-1].get("prefix"):
            end = _end_of(str(given["messages"][-1]["content"]), rendered.text)
            tokens = [token for token in tokens if token[1] < end]
        return [index for index, _, _ in tokens], _mark_overlaps(tokens, spans)

    def completion_mask(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """Ids of both texts as one, and 1 for each token that holds some of the second, 0 for the others.

        What the tokenizer puts around a text is there too; at its end it belongs to the completion.
        """
        try:
            encoding = self._plain.encode(prompt + completion, add_special_tokens=True)
        except (TypeError, UnicodeError):
            raise TokenizerError("Only valid Unicode text can be encoded: no lone surrogates, no bytes.") from None
        mask = [int(stop > len(prompt)) for _, stop in encoding.offsets]
        first = mask.index(1) if 1 in mask else len(mask)
        return encoding.ids, mask[:first] + [1] * (len(mask) - first)

    def _hide(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]
    ) -> tuple[HiddenText, dict[str, Any]]:
        """What a template is rendered from, with the control tokens that users spelled out of its sight."""
        hidden = HiddenText(self._spellings)
        return hidden, hidden.hide({"messages": messages, "tools": tools, "variables": variables})

    def _template(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ChatTemplateError("This model has no chat template; use plain completions.")
        return self.templates[name]

    @cached_property
    def _spellings(self) -> ControlTokens:
        return ControlTokens(self.control_tokens.values())

    def _encode_rendered(self, text: str, hidden: HiddenText) -> list[Token]:
        """Tokens of rendered text; positions are those of `text`, in which control spellings of users are hidden."""
        encoding = self._control.encode(text, add_special_tokens=False)
        tokens = [(index, start, stop) for index, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)]
        if not hidden.originals:
            return tokens
        # Between two control tokens the tokenizer works on its own, so each such stretch can be encoded anew.
        result: list[Token] = []
        stretch: list[Token] = []
        begin = 0
        for token in [*tokens, None]:
            if token is not None and token[0] not in self.control_tokens:
                stretch.append(token)
                continue
            end = len(text) if token is None else token[1]
            if any(character in hidden.originals for character in text[begin:end]):
                stretch = self._encode_stretch(text, begin, end, hidden)
            result += stretch
            if token is not None:
                result.append(token)
                begin = token[2]
            stretch = []
        return result

    def _encode_stretch(self, text: str, begin: int, end: int, hidden: HiddenText) -> list[Token]:
        """Tokens of `text[begin:end]` with what is hidden in it spelled out in ordinary tokens."""
        stretch = text[begin:end]
        engine = self._continuing if begin else self._plain
        encoding = engine.encode(hidden.restore(stretch), add_special_tokens=False)
        origin = [
            begin + position
            for position, character in enumerate(stretch)
            for _ in hidden.originals.get(character, character)
        ]
        return [
            (index, origin[start], origin[stop - 1] + 1) if start < stop else (index, begin, begin)
            for index, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    @cached_property
    def _continuing(self) -> tokenizers.Tokenizer:
        """Like `_plain`, for text that is not at the beginning: no space is put before the first word."""
        raw = json.loads(self._json)
        splitter = raw.get("pre_tokenizer") or {}
        steps = [step for step in splitter.get("pretokenizers", [splitter]) if step.get("prepend_scheme") == "first"]
        if not steps:
            return self._plain
        for step in steps:
            step["prepend_scheme"] = "never"
        engine = self._build(json.dumps(raw))
        engine.encode_special_tokens = True
        return engine

    def _build(self, tokenizer_json: str) -> tokenizers.Tokenizer:
        try:
            engine = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as reason:  # the library raises bare Exception
            raise TokenizerError(f"tokenizer.json is not valid: {' '.join(str(reason).split())}.") from None
        engine.no_truncation()
        engine.no_padding()
        # A token that the configuration names as special is one, even where tokenizer.json forgets to say so.
        control = {token.content for token in engine.get_added_tokens_decoder().values() if token.special}
        named = set(self.special_tokens.values()) - control
        engine.add_special_tokens([token for token in sorted(named) if engine.token_to_id(token) is not None])
        return engine

    def _id_of(self, name: str) -> int | None:
        spelling = self.special_tokens.get(name)
        return None if spelling is None else self._control.token_to_id(spelling)


def vocabulary_difference(one: str | Path, other: str | Path, *, names: tuple[str, str]) -> str | None:
    """What differs between the vocabularies of two model folders, as "A has 1,024 tokens, B 1,536", by their names.

    None where they are equal: rows that only pad an embedding are no tokens. Merges, templates and settings may differ.
    """
    ours, theirs = _spellings_of(Path(one)), _spellings_of(Path(other))
    if ours == theirs:
        return None
    if len(ours) != len(theirs):
        return f"{names[0]} has {len(ours):,} tokens, {names[1]} {len(theirs):,}"
    token = min(index for index in ours.keys() | theirs.keys() if ours.get(index) != theirs.get(index))
    return f"token {token} is {ours.get(token)!r} in {names[0]} and {theirs.get(token)!r} in {names[1]}"


def _spellings_of(folder: Path) -> dict[int, str]:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise TokenizerError(f"{folder} has no tokenizer.json, so its vocabulary cannot be compared")
    vocabulary = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    return {index: token for token, index in vocabulary.items()}


def _spelling(name: str, token: Any) -> str:
    spelled = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(spelled, str):
        raise TokenizerError(f"tokenizer_config.json has {name} {shown(token)}; it must be text, or have a content.")
    return spelled


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path, TokenizerError) if path.exists() else {}


def _read_templates(folder: Path, configured: Any) -> dict[str, str]:
    """Templates by name; files go before what tokenizer_config.json holds."""
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif configured is not None:
        templates |= _named_templates(configured)
    paths = {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    if (folder / TEMPLATE_NAME).exists():
        paths["default"] = folder / TEMPLATE_NAME
    return templates | {name: path.read_text(encoding="utf-8") for name, path in paths.items()}


def _named_templates(configured: Any) -> dict[str, str]:
    entries = configured if isinstance(configured, list) else [configured]
    for entry in entries:
        if not (isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))):
            raise TokenizerError(
                f"tokenizer_config.json has chat_template {shown(configured)}; it must be text or a list of named ones."
            )
    return {entry["name"]: entry["template"] for entry in entries}


def _added_spans(
    template: ChatTemplate, given: dict[str, Any], whole: str, ends_of_turn: Sequence[str]
) -> list[tuple[int, int]]:
    """For each assistant message, the characters from the end of its generation prompt to the end of its turn.

    The end is where the conversation ends when it is cut after that message. Where a template shows a last turn in
    another way than an earlier one (Qwen3 drops earlier thoughts), it is the turn's first end-of-text token.
    """
    messages = given["messages"]
    spans = []
    for turn, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = template.render(**given | {"messages": messages[:turn]}, add_generation_prompt=True).text
        after = template.render(**given | {"messages": messages[: turn + 1]}, add_generation_prompt=False).text
        stop = len(after)
        if not (whole.startswith(after) and after.startswith(before)):
            found = [(whole.find(end, len(before)), end) for end in ends_of_turn]
            stop = min((at + len(end) for at, end in found if at >= 0), default=-1)
        if not whole.startswith(before) or stop < 0:
            raise ChatTemplateError(
                f"Which tokens of message {turn} are the assistant's cannot be told from this chat template: it "
                "renders earlier turns differently once later ones follow. Put {% generation %} ... {% endgeneration %}"
                " around the assistant's text in the template."
            )
        spans.append((len(before), stop))
    return spans


def _end_of(content: str, rendered: str) -> int:
    """Where the text of the last message ends in the conversation; templates may trim it."""
    at = rendered.rfind(content.strip())
    if at < 0:
        raise ChatTemplateError("The last message is unfinished, but the chat template does not show it as it is.")
    return at + len(content.strip())


def _mark_overlaps(tokens: Sequence[Token], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for each token that shares a character with a span. Tokens and spans are in order of position."""
    mask = []
    current = 0
    for _, start, stop in tokens:
        while current < len(spans) and spans[current][1] <= start:
            current += 1
        mask.append(int(current < len(spans) and spans[current][0] < stop and start < spans[current][1]))
    return mask
