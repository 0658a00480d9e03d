"""What a benchmark case is: a shape, with its inputs, its cost and its result, and everybody who computes it.

Costs count what the mathematics needs: FLOPs of the visible scores only, each input read once, each output written
once. Results are in fp64, by the references beside the kernels, called in pieces that fit in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

BF16 = torch.bfloat16
Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]
Call = Callable[..., Any]
"""From the shape's leaves, if it has any, to a tensor or a tuple of them."""
Adapt = Callable[["Inputs"], Call]
"""From a set of inputs to what is called and timed. Copies and plans made before are not timed."""
Role = Literal["ours", "peer", "baseline"]
"""A baseline is our own kernel again, with less or more to do, for the ratio; peers are others with the same task."""


class NotItsTask(Exception):
    """A candidate does not do what a case asks for."""

    status = "left out"


class NotInstalled(NotItsTask):
    """Nor does it do anything else."""

    status = "absent"


class Inputs(SimpleNamespace):
    """Tensors by name, and the `shape` that made them, which says what they are."""

    def replace(self, **changes: Any) -> "Inputs":
        return Inputs(**{**vars(self), **changes})


@dataclass(frozen=True, eq=False)
class Shape:
    """A line of the table: what there is to compute, from which tensors, and what it must give."""

    name: str
    fields: Mapping[str, Any]
    make: Callable[[], dict[str, Any]]
    """Fresh random tensors, on torch's default device."""
    reference: Callable[[Inputs], Outputs]
    num_bytes: float
    """Least traffic with device memory."""
    flops: float = 0.0
    dtype: torch.dtype = BF16
    leaves: Sequence[str] = ()
    """What a function of leaves is given, and what is differentiated by."""
    grads: Sequence[str] = ()
    """The gradients of the results."""
    mode: str = "forward"
    """Or "forward+backward", or "backward"."""

    def __getitem__(self, field: str) -> Any:
        return self.fields[field]

    def inputs(self, device: torch.device) -> Inputs:
        with device:
            return Inputs(shape=self, **self.make())


@dataclass(frozen=True)
class Candidate:
    """One way to compute a case."""

    name: str
    adapt: Adapt
    role: Role = "peer"
    compiles: bool = False
    """Takes seconds to prepare, for every shape: left out when the part runs out of time."""
    in_place: bool = False
    """Overwrites its inputs."""
    reads_on_host: bool = False
    """Waits for results on the host, so that no graph can hold it."""
    compare: Callable[[Outputs, Outputs], tuple[Outputs, Outputs]] = lambda outputs, expected: (outputs, expected)
    """From outputs and the reference's to what must be close: for who computes a part, or draws other numbers."""
    takes: Callable[[Shape], bool] = lambda shape: True
    """The shapes that it is listed for."""

    def prepare(self, inputs: Inputs) -> Run:
        """The call to time. Who overwrites inputs gets a copy, so that everybody else works on random numbers."""
        own = deepcopy(inputs) if self.in_place else inputs
        return on_leaves(self.adapt(own), own)


@dataclass(frozen=True)
class Case:
    """One shape, and who computes it."""

    shape: Shape
    candidates: Sequence[Candidate]
    measures_memory: bool = False
    """Calls are launched one by one, as a graph would keep what each allocates, and the peak of one is written down."""


def on_leaves(call: Call, inputs: Inputs) -> Run:
    """A call with the leaves, and for its gradients where the shape's mode wants them."""
    shape = inputs.shape
    leaves = [getattr(inputs, name).detach().requires_grad_(shape.mode != "forward") for name in shape.leaves]

    def forward() -> Outputs:
        outputs = call(*leaves)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def backward(outputs: Outputs) -> Outputs:
        """Gradients of results may have another layout."""
        grads = [getattr(inputs, name) for name in shape.grads]
        shaped = [grad.view(out.shape) for grad, out in zip(grads, outputs, strict=True)]
        return torch.autograd.grad(outputs, leaves, shaped, retain_graph=shape.mode == "backward")

    def both() -> Outputs:
        outputs = forward()
        return *(output.detach() for output in outputs), *backward(outputs)

    if shape.mode == "backward":
        outputs = forward()
        return lambda: backward(outputs)
    return forward if shape.mode == "forward" else both


def by_name(function: Call, *, compiles: bool = False) -> Callable[[Inputs], Call]:
    """Gives a function the leaves, the other inputs, or fields of the shape, that its parameters are named after.

    A parameter whose name is nowhere keeps its default.
    """

    def adapt(inputs: Inputs) -> Call:
        leaves, known = inputs.shape.leaves, {**inputs.shape.fields, **vars(inputs)}
        names = [name for name in signature(function).parameters if name in known and name not in leaves]
        given = {name: known[name] for name in names}
        call = compiled(function, next(tensors(inputs)).device) if compiles else function
        return lambda *values, **more: call(**given, **dict(zip(leaves, values, strict=True)), **more)

    return adapt


def in_fp64(function: Call) -> Callable[[Inputs], Outputs]:
    """The reference that calls a function `by_name`, with all floating inputs in fp64."""

    def reference(inputs: Inputs) -> Outputs:
        floating = {name: x for name, x in vars(inputs).items() if isinstance(x, Tensor) and x.is_floating_point()}
        wide = inputs.replace(**{name: x.double() for name, x in floating.items()})
        if inputs.shape.mode != "backward":
            return on_leaves(by_name(function)(wide), wide)()
        # Backward alone would keep for its next call what is computed again in bands.
        wide.shape = replace(inputs.shape, mode="forward+backward")
        return on_leaves(by_name(function)(wide), wide)()[-len(inputs.shape.leaves) :]

    return reference


def installed(module: str) -> Any:
    """The module. Raises NotInstalled without its package."""
    if find_spec(module.partition(".")[0]) is None:
        raise NotInstalled("not installed")
    return import_module(module)


def needs(*modules: str) -> Callable[[Callable[..., Call]], Adapt]:
    """An adapter that is given modules first."""
    return lambda adapt: wraps(adapt)(lambda inputs: adapt(*map(installed, modules), inputs))


def compiled(function: Call, device: torch.device) -> Call:
    """torch.compile for the shape at hand; on the CPU, where only --tiny comes, the function as it is."""
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


def tensors(inputs: Any) -> Iterator[Tensor]:
    """The tensors in a set of inputs: of tensors, dataclasses and tuples of them, and what else it needs."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif is_dataclass(inputs):
        yield from tensors(tuple(getattr(inputs, field.name) for field in fields(inputs)))
    elif isinstance(inputs, SimpleNamespace | tuple):
        for part in inputs if isinstance(inputs, tuple) else vars(inputs).values():
            yield from tensors(part)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=BF16)
