"""`system_fingerprint` identifies the configuration that computes the answers."""

from typing import Any

import pytest

from penstock.router.config import RouterConfig
from tests.support.openai_client import HELLO, connect
from tests.support.served_router import serving
from tests.support.stub_worker import StubWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def fingerprint_of(config: RouterConfig, *layouts: str) -> str:
    """Return the fingerprint of a router whose workers have these layouts."""
    workers = [StubWorker(f"w{number}") for number in range(len(layouts))]
    for worker, layout in zip(workers, layouts, strict=True):
        worker.welcome.layout = layout
    async with serving(config, *workers) as served, connect(served) as client:
        answer = await client.chat.completions.create(model="stub", messages=HELLO, max_tokens=1)
        return str(answer.system_fingerprint)


async def test_every_answer_and_chunk_has_the_fingerprint(client: Any) -> None:
    chat = {"model": "stub", "messages": HELLO, "max_tokens": 4}
    plain = {"model": "stub", "prompt": "x", "max_tokens": 4}
    found = {
        (await client.chat.completions.create(**chat)).system_fingerprint,
        (await client.completions.create(**plain)).system_fingerprint,
    }
    for stream in (
        await client.chat.completions.create(**chat, stream=True),
        await client.completions.create(**plain, stream=True),
    ):
        found |= {chunk.system_fingerprint async for chunk in stream}
    (fingerprint,) = found
    assert fingerprint.startswith("fp_")


async def test_fingerprint_changes_with_weights_or_dtype(config: RouterConfig) -> None:
    one = await fingerprint_of(config, "weights a")
    assert await fingerprint_of(config, "weights a", "weights a") == one
    assert await fingerprint_of(config, "weights b") != one
    two = await fingerprint_of(config, "weights a", "weights b")
    assert await fingerprint_of(config, "weights b", "weights a") == two
    assert two != one
