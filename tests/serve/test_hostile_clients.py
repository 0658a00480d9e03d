"""Promises about clients that try everything, on one real server: they hurt nobody else, and leave nothing behind.

The numbers of tests/serve/README.md: a part of each in every run, all with `--all-trials`.
"""

import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.http_server import RunningServer, children_of, running_server, save_tiny_folder
from tests.trials import trials

KEYS = ("first-key-of-the-test", "second-key-of-the-test")
CANARY = "canary5e1f"
MAX_MODEL_LEN, VOCAB_SIZE = 512, 512
HEALTHY = {"prompt": list(range(5, 40)), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ \S+: ")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Its log is read at the end: one record a line, without prompts and keys."""
    folder = save_tiny_folder(tmp_path_factory.mktemp("hostile") / "model")
    keys = [word for key in KEYS for word in ("--api-key", key)]
    draft = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']
    sizes = ["--dtype", "float32", "--kv-cache-bytes", "8M", "--max-model-len", str(MAX_MODEL_LEN)]
    log = folder.parent / "log"
    with running_server(folder, log, "--served-model-name", "tiny", *sizes, *draft, *keys) as running:
        running.api_key = KEYS[0]
        yield running
        text = log.read_text() + httpx.get(f"{running.url}/metrics").text
        assert running.metric("potstill:engine_restarts_total") == 0
    assert CANARY not in text, "a prompt was written down"
    assert not any(key in text for key in KEYS), "a key was written down"
    assert all(RECORD.match(line) for line in log.read_text().splitlines())


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with client_of(server) as client:
        yield client


def client_of(server: RunningServer, key: str = KEYS[0]) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def post(http: httpx.Client, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    """With escapes, so that JSON holds what UTF-8 cannot."""
    return http.post(path, content=json.dumps(fields), headers={"Content-Type": "application/json"})


# Poison (S8)

DEEP_SCHEMA = json.loads('{"type": "array", "items": ' * 14 + "{}" + "}" * 14)
POISONS: list[dict[str, Any]] = [
    *({"prompt": [token]} for token in (-1, VOCAB_SIZE, 2**31 - 1, 2**31, 1.5)),
    *({"prompt": prompt} for prompt in ([], [[]], "", "\ud83d", "\0" * 300, "\u202e" * 200, [5] * 600)),
    *({"logit_bias": bias} for bias in ({"511": 100, "5": -100}, {"-1": 1}, {"99999": 1}, {"5": 1e308})),
    *({"stop": stop} for stop in ("\0", "\ufffd", ["a" * 1024] * 4, ["a" * 1025], [""])),
    *({"bad_words": words} for words in (["\0"], ["e"] * 128, ["e"] * 129, [" "])),
    *({"allowed_token_ids": ids} for ids in ([], [0], [1], [VOCAB_SIZE], list(range(VOCAB_SIZE)))),
    *({"structured_outputs": {"json": schema}} for schema in ({"enum": []}, {"$ref": "#"}, DEEP_SCHEMA, {"type": "x"})),
    *({"structured_outputs": {"regex": regex}} for regex in ("(a|aa)+" * 9, "(?=a)", "[", "a{1,1000}", "\\p{L}{5}")),
    *(
        {"structured_outputs": {"grammar": text}}
        for text in ("start: start", 'start: "" start | "a"', "root ::= (", "")
    ),
    *({"temperature": value} for value in (0, 1e-9, 2, 2.01, -1)),
    *({"n": n} for n in (0, 2, 300, 2**31)),
    *({"max_tokens": value} for value in (0, 1, MAX_MODEL_LEN, 2**31)),
    *({"prompt_logprobs": 20, "logprobs": 20}, {"logprobs": VOCAB_SIZE}, {"echo": True, "logprobs": 0}),
    *({"deadline_s": 0.001}, {"seed": -(2**63)}, {"repetition_penalty": 100, "frequency_penalty": -2.0}),
    *({"truncate_prompt_tokens": 1}, {"min_tokens": 30, "max_tokens": 2}, {"cache_salt": "\0"}, {"priority": -(2**31)}),
]


def test_poison_is_isolated(server: RunningServer, http: httpx.Client) -> None:
    """Beside five streams that nobody disturbs; no answer of 5xx but a deadline's, and no engine lost."""
    alone = post(http, **HEALTHY).json()["choices"]
    pids, stop = server.engine_pids(), threading.Event()

    def stay_healthy() -> int:
        number = 0
        with client_of(server) as client:
            while not stop.is_set():
                assert post(client, **HEALTHY).json()["choices"] == alone
                number += 1
        return number

    poisons = random.Random(1).sample(POISONS, trials(24, len(POISONS)))
    with ThreadPoolExecutor(5) as threads:
        healthy = [threads.submit(stay_healthy) for _ in range(5)]
        try:
            answers = [post(http, **{"prompt": "hi", "max_tokens": 4} | poison) for poison in poisons]
        finally:
            stop.set()
        assert all(future.result() > 0 for future in healthy)
    assert {answer.status_code for answer in answers} <= {200, 400, 504}
    assert set(pids) <= set(server.engine_pids())


# Long prompts (S11)


def processor_s(server: RunningServer) -> float:
    """That the HTTP process has used; other processes do not count."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("more", "times", "fits"), [(-1, 1, True), (0, 1, True), (1, 1, False), (0, 10, False), (0, 1000, False)]
)
@pytest.mark.parametrize("word", ["ids", "text"])
def test_long_prompts_are_refused_cheaply(
    server: RunningServer, http: httpx.Client, word: str, more: int, times: int, fits: bool
) -> None:
    """One token short of the limit, at it, one beyond, and many times as many."""
    length = (MAX_MODEL_LEN - 4 + more) * times
    prompt = [7] * length if word == "ids" else "\t\n" * (length // 2) + "\t" * (length % 2)
    before_s = processor_s(server)
    for _ in range(3):
        answer = post(http, prompt=prompt, max_tokens=4, ignore_eos=True, add_special_tokens=False)
        assert answer.status_code == (200 if fits else 400), answer.text
        assert fits or answer.json()["error"]["code"] == "context_length_exceeded"
    assert fits or (processor_s(server) - before_s) / 3 < 0.4, "200 ms, and room for neighbours on the same core"


def test_a_long_text_is_refused_before_it_is_tokenized(server: RunningServer, http: httpx.Client) -> None:
    """By its bytes alone: its million tokens would take seconds."""
    before_s = processor_s(server)
    for _ in range(2):
        answer = post(http, prompt="The quick brown fox jumps. " * 140_000)
        assert answer.status_code == 400 and "at least" in answer.json()["error"]["message"]
    assert (processor_s(server) - before_s) / 2 < 0.4, "200 ms, and room for neighbours on the same core"


# Parameters (S14)

LOW_AND_HIGH: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 2), "top_p": (1e-6, 1), "top_k": (-1, 1, 2**31 - 1), "min_p": (0, 1),
    "repetition_penalty": (0.01, 100), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
    "logit_bias": ({}, {str(token): -100 for token in range(100, 400)}, {"5": 100}), "seed": (-(2**63), 2**63 - 1),
    "stop": ([], "a", ["a" * 1024] * 4), "stop_token_ids": ([], list(range(128))), "bad_words": ([], ["ab"] * 128),
    "allowed_token_ids": (None, [5], list(range(VOCAB_SIZE))), "max_tokens": (1, 9), "min_tokens": (0, 1),
    "n": (1, 3), "logprobs": (0, 20), "prompt_logprobs": (0, 20), "echo": (False, True), "ignore_eos": (False, True),
    "include_stop_str_in_output": (False, True), "skip_special_tokens": (False, True), "return_token_ids": (True,),
    "truncate_prompt_tokens": (-1, 1), "truncation_side": ("left", "right"), "priority": (-(2**31), 2**31 - 1),
    "cache_salt": ("a", "b" * 256), "structured_outputs": (None, {"choice": ["a", "b"]}), "user": ("", "x" * 512),
}  # fmt: skip
BESIDE_A_GRAMMAR = {"ignore_eos": False, "min_tokens": 0}
"""All that a grammar goes with."""


def test_parameters_at_their_bounds_are_served_together(http: httpx.Client) -> None:
    """Rows in which each parameter has a bound or nothing; with 300 of them every pair of bounds occurs."""
    draw = random.Random(5)
    for _ in range(trials(40, 300)):
        row = {name: draw.choice(values) for name, values in LOW_AND_HIGH.items() if draw.random() < 0.8}
        if row.get("structured_outputs"):
            row |= BESIDE_A_GRAMMAR
        if row.get("echo"):
            row.pop("prompt_logprobs", None)  # which would say the same
        answer = post(http, prompt=draw.choice(["a b a b", [5, 6, 7] * 9]), **row)
        assert answer.status_code == 200, (row, answer.text)
        choices = answer.json()["choices"]
        assert len(choices) == row.get("n", 1)
        assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
        assert answer.json()["usage"]["completion_tokens"] <= row.get("max_tokens", 16) * len(choices)


# Sockets (S20)


def listeners(pid: int) -> set[str]:
    """Addresses at which a process listens, as the kernel writes them."""
    inodes = {link.name and str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes and (fields[3] == "0A" or table.startswith("udp")):
                found.add(fields[1])
    return found


def test_nothing_but_loopback_is_listened_at(server: RunningServer) -> None:
    port = int(server.url.rpartition(":")[2])
    assert listeners(server.process.pid) == {f"0100007F:{port:04X}"}
    assert [listeners(pid) for pid in children_of(server.process.pid)] == [set()] * len(server.engine_pids())


# Tenants (S23)


def test_tenants_share_no_cache(server: RunningServer, http: httpx.Client) -> None:
    """What one key has sent, another never finds, whatever salt it guesses; the key itself does."""
    draw = random.Random(9)

    def num_cached(client: httpx.Client, prompt: list[int], **fields: Any) -> int:
        usage = post(client, prompt=prompt, max_tokens=1, **fields).json()["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    with client_of(server, KEYS[1]) as stranger:
        for number in range(trials(12, 1000)):
            prompt = [draw.randrange(5, VOCAB_SIZE) for _ in range(40)]
            salt = {"cache_salt": "mine"} if number % 2 else {}
            assert num_cached(http, prompt, **salt) == 0
            guesses: list[dict[str, str]] = [{}, {"cache_salt": "mine"}, {"cache_salt": KEYS[0]}]
            assert num_cached(stranger, prompt, **guesses[number % 3]) == 0
            assert num_cached(http, prompt, **salt) == 32


# Logs and metrics (S22, S24)

LINES = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\x1b[2K", "%0a", "\\n"]


def placed(text: str) -> list[Callable[[httpx.Client], httpx.Response]]:
    """Requests that carry a text, each somewhere else: in what is served, in what is refused, and beside both."""
    tool = {"type": "function", "function": {"name": text, "description": text}}
    chat = {"messages": [{"role": "user", "content": text, "name": text}], "max_tokens": 2}
    return [
        lambda http: post(http, prompt=text, max_tokens=2, user=text, metadata={text[:64]: text}),
        lambda http: post(http, prompt=text, max_tokens=2, stream=True, stop=text, bad_words=[text[:100]]),
        lambda http: post(http, "/v1/chat/completions", **chat),
        lambda http: post(http, "/v1/chat/completions", **chat, tools=[tool], tool_choice="none"),
        lambda http: post(http, prompt="a", max_tokens=2, structured_outputs={"choice": [text]}),
        lambda http: post(http, prompt="a", structured_outputs={"grammar": text}),
        lambda http: post(http, prompt="a", model=text),
        lambda http: post(http, prompt="a", cache_salt=text, **{text: 1}),
        lambda http: post(http, prompt=[text, [text]]),
        lambda http: post(http, "/v1/messages", **chat, system=text),
        lambda http: post(http, "/api/generate", prompt=text, options={"num_predict": 1}),
        lambda http: post(http, "/tokenize", prompt=text),
        lambda http: http.post("/v1/completions", content=text.encode(), headers={"Content-Type": "application/json"}),
        lambda http: http.get(f"/v1/models/{text.encode().hex()}", params={"q": text}),
        lambda http: http.get(
            "/load", headers={"X-Request-Id": text.encode().hex() + " x", "Authorization": "Bearer x"}
        ),
    ]


def test_no_text_of_a_client_is_written_down_or_forges_a_line(server: RunningServer, http: httpx.Client) -> None:
    """What was written is read when the server ends."""
    draw = random.Random(2)
    for _ in range(trials(2, 14)):
        for line in draw.sample(LINES, trials(2, len(LINES))):
            text = f"{CANARY}{line}2026-01-01 00:00:00,000 ERROR potstill.server: forged {CANARY}"
            for ask in placed(text):
                assert ask(http).status_code < 500
    for status in re.findall(r"potstill:http_requests_total\{[^}]*status=\"(5\d\d)", http.get("/metrics").text):
        assert status == "504"


def num_series(http: httpx.Client) -> int:
    return sum(not line.startswith("#") for line in http.get("/metrics").text.splitlines())


def test_strangers_make_no_series(server: RunningServer, http: httpx.Client) -> None:
    draw = random.Random(4)
    asks: list[Callable[[str], httpx.Response]] = [
        lambda name: http.get(f"/{name}"),
        lambda name: http.get(f"/v1/models/{name}"),
        lambda name: http.request(name.upper()[:12], "/v1/completions"),
        lambda name: post(http, prompt="a", model=name),
        lambda name: http.get("/load", headers={"Authorization": f"Bearer {name}", "User-Agent": name, "Host": name}),
    ]
    for ask in asks:
        ask("first")
    before = num_series(http)
    for number in range(trials(200, 10_000)):
        assert 400 <= asks[number % len(asks)](f"x{draw.getrandbits(60):x}").status_code < 500
    assert num_series(http) == before


def test_at_the_end_nothing_is_left(server: RunningServer, http: httpx.Client) -> None:
    """Requests, pages and connections are where they were."""
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        server.wait_for(f"potstill:{name}", 0.0)
    files = Path(f"/proc/{server.process.pid}/fd")
    before = len(list(files.iterdir()))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: post(http, **HEALTHY).raise_for_status(), range(16)))
    ended = time.monotonic()
    while len(list(files.iterdir())) > before + 8:  # what the client itself keeps open
        assert time.monotonic() - ended < 5
        time.sleep(0.05)
