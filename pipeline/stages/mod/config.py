"""Settings of the stage `mod`."""

from dataclasses import dataclass, field

from pipeline.settings import COUNTS, FRACTION, setting
from pipeline.stages.shared.config import Decoding, Recovery


@dataclass(frozen=True)
class RoutedSpeed(Decoding):
    """What routing is timed on, beside the dense parent: decoding, and the pass over one prompt."""

    prefill_tokens: int = setting(2048, count=True, range=(1, 1e7))
    """Length of that prompt."""


@dataclass(frozen=True)
class Mod(Recovery):
    """Stage: routers that let only part of the tokens into some layers, trained towards the dense parent."""

    model: str = setting(refers="model")
    route: str = setting("attention", choices=("attention", "mlp", "block"))
    """What a token that is not selected skips; attention alone costs a finished model least."""
    capacity: float = setting(0.5, range=(0.01, 1.0))
    """The part of the tokens that a routed layer selects."""
    every: int = setting(2, range=(1, 10_000))
    """Every n-th layer gets a router, unless one of the next two says otherwise."""
    layers: tuple[int, ...] = setting((), range=(0, 10_000))
    """Exactly these layers, 0 is the first."""
    least_important: int | None = setting(None, range=(1, 10_000))
    """This many layers: those that lose least without what is routed, measured on `calibration_tokens`."""
    start: str = setting("fitted", choices=("fitted", "zero"))
    """Routers begin as the best linear guess of what each token's absence would cost, or know nothing."""
    train: str = setting("full", choices=("router", "adapters", "full"))
    """What is trained beside the routers: nothing, adapters that are merged in the end, or everything."""
    adapter_rank: int = setting(64, range=(1, 10_000))
    """Of those adapters, which are on all projections."""
    calibration_tokens: int = setting(16_384, count=True, range=COUNTS)
    """Training tokens to fit routers, measure importance, and set thresholds on."""
    anneal_fraction: float = setting(0.3, range=FRACTION)
    """The part of training in which the capacity falls from 1."""
    auxiliary_weight: float = setting(0.1, range=(0.0, 100.0))
    """Weight of the loss by which a router's own score predicts whether its token is selected."""
    speed: RoutedSpeed = field(default_factory=RoutedSpeed, metadata={"weights": False})

    @property
    def held_out_passes(self) -> int:
        """Before and after training, each time with tokens selected at random too."""
        return 4
