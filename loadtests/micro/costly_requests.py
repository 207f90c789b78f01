"""Measures how long a router's `/health` takes while the router handles costly requests.

`python -m penstock.loadtests.micro.costly_requests` runs one real router process and one stub
worker without a model. It sends requests that are as large as allowed, or too large, one kind at a
time. Meanwhile, it calls `/health` every few milliseconds. The longest call shows how long the
event loop was busy with one request. The bound of 50 ms is for a quiet machine.
"""

import asyncio
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil

import penstock
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.ab_runner import MeasurementFailed, run
from penstock.loadtests.micro.router import FanIn, stub_workers, until_ready
from penstock.loadtests.micro.standalone_router import standalone_router

_MODEL = Path(penstock.__file__).parent / "models" / "demo-small"
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_MESSAGE = {"role": "user", "content": "x"}

SLOW_TEMPLATE = (
    "{% if spin %}{% for i in range(99999) %}{% for j in range(99999) %}{% if j < 0 %}"
    "{{ j }}{% endif %}{% endfor %}{% endfor %}{% endif %}{% if size %}{{ 'a' * size }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
"""A chat template that a client can make slow (argument `spin`) or large (argument `size`)."""

REQUESTS: Mapping[str, tuple[str, Mapping[str, Any], int]] = {
    "64 echoed choices of 4 prompts": (
        _COMPLETIONS,
        {"prompt": [[52] * 2000] * 4, "n": 64, "echo": True, "logprobs": 20, "max_tokens": 0},
        400,
    ),
    "300,000 prompts": (_COMPLETIONS, {"prompt": ["a"] * 300_000}, 400),
    "1,024 prompts": (_COMPLETIONS, {"prompt": [[52] * 200] * 1024, "max_tokens": 1}, 200),
    "400 texts of 4,090 newlines": (_COMPLETIONS, {"prompt": ["\n" * 4090] * 400}, 400),
    "text of 4,000,000 spaces": (_COMPLETIONS, {"prompt": " " * 4_000_000}, 400),
    "300,000 entries of logit_bias": (
        _COMPLETIONS,
        {"prompt": "x", "logit_bias": {str(token): 1 for token in range(300_000)}},
        400,
    ),
    "90,000 messages": (_CHAT, {"messages": [_MESSAGE] * 90_000}, 400),
    "1,350,000 empty lists": (_COMPLETIONS, {"prompt": "x", "x": [[]] * 1_350_000}, 200),
    "580,000 small objects": (_COMPLETIONS, {"prompt": "x", "x": [{"": 0}] * 580_000}, 200),
    "1,350,000 token ids": (_COMPLETIONS, {"prompt": [52] * 1_350_000}, 400),
    "1,350,000 wrong token ids": (_COMPLETIONS, {"prompt": "x", "stop": [0] * 1_350_000}, 400),
    "4,096 messages": (_CHAT, {"messages": [_MESSAGE] * 4096}, 400),
    "chat template without end": (
        _CHAT,
        {"messages": [_MESSAGE], "chat_template_kwargs": {"spin": True}},
        400,
    ),
    "chat template of 4 GiB": (
        _CHAT,
        {"messages": [_MESSAGE], "chat_template_kwargs": {"size": 4 << 30}},
        400,
    ),
    "text of 4,000 words to /tokenize": (
        "/tokenize",
        {"prompt": "word " * 4000, "return_token_strs": True},
        200,
    ),
    "120,000 tokens to /detokenize": ("/detokenize", {"tokens": [300] * 120_000}, 200),
    "64 choices of 500 tokens": (
        _COMPLETIONS,
        {"prompt": [52] * 100, "n": 64, "max_tokens": 500, "return_token_ids": True},
        200,
    ),
}
"""Path, body and expected status of each kind of request."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the measurement."""

    repeats: int = option(3, "requests of each kind, one after another")
    interval_ms: float = option(5.0, "time between calls of /health, in milliseconds")
    save_json: str = option("", "write the results to this file")


def write_model(folder: Path) -> None:
    """Write the files that a router reads, with `SLOW_TEMPLATE` as the chat template."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(_MODEL / name, folder / name)
    (folder / "chat_template.jinja").write_text(SLOW_TEMPLATE)


async def _call(address: str, head: str, body: bytes) -> int:
    """Send a request on a new connection. Read the whole answer and return its status."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{head} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n".encode())
    writer.write(f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    writer.write(body)
    await writer.drain()
    status = await reader.readline()
    while await reader.read(1 << 16):
        pass
    writer.close()
    return int(status.split()[1])


async def _probe(address: str, interval: float, seconds: list[float]) -> None:
    while True:
        began = time.perf_counter()
        if (status := await _call(address, "GET /health", b"")) != 200:
            raise MeasurementFailed(f"GET /health returned status {status}, expected 200")
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(interval)


async def _measure_kind(address: str, pid: int, name: str, options: Options) -> dict[str, float]:
    path, content, expected = REQUESTS[name]
    body = json.dumps(content, separators=(",", ":")).encode()
    seconds: list[float] = []
    probing = asyncio.create_task(_probe(address, options.interval_ms / 1000, seconds))
    process = psutil.Process(pid)
    before = process.memory_info().rss
    began = time.perf_counter()
    for _ in range(options.repeats):
        status = await _call(address, f"POST {path}", body)
        if status != expected:
            raise MeasurementFailed(
                f"{name}: POST {path} returned status {status}, expected {expected}"
            )
    took = (time.perf_counter() - began) / options.repeats
    probing.cancel()
    await asyncio.wait([probing])
    return {
        "request_seconds": took,
        "longest_health_ms": 1000 * max(seconds, default=0.0),
        "rss_mib": (process.memory_info().rss - before) / 2**20,
    }


async def measure(options: Options) -> dict[str, Any]:
    """Send each kind of request. Print and return the longest call of /health for each kind."""
    rows: dict[str, dict[str, float]] = {}
    async with AsyncExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(model)
        workers = await stack.enter_async_context(stub_workers(1, FanIn(step_ms=1, processes=1)))
        router = await stack.enter_async_context(standalone_router(model, workers))
        await until_ready(router.admin, 1)
        for name in REQUESTS:
            row = await _measure_kind(router.http, router.process.pid, name, options)
            rows[name] = row
            print(
                f"{name}: /health at most {row['longest_health_ms']:.1f} ms, "
                f"{row['request_seconds']:.2f} s a request, {row['rss_mib']:+.0f} MiB",
                flush=True,
            )
    return {"requests": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program, about = "python -m penstock.loadtests.micro.costly_requests", "Costly requests."
    (options,) = read_flags(program, about, (Options,), arguments)
    return run(lambda: measure(options), dataclasses.asdict(options), options.save_json)


if __name__ == "__main__":
    sys.exit(main())
