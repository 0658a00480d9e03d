"""Tiny tokenizers of the two kinds that matter, trained on the spot, and chat templates to go with them."""

import functools
import inspect
import json
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from model.text.tokenizer import Tokenizer

TEXT = inspect.getsource(json) + inspect.getsource(functools) + "Grüße, 世界! Привет 👩‍💻 naïve café\n" * 3
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"]
NAMES = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}

# SentencePiece writes spaces as "▁", so the character itself does not survive.
ANY_TEXT = st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=40)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_GENERATION = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
LLAMA3_LIKE = """
{%- set ns = namespace(system='You are terse.') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token + '<|im_start|>system\n' + ns.system + '<|im_end|>' }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('Unexpected role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' ~ message['role'] ~ '\n\n' ~ message['content'] | trim ~ '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n\n' }}
{%- endif %}
"""
TOOLS = """
{%- if tools %}
<|im_start|>system
Tools, as of {{ strftime_now('%Y') }}:
    {%- for tool in tools %}
{{ tool | tojson }}
{{ tool.function.parameters | tojson(indent=2) }}
    {%- endfor %}
<|im_end|>
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'stop' %}
        {%- break %}
    {%- endif %}
<|im_start|>{{ message.role }}
    {%- if message.content is string %}
{{ message.content }}
    {%- elif message.content %}
        {%- for part in message.content %}{{ part.text }}{% endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
    {%- endfor %}
<|im_end|>
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
"""
MISTRAL_LIKE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Thoughts are shown in the last answer alone, as Qwen3 does.
FORGETS_THOUGHTS = """
{%- for message in messages %}
    {%- set content = message.content %}
    {%- set thoughts = '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.last %}{{- '<think>\n' + thoughts + '\n</think>\n\n' }}{% endif %}
    {{- content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
TEMPLATES = {
    "chatml": CHATML,
    "generation": CHATML_GENERATION,
    "llama3": LLAMA3_LIKE,
    "tools": TOOLS,
    "mistral": MISTRAL_LIKE,
    "forgets": FORGETS_THOUGHTS,
}


@functools.cache
def byte_level_json(vocab_size: int = 500) -> str:
    """GPT-2's kind, as Llama 3, Qwen and SmolLM have it; "<think>" is an added token that is not control."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer.to_str()


@functools.cache
def sentencepiece_json(kind: str) -> str:
    """Llama 2's kind, with bytes for unknown characters: "prepend" as first converted, "metaspace" as of today."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<|endoftext|>", fuse_unk=True))
    replace = decoders.Replace("▁", " ")
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=90,
        max_token_length=12,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(raw)


KINDS = ("byte-level", "prepend", "metaspace")


def tokenizer_json(kind: str) -> str:
    return byte_level_json() if kind == "byte-level" else sentencepiece_json(kind)


def decoded(kind: str, text: str) -> str:
    """What remains of a text: "metaspace" takes a space at its beginning for the one that it would have put there."""
    return text.removeprefix(" ") if kind == "metaspace" else text


def our_tokenizer(kind: str = "byte-level", template: str | None = None) -> Tokenizer:
    templates = None if template is None else {"default": TEMPLATES[template]}
    return Tokenizer(tokenizer_json(kind), config=NAMES, templates=templates)


def their_tokenizer(kind: str = "byte-level", template: str | None = None) -> Any:
    """The same in transformers."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer_json(kind)), **NAMES)
    theirs.chat_template = None if template is None else TEMPLATES[template]
    return theirs
