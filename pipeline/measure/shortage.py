"""What one device does not hold is not measured there, and the report says so."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from model.mesh import has_gpu

T = TypeVar("T")
log = logging.getLogger(__name__)


def unless_short(what: str, measure: Callable[[], T]) -> tuple[T | None, tuple[str, ...]]:
    """What `measure` finds; where the memory of its device is too short for that, None and a sentence about `what`."""
    try:
        return measure(), ()
    except torch.OutOfMemoryError:
        pass  # what was on its way to the error is free from here on
    if has_gpu():
        torch.cuda.empty_cache()
    sentence = f"{what} is not known: one device does not hold what would be measured."
    log.warning("%s", sentence)
    return None, (sentence,)
