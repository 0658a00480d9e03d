"""What a benchmark case is: one shape, its inputs, its cost, its reference, and everybody who computes it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    expected: Callable[[Outputs], Outputs] = tuple
    """Picks what this candidate computes out of the reference's outputs."""


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


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Outputs:
    """The gradients of `leaves`, given those of `outputs` in any layout."""
    shaped = [None if grad is None else grad.view(out.shape) for out, grad in zip(outputs, grads, strict=True)]
    return torch.autograd.grad(outputs, leaves, shaped, retain_graph=True)


def copied(inputs: Any) -> Any:
    """The same inputs in memory of their own."""
    return dataclasses.replace(inputs, **{name: x.clone() for name, x in tensors(inputs).items()})


def tensors(inputs: Any) -> dict[str, Tensor]:
    """The tensors among the fields of a set of inputs."""
    return {name: x for name, x in vars(inputs).items() if isinstance(x, Tensor)}
