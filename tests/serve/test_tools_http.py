"""Tools and thoughts over HTTP with OpenAI's own client: one test template for each family, answers that are quoted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from model.text.tokenizer import Tokenizer as OurTokenizer
from serve.http.tools.formats import formats_of
from tests.serve.http_server import SCRIPTED, RunningServer, running_server, save_tiny_folder

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION = {"name": "weather", "description": "What the weather will be", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "now"}}]

HERMES = """
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% elif enable_thinking is defined %}<think>

</think>

{% endif %}{% endif %}"""
LLAMA3 = """
{%- for message in messages %}<|im_start|>{{ message.role }}

{% if tools and loop.first %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{% endif %}
{%- if message.tool_calls %}{"name": "{{ message.tool_calls[0].function.name }}", "parameters":{{ " " }}
{{- message.tool_calls[0].function.arguments | tojson }}}{% else %}{{ message.content }}{% endif %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""
MISTRAL = """{{ bos_token }}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
{%- endfor %}[TOOL_CALLS]{{ message.tool_calls | tojson }}{{ eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.tool_call_id }} {{ message.content }}[/TOOL_RESULTS]
{%- else %}{{ message.content }}{{ eos_token }}{% endif %}
{%- endfor %}"""
SMOLLM3 = """<|im_start|>system
{% if xml_tools or python_tools %}{% if xml_tools %}{% for tool in xml_tools[:] %}{{ tool | string }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}{% endif %}<|im_end|>
{% for message in messages %}<|im_start|>{{ message.role if message.role != 'tool' else 'user' }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PYTHONIC = LLAMA3.replace("Respond in", "Call [func_name1(params_name1=params_value1)] or respond in").replace(
    '"parameters": dictionary of argument name', "as"
)
ONE = [("weather", {"city": "Zürich", "days": 2})]
TWO = [*ONE, ("now", {})]
NOW_CALL = '{"name": "now", "arguments": {}}'
JSON_CALL = '{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}'
FAMILIES: dict[str, tuple[str, str, str | None, list[tuple[str, dict[str, Any]]]]] = {
    "hermes": (
        HERMES,
        f"I look it up.\n<tool_call>\n{JSON_CALL}\n</tool_call>\n<tool_call>\n{NOW_CALL}\n</tool_call>",
        "I look it up.",
        TWO,
    ),
    "llama3_json": (LLAMA3, JSON_CALL.replace("arguments", "parameters"), None, ONE),
    "llama3_json tag": (LLAMA3, f"<|python_tag|>{JSON_CALL}", None, ONE),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{JSON_CALL}]", None, ONE),
    "mistral named": (
        MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Zürich", "days": 2}[TOOL_CALLS]now[ARGS]{}', None, TWO,
    ),
    "smollm3": (SMOLLM3, f"<tool_call>{JSON_CALL}</tool_call>", None, ONE),
    "smollm3 code": (SMOLLM3, "<code>\nprint(weather('Zürich', days=2))\nnow()\n</code>", None, TWO),
    "pythonic": (PYTHONIC, "[weather(city='Zürich', days=2), now()]", None, TWO),
}  # fmt: skip
CONTROL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>"]
ANSWERS = {"Thanks": "You are welcome.", "sunny": "It will be sunny.", "Talk": "<|im_start|>Hello <b>there</b>."}
QUESTION: Any = [{"role": "user", "content": "Weather?"}]


def save_family(folder: Path, template: str, answers: dict[str, str]) -> Path:
    """A tiny model folder whose vocabulary has the formats' control tokens."""
    save_tiny_folder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (folder / "answers.json").write_text(json.dumps(ANSWERS | answers))
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of one family, and what its model says of the weather."""
    template, text, content, calls = FAMILIES[request.param]
    folder = save_family(tmp_path_factory.mktemp("family") / "model", template, {"Weather?": text})
    assert formats_of(OurTokenizer.load(folder)).tools.name == request.param.split()[0]  # type: ignore[union-attr]
    with running_server(folder, folder.parent / "log", "--served-model-name", "tiny", program=SCRIPTED) as server:
        yield server, folder, content, calls


def called(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_calls_whole_streamed_and_sent_back(family: Any) -> None:
    """The model calls tools, is sent its own message and their results, and answers; templates see what was said."""
    server, folder, content, calls = family
    client = server.client()
    first = client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS)
    choice = first.choices[0]
    assert (choice.finish_reason, choice.message.content, called(choice.message)) == ("tool_calls", content, calls)
    assert len({call.id for call in choice.message.tool_calls}) == len(calls)
    with client.chat.completions.stream(model="tiny", messages=QUESTION, tools=strict(TOOLS)) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.content or None, called(final.message)) == ("tool_calls", content, calls)

    messages = [*QUESTION, choice.message]
    for call in choice.message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    second = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, extra_body={"return_token_ids": True}
    )
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "It will be sunny.")
    assert second.choices[0].message.tool_calls is None
    assert second.model_extra is not None
    seen = OurTokenizer.load(folder).decode(second.model_extra["prompt_token_ids"], skip_special_tokens=False)
    assert seen == rendered_by_transformers(folder, messages)


def strict(tools: Any) -> Any:
    """OpenAI's `stream` takes tools whose arguments it can check only."""
    return [tool | {"function": tool["function"] | {"strict": True}} for tool in tools]


def rendered_by_transformers(folder: Path, messages: list[Any]) -> str:
    from transformers import AutoTokenizer

    plain = [dict(message) if isinstance(message, dict) else message.to_dict() for message in messages]
    for message in plain:
        message["content"] = message.get("content") or ""
        for call in message.get("tool_calls") or ():
            function = call["function"]  # in the order in which a model writes it
            call["function"] = {"name": function["name"], "arguments": json.loads(function["arguments"])}
    text: str = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        plain, tools=TOOLS, xml_tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    return text


def test_deltas_have_openais_shape(family: Any) -> None:
    """A call begins with index, id, type and name; then only pieces of its arguments come."""
    server, _, content, calls = family
    events = list(server.client().chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS, stream=True))
    assert events[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(event.choices[0].delta.content or "" for event in events) == (content or "")
    deltas = [call for event in events for call in event.choices[0].delta.tool_calls or ()]
    begun: list[int] = []
    for delta in deltas:
        if delta.index in begun:
            assert delta.index == begun[-1] and (delta.id, delta.type, delta.function.name) == (None, None, None)
        else:
            assert delta.id and delta.type == "function" and delta.function.name
            assert delta.function.arguments == ""
            begun.append(delta.index)
    assert begun == list(range(len(calls)))


def test_answers_without_calls_are_content(family: Any) -> None:
    server, _, _, _ = family
    client = server.client()
    for text, answer in (("Thanks", "You are welcome."), ("Talk", "Hello <b>there</b>.")):
        messages: Any = [{"role": "user", "content": text}]
        whole = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0]
        assert (whole.finish_reason, whole.message.content, whole.message.tool_calls) == ("stop", answer, None)
        events = list(client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, stream=True))
        assert "".join(event.choices[0].delta.content or "" for event in events) == answer


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    answers = {
        "Weather?": FAMILIES["hermes"][1],
        "Think": f"<think>\nIs it <tool_call>?\n</think>\n\nYes.\n<tool_call>{JSON_CALL}</tool_call>",
        "Ponder": "So it is.\n</think>\n\n42",
        "Broken": '<tool_call>{"name": "weather", "arguments": nonsense}</tool_call>',
    }
    folder = save_family(tmp_path_factory.mktemp("hermes") / "model", HERMES, answers)
    with running_server(folder, folder.parent / "log", "--served-model-name", "tiny", program=SCRIPTED) as running:
        yield running


def ask(server: RunningServer, text: str, **fields: Any) -> Any:
    given: Any = {"messages": [{"role": "user", "content": text}], "tools": TOOLS} | fields
    return server.client().chat.completions.create(model="tiny", **given)


def test_broken_calls_stay_content(hermes: RunningServer) -> None:
    choice = ask(hermes, "Broken").choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == '<tool_call>{"name": "weather", "arguments": nonsense}</tool_call>'


def test_one_call_where_parallel_calls_are_not_wanted(hermes: RunningServer) -> None:
    assert called(ask(hermes, "Weather?", parallel_tool_calls=False).choices[0].message) == ONE
    events = list(ask(hermes, "Weather?", parallel_tool_calls=False, stream=True))
    assert {call.index for event in events for call in event.choices[0].delta.tool_calls or ()} == {0}
    assert called(ask(hermes, "Weather?", parallel_tool_calls=True).choices[0].message) == TWO


def test_without_a_choice_of_tools_nothing_is_shown_or_parsed(hermes: RunningServer) -> None:
    choice = ask(hermes, "Weather?", tool_choice="none").choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert "weather" in choice.message.content
    assert ask(hermes, "Weather?", tool_choice="none").usage == ask(hermes, "Weather?", tools=[]).usage


def test_a_call_that_max_tokens_cuts_is_not_finished(hermes: RunningServer) -> None:
    whole = ask(hermes, "Weather?").choices[0].message.tool_calls[0].function.arguments
    for most in range(20, 60):
        choice = ask(hermes, "Weather?", max_tokens=most).choices[0]
        assert choice.finish_reason == "length"
        for call in (choice.message.tool_calls or ())[:1]:
            assert whole.startswith(call.function.arguments.removesuffix("\ufffd"))  # half a character


def test_choices_have_calls_of_their_own(hermes: RunningServer) -> None:
    choices = ask(hermes, "Weather?", n=3).choices
    assert [called(choice.message) for choice in choices] == [TWO] * 3
    assert len({call.id for choice in choices for call in choice.message.tool_calls}) == 6


def test_token_ids_of_a_stream_come_once(hermes: RunningServer) -> None:
    body = {"return_token_ids": True}
    whole = ask(hermes, "Think", extra_body=body).choices[0].model_extra["token_ids"]
    events = list(ask(hermes, "Think", extra_body=body, stream=True))
    assert [token for event in events for token in event.choices[0].model_extra.get("token_ids", ())] == whole


def test_thoughts_are_a_field_of_their_own(hermes: RunningServer) -> None:
    message = ask(hermes, "Think").choices[0].message
    assert (message.reasoning, message.reasoning_content) == ("Is it <tool_call>?",) * 2
    assert (message.content, called(message)) == ("Yes.", ONE)
    deltas = [event.choices[0].delta for event in ask(hermes, "Think", stream=True)]
    for name in ("reasoning", "reasoning_content"):
        assert "".join((delta.model_extra or {}).get(name, "") for delta in deltas) == "Is it <tool_call>?"
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    without_tools = ask(hermes, "Think", tools=None).choices[0].message
    assert without_tools.reasoning == "Is it ?"  # a control token shows only where it may begin a call
    assert without_tools.content.startswith("Yes.") and without_tools.tool_calls is None


def test_thoughts_that_the_prompt_opens(hermes: RunningServer) -> None:
    def message(thinking: bool | None) -> Any:
        return (
            ask(hermes, "Ponder", extra_body={"chat_template_kwargs": {"enable_thinking": thinking}}).choices[0].message
        )

    assert (message(True).reasoning, message(True).content) == ("So it is.", "42")
    for thinking in (None, False):  # the model closes thoughts that nobody has opened: text as any other
        assert message(thinking).content == "So it is.\n</think>\n\n42"


def test_thoughts_are_sent_back(hermes: RunningServer) -> None:
    message = ask(hermes, "Think").choices[0].message
    messages = [{"role": "user", "content": "Think"}, message.to_dict(), {"role": "user", "content": "Thanks"}]
    for names in ({"reasoning"}, {"reasoning_content"}, {"reasoning", "reasoning_content"}):
        sent = {
            name: value for name, value in message.to_dict().items() if not name.startswith("reas") or name in names
        }
        answer = httpx.post(f"{hermes.url}/tokenize", json={"messages": [messages[0], sent, messages[2]]}).json()
        text = httpx.post(f"{hermes.url}/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
        assert "<think>\nIs it <tool_call>?\n</think>\n\nYes." in text
    assert ask(hermes, "", messages=messages).choices[0].message.content == "You are welcome."


def test_arguments_that_are_not_json_are_taken_back(hermes: RunningServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zü'}}
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "no JSON, but sunny"})
    assert ask(hermes, "", messages=messages).choices[0].message.content == "It will be sunny."


def test_a_thought_that_is_continued(hermes: RunningServer) -> None:
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [{"role": "user", "content": "Hm"}, {"role": "assistant", "content": "<think>\nPonder"}]
    message = ask(hermes, "", messages=messages, extra_body=extra).choices[0].message
    assert (message.reasoning, message.content) == ("So it is.", "42")


def test_models_that_cannot_call_say_so(tmp_path: Path) -> None:
    without = save_family(tmp_path / "without", HERMES.replace("tools", "cools"), {"Weather?": "no"})
    with running_server(without, tmp_path / "log", "--served-model-name", "tiny", program=SCRIPTED) as server:
        with pytest.raises(openai.BadRequestError, match="chat template shows it none") as caught:
            ask(server, "Weather?")
        assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    template = HERMES.replace("<tool_call>", "<my_call>")
    unknown, log = save_family(tmp_path / "unknown", template, {"Weather?": FAMILIES["hermes"][1]}), tmp_path / "log"
    with running_server(unknown, log, "--served-model-name", "tiny", program=SCRIPTED) as server:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
            ask(server, "Weather?")
        assert caught.value.param == "tools"
    options = ("--served-model-name", "tiny", "--tool-call-parser", "hermes", "--reasoning-parser", "none")
    with running_server(unknown, log, *options, program=SCRIPTED) as server:
        assert called(ask(server, "Weather?").choices[0].message) == TWO
        assert ask(server, "Weather?", tools=None).choices[0].message.content.startswith("I look it up.")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (HERMES, "hermes", "qwen3"),
        (HERMES.replace("<tool_call>", "<tool_call><function="), None, "qwen3"),
        (LLAMA3, "llama3_json", None),
        (MISTRAL + "{# [THINK] [/THINK] #}", "mistral", "mistral"),
        (SMOLLM3, "smollm3", None),
        (PYTHONIC, "pythonic", None),
    ],
)
def test_formats_are_read_off_the_template(
    tmp_path: Path, template: str, tools: str | None, reasoning: str | None
) -> None:
    from serve.http.tools.registry import REASONING_FORMATS

    formats = formats_of(OurTokenizer.load(save_family(tmp_path / "model", template, {})))
    assert formats.shows_tools
    assert (formats.tools.name if formats.tools else None) == tools
    assert formats.reasoning == (REASONING_FORMATS[reasoning] if reasoning else None)
