"""Gates: what a stage must prove before its result is published.

A bound holds when the whole 95 % confidence interval of the measurement keeps it, so noise cannot publish a bad model.
"""

import math
from collections.abc import Sequence

from pipeline.results import Check, Estimate, Parity, Quality
from pipeline.stages.shared.config import Gate

Z_95 = 1.96


def estimate(means: Sequence[float], weights: Sequence[float]) -> Estimate:
    """Weighted mean of per-batch means and its 95 % margin; batches are the independent draws, tokens are not."""
    total = math.fsum(weights)
    mean = math.fsum(mean * weight for mean, weight in zip(means, weights, strict=True)) / total
    count = len(means)
    if count < 2:
        return Estimate(mean, None)
    spread = math.fsum((weight * (value - mean)) ** 2 for value, weight in zip(means, weights, strict=True))
    return Estimate(mean, Z_95 * math.sqrt(spread * count / (count - 1)) / total)


def wilson(passed: int, total: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share, which holds for few draws and for shares of 0 and 1 (Wilson, 1927)."""
    share, spread = passed / total, Z_95**2 / total
    middle = share + spread / 2
    reach = math.sqrt(spread * (share * (1 - share) + spread / 4))
    return (middle - reach) / (1 + spread), (middle + reach) / (1 + spread)


def check_gate(gate: Gate, quality: Quality, before: Quality | None = None) -> tuple[Check, ...]:
    """Compares every bound that the recipe sets. A value that was not measured, or is not finite, fails its bound."""
    kl_ratio = None
    if quality.kl and before and before.kl and before.kl.value > 0:
        margin = None if quality.kl.margin is None else quality.kl.margin / before.kl.value
        kl_ratio = Estimate(quality.kl.value / before.kl.value, margin)
    upper = {
        "max_kl": quality.kl,
        "max_kl_ratio": kl_ratio,
        "max_bits_per_byte": quality.bits_per_byte,
    }
    lower = {"min_acceptance": quality.acceptance, "min_agreement": quality.agreement}
    bounds = [(name, measured, True) for name, measured in upper.items()]
    bounds += [(name, measured, False) for name, measured in lower.items()]
    return tuple(
        check_bound(name, measured, getattr(gate, name), is_upper=is_upper)
        for name, measured, is_upper in bounds
        if getattr(gate, name) is not None
    )


def check_bound(name: str, measured: Estimate | None, bound: float, *, is_upper: bool = True) -> Check:
    """Compares the worst end of the measurement's confidence interval with the bound."""
    if measured is None:
        raise ValueError(f"The gate sets {name}, but there is nothing to measure it against in this stage.")
    worst = measured.high if is_upper else measured.low
    passed = worst <= bound if is_upper else worst >= bound  # false for NaN
    return Check(name=name, value=measured.value, worst=worst, bound=bound, passed=passed)


def describe(check: Check) -> str:
    """One line: what was asked, what was measured."""
    sign = "≤" if check.name.startswith("max_") else "≥"
    verdict = "holds" if check.passed else "FAILS"
    return f"{check.name} {verdict}: {check.value:.4g} (worst case {check.worst:.4g}), wanted {sign} {check.bound:g}"


def describe_loss(before: Quality, after: Quality) -> str | None:
    """What training made worse on held-out text: the distance to the reference by all measures, or else the loss."""
    if before.kl and after.kl and before.acceptance and after.acceptance:
        is_worse = after.kl.value > before.kl.value and after.acceptance.value < before.acceptance.value
        name, was, now = "KL", before.kl, after.kl
    else:
        is_worse = after.nll.value > before.nll.value
        name, was, now = "loss", before.nll, after.nll
    decimals = next((n for n in range(3, 9) if round(was.value, n) != round(now.value, n)), 9)  # those that tell
    return (
        f"held-out {name} {was.value:.{decimals}f} became {now.value:.{decimals}f} nats a token" if is_worse else None
    )


def describe_parity(parity: Parity) -> str:
    """One line: how far trainer and server are apart."""
    mean = "" if parity.mean_difference is None else " in the mean"
    distance = f"{parity.difference:.1e} nats{mean} (tolerance {parity.tolerance:.0e})"
    both = f"agree to {distance} and" if parity.passed else f"differ by {distance} and agree"
    return f"trainer and server {both} in {parity.same_top * 100:.1f} % of first choices, over {parity.tokens:,} tokens"
