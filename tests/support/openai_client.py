"""The official `openai` client, connected to a served router with stub workers."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai

from penstock.router.config import RouterConfig
from tests.support.served_router import Served, serving
from tests.support.stub_worker import StubWorker

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def message_of(error: openai.APIStatusError) -> str:
    """Return the server's message in an error."""
    body: Any = error.body
    return str(body["message"])


@contextlib.asynccontextmanager
async def connect(served: Served) -> AsyncIterator[Any]:
    """Yield a client, typed as Any so that tests can send any value."""
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@contextlib.asynccontextmanager
async def serving_with_client(config: RouterConfig) -> AsyncIterator[tuple[Served, Any]]:
    """Serve with one mixed worker; yield the router and a client."""
    async with serving(config, StubWorker()) as served, connect(served) as client:
        yield served, client
