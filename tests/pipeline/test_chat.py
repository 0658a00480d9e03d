"""`potstill chat` as a user meets it: on a terminal of its own, piped, in this process and with a server."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.chat.conversation import ChatSession
from pipeline.chat.models import Answer, LocalModel, Messages, Write, take
from pipeline.cli import main
from pipeline.errors import UserError
from serve import LLM, SamplingParams
from tests.serve.http_server import ROOT, RunningServer, running_server, save_tiny_folder

LONG = ["--max-tokens", "1900", "--temperature", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("log") / "log"
    with running_server(folder, log, "--api-key", "secret", "--served-model-name", "tiny") as server:
        yield server


class Terminal:
    """The command on a pseudo-terminal, typed at."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.chdir(ROOT)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # also where whoever runs the tests ignores it
            os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm"}
            os.execv(sys.executable, [sys.executable, "-m", "pipeline", "chat", *arguments])
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> "re.Match[str]":
        """Until what was shown since the last call has this; what comes behind it stays for the next."""
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.shown)) is None:
            if not select.select([self._fd], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError(f"{pattern!r} is not in {self.shown!r}")
            self.shown += os.read(self._fd, 4096).decode("utf-8", "replace")
        self.shown = self.shown[found.end() :]
        return found

    def press_until(self, key: str, pattern: str) -> None:
        """Readline notices a signal between its drawing of the prompt and its wait only with the next key."""
        for _ in range(30):
            self.type(key)
            try:
                self.wait_for(pattern, timeout_s=2.0)
            except TimeoutError:
                continue
            return
        raise TimeoutError(f"{pattern!r} is not in {self.shown!r}")

    def exit_code(self) -> int:
        """Once it has ended by itself."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                if select.select([self._fd], [], [], 0.1)[0] and not os.read(self._fd, 4096):
                    break
            except OSError:  # the other side is closed
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self._fd)


def sources(folder: Path, server: RunningServer, how: str) -> list[str]:
    return [str(folder)] if how == "here" else ["--url", server.url, "--api-key", "secret"]


@pytest.mark.parametrize("how", ["here", "server"])
def test_a_conversation_on_a_terminal(folder: Path, server: RunningServer, how: str, tmp_path: Path) -> None:
    saved = tmp_path / "talk.jsonl"
    with Terminal(*sources(folder, server, how), "--max-tokens", "12", "--temperature", "0") as terminal:
        terminal.wait_for("/help lists the commands")
        terminal.wait_for("> ")
        terminal.type("/system Be brief.\n")
        for text in ("the quick brown fox", "and then?"):
            terminal.wait_for("> ")
            terminal.type(f"{text}\n")
            terminal.wait_for(r"\d+ tokens, [\d.]+ tokens/s, first after [\d.]+ s; stopped at --max-tokens")
        terminal.type(f"/save {saved}\n")
        terminal.wait_for("5 messages saved in")
        terminal.type("/clear\n")
        terminal.type(f"/save {saved}\n")
        terminal.wait_for("1 messages saved in")
        terminal.type("/help\n")
        terminal.wait_for("/quit +leave")
        terminal.type("/quit\n")
        assert terminal.exit_code() == 0
    assert json.loads(saved.read_text()) == {"messages": [{"role": "system", "content": "Be brief."}]}


@pytest.mark.parametrize("how", ["here", "server"])
def test_ctrl_c_stops_the_answer_and_ctrl_d_the_program(folder: Path, server: RunningServer, how: str) -> None:
    with Terminal(*sources(folder, server, how), *LONG) as terminal:
        terminal.wait_for("> ")
        terminal.press_until("\x03", "Ctrl-D or /quit leaves")
        terminal.wait_for("> ")
        terminal.type("tell me a story\n")
        terminal.wait_for("story\r\n(.|\n){20}")
        terminal.type("\x03")
        count = int(terminal.wait_for(r"(\d+) tokens, .*; interrupted")[1])
        assert 0 < count < 1900
        if how == "server":
            server.wait_for("vllm:num_requests_running", 0)
        terminal.wait_for("> ")
        terminal.type("/clear\n")  # what was said before leaves less room for a long answer
        terminal.wait_for("> ")
        terminal.type("again\n")
        terminal.wait_for("again\r\n(.|\n){20}")
        terminal.type("\x03")
        terminal.wait_for("interrupted")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0


@pytest.mark.parametrize("how", ["here", "server"])
def test_piped_lines_are_answered_one_after_the_other(
    folder: Path, server: RunningServer, how: str, tmp_path: Path
) -> None:
    """The model is shown the whole conversation: each answer is the one that the engine gives to all before it.

    And nobody waits for more than is needed: a server's client for torch, an engine for torch's compiler.
    """
    saved = tmp_path / "talk.jsonl"
    lines = f"the quick\\\nbrown fox\n/nonsense\n /not a command\n/save {saved}\n"
    settings = ["--max-tokens", "8", "--temperature", "0", *(["--dtype", "float32"] if how == "here" else [])]
    command = [sys.executable, "-m", "pipeline", "chat", *sources(folder, server, how), *settings]
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=ROOT, env=environment)
    imported = set(re.findall(r"^import time: .*\| +(\S+)$", done.stderr, re.MULTILINE))
    assert ("torch" in imported) == (how == "here") and "torch._dynamo" not in imported
    assert done.returncode == 1 and "potstill: There is no command /nonsense; /help lists them." in done.stderr
    assert done.stderr.count("tokens/s, first after") == 2 and "Traceback" not in done.stderr
    messages = json.loads(saved.read_text())["messages"]
    assert [message["content"] for message in messages[::2]] == ["the quick\nbrown fox", "/not a command"]
    engine = LLM(str(folder), max_num_seqs=1, dtype="float32")
    params = SamplingParams(max_tokens=8, temperature=0.0)
    for end in (1, 3):
        expected = engine.chat(messages[:end], params)[0].text
        assert how == "server" or messages[end]["content"] == expected
        visible = "".join(one for one in messages[end]["content"] if one in "\n\t" or one.isprintable())
        assert visible in done.stdout


def test_what_cannot_be_asked_is_one_sentence(
    folder: Path, server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untalkative = save_tiny_folder(tmp_path / "base")
    config = json.loads((untalkative / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (untalkative / "tokenizer_config.json").write_text(json.dumps(config))
    for arguments, sentence in (
        ([], "Give either a MODEL or the --url of a server."),
        ([str(folder), "--url", server.url], "Give either a MODEL or the --url of a server."),
        ([str(folder), "--name", "x"], "--name goes with --url."),
        (["--url", server.url, "--verify", "x"], "--verify goes with a MODEL"),
        (["--url", server.url, "--api-key", "wrong"], "does not answer as OpenAI's servers do: 401, "),
        (["--url", server.url, "--api-key", "secret", "--name", "other"], "/v1 serves tiny, not other."),
        (["--url", "http://127.0.0.1:9"], "does not answer as OpenAI's servers do: "),
        (["--url", "nonsense"], "does not answer as OpenAI's servers do: unknown url type"),
        ([str(untalkative)], "has no chat template; `potstill generate --raw` continues text"),
    ):
        assert main(["chat", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1


def test_a_conversation_goes_on_after_a_mistake(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Narrow:
        name = "narrow"

        def answer(self, messages: Messages, write: Write) -> Answer:
            if len(messages) > 3:
                raise ValueError("the conversation is too long")
            answer = Answer(write)
            answer.add("\x1b[31mred\x07")
            return answer

    (tmp_path / "there").write_text("precious")
    talk = ChatSession(Narrow(), "brief")
    for line in ("one", "two", f"/save {tmp_path / 'there'}", "/save", f"/save {tmp_path / 'no' / 'x'}", "", "/system"):
        talk.take(line)
    said = capfd.readouterr()
    assert said.out == "[31mred\n" and said.err.count("\n") == 6 and len(talk.turns) == 2
    for sentence in ("conversation is too long.", "exists already; name another", "needs the name of a file", "brief"):
        assert sentence in said.err
    assert (tmp_path / "there").read_text() == "precious"
    talk.take("/clear")
    talk.take("/quit")
    assert talk.is_over and not talk.turns


def test_thoughts_are_shown_apart_and_are_no_part_of_the_answer() -> None:
    """As servers stream them: `reasoning` before `content`, an error in the middle, usage at the end."""
    shown: list[tuple[str, bool]] = []
    answer = Answer(lambda text, is_thought: shown.append((text, is_thought)))
    for delta in ({"role": "assistant", "content": ""}, {"reasoning": "Hm"}, {"reasoning": "."}, {"content": "Yes"}):
        take({"choices": [{"delta": delta, "finish_reason": None}]}, answer)
    take({"choices": [], "usage": {"completion_tokens": 7}}, answer)
    assert shown == [("Hm", True), (".", True), ("\n\n", True), ("Yes", False)]
    assert (answer.text, answer.num_tokens) == ("Yes", 7)
    with pytest.raises(UserError, match="The server broke off: the engine died"):
        take({"error": {"message": "the engine died"}}, answer)


def test_speeds_count_what_a_draft_proposed(folder: Path) -> None:
    model = LocalModel(
        "tiny", LLM(str(folder), draft=str(folder), num_speculative_tokens=3), SamplingParams(max_tokens=9)
    )
    shown: list[str] = []
    answer = model.answer([{"role": "user", "content": "dog"}], lambda text, is_thought: shown.append(text))
    assert "".join(shown) == answer.text
    assert answer.num_drafted > 0 and f"{answer.num_accepted} of {answer.num_drafted} drafted" in answer.speeds()
