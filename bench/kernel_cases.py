"""What a benchmark case is: one shape, its inputs, its cost, its reference, and everybody who computes it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]
Role = Literal["ours", "peer", "baseline"]
"""A baseline is our own kernel again, with less or more to do, for the ratio; peers are others with the same task."""


class NotItsTask(Exception):
    """A candidate does not do what a case asks for."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute a case."""

    name: str
    prepare: Callable[[Any], Run | None]
    """From a set of inputs to the call that is timed; None: not installed. Copies and plans made here are not timed."""
    role: Role = "peer"
    compiles: bool = False
    """Takes seconds to prepare, for every shape: left out when the part runs out of time."""
    in_place: bool = False
    """Overwrites its inputs."""
    reads_on_host: bool = False
    """Waits for results on the host, so that no graph can hold it."""
    compare: Callable[[Outputs, Outputs], tuple[Outputs, Outputs]] = lambda outputs, expected: (outputs, expected)
    """From outputs and the reference's to what must be close: for who computes a part, or draws other numbers."""


@dataclass(frozen=True)
class Case:
    """One shape: its inputs, its cost, its reference, and who computes it."""

    name: str
    shape: Mapping[str, Any]
    flops: float
    num_bytes: float
    """Least traffic with device memory: each input read once, each output written once."""
    make_inputs: Callable[[torch.device], Any]
    """A dataclass with fresh random tensors."""
    reference: Callable[[Any], Outputs]
    candidates: Sequence[Candidate]
    dtype: torch.dtype = torch.bfloat16
    measures_memory: bool = False
    """Calls are launched one by one, as a graph would keep what each allocates, and the peak of one is written down."""


def installed(module: str) -> Any | None:
    """The module, or None where its package is not installed."""
    return None if find_spec(module.partition(".")[0]) is None else import_module(module)


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Outputs:
    """The gradients of `leaves`, given those of `outputs` in any layout."""
    shaped = [None if grad is None else grad.view(out.shape) for out, grad in zip(outputs, grads, strict=True)]
    return torch.autograd.grad(outputs, leaves, shaped, retain_graph=True)


def copied(inputs: Any) -> Any:
    """The same inputs in memory of their own."""
    return deepcopy(inputs)


def tensors(inputs: Any) -> Iterator[Tensor]:
    """The tensors in a set of inputs: a dataclass or tuple of tensors, of other such, and of what else it needs."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif dataclasses.is_dataclass(inputs):
        for field in dataclasses.fields(inputs):
            yield from tensors(getattr(inputs, field.name))
    elif isinstance(inputs, tuple):
        for part in inputs:
            yield from tensors(part)
