"""What a user can do wrong, and how a run can end. The command turns each into one sentence and an exit code."""

import sys
from dataclasses import dataclass


class UserError(ValueError):
    """A mistake in what the user gave: one sentence that says what is wrong, where, and what would be right."""

    exit_code = 2


class RunLockedError(UserError):
    """Another process runs in the same run folder."""


class GateRefused(Exception):
    """A stage ended below its gate: nothing was published and the stages after it did not run."""

    exit_code = 1


class StageFailed(Exception):
    """A stage could not do its work for a reason that one sentence explains."""

    exit_code = 1


class MeetingFailed(Exception):
    """Processes that were started together have not come together; the same command may do so another time."""

    exit_code = 1


class RunInterrupted(Exception):
    """A signal stopped the run; its state is saved and the same command goes on from there."""

    exit_code = 130


class EndedElsewhere(Exception):
    """Another process has said why this one ends too."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"ends with exit code {exit_code}, as another process has said why")
        self.exit_code = exit_code


@dataclass(frozen=True)
class Exit:
    """How a command ends that could not do its work."""

    sentence: str
    """Nothing where another process says it."""
    exit_code: int
    is_agreed: bool = False
    """Whether all processes of a run end so, each by itself."""


def exit_of(error: BaseException, *, shows_traceback: bool) -> Exit | None:
    """What a command makes of an error; None where it is shown as Python does, being unforeseen or because of that."""
    match error:
        case EndedElsewhere():
            return Exit("", error.exit_code)
        case GateRefused() | RunInterrupted():
            return Exit(f"{error}.", error.exit_code, is_agreed=True)
        case StageFailed() | MeetingFailed():
            return Exit(f"{error}.", error.exit_code)
        case KeyboardInterrupt():
            return Exit("interrupted.", RunInterrupted.exit_code, is_agreed=True)
        case ValueError() | OSError() if not shows_traceback:
            text = str(error) or type(error).__name__
            return Exit(text if text.endswith((".", "?", "!")) else f"{text}.", UserError.exit_code)
    return None


def say(sentence: str) -> None:
    """To the user, whatever is logged."""
    print(f"potstill: {sentence}", file=sys.stderr, flush=True)
