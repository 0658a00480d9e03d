"""Runs Gluon kernels for Hopper in NumPy, step by step: who waits for whom, what lies in which buffer, and the numbers.

The kernel's own functions run, with other modules in place of Gluon's. A partition of `warp_specialize` is a thread,
and one thread runs at a time; wherever they could meet (barriers, copies, products), chance decides who goes on. A copy
lands, and a product is computed, at any moment between its issue and the wait for it. Raises Deadlock where nobody can
go on, and Overwritten where a buffer changes under a product that has yet to read it. What has not landed is NaN.

Not modelled: layouts, dtypes (all is fp64), the fence between ordinary and asynchronous writes.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime.jit import JITFunction


class Deadlock(Exception):
    """Every partition waits."""


class Overwritten(Exception):
    """A buffer changed while a product was reading it."""


class Block(np.ndarray):
    """A tensor, or a number, of a kernel."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> "Block":
        return self


def block(values: Any) -> Block:
    return np.asarray(values).view(Block)


@dataclass
class Pointer:
    """Into the elements of an array, in the order of memory."""

    memory: np.ndarray
    offset: Any = 0

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)


@dataclass(eq=False)
class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have landed."""

    count: int
    missing: int = 0
    bytes: int = 0
    parity: int = 0
    arrivals: int = 0

    def __post_init__(self) -> None:
        self.missing = self.count

    def change(self, arrivals: int = 0, bytes: int = 0) -> None:
        self.missing, self.bytes, self.arrivals = self.missing - arrivals, self.bytes + bytes, self.arrivals + arrivals
        assert self.missing >= 0, "more arrivals than a phase has"
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.parity = self.count, self.parity ^ 1


@dataclass(eq=False)
class Buffer:
    """Shared memory: a tile, with the products that have yet to read it, or a barrier."""

    values: np.ndarray
    readers: list["Product"] = field(default_factory=list)
    dtype = np.float64
    barrier: Barrier | None = None

    def write(self, values: np.ndarray) -> None:
        if self.readers and not np.array_equal(self.values, values, equal_nan=True):
            raise Overwritten
        self.values[:] = values

    def load(self, layout: Any) -> Block:
        return block(self.values.copy())

    store = write

    def permute(self, order: Any) -> "Transposed":
        return Transposed(self)


@dataclass(eq=False)
class Transposed:
    buffer: Buffer


@dataclass(eq=False)
class Product:
    """An asynchronous product; no number before somebody waits for it."""

    left: Any
    right: Any
    total: np.ndarray | None
    value: Block | None = None

    def __post_init__(self) -> None:
        for buffer in self.buffers():
            buffer.readers.append(self)

    def buffers(self) -> list[Buffer]:
        operands = [x.buffer if isinstance(x, Transposed) else x for x in (self.left, self.right)]
        return [x for x in operands if isinstance(x, Buffer)]

    def compute(self) -> None:
        if self.value is not None:
            return
        left, right = operand_values(self.left), operand_values(self.right)
        self.value = block(left @ right if self.total is None else left @ right + self.total)
        for buffer in self.buffers():
            buffer.readers.remove(self)


def operand_values(operand: Any) -> np.ndarray:
    if isinstance(operand, Transposed):
        return operand.buffer.values.T
    return operand.values if isinstance(operand, Buffer) else operand


@dataclass
class Allocation:
    """Several buffers of one shape."""

    buffers: list[Buffer]
    dtype: Any

    def index(self, place: int) -> Buffer:
        return self.buffers[int(place)]


class Descriptor:
    """A matrix that copies take blocks of; what lies past its last row is 0."""

    dtype, layout = np.float64, None

    def __init__(self, matrix: np.ndarray, block_shape: Sequence[int]) -> None:
        self.matrix = matrix
        self.block_type = SimpleNamespace(shape=block_shape, nbytes=int(np.prod(block_shape)))

    def read(self, row: int, column: int) -> np.ndarray:
        rows, columns = self.block_type.shape
        found = np.zeros((rows, columns))
        part = self.matrix[row : row + rows, column : column + columns]
        found[: len(part)] = part
        return found


class Program:
    """One program of a grid, with its partitions and what is under way."""

    def __init__(self, number: int, chance: Random) -> None:
        self.number, self.chance = number, chance
        self.barriers: list[Barrier] = []
        self.landings: list[Callable[[], None]] = []
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.turns: dict[int, threading.Semaphore] = {}
        self.back = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.own = threading.local()

    # What partitions do

    def meet(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others go on, and go on oneself when ready."""
        name = getattr(self.own, "name", None)
        if name is None:  # before the partitions
            assert ready()
            return
        self.waiting[name] = ready
        self.back.release()
        self.turns[name].acquire()
        if self.error is not None:
            raise self.error

    def specialize(self, partitions: Sequence[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
        threads = [threading.Thread(target=self._run, args=(name, *of)) for name, of in enumerate(partitions)]
        for name in range(len(partitions)):
            self.waiting[name], self.turns[name] = lambda: True, threading.Semaphore(0)
        for thread in threads:
            thread.start()
        while self.waiting and self.error is None:
            self._step()
        for turn in self.turns.values():
            turn.release()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _run(self, name: int, function: Any, arguments: tuple[Any, ...]) -> None:
        self.own.name, self.own.products = name, []
        self.turns[name].acquire()
        try:
            if self.error is None:
                function(*arguments)
        except BaseException as error:
            self.error = self.error or error
        self.waiting.pop(name, None)
        self.back.release()

    def _step(self) -> None:
        ready = [name for name, is_ready in self.waiting.items() if is_ready()]
        choice = self.chance.randrange(len(ready) + len(self.landings)) if ready or self.landings else None
        if choice is None:
            self.error = Deadlock()
        elif choice < len(ready):
            self.turns[ready[choice]].release()
            self.back.acquire()
        else:
            try:
                self.landings.pop(choice - len(ready))()
            except Overwritten as error:
                self.error = error

    # Barriers, copies, products

    def init(self, bar: Buffer, count: int) -> None:
        bar.barrier = Barrier(count)
        self.barriers.append(bar.barrier)

    def expect(self, bar: Buffer, bytes: int) -> None:
        bar.barrier.change(arrivals=1, bytes=bytes)
        self.meet()

    def arrive(self, bar: Buffer, count: int) -> None:
        bar.barrier.change(arrivals=count)
        self.meet()

    def wait(self, bar: Buffer, parity: int) -> None:
        self.meet(lambda: bar.barrier.parity != parity)

    def copy(self, descriptor: Descriptor, corner: Sequence[int], bar: Buffer, buffer: Buffer) -> None:
        def land() -> None:
            buffer.write(found)
            bar.barrier.change(bytes=-descriptor.block_type.nbytes)

        found = descriptor.read(*map(int, corner))
        buffer.write(np.full_like(buffer.values, np.nan))
        self.landings.append(land)
        self.meet()

    def multiply(self, left: Any, right: Any, total: Any, *, use_acc: bool = True, is_async: bool) -> Product:
        product = Product(left, right, np.array(total) if use_acc else None)
        self.own.products.append(product)
        if self.chance.random() < 0.5:
            product.compute()
        self.meet()
        return product

    def wait_for_products(self, most: int, deps: Sequence[Product]) -> Block:
        self.meet()
        products = self.own.products
        while len(products) > most:
            products.pop(0).compute()
        (dependence,) = deps
        assert dependence.value is not None and dependence not in products, "not waited for"
        return dependence.value

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Allocation:
        return Allocation([Buffer(np.full(shape[1:], np.nan)) for _ in range(shape[0])], dtype)

    # The modules of Gluon

    def modules(self) -> dict[str, Any]:
        language = SimpleNamespace(
            allocate_shared_memory=self.allocate, warp_specialize=self.specialize,
            program_id=lambda axis: block(self.number), static_range=range, load=load, store=store,
            atomic_add=atomic_add, NVMMASharedLayout=SimpleNamespace(get_default_for=no_layout),
            arange=lambda first, end, layout: block(np.arange(first, end)),
            zeros=lambda shape, dtype, layout: block(np.zeros(shape)), zeros_like=lambda x: block(np.zeros(x.shape)),
            full=lambda shape, value, dtype, layout: block(np.full(shape, value)),
            where=lambda *of: block(np.where(*of)), maximum=np.maximum, exp2=np.exp2, log2=np.log2,
            max=lambda x, axis: block(np.max(x, axis)), sum=lambda x, axis: block(np.sum(x, axis)),
            convert_layout=lambda x, layout: x, int32=int, int64=int, float32=float,
            **dict.fromkeys(("SliceLayout", "DotOperandLayout", "BlockedLayout", "NVMMADistributedLayout"), no_layout),
        )  # fmt: skip
        return {
            "gl": language,
            "mbarrier": SimpleNamespace(
                init=self.init, expect=self.expect, arrive=self.arrive, wait=self.wait, MBarrierLayout=no_layout
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=self.copy),
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait_for_products,
            "fence_async_shared": lambda: None,
        }


def no_layout(*_: Any) -> None:
    return None


def load(pointer: Pointer, mask: np.ndarray | None = None, other: float = 0.0) -> Block:
    memory = pointer.memory.reshape(-1)
    if mask is None:
        return block(memory[pointer.offset])
    found = np.full(mask.shape, other)
    found[mask] = memory[np.asarray(pointer.offset)[mask]]
    return block(found)


def atomic_add(pointer: Pointer, values: np.ndarray, mask: np.ndarray, sem: str) -> None:
    np.add.at(pointer.memory.reshape(-1), np.asarray(pointer.offset)[mask], np.asarray(values)[mask])


def store(pointer: Pointer, values: np.ndarray, mask: np.ndarray) -> None:
    pointer.memory.reshape(-1)[np.asarray(pointer.offset)[mask]] = values[mask]


def in_python(kernel: JITFunction, names: dict[str, Any]) -> FunctionType:
    """A kernel's function, and those it calls, with these names in place of what they have at the top of their file."""

    def replaced(value: Any) -> Any:
        return in_python(value, names) if isinstance(value, JITFunction) else getattr(value, "value", value)

    used = {
        name: replaced(kernel.fn.__globals__[name])
        for name in kernel.fn.__code__.co_names
        if name in kernel.fn.__globals__
    }
    return FunctionType(kernel.fn.__code__, used | names, kernel.fn.__name__, kernel.fn.__defaults__)


def run(kernel: JITFunction, number: int, chance: Random, *args: Any, changed: dict[str, Any] | None = None) -> Program:
    """One program of a kernel; `changed` takes the place of some of its functions."""
    program = Program(number, chance)
    in_python(kernel, {"__builtins__": __builtins__, **program.modules(), **(changed or {})})(*args)
    return program
