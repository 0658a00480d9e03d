"""Which LoRA adapters requests may name, and which of them lie in the slots of the model.

An adapter is read once, kept on the host, and written into a slot when a request that names it enters the batch; the
slot that was used longest ago and by nobody who runs now makes room. A request keeps the adapter that it found under
its name: what is unloaded, or replaced by another of its name, goes when its last request has ended.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from model.adapter_slots import AdapterSlots
from model.files.adapter import Adapter, check_base, read_adapter_for
from model.files.artifact import MANIFEST_NAME, open_artifact
from serve.config import NO_ADAPTER, EngineConfig


@dataclass(eq=False, slots=True)
class LoadedAdapter:
    """An adapter that requests hold on to."""

    number: int
    """Its own for good: cached prefixes are kept apart by it, even those of adapters that bear one name in turn."""
    weights: Adapter | None
    """On the host; None for one that was fused with the model and never leaves its slot."""
    slot: int = NO_ADAPTER
    """Where it lies in the model, if it does."""


class AdapterUser(Protocol):
    """A sequence that may have an adapter."""

    adapter: LoadedAdapter | None
    batch_row: int

    @property
    def adapter_slot(self) -> int: ...


class Adapters:
    """All that are loaded. One thread calls everything here but `read`."""

    def __init__(
        self, config: EngineConfig, slots: AdapterSlots | None, *, forget_others: Callable[[set[int]], None]
    ) -> None:
        """`slots` of the model; None where the adapters of `config` were fused with it, in their order.

        `forget_others` is told the batch rows in use when a slot changes: what the others hold names old slots.
        ValueError for an adapter of `config` that does not fit.
        """
        self._config, self._slots, self._forget_others = config, slots, forget_others
        self._by_name: dict[str, LoadedAdapter] = {}
        self._num_loaded = 0
        self._in_slots: OrderedDict[int, LoadedAdapter | None] = OrderedDict()
        """What lies in each slot, the one used longest ago first."""
        if slots is not None:
            self._in_slots = OrderedDict.fromkeys(range(slots.num_slots))
        for number, (name, folder) in enumerate(config.adapters.items()):
            if slots is not None:
                self.add(name, self.read(folder))
            else:
                self._by_name[name] = self._in_slots[number] = LoadedAdapter(number, None, number)

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of this name; None without one. ValueError when none is called so."""
        if name is None:
            return None
        if name not in self._by_name:
            raise ValueError(f"there is no adapter {name!r}; there are {', '.join(self._by_name) or 'none'}")
        return self._by_name[name]

    def read(self, folder: str) -> Adapter:
        """The adapter in a folder, for `add`, in any thread. ValueError with one sentence for one that does not fit."""
        if self._slots is None:
            raise ValueError("adapters can only be loaded by an engine that was started with enable_lora")
        if (Path(folder) / MANIFEST_NAME).exists():
            open_artifact(folder, verify=self._config.verify_artifact)
        check_base(folder, self._config.model)
        return read_adapter_for(self._slots, folder)

    def add(self, name: str, weights: Adapter) -> None:
        """Let requests name it from here on; one that bore the name before stays with the requests that have it."""
        self._by_name[name] = LoadedAdapter(self._num_loaded, weights)
        self._num_loaded += 1

    def remove(self, name: str) -> None:
        """Let no further request name it; unknown names are ignored."""
        self._by_name.pop(name, None)

    def place(self, sequence: AdapterUser, running: Iterable[AdapterUser]) -> bool:
        """Have the adapter of a sequence that is to run lie in a slot; False while those that run need all."""
        adapter = sequence.adapter
        if adapter is None:
            return True
        if adapter.slot == NO_ADAPTER:
            used = {other.adapter_slot for other in running}
            slot = next((slot for slot in self._in_slots if slot not in used), None)
            if slot is None:
                return False
            self._write(slot, adapter)
            self._forget_others({other.batch_row for other in running})
        self._in_slots.move_to_end(adapter.slot)
        return True

    def _write(self, slot: int, adapter: LoadedAdapter) -> None:
        if (before := self._in_slots[slot]) is not None:
            before.slot = NO_ADAPTER
        if self._slots is not None and adapter.weights is not None:
            self._slots.write(slot, adapter.weights.layers, adapter.weights.config.scale)
        self._in_slots[slot], adapter.slot = adapter, slot
