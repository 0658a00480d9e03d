"""What a benchmark case is: a shape, with its inputs, its cost and its result, and everybody who computes it.

Costs count what the mathematics needs: FLOPs of the visible scores only, each input read once, each output written
once. Results are in fp64, by the references beside the kernels, called in pieces that fit in memory.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
Prepare = Callable[[Any], Run | None]
Adapt = Callable[[Any], Callable[..., Any] | None]
"""From a set of inputs to a function of its leaves; None: not installed."""
Role = Literal["ours", "peer", "baseline"]
"""A baseline is our own kernel again, with less or more to do, for the ratio; peers are others with the same task."""


class NotItsTask(Exception):
    """A candidate does not do what a case asks for."""


class Inputs(SimpleNamespace):
    """Tensors by name, and the `shape` that made them, which says what they are."""

    def replace(self, **changes: Any) -> "Inputs":
        return Inputs(**{**vars(self), **changes})


@dataclass(frozen=True, eq=False)
class Shape:
    """A line of the table: what there is to compute, from which tensors, and what it must give."""

    name: str
    fields: Mapping[str, Any]
    make: Callable[[torch.device], dict[str, Any]]
    """Fresh random tensors."""
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
        return Inputs(shape=self, **self.make(device))


def in_fp64(function: Callable[..., Any]) -> Callable[[Inputs], Outputs]:
    """The reference that computes a function of the leaves, and gradients as the mode wants them."""

    def reference(inputs: Inputs) -> Outputs:
        shape = inputs.shape
        leaves = [getattr(inputs, name).double().requires_grad_() for name in shape.leaves]
        outputs = _tuple(function(*leaves))
        values = () if shape.mode == "backward" else tuple(output.detach() for output in outputs)
        if shape.mode == "forward":
            return values
        grads = [getattr(inputs, name).double() for name in shape.grads]
        return *values, *torch.autograd.grad(outputs, leaves, grads)

    return reference


@dataclass(frozen=True)
class Candidate:
    """One way to compute a case."""

    name: str
    prepare: Prepare
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
    takes: Callable[[Shape], bool] = lambda shape: True
    """The shapes that it is listed for."""


@dataclass(frozen=True)
class Case:
    """One shape, and who computes it."""

    shape: Shape
    candidates: Sequence[Candidate]
    measures_memory: bool = False
    """Calls are launched one by one, as a graph would keep what each allocates, and the peak of one is written down."""


def of_leaves(adapt: Adapt) -> Prepare:
    """The call of a function of the leaves, with its gradients where the shape's mode wants them."""

    def prepare(inputs: Inputs) -> Run | None:
        function, shape = adapt(inputs), inputs.shape
        if function is None:
            return None
        leaves = [getattr(inputs, name).detach().requires_grad_(shape.mode != "forward") for name in shape.leaves]

        def forward() -> Outputs:
            return _tuple(function(*leaves))

        def backward(outputs: Outputs) -> Outputs:
            """Gradients of results may have another layout."""
            grads = [getattr(inputs, name) for name in shape.grads]
            shaped = [grad.view(out.shape) for grad, out in zip(grads, outputs, strict=True)]
            return torch.autograd.grad(outputs, leaves, shaped, retain_graph=True)

        def both() -> Outputs:
            outputs = forward()
            return *(output.detach() for output in outputs), *backward(outputs)

        if shape.mode == "backward":
            outputs = forward()
            return lambda: backward(outputs)
        return forward if shape.mode == "forward" else both

    return prepare


def by_name(
    function: Callable[..., Any], *, dtype: torch.dtype | None = None, compiles: bool = False
) -> Callable[[Inputs], Run]:
    """The call of a function with the inputs, or fields of the shape, that its parameters are named after.

    Floating inputs come in `dtype`; a parameter whose name is nowhere keeps its default.
    """

    def prepare(inputs: Inputs) -> Run:
        known = {**inputs.shape.fields, **vars(inputs)}
        given = {name: known[name] for name in signature(function).parameters if name in known}
        if dtype is not None:
            is_wide = {name: isinstance(x, Tensor) and x.is_floating_point() for name, x in given.items()}
            given = {name: x.to(dtype) if is_wide[name] else x for name, x in given.items()}
        call = compiled(function, next(tensors(inputs)).device) if compiles else function
        return lambda: _tuple(call(**given))

    return prepare


def of_names(function: Callable[..., Any], dtype: torch.dtype | None = torch.float64) -> Callable[[Inputs], Outputs]:
    """The reference that calls a function as `by_name` does, in fp64 unless told."""
    return lambda inputs: by_name(function, dtype=dtype)(inputs)()


def installed(module: str) -> Any | None:
    """The module, or None where its package is not installed."""
    return None if find_spec(module.partition(".")[0]) is None else import_module(module)


def needs(module: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An adapter that is given a package first; without the package there is nothing to run."""

    def decorate(adapt: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(adapt)
        def adapted(inputs: Inputs, **options: Any) -> Any:
            package = installed(module)
            return None if package is None else adapt(package, inputs, **options)

        return adapted

    return decorate


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """torch.compile for the shape at hand; on the CPU, where only --tiny comes, the function as it is."""
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


def tensors(inputs: Any) -> Iterator[Tensor]:
    """The tensors in a set of inputs: of tensors, dataclasses and tuples of them, and what else it needs."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif dataclasses.is_dataclass(inputs):
        for field in dataclasses.fields(inputs):
            yield from tensors(getattr(inputs, field.name))
    elif isinstance(inputs, SimpleNamespace | tuple):
        for part in vars(inputs).values() if isinstance(inputs, SimpleNamespace) else inputs:
            yield from tensors(part)


def normal(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=BF16)


def _tuple(outputs: Tensor | Outputs) -> Outputs:
    return outputs if isinstance(outputs, tuple) else (outputs,)
