"""What the HTTP process spends on a token of a stream: its processor time at 32 streams.

    python -m bench.serve.http_cost      # writes bench/results/http-cost.json; a minute

The server is the real one; in place of the engine process stands one without a model, which gives each of 32 chat
streams a token every 25 ms, as a small model on a few cores does. Clients read what comes and parse nothing.
"""

import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.common import write_result
from tests.serve.http_server import SCRIPTED, RunningServer, running_server, save_tiny_folder

STREAMS, TOKENS, WARM_UP, STEP_MS, TURNS = 32, 400, 50, 25, 3


def processor_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read_stream(server: RunningServer, route: str, request: dict[str, Any]) -> int:
    """Events of one stream."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"stream": True, "ignore_eos": True, **request}).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
    data = await reader.read()
    writer.close()
    return data.count(b"data: ")


async def streams(server: RunningServer, tokens: int) -> int:
    """Events of as many chats at once; a completion beside them tells the engine how long a step takes."""
    chat = {"messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": tokens}
    pace = {"prompt": [STEP_MS], "max_tokens": tokens + 20}
    chats = [read_stream(server, "/v1/chat/completions", chat) for _ in range(STREAMS)]
    *events, _ = await asyncio.gather(*chats, read_stream(server, "/v1/completions", pace))
    return sum(events)


def measure(server: RunningServer) -> float:
    """Microseconds of the HTTP process's processor time a token."""
    before = processor_s(server.process.pid)
    events = asyncio.run(streams(server, TOKENS))
    if events < STREAMS * TOKENS:
        raise SystemExit(f"{events} events came for {STREAMS} streams of {TOKENS} tokens")
    return 1e6 * (processor_s(server.process.pid) - before) / ((STREAMS + 1) * TOKENS)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_tiny_folder(Path(scratch, "model"))
        with running_server(folder, Path(scratch, "log"), "--max-num-seqs", "64", program=SCRIPTED) as server:
            asyncio.run(streams(server, WARM_UP))
            turns = [measure(server) for _ in range(TURNS)]
    print([round(one) for one in turns])
    result = {"streams": STREAMS, "tokens": TOKENS, "microseconds_a_token": statistics.median(turns), "turns": turns}
    write_result("http-cost", "python -m bench.serve.http_cost", result)


if __name__ == "__main__":
    main()
