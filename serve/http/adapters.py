"""LoRA adapters as clients load and unload them: vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter.

The HTTP process knows by name what is loaded, and tells every fresh engine; the engine reads and checks the folders.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from serve.config import EngineConfig
from serve.http.errors import ApiError, invalid
from serve.http.metrics import Metrics
from serve.messages import LoadAdapter, ToEngine, UnloadAdapter

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}")
_FILES = "adapter_config.json", "adapter_model.safetensors"

Name = Annotated[str, Meta(min_length=1, max_length=128)]


class LoadLoraAdapterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """A folder below the server's --allowed-lora-path, or its path from there."""
    load_inplace: bool = False
    """Replace the adapter of this name; requests that it has already keep the old one."""


class UnloadLoraAdapterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: Name


class AdapterRegistry:
    """The adapters that requests may name, whichever engine is running."""

    def __init__(self, engine: EngineConfig, metrics: Metrics, send: Callable[[ToEngine], None]) -> None:
        """`send` puts a message on its way to the engine."""
        self._most = engine.max_cpu_loras
        self._metrics, self._send = metrics, send
        self._folders: OrderedDict[str, str] = OrderedDict(engine.adapters)
        """By name, the one asked for longest ago first."""
        self._lock = asyncio.Lock()
        self._answer: asyncio.Future[str | None] | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._folders

    @property
    def folders(self) -> dict[str, str]:
        """Of all that are loaded, in the order of their names."""
        return dict(sorted(self._folders.items()))

    def use(self, name: str) -> None:
        """A request goes to this one. ApiError 404 if it has just been unloaded."""
        if name not in self._folders:
            raise ApiError(404, "the requested adapter was unloaded just now", code="model_not_found", param="model")
        self._folders.move_to_end(name)

    async def load(self, name: str, folder: str, *, in_place: bool) -> str | None:
        """Load one more, of the name of one that is loaded only `in_place`.

        Returns the name of that which made room, if one had to. ApiError 400, with nothing changed, for a folder that
        the engine refuses; 503 when the engine ends meanwhile.
        """
        async with self._lock:
            if name in self._folders and not in_place:
                raise invalid(f"the adapter {name} is loaded already; load_inplace: true replaces it", "lora_name")
            self._answer = asyncio.get_running_loop().create_future()
            self._send(LoadAdapter(name, folder))
            if (refusal := await self._answer) is not None:
                raise invalid(refusal, "lora_path")
            self._metrics.add_model(name)
            self._folders[name] = folder
            self._folders.move_to_end(name)
            if len(self._folders) <= self._most:
                return None
            oldest = next(iter(self._folders))
            self._unload(oldest)
            return oldest

    async def unload(self, name: str) -> None:
        """Let no further request name it. ApiError 404 if none does."""
        async with self._lock:
            if name not in self._folders:
                raise ApiError(404, "there is no adapter of this name", code="model_not_found", param="lora_name")
            self._unload(name)

    def _unload(self, name: str) -> None:
        self._send(UnloadAdapter(name))
        self.forget(name)

    def forget(self, name: str) -> None:
        """It is not loaded any more."""
        if self._folders.pop(name, None) is not None:
            self._metrics.remove_model(name)

    def answered(self, refusal: str | None) -> None:
        """The engine has loaded what it was told to, or refused to."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(refusal)

    def engine_ended(self, error: ApiError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def adapter_folder(root: Path, path: str) -> str:
    """The folder below `root` that `path` names. ApiError 400 for one elsewhere, even by a link."""
    root = root.resolve()
    try:
        folder = (root / path).resolve()
        files = [folder, *((folder / name).resolve() for name in _FILES)]
        is_below = all(file.is_relative_to(root) for file in files) and folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, a circle of links
        is_below = False
    if not is_below:
        raise invalid("lora_path is no folder below the server's --allowed-lora-path", "lora_path")
    return str(folder)


def check_name(name: str, model_names: tuple[str, ...]) -> None:
    """ApiError 400 for what cannot be an adapter's name."""
    if NAME.fullmatch(name) is None:
        raise invalid("lora_name may hold letters, digits and ._/:@+- and begins with one of the former", "lora_name")
    if name in model_names:
        raise invalid("lora_name is the name of the model itself", "lora_name")


async def load_adapter(
    registry: AdapterRegistry, wanted: LoadLoraAdapterRequest, root: Path, model_names: tuple[str, ...]
) -> str:
    """What /v1/load_lora_adapter does; returns what it says."""
    check_name(wanted.lora_name, model_names)
    folder = await asyncio.to_thread(adapter_folder, root, wanted.lora_path)
    try:
        unloaded = await registry.load(wanted.lora_name, folder, in_place=wanted.load_inplace)
    except ApiError as error:
        error.message = error.message.replace(f"{root.resolve()}/", "")  # where that lies is the operator's affair
        raise
    gone = "" if unloaded is None else f" '{unloaded}', which was asked for longest ago, was unloaded."
    return f"Success: LoRA adapter '{wanted.lora_name}' added successfully.{gone}"
