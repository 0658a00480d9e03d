"""How the processes of a run end together: one says why, once, and all of them end with its exit code.

Who fails leaves word in the store where all have met (pipeline/meeting.py). A process that waits in a library for one
that has gone would end with the library's error, after minutes or never.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from pipeline.errors import EndedElsewhere, Exit, MeetingFailed, exit_of, say
from pipeline.meeting import FAILURE, SAID_S, Meeting, is_set

WATCH_S = 0.5
"""How often a process looks whether the main one has ended."""
LEAVE_S = 10.0
"""Within which a process is gone that has failed. Groups of processes that one of them has left may wait for it."""
SEEN_S = 0.2
"""In which everybody who looks for it has seen what was set."""
END, SAID, OVER = "end", "said", "over"
"""The main process's exit code, which ends all; how many wanted to say why; that all have left."""

MAIN_IS_GONE = Exit(
    "the main process, or its launcher, has ended without a word to the others; its output may say why.",
    MeetingFailed.exit_code,
)
BROKEN = Exit(
    "the connection to another process is broken: it has ended, or its machine cannot be reached any more; its output "
    "may say why, and the same command goes on from the latest checkpoint.",
    MeetingFailed.exit_code,
)


@dataclass(frozen=True)
class Failure(Exit):
    """What a process other than the main one has failed with; the main one may fail with the same."""

    where: str = ""


class SharedExit:
    """This process's side."""

    def __init__(self, meeting: Meeting) -> None:
        self._rank, self._store = meeting.rank, meeting.store
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._end_with_the_main_process, daemon=True)

    @contextmanager
    def shared(self, *, shows_traceback: bool) -> Iterator[None]:
        """Whatever ends the main process inside ends all. Raises EndedElsewhere for what has been said."""
        if self._rank.index:
            self._watch.start()
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            end = exit_of(error, shows_traceback=shows_traceback)
            if end is None and not shows_traceback and _is_of_a_connection(error):
                end = BROKEN
            code = self._end_all(end) if self._rank.index == 0 else self._end_one(end)
            self._leave()
            _end_soon(1 if code is None else code)
            if code is None:
                raise
            raise EndedElsewhere(code) from error
        self._leave()

    def _end_all(self, end: Exit | None) -> int | None:
        """Of the main process: the exit code, or None for an error that nobody foresaw."""
        code = 1 if end is None else end.exit_code
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher's, once the first has ended
        with suppress(RuntimeError):  # torchrun kept the store and has gone
            failure = self._failure()
            if failure is not None and (end is None or not (failure.is_agreed or end.sentence == failure.sentence)):
                end, code = failure, failure.exit_code  # which has brought this about
                self._say_once(f"{failure.where}: {failure.sentence}")
            elif end is not None:
                self._say_once(end.sentence)
            self._store.set(END, str(code))
        return None if end is None else code

    def _end_one(self, end: Exit | None) -> int | None:
        """Of another process, likewise. What the main one meets with too it says itself, and ends this one."""
        try:
            if end is None:
                time.sleep(2 * WATCH_S)  # it may be of another's end
                return None if (failure := self._failure()) is None else failure.exit_code
            where = f"process {self._rank.index} on {socket.gethostname()}"
            first = self._first(Failure(**asdict(end), where=where))
            if end.is_agreed:
                return end.exit_code
            time.sleep(SAID_S)
            self._say_once(f"{first.where}: {first.sentence}")
            return first.exit_code
        except RuntimeError:
            return self._end_alone(end or MAIN_IS_GONE)

    def _end_alone(self, end: Exit) -> int:
        if self._rank.local == 0:
            say(end.sentence)
        else:
            time.sleep(SAID_S)  # a launcher ends all as soon as one has ended
        return end.exit_code

    def _first(self, failure: Failure) -> Failure:
        """Leaves word of this one where none has failed before; returns what has failed first."""
        return Failure(**json.loads(self._store.compare_set(FAILURE, "", json.dumps(asdict(failure)))))

    def _failure(self) -> Failure | None:
        return Failure(**json.loads(self._store.get(FAILURE))) if self._store.check([FAILURE]) else None

    def _say_once(self, sentence: str) -> None:
        if self._store.add(SAID, 1) == 1:
            say(sentence)

    def _end_with_the_main_process(self) -> None:
        """In a thread of its own, since this process may wait for what the main one will never do."""
        with suppress(RuntimeError):  # the store has gone: what this process does next fails
            while not self._is_over.wait(WATCH_S):
                if self._store.check([END]):
                    code = int(self._store.get(END))
                    self._say_left()
                    is_set(self._store, [OVER], 2 * SAID_S)  # a launcher that sees one end sends signals to the others
                    os._exit(code)

    def _leave(self) -> None:
        with suppress(RuntimeError):
            if self._rank.index:
                self._is_over.set()
                self._watch.join()
                self._say_left()
            else:
                self._wait_for_all()

    def _say_left(self) -> None:
        self._store.set(f"{self._rank.index} has left", "")

    def _wait_for_all(self) -> None:
        """Who has come may still ask for what the main process keeps."""
        others = range(1, self._rank.count)
        came = [index for index in others if self._store.check([f"{index} has come"])]
        is_set(self._store, [f"{index} has left" for index in came], SAID_S)
        self._store.set(OVER, "")
        time.sleep(SEEN_S if came else 0)


def _end_soon(code: int) -> None:
    """Unless this process has ended by itself: all is said and closed that others could miss."""
    timer = threading.Timer(LEAVE_S, os._exit, [code])
    timer.daemon = True
    timer.start()


def _is_of_a_connection(error: BaseException) -> bool:
    """NCCL's and the store's errors have a type; gloo's do not, and name the file of its source that they are from."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
