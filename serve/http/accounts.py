"""API keys by name: what share of the machine is fair for each, what it may use in a minute, and how urgent that is.

    {"classes": {"interactive": {"priority": 0, "deadline_s": 60}, "batch": {"priority": 10}},
     "keys": [{"name": "shop", "key": "…", "weight": 2, "requests_per_minute": 60, "tokens_per_minute": 100000,
               "classes": ["interactive", "batch"]}]}

The first class of a key is that of requests which name none; `service_tier` names another. Limits are token buckets: a
minute's worth may come at once, and comes back evenly. Prompts are counted before they are computed, output tokens when
a request has ended, so that the next one waits for what this one used.
"""

import hashlib
import math
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from serve.http.errors import ApiError, invalid
from serve.http.options import EVERYBODY, ServerOptions

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
DEFAULT_TIERS = (None, "auto", "default")
MINUTE_S = 60.0
PerMinute = Annotated[int, Meta(ge=1, le=10**12)]


class RequestClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What its requests are given."""

    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    """Lower goes first, whoever asks."""
    deadline_s: Annotated[float, Meta(gt=0, le=3600)] | None = None
    """The longest that one may take, in seconds; then it ends with 504."""


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One API key."""

    name: str
    key: Annotated[str, Meta(min_length=1)]
    weight: Annotated[float, Meta(ge=1e-3, le=1e3)] = 1.0
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    """Of prompts and output together."""
    classes: tuple[str, ...] = ()


class KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What --api-keys-file holds."""

    keys: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=10_000)]
    classes: dict[str, RequestClass] = {}


class Bucket:
    """What is left of a minute's worth."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._level, self._at = float(per_minute), time.monotonic()

    @property
    def level(self) -> float:
        """What may be taken now; below zero while more was used than there was."""
        now = time.monotonic()
        self._level = min(self._level + (now - self._at) * self.per_minute / MINUTE_S, self.per_minute)
        self._at = now
        return self._level

    def wait_s(self, amount: float) -> float:
        """How long until so much can be taken, or all that it holds; 0: now."""
        return max(0.0, (min(amount, self.per_minute) - self.level) * MINUTE_S / self.per_minute)

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    @property
    def full_s(self) -> float:
        """How long until it is full."""
        return (self.per_minute - self.level) * MINUTE_S / self.per_minute


@dataclass(frozen=True)
class Account:
    """One key while the server runs."""

    name: str
    digest: bytes
    """SHA-256 of the key."""
    weight: float = 1.0
    requests: Bucket | None = None
    tokens: Bucket | None = None
    classes: dict[str, RequestClass] = field(default_factory=dict)
    """Those that its requests may have, the first unless they say."""
    consents: bool = False
    """Whether its answers may be stored for training."""
    is_ordered: bool = False
    """Whether the operator orders requests, so that they cannot do so themselves."""

    def admit_request(self) -> None:
        """Count a request. ApiError 429 when there were too many."""
        if self.requests is not None:
            self._check(self.requests, 1, "requests")
            self.requests.take(1)

    def admit_prompts(self, num_tokens: int) -> None:
        """Count prompts. ApiError 429 when tokens are used up."""
        if self.tokens is not None:
            self._check(self.tokens, num_tokens, "tokens")
            self.tokens.take(num_tokens)

    def spend(self, num_tokens: int) -> None:
        """Count what was generated."""
        if self.tokens is not None:
            self.tokens.take(num_tokens)

    def _check(self, bucket: Bucket, amount: int, unit: str) -> None:
        if (wait_s := bucket.wait_s(amount)) > 0:
            text = f"this API key may use {bucket.per_minute} {unit} a minute; they are used up for now"
            raise ApiError(429, text, code="rate_limit_exceeded", retry_after_s=math.ceil(wait_s))

    def terms(self, tier: str | None, priority: int | None, deadline_s: float | None) -> tuple[int, float | None]:
        """Priority and deadline of a request that asks for these. ApiError 400 for what its key does not have."""
        if self.is_ordered and priority:
            raise invalid("priority is given by the class of a request here; name one by service_tier", "priority")
        if tier not in DEFAULT_TIERS and tier not in self.classes:
            known = ", ".join(("auto", "default", *self.classes))
            raise invalid(f"service_tier can be {known} here", "service_tier")
        default = next(iter(self.classes.values()), RequestClass(priority or 0))
        own = default if tier in DEFAULT_TIERS else self.classes[tier or ""]
        limits = [limit for limit in (own.deadline_s, deadline_s) if limit is not None]
        return own.priority, min(limits, default=None)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit-* headers, for a key with limits."""
        found = []
        for unit, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                left, reset = max(0, math.floor(bucket.level)), f"{bucket.full_s:.3f}s"
                facts = ("limit", str(bucket.per_minute)), ("remaining", str(left)), ("reset", reset)
                found += [(f"x-ratelimit-{what}-{unit}".encode(), value.encode()) for what, value in facts]
        return found


def accounts_of(options: ServerOptions) -> list[Account]:
    """All keys of the options. ValueError with one sentence, which holds no key, for a file that is wrong."""
    accounts = [Account(f"key{number}", _digest(key)) for number, key in enumerate(options.api_keys, 1)]
    if options.api_keys_file is not None:
        accounts = _with_file(accounts, options.api_keys_file)
    return _with_consent(accounts, options.label_consent)


def _with_file(plain: list[Account], path: str) -> list[Account]:
    file = _read(Path(path))
    accounts = plain + [_account(key, file.classes) for key in file.keys]
    if min(len({account.name for account in accounts}), len({account.digest for account in accounts})) < len(accounts):
        raise ValueError(f"--api-keys-file {path}: a key, or its name, is there twice")
    return accounts


def _with_consent(accounts: list[Account], consent: tuple[str, ...]) -> list[Account]:
    """The same, each with what --label-consent says of it."""
    names = [account.name for account in accounts]
    if unknown := [name for name in consent if name not in (EVERYBODY, *names)]:
        raise ValueError(f"--label-consent names {unknown[0]}; it can name {', '.join((EVERYBODY, *names))}")
    if EVERYBODY in consent and EVERYBODY in names:
        raise ValueError(f"--label-consent {EVERYBODY} means everybody, but a key has this name; give it another")
    return [replace(account, consents=EVERYBODY in consent or account.name in consent) for account in accounts]


def _read(path: Path) -> KeysFile:
    try:
        file = msgspec.json.decode(path.read_bytes(), type=KeysFile)
    except OSError as error:
        raise ValueError(f"--api-keys-file {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"--api-keys-file {path}: {str(error)[:1].lower()}{str(error)[1:]}") from None
    for key in file.keys:
        if NAME.fullmatch(key.name) is None:
            raise ValueError(f"--api-keys-file {path}: {key.name!r} is no name; it may hold letters, digits and ._-")
        for name in key.classes:
            if name not in file.classes:
                raise ValueError(
                    f"--api-keys-file {path}: the key {key.name} has the class {name!r}, which is not there"
                )
    return file


def _account(key: Key, classes: dict[str, RequestClass]) -> Account:
    return Account(
        key.name,
        _digest(key.key),
        key.weight,
        None if key.requests_per_minute is None else Bucket(key.requests_per_minute),
        None if key.tokens_per_minute is None else Bucket(key.tokens_per_minute),
        {name: classes[name] for name in key.classes},
        is_ordered=True,
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
