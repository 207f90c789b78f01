"""Long texts are encoded off the event loop, or not at all if their client has disconnected."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
import pytest_asyncio

from penstock.router.config import RouterConfig
from penstock.router.requests.prompt_encoder import INLINE_CHARS
from tests.support.served_router import Served, serving, until
from tests.support.stub_worker import StubWorker


class HeldTokenizer:
    """Replaces the encoding of a router's tokenizer; long texts wait for `release`."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.release = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.began.append(text[:1])
        assert self.release.wait(60)
        return [5]


@pytest_asyncio.fixture
async def held(served: Served, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HeldTokenizer]:
    held = HeldTokenizer()
    monkeypatch.setattr(served.router.frontend.tokenizer, "encode", held.encode)
    yield held
    held.release.set()


def body_of(letter: str) -> dict[str, object]:
    return {"prompt": letter * (INLINE_CHARS + 1), "max_tokens": 1}


async def test_text_of_a_client_that_left_is_not_encoded(
    served: Served, held: HeldTokenizer
) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        first = asyncio.create_task(client.post("/v1/completions", json=body_of("a")))
        await until(lambda: held.began == ["a"])
        second = asyncio.create_task(client.post("/v1/completions", json=body_of("b")))
        waiting = served.router.frontend.prompts
        await until(lambda: waiting.num_waiting == 1)
        second.cancel()  # this closes the client's connection
        await until(lambda: waiting.num_waiting == 0)
        # The event loop still answers other requests.
        assert (await client.get("/health")).status_code == 200
        held.release.set()
        assert (await first).status_code == 200
    assert held.began == ["a"]


async def test_too_many_waiting_texts_are_refused_with_429(config: RouterConfig) -> None:
    size = 3 * INLINE_CHARS
    bounds = replace(config.bounds, max_encoding_chars=4 * size)
    async with serving(replace(config, bounds=bounds), StubWorker()) as served:
        frontend = served.router.frontend
        held = HeldTokenizer()
        frontend.tokenizer.encode = held.encode  # type: ignore[method-assign]
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            body = {"prompt": "x" * size, "max_tokens": 1}
            calls = [asyncio.create_task(client.post("/v1/completions", json=body))]
            await until(lambda: held.began == ["x"])
            calls.append(asyncio.create_task(client.post("/v1/completions", json=body)))
            await until(lambda: frontend.prompts.num_waiting == 1)
            refused = await client.post("/v1/completions", json=body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            held.release.set()
            assert [(await call).status_code for call in calls] == [200, 200]
