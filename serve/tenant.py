"""Who a request is from, as the engine sees it. Both processes read this."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """One API key's requests."""

    name: str = ""
    """Those of one name share what is fair; "": nobody in particular."""
    weight: float = 1.0
    """How much of the machine is fair, beside the weights of others."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
