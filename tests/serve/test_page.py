"""The page at `/`: what it may load, and in a headless Chromium what a reader sees and does."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from model.lora import LoraConfig
from serve.http.page import FILES, FOLDER, PAGE_PATHS
from tests.model.test_fused_adapters import save_adapters
from tests.serve import browser
from tests.serve.browser import Browser
from tests.serve.http_server import RunningServer, running_server, save_tiny_folder
from tests.tiny import tiny_model

KEY = "the-key-of-the-page"
WIDTHS, HEIGHTS = (1280, 390), {1280: 800, 390: 844}
needs_browser = pytest.mark.skipif(browser.PROGRAM is None, reason="needs Chromium: apt-get install chromium")
CONTRAST = """(() => {
  const parse = (color) => color.match(/[\\d.]+/g).slice(0, 4).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92
    : ((c + 0.055) / 1.055) ** 2.4).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const worst = [...document.querySelectorAll("body *")].filter((element) => element.checkVisibility()
      && !element.disabled && (element.placeholder
        || [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())))
    .map((element) => {
      const style = getComputedStyle(element, element.placeholder ? "::placeholder" : null);
      const [a, b] = [light(parse(style.color)), light(behind(element))];
      const text = (element.placeholder || element.textContent).trim().slice(0, 30);
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text];
    }).sort((one, other) => one[0] - other[0]);
  return worst[0];
})()"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A target that verifies a draft of its own weights' rounded kin, an adapter, a key, and a price."""
    home = tmp_path_factory.mktemp("page")
    save_tiny_folder(home / "tiny")
    save_tiny_folder(home / "draft", tiny_model(initializer_range=0.205))
    [adapter] = save_adapters(home / "adapters", tiny_model(), [LoraConfig(rank=4, alpha=8)])
    speculative = f'{{"model": "{home / "draft"}", "num_speculative_tokens": 3}}'
    arguments = ["--speculative-config", speculative, "--adapter", f"poet={adapter}", "--api-key", KEY]
    arguments += ["--served-model-name", "tiny", "--dtype", "float32", "--price-per-hour", "3.6"]
    with running_server(home / "tiny", home / "log", *arguments) as server:
        server.api_key = KEY
        yield server


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.fixture
def page(window: Browser, server: RunningServer) -> Browser:
    """The page at 1280 pixels with the key given, and nothing said yet."""
    window.events.clear()
    window.open(server.url)
    window.value(f"sessionStorage.setItem('potstill-key', '{KEY}')")
    window.open(server.url)
    window.wait_for("document.title.startsWith('tiny')")
    window.value("document.querySelector('#temperature').value = 0, document.querySelector('#max_tokens').value = 24")
    return window


def ask(page: Browser, text: str) -> str:
    """The answer, once it is whole, or the sentence that says why there is none."""
    before = page.value("document.querySelectorAll('.assistant').length")
    page.point_at("#text", click=True)
    page.type(f"{text}\n")
    page.wait_for(f"document.querySelectorAll('.assistant:not(.waiting)').length > {before}")
    return page.value("document.querySelector('.assistant:last-child .text').textContent")


def test_it_is_open_and_lets_nothing_else_in(server: RunningServer) -> None:
    for path in PAGE_PATHS:
        response = httpx.get(server.url + path)
        assert response.status_code == 200 and response.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert all("*" not in allowed and "unsafe" not in allowed for allowed in policy.values())
    assert httpx.get(f"{server.url}/web/../page.py").status_code == 401
    assert httpx.get(f"{server.url}/web/nothing.js").status_code == 401
    assert httpx.post(server.url).status_code == 405


def test_nothing_comes_from_elsewhere_and_nothing_stands_inline() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)
    for name in FILES:
        text = (FOLDER / name).read_text()
        assert not re.search(r"(?<!\"http://www.w3.org/2000/)https?://(?!www\.w3\.org/2000/svg)", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)", page)


@needs_browser
def test_a_key_is_asked_for_and_then_used(window: Browser, server: RunningServer) -> None:
    window.open(server.url)
    window.value("sessionStorage.clear()")
    window.open(server.url)
    window.wait_for("document.querySelector('#settings').open")
    assert "wants an API key" in window.value("document.querySelector('#notice').textContent")
    window.point_at("#key", click=True)
    window.type(f"{KEY}\n")
    window.wait_for("document.title.startsWith('tiny') && document.querySelector('#notice').hidden")
    models = window.value("[...document.querySelector('#model').options].map((option) => option.text)")
    assert models == ["tiny", "poet (adapter)"]
    window.open(server.url)
    window.wait_for("document.title.startsWith('tiny')")


@needs_browser
def test_an_answer_shows_text_origin_and_alternatives(page: Browser, server: RunningServer) -> None:
    messages: list[Any] = [{"role": "user", "content": "the quick <b>brown</b> fox"}]
    settings: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    expected = server.client().chat.completions.create(model="tiny", messages=messages, **settings)
    shown = ask(page, messages[0]["content"])
    assert shown == expected.choices[0].message.content
    assert page.value("document.querySelector('.user .text').textContent") == messages[0]["content"]
    facts = page.value("document.querySelector('.facts').textContent")
    found = re.fullmatch(
        r"24 tokens · [\d.]+ tokens/s · first after [\d.]+ s · (\d+) of (\d+) drafted tokens accepted · .*", facts
    )
    assert found is not None, facts
    drafted, own = (page.value(f"document.querySelectorAll('.turn .{kind}').length") for kind in ("drafted", "own"))
    assert 0 < drafted <= int(found[1]) < int(found[2]) and own > 0
    assert not page.value("document.querySelector('#legend').hidden")
    page.point_at(".turn .t:nth-child(3)")
    rows = page.wait_for("[...document.querySelectorAll('#alternatives div')].map((row) => row.lastChild.textContent)")
    entry = expected.choices[0].logprobs.content[2]  # type: ignore[union-attr,index]
    for chance, top in zip(rows, entry.top_logprobs, strict=False):
        percent = 100 * math.exp(top.logprob)
        assert chance == ("< 0.1 %" if percent < 0.1 else f"{percent:.1f} %")
    assert len(rows) >= 5 and page.value("document.querySelectorAll('#alternatives div.chosen').length") == 1
    page.point_at("h1")
    page.wait_for("document.querySelector('#alternatives').hidden")


SMILE = "\U0001f642".encode()
STREAMS: dict[str, tuple[list[tuple[str, str, list[bytes]]], list[str]]] = {
    "end token": ([("", "He", [b"He"]), ("", "llo", [b"llo", b"</s>"])], ["", "He|llo"]),
    "two tokens a character": ([("", "", [SMILE[:2]]), ("", "\U0001f642!", [SMILE[2:], b"!"])], ["", "\U0001f642|!"]),
    "first space": ([("", "Hello", [b" Hello"]), ("", " you", [b" you"])], ["", "Hello| you"]),
    "late text": (
        [("", "", [b"one", b" two"]), ("", "one two", [b" three"]), ("", " three", [])],
        ["", "one| two| three"],
    ),
    "thoughts": (
        [
            ("", "", [b"<think>", b"\n"]),
            ("Why", "", [b"Why", b"?\n\n"]),
            ("?", "", [b"</think>\n"]),
            ("", "So", [b"So"]),
        ],
        ["Why|?", "So"],
    ),
    "no tokens": ([("", "plain", []), ("", " text", [])], ["", "plain| text"]),
    "other tokens": ([("", "lost", [b"x"]), ("", " for good", [b"y"])], ["", "lost for good"]),
}
"""What streams bring, as (thought, text, tokens) of each event, and the pieces that are drawn of it."""


@needs_browser
@pytest.mark.parametrize("stream", STREAMS)
def test_tokens_are_drawn_where_their_text_is(page: Browser, stream: str) -> None:
    events, expected = STREAMS[stream]
    steps = [(thought, text, [list(token) for token in tokens]) for thought, text, tokens in events]
    shown = page.value(
        f"""(async () => {{
          const {{ TokenText }} = await import("/web/tokens.js");
          const [thoughts, said] = [document.createElement("p"), document.createElement("p")];
          const drawn = new TokenText();
          for (const [thought, text, tokens] of {json.dumps(steps)}) {{
            const entries = tokens.map((bytes) => ({{ bytes, top_logprobs: [] }}));
            drawn.add(thought || text, entries, thought ? thoughts : said);
          }}
          drawn.finish();
          return [thoughts, said].map((one) => [...one.childNodes].map((node) => node.textContent).join("|"));
        }})()"""
    )
    assert shown == expected


@needs_browser
def test_turns_add_up_and_a_new_chat_forgets_them(page: Browser, server: RunningServer) -> None:
    messages: list[dict[str, str]] = []
    for text in ("hello", "and again"):
        messages.append({"role": "user", "content": text})
        answer = server.client().chat.completions.create(
            model="tiny",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=24,
            temperature=0,
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        assert ask(page, text) == messages[-1]["content"]
    page.point_at("#clear", click=True)
    page.wait_for("!document.querySelector('.turn') && !document.querySelector('#welcome').hidden")
    assert ask(page, "hello") == messages[1]["content"]


@needs_browser
def test_the_model_switch_asks_the_adapter(page: Browser, server: RunningServer) -> None:
    plain = ask(page, "hello")
    page.point_at("#clear", click=True)
    page.value("document.querySelector('#model').value = 'poet'")
    answer = server.client().chat.completions.create(
        model="poet", messages=[{"role": "user", "content": "hello"}], max_tokens=24, temperature=0
    )
    assert ask(page, "hello") == answer.choices[0].message.content != plain


STOPS_EARLY = """
    label = new Promise((resolve) => new MutationObserver((_, observer) => {
        if (document.querySelectorAll('.turn .t').length <= 3) return;
        observer.disconnect();
        resolve(document.querySelector('#send').textContent);
        document.querySelector('#send').click();
    }).observe(document.body, {childList: true, subtree: true}));
    0
"""
"""Clicks as soon as an answer has four tokens: seen from another process, a short one may be over by then."""


@needs_browser
def test_stop_ends_an_answer_and_errors_are_sentences(page: Browser, server: RunningServer) -> None:
    page.value("document.querySelector('#max_tokens').value = 1800")
    page.value(STOPS_EARLY)
    page.point_at("#text", click=True)
    page.type("go on\n")
    assert page.value("label") == "Stop"
    page.wait_for("document.querySelector('.facts').textContent.endsWith('stopped')")
    server.wait_for("vllm:num_requests_running", 0)
    page.value("document.querySelector('#max_tokens').value = 5000")
    assert "maximum context length is 2048 tokens" in ask(page, "too much")
    page.value("document.querySelector('#max_tokens').value = 24")
    assert page.value("document.querySelector('.assistant:last-child').classList.contains('failed')")
    assert ask(page, "well") and not page.value(
        "document.querySelector('.assistant:last-child').classList.contains('failed')"
    )


@needs_browser
def test_it_shows_what_the_server_does(page: Browser, server: RunningServer) -> None:
    ask(page, "hello")
    read = "(id) => document.getElementById(id).textContent"
    page.wait_for(f"Number(({read})('throughput')) > 0 && ({read})('ttft-p50') !== '–'")
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        load = http.get("/load").json()
    for name in ("ttft", "tpot"):
        shown = page.value(f"({read})('{name}-p99')")
        seconds = float(shown.split()[0]) / (1000 if shown.endswith(" ms") else 1)
        assert seconds == pytest.approx(load[f"{name}_s"]["p99"], rel=0.06)
    assert page.value(f"({read})('running')") == "0" and page.value(f"({read})('waiting')") == "0"
    pages = server.lines[1].split(" KV pages")[0].split()[-1]
    assert page.value(f"({read})('pages')") == f"0 of {int(pages):,}"
    shares = page.value("[...document.querySelectorAll('#positions li')].map((item) => parseInt(item.innerText))")
    accepted, drafts = (server.metric(f"vllm:spec_decode_num_{name}_total") for name in ("accepted_tokens", "drafts"))
    assert len(shares) >= 3 and sorted(shares, reverse=True) == shares
    assert sum(shares) == pytest.approx(100 * accepted / drafts, abs=2)
    assert page.value("!document.querySelector('#cost-tile').hidden") and float(
        page.value(f"({read})('cost')").replace(",", "")
    ) == pytest.approx(load["cost_per_million_tokens"], rel=0.3)


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_can_be_read(page: Browser, server: RunningServer, width: int, dark: bool) -> None:
    page.open(server.url, width=width, height=HEIGHTS[width], dark=dark)
    page.wait_for("document.title.startsWith('tiny') && document.querySelector('#throughput').textContent !== '–'")
    ask(page, "the quick brown fox jumps over the lazy dog " * 6)
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    assert page.value("document.documentElement.scrollHeight <= innerHeight")
    for selector in ("#text", "#send", "header", "nav", "#model", "#open-settings", "#live", "#log"):
        box = page.box(selector)
        assert box["width"] > 20 and box["left"] >= 0 and box["right"] <= width, selector
    assert page.box("#send")["bottom"] <= HEIGHTS[width]
    assert page.value("document.querySelector('#live').open") == (width == 1280)
    page.point_at(".turn .t:nth-child(2)", click=True)
    popover = page.box("#alternatives")
    assert popover["left"] >= 0 and popover["right"] <= width and popover["bottom"] <= HEIGHTS[width]
    page.value("document.querySelector('#live').open = true")
    worst, text = page.value(CONTRAST)
    assert worst >= 4.5, text
    is_dark = page.value("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 28)"
    assert is_dark == dark


@needs_browser
def test_chat_metrics_and_docs_are_found_from_the_page_alone(page: Browser, server: RunningServer) -> None:
    links = page.value("[...document.querySelectorAll('nav a')].map((link) => link.href)")
    assert links == [f"{server.url}/docs", f"{server.url}/metrics"]
    assert all(httpx.get(link).status_code == 200 for link in links)
    assert page.value("document.querySelector('#address').textContent") == f"{server.url}/v1"
    ask(page, "hello")
    assert all(address.startswith(f"{server.url}/") for address in page.addresses())
    assert page.complaints() == []
