"""Chat templates for models that came without one, and how a model folder gets one.

    chatml   <|im_start|>role … <|im_end|>, for tokenizers that have these tokens
    plain    "User:", "Assistant:", answers end with the end-of-text token; for every tokenizer

A model stops where its template ends the assistant's turn, so the token that does becomes an end-of-text token.
"""

import shutil
from pathlib import Path

from model.files.safe_io import CheckpointError, read_json_object, write_json
from model.text.chat_template import ChatTemplateError
from model.text.tokenizer import MORE_TEMPLATES, Tokenizer

FOLDER = Path(__file__).parent / "templates"
SHIPPED = ("chatml", "plain")
ANSWER = "potstill"


def template_text(chosen: str) -> str:
    """A shipped template by its name, or the text of a file; raises ChatTemplateError where there is neither."""
    path = FOLDER / f"{chosen}.jinja" if chosen in SHIPPED else Path(chosen).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        known = " or ".join(SHIPPED)
        raise ChatTemplateError(
            f"chat_template is {chosen!r}; it must be {known}, or a file with a Jinja template"
        ) from None


def set_chat_template(folder: Path, chosen: str) -> None:
    """Gives the model in `folder` this template instead of its own. Raises as `templated`."""
    tokenizer = Tokenizer.load(folder)
    renewed = templated(tokenizer, chosen)
    shutil.rmtree(folder / MORE_TEMPLATES, ignore_errors=True)
    renewed.save(folder)
    if renewed.eos_token_ids != tokenizer.eos_token_ids:
        _write_ends(folder, list(renewed.eos_token_ids))


def templated(tokenizer: Tokenizer, chosen: str) -> Tokenizer:
    """The same tokenizer with this template, and with what ends its turns as the last of its end-of-text tokens.

    Raises ChatTemplateError when there is no such template, or it ends no turn with a control token of the tokenizer.
    """
    text = template_text(chosen)
    if chosen in SHIPPED and tokenizer.bos_token_id in tokenizer.encode("", add_special_tokens=True)[:1]:
        text = "{{- bos_token }}\n" + text
    renewed = tokenizer.with_chat_template(text)
    return tokenizer.with_chat_template(text, ends_with=_end_of_turn(renewed, chosen))


def _end_of_turn(tokenizer: Tokenizer, chosen: str) -> int:
    """The control token behind an answer."""
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    rest = tokenizer.apply_chat_template(asked, add_generation_prompt=False).rpartition(ANSWER)[2]
    found = [(rest.index(token), index) for index, token in tokenizer.control_tokens.items() if token in rest]
    if not found:
        known = ", ".join(sorted(tokenizer.control_tokens.values())[:8]) or "none"
        raise ChatTemplateError(
            f"The chat template {chosen} does not end what the assistant says with a control token of the tokenizer "
            f"({known}), so the model could not learn to stop; `plain` ends it with the end-of-text token"
        )
    return min(found)[1]


def _write_ends(folder: Path, eos_token_ids: list[int]) -> None:
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            write_json(
                folder / name, read_json_object(folder / name, CheckpointError) | {"eos_token_id": eos_token_ids}
            )
