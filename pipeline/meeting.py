"""How the processes of a run come together before anything else is done, and find that they run the same program.

They meet at the address that their launcher names (MASTER_ADDR, MASTER_PORT), in torch's key-value store, which the
main process keeps, or torchrun's agent. Process groups wait for a day, since the main process may work alone for hours
(train/accelerator.py); who has not come here after minutes never will.
"""

import json
import os
import platform
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from model.mesh import Rank
from pipeline.environment import ROOMS, versions
from pipeline.errors import EndedElsewhere, MeetingFailed, UserError, say

if TYPE_CHECKING:
    from torch.distributed import Store

TIMEOUT_VARIABLE = "POTSTILL_MEETING_TIMEOUT_S"
TIMEOUT_S = 300.0
"""Within that, machines whose launchers have met read Python, torch and potstill, from slow disks too."""
PROGRESS_S = 15.0
"""How often who waits says so."""
POLL_S = 0.05
SAID_S = 5.0
"""How long one process waits for another to say why all of them end."""
NAMED = 4
"""So many differences are told."""
FAILURE = "failure"
"""Where a process that fails leaves word of it (pipeline/shared_exit.py)."""
ROOT = Path(__file__).resolve().parents[1]

Facts = Mapping[str, str]
"""What has to be the same in all processes, by name."""


@dataclass(frozen=True)
class Address:
    """Where processes meet."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def given(cls, environment: Mapping[str, str] = os.environ) -> "Address":
        """By the launcher; UserError where none has."""
        host, port = (environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        if host and port.isdecimal() and 0 < int(port) < 2**16:
            return cls(host, int(port))
        raise UserError(
            "several processes are started by `accelerate launch` or torchrun, which say where they meet; "
            f"MASTER_ADDR is {host!r} and MASTER_PORT {port!r}"
        )

    def reason_against(self, timeout_s: float) -> str | None:
        """Why nobody can be reached there now."""
        try:
            socket.create_connection((self.host, self.port), timeout_s).close()
        except OSError as error:
            return error.strerror or str(error)
        return None


class Meeting:
    """One process among those that come."""

    def __init__(self, rank: Rank) -> None:
        """Raises UserError, or MeetingFailed where the address cannot be reached; in one process of each machine."""
        self.rank, self.address, self._timeout_s = rank, Address.given(), timeout_s()
        if rank.index == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self.store = self._kept()
        else:
            self._reach()
            self.store = self._opened(keeps=False)
        self.store.set(f"{rank.index} has come", "")
        self._compared = 0

    def compare(self, facts: Facts) -> None:
        """Returns when all processes have come here with the same facts.

        Otherwise raises in the main process, MeetingFailed for those who do not come, UserError for those who differ;
        the others wait for what it makes of that.
        """
        name, self._compared = f"facts {self._compared}", self._compared + 1
        keys = [f"{name} of {index}" for index in range(self.rank.count)]
        self.store.set(keys[self.rank.index], json.dumps([socket.gethostname(), dict(facts)]))
        if self.rank.index == 0:
            self._expect(keys)
            if sentence := difference([json.loads(self.store.get(key)) for key in keys]):
                raise UserError(sentence)
            self.store.set(f"{name} are the same", "")
        elif not self._is_said(keys[0], f"{name} are the same"):
            raise MeetingFailed(f"the main process has not come to {self.address}, or has ended; its output says why")

    def _expect(self, keys: Sequence[str]) -> None:
        said = time.monotonic()
        for left_s in self._waits():
            if is_set(self.store, keys, POLL_S):
                return
            if self.store.check([FAILURE]):
                raise MeetingFailed("another process has ended")
            if time.monotonic() - said > self._progress_s:
                said = time.monotonic()
                say(f"waits for {_named(self._missing(keys))} of {len(keys)} at {self.address}, {left_s:.0f} s left")
        missing = self._missing(keys)
        raise MeetingFailed(
            f"{len(keys) - len(missing)} of {len(keys)} processes came to {self.address} within {self._timeout_s:.0f} "
            f"s, {_named(missing)} did not: start the same command on every machine, each of which reaches that "
            "address; what the missing ones printed says more"
        )

    def _missing(self, keys: Sequence[str]) -> list[int]:
        return [index for index, key in enumerate(keys) if not self.store.check([key])]

    def _is_said(self, come: str, same: str) -> bool:
        """Whether the main process comes in time, and says so of all."""
        with suppress(RuntimeError):  # it kept the store and has gone
            return is_set(self.store, [come], self._timeout_s) and is_set(self.store, [same], self._timeout_s + SAID_S)
        return False

    def _reach(self) -> None:
        """Returns when somebody is there."""
        said, reason = time.monotonic(), None
        for left_s in self._waits():
            if (reason := self.address.reason_against(min(left_s, 5.0))) is None:
                return
            if time.monotonic() - said > self._progress_s and self.rank.local == 0:
                said = time.monotonic()
                say(f"waits for the main process at {self.address} ({reason}), {left_s:.0f} s left")
            time.sleep(min(left_s, 0.2))
        error = MeetingFailed(
            f"{socket.gethostname()} cannot reach the main process at {self.address} within {self._timeout_s:.0f} s "
            f"({reason}): start the same command there, at an address and a port that this machine can connect to"
        )
        raise once(error, self.rank.local)

    def _waits(self) -> Iterator[float]:
        """Seconds that are left, until none are."""
        end = time.monotonic() + self._timeout_s
        while (left_s := end - time.monotonic()) > 0:
            yield left_s

    @property
    def _progress_s(self) -> float:
        return min(PROGRESS_S, self._timeout_s / 4)

    def _kept(self) -> "Store":
        try:
            return self._opened(keeps=True)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"processes cannot meet at {self.address}; give another port: {reason}") from error

    def _opened(self, *, keeps: bool) -> "Store":
        from torch.distributed import PrefixStore, TCPStore

        kept = TCPStore(
            self.address.host,
            self.address.port,
            is_master=keeps,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            multi_tenant=True,  # process groups are made there too
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"potstill {attempt}", kept)


def once(error: UserError | MeetingFailed, index: int) -> UserError | MeetingFailed | EndedElsewhere:
    """What the process of this index raises where all meet with the same error and cannot agree who tells it."""
    if index == 0:
        return error
    time.sleep(SAID_S)  # a launcher ends all as soon as one has ended
    return EndedElsewhere(error.exit_code)


def timeout_s(environment: Mapping[str, str] = os.environ) -> float:
    """How long processes wait for each other to come. Raises UserError for what is no number of seconds."""
    given = environment.get(TIMEOUT_VARIABLE)
    with suppress(ValueError):
        seconds = TIMEOUT_S if given is None else float(given)
        if 0 < seconds < 1e6:
            return seconds
    raise UserError(f"{TIMEOUT_VARIABLE} is a number of seconds above 0, not {given!r}")


def installation() -> dict[str, str]:
    """What of a process's program can change a number: versions of Python and libraries, and potstill's own source."""
    found = versions()
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    files = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".c", ".h"))
    source = sha256()
    for path in files:
        source.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return found | {"source of potstill": source.hexdigest()[:12]}


def leaves(value: object, name: str) -> Iterator[tuple[str, str]]:
    """What a nest of mappings and lists holds, by where it stands: `name.key.0.key`."""
    if isinstance(value, Mapping):
        inner: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        yield name, str(value)
        return
    for key, part in inner:
        yield from leaves(part, f"{name}.{key}")


def difference(told: Sequence[tuple[str, Facts]]) -> str | None:
    """One sentence on which processes have come with other facts than the first, and how; each tells host and facts."""
    ours, groups = told[0][1], dict[tuple[str, str], list[int]]()
    for index, (host, theirs) in enumerate(told):
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        how = [f"{name} {theirs.get(name, 'none')} instead of {ours.get(name, 'none')}" for name in names[:NAMED]]
        how += [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
        if how:
            groups.setdefault((host, ", ".join(how)), []).append(index)
    if not groups:
        return None
    who = [f"{_named(indices)} on {host} with {how}" for (host, how), indices in groups.items()]
    who = who[:NAMED] + ([f"{len(who) - NAMED} more groups"] if len(who) > NAMED else [])
    return f"all processes of a run have the same installation and recipe, but there is {'; '.join(who)}"


def is_set(store: "Store", keys: Sequence[str], seconds: float) -> bool:
    """Whether all keys have a value within that time. RuntimeError when whoever kept the store has gone.

    It asks again and again: the store's own wait prints a warning when it gives up, and holds the store meanwhile.
    """
    end = time.monotonic() + seconds
    while not store.check(list(keys)):
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def _named(indices: Sequence[int]) -> str:
    """Process 3; processes 1, 4–7."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    text = ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
    return f"process{'es' if len(indices) > 1 else ''} {text}"
