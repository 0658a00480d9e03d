"""Settings of the stage `conversation`."""

from dataclasses import dataclass

from pipeline.settings import setting


@dataclass(frozen=True)
class Conversation:
    """Stage: start the HTTP server, ask, and keep the answers: of the model alone, and verified by `verify`."""

    model: str = setting(refers="model")
    verify: str | None = setting(None, refers="model")
    prompts: tuple[str, ...] = setting((), required=True)
    """What the user says; each prompt begins a conversation of its own."""
    max_tokens: int = setting(48, range=(1, 1e6))
    """Most tokens of an answer."""
    temperature: float = setting(0.0, range=(0.0, 100.0))
    seed: int = 0
