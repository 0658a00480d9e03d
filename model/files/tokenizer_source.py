"""The tokenizer of a model from wherever models come from, without its weights."""

import tempfile
from pathlib import Path

from model.files.sources import locate
from model.text.shipped_templates import templated
from model.text.tokenizer import Tokenizer

FILES = ["*.json", "*.jinja"]


def load_tokenizer(
    source: str, *, revision: str | None, sha256: str | None, chat_template: str | None, cache: Path
) -> Tokenizer:
    """As a run's import of the model would publish it. Raises as `locate` and `Tokenizer.load`."""
    found = locate(source, revision=revision, sha256=sha256, files=FILES, cache=cache)
    if found.is_file():
        from model.formats.gguf.reader import write_gguf_tokenizer

        with tempfile.TemporaryDirectory() as folder:
            write_gguf_tokenizer(found, Path(folder))
            tokenizer = Tokenizer.load(folder)
    else:
        tokenizer = Tokenizer.load(found)
    return tokenizer if chat_template is None else templated(tokenizer, chat_template)
