"""Chat templates that models are given: rendered as transformers renders them, learnt, and ended where they end."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from model.files.checkpoint import load_config
from model.text.chat_template import ChatTemplateError
from model.text.shipped_templates import SHIPPED, set_chat_template
from model.text.tokenizer import Tokenizer
from pipeline.stages.import_model.config import ModelSource, file_times
from pipeline.stages.import_model.run import import_model
from tests.pipeline.tiny_run import write_teacher

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What is a pot still?"},
    {"role": "assistant", "content": "Copper."},
    {"role": "user", "content": "Sure? <|im_end|>"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model without a chat template whose text ends with <|endoftext|>."""
    folder = write_teacher(tmp_path / "base")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    for name in ("config.json", "generation_config.json"):
        raw = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(raw | {"eos_token_id": 0}))
    return folder


@pytest.mark.parametrize("name", SHIPPED)
def test_a_base_model_writes_conversations_as_transformers_does(name: str, base: Path) -> None:
    set_chat_template(base, name)
    ours, theirs = Tokenizer.load(base), AutoTokenizer.from_pretrained(base)
    for prompt in (False, True):
        expected = theirs.apply_chat_template(MESSAGES[:-2], tokenize=False, add_generation_prompt=prompt)
        assert ours.apply_chat_template(MESSAGES[:-2], add_generation_prompt=prompt) == expected
    ids, mask = ours.assistant_mask(MESSAGES)
    learnt = ours.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special_tokens=False)
    end = {"chatml": "<|im_end|>", "plain": "<|endoftext|>"}[name]
    assert learnt == f"Copper.{end}\nYes.{end}\n"
    end_id = theirs.convert_tokens_to_ids(end)
    assert end_id in load_config(base).eos_token_ids and end_id in ours.eos_token_ids
    assert ours.eos_token_ids[0] == 0, "plain text ends as before"


def test_a_template_begins_as_the_tokenizer_begins_a_text(base: Path) -> None:
    raw = json.loads((base / "tokenizer.json").read_text())
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    one = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    raw["post_processor"] = {"type": "TemplateProcessing", "single": one, "pair": one, "special_tokens": special}
    (base / "tokenizer.json").write_text(json.dumps(raw))
    settings = {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    set_chat_template(base, "plain")
    rendered = Tokenizer.load(base).apply_chat_template(MESSAGES[:1], add_generation_prompt=False)
    assert rendered == "<|im_start|>System:\nBe kind.\n\n"


def test_a_file_replaces_the_models_own(base: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}")
    set_chat_template(base, "chatml")
    set_chat_template(base, str(tmp_path / "own.jinja"))
    tokenizer = Tokenizer.load(base)
    assert tokenizer.apply_chat_template(MESSAGES[1:2], add_generation_prompt=True).startswith("user>What is")
    assert tokenizer.eos_token_ids == (0, 2)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "must be chatml or plain, or a file with a Jinja template"),
        ("{% for", "The chat template is not valid, line 1"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not end what the assistant says with a control"),
    ],
)
def test_what_is_no_template_is_one_sentence(content: str | None, sentence: str, base: Path, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "own.jinja").write_text(content)
    with pytest.raises(ChatTemplateError, match=sentence):
        set_chat_template(base, str(tmp_path / "own.jinja"))


def test_a_tokenizer_without_the_tokens_is_told_of_plain(base: Path) -> None:
    raw = (base / "tokenizer.json").read_text().replace("<|im_end|>", "<|other|>")
    (base / "tokenizer.json").write_text(raw)
    with pytest.raises(ChatTemplateError, match=r"template chatml does not end .* `plain` ends it"):
        set_chat_template(base, "chatml")
    set_chat_template(base, "plain")


def test_an_import_gives_the_model_its_template_and_keeps_its_weights(base: Path, tmp_path: Path) -> None:
    source = ModelSource(origin=str(base), chat_template="plain")
    import_model(source, tmp_path / "imported", tmp_path / "cache")
    assert "Assistant:" in (tmp_path / "imported" / "chat_template.jinja").read_text()
    import_model(ModelSource(origin=str(base)), tmp_path / "plain", tmp_path / "cache")
    names = ("imported/model.safetensors", "plain/model.safetensors")
    assert len({(tmp_path / name).read_bytes() for name in names}) == 1
    assert not (tmp_path / "plain" / "chat_template.jinja").exists()


def test_another_text_in_the_file_is_another_import(base: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("one")
    source = ModelSource(origin=str(base), chat_template=str(own))
    before = file_times(source)
    own.write_text("two")
    assert file_times(source) != before
    assert file_times(ModelSource(origin=str(base))) == before[0]
