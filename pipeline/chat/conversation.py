"""The conversation itself: what is typed, the commands, and what has been said."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.chat.models import Answer, ChatModel
from pipeline.errors import UserError
from pipeline.files import write_atomically

PROMPT, CONTINUED = "> ", ". "
HELP = """\
/system [TEXT]  what the model is told before everything else; without TEXT shows it
/save FILE      write the conversation as a line of JSON, which `sft` and `distill` read
/clear          forget what was said; the system text stays
/help           this list
/quit           leave, as Ctrl-D does
A backslash at the end of a line continues it. Ctrl-C stops an answer. Begin with a space to say what begins with /."""


class ChatSession:
    """A conversation with one model, and the commands that change it."""

    def __init__(self, model: ChatModel, system: str | None = None) -> None:
        self.model, self.system = model, system
        self.turns: list[dict[str, str]] = []
        self.is_over = False
        self.failed = False
        """Whether a line was refused."""
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/save": self._save,
            "/clear": self._clear,
            "/help": lambda _: say(HELP),
            "/quit": self._quit,
        }

    @property
    def messages(self) -> list[dict[str, str]]:
        """All that the model is shown."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def take(self, line: str) -> None:
        """One line that was typed: a command, or something said. A mistake is one sentence."""
        try:
            if line.startswith("/"):
                self._command(line)
            elif line.strip():
                self._ask(line.strip())
        except (ValueError, OSError) as error:
            self.failed = True
            say(f"potstill: {str(error).rstrip('.')}.")

    def _command(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        if name not in self._commands:
            raise UserError(f"There is no command {name}; /help lists them.")
        self._commands[name](rest.strip())

    def _ask(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = self.model.answer(asked, write)
        write("" if answer.text.endswith("\n") else "\n")
        say(_dim(answer.speeds()))
        if answer.text:
            self._keep(text, answer)

    def _keep(self, text: str, answer: Answer) -> None:
        self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]

    def _set_system(self, text: str) -> None:
        if not text:
            say(self.system or "There is no system text; /system TEXT gives one.")
            return
        self.system = text

    def _save(self, name: str) -> None:
        if not name:
            raise UserError("/save needs the name of a file")
        path = Path(name).expanduser()
        if path.exists() and path.resolve() not in self._saved:
            raise UserError(f"{path} exists already; name another file")
        line = json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n"
        write_atomically(path, line.encode())
        self._saved.add(path.resolve())
        say(f"{len(self.messages)} messages saved in {path}")

    def _clear(self, rest: str) -> None:
        self.turns.clear()

    def _quit(self, rest: str) -> None:
        self.is_over = True


def run_conversation(conversation: ChatSession) -> int:
    """Until the input ends or /quit. Returns the exit code: of piped input, 1 when a line was refused."""
    typed = sys.stdin.isatty()
    if typed:
        import readline  # noqa: F401  makes input() edit lines and remember them

        say(f"{conversation.model.name}; /help lists the commands, Ctrl-D leaves")
    for line in _typed_lines() if typed else _piped_lines():
        try:
            conversation.take(line)
        except KeyboardInterrupt:  # it came when the answer was over already
            say("")
        if conversation.is_over:
            break
    return int(conversation.failed and not typed)


def write(text: str, is_thought: bool = False) -> None:
    """A part of an answer, without what would steer the terminal; thoughts go where all goes that is no answer."""
    plain = "".join(one for one in text if one in "\n\t" or one.isprintable())
    print(_dim(plain) if is_thought else plain, end="", flush=True, file=sys.stderr if is_thought else sys.stdout)


def say(text: str) -> None:
    """What is no answer."""
    print(text, file=sys.stderr, flush=True)


def _typed_lines() -> Iterator[str]:
    while True:
        try:
            line = input(PROMPT)
            while line.endswith("\\"):
                line = f"{line[:-1]}\n{input(CONTINUED)}"
        except KeyboardInterrupt:
            say("\nCtrl-D or /quit leaves")
            continue
        except EOFError:
            say("")
            return
        yield line


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin:
        line = line.removesuffix("\n")
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{next(sys.stdin, '').removesuffix(chr(10))}"
        yield line


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text
