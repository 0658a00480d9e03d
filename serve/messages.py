"""What the HTTP process and the engine process tell each other, and how it is put on the wire.

A frame is a length (4 bytes, little endian) and that many bytes of MessagePack. Every message is a typed struct with a
tag; a frame that is none of them raises ProtocolError. MessagePack holds data alone, unlike pickle: neither process can
make the other run code.
"""

import socket
import struct

import msgspec

from serve.outputs import EngineStats, RequestOutput
from serve.sampling_params import SamplingParams
from serve.tenant import Tenant

MAX_FRAME_BYTES = 256 * 2**20
LENGTH = struct.Struct("<I")


class Add(msgspec.Struct, frozen=True, tag=True):
    """Continue one prompt: the arguments of `Engine.add_request`, under their names there.

    Times are seconds of `time.monotonic`, one clock for all processes of a machine.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    priority: int = 0
    deadline: float | None = None
    tenant: Tenant | None = None
    adapter: str | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget these requests and free what they hold; unknown ids are no error, since they may just have finished."""

    request_ids: list[str]


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by the engine's loop between two steps: proof that steps still end."""

    number: int


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read the adapter in a folder, and let requests that come after the answer name it."""

    name: str
    folder: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Let no further request name it; not answered."""

    name: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave now; what still runs is lost."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is loaded and warm; sent once, first."""

    model: str
    draft: str | None
    dtype: str
    kv_cache_dtype: str
    kv_bytes_per_token: int
    """Target and draft together."""
    device: str
    vocab_size: int
    max_model_len: int
    num_pages: int
    page_size: int
    stats: EngineStats
    """Counters do not begin at zero: the warm-up has run."""
    lost_adapters: tuple[str, ...] = ()
    """Those that were to be loaded again and could not be."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot be built from these options; `reason` is one sentence for the operator."""

    reason: str


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The engine will not serve this request; `reason` is one sentence for the client."""

    request_id: str
    reason: str
    overload: bool = False
    """True: it waited too long for a place, and another try may go better. False: it can never be served."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """What one step brought."""

    outputs: list[RequestOutput]
    stats: EngineStats
    started: list[str]
    """Requests that have left the queue; said before their first step is computed."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Ping."""

    number: int
    stats: EngineStats


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """The answer to a LoadAdapter, in its turn; `refusal` is one sentence for the client: nothing has changed then."""

    refusal: str | None


ToEngine = Add | Abort | Ping | LoadAdapter | UnloadAdapter | Shutdown
FromEngine = Ready | Failed | Rejected | Report | Pong | AdapterLoaded

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


class ProtocolError(Exception):
    """The other side sent something that is not a message."""


def frame(message: msgspec.Struct) -> bytes:
    """A message ready for the socket."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(connected: socket.socket) -> bytes:
    """The body of the next frame of a blocking socket. EOFError when the other process has closed it."""
    (size,) = LENGTH.unpack(_read(connected, LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes is larger than {MAX_FRAME_BYTES}")
    return _read(connected, size)


def _read(connected: socket.socket, size: int) -> bytes:
    data = connected.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError("the other process has closed the socket")
    return data


def decode_to_engine(body: bytes | bytearray) -> ToEngine:
    """One frame's body, as read by the engine process."""
    return _decode(_to_engine, body)


def decode_from_engine(body: bytes | bytearray) -> FromEngine:
    """One frame's body, as read by the HTTP process."""
    return _decode(_from_engine, body)


def _decode(decoder: msgspec.msgpack.Decoder, body: bytes | bytearray):  # type: ignore[no-untyped-def]
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a frame of {len(body)} bytes is no message: {error}") from error
