"""The official `anthropic` client, connected to a served router with stub workers."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic

from tests.support.served_router import Served

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
}


@contextlib.asynccontextmanager
async def connect(served: Served, key: str = "none") -> AsyncIterator[Any]:
    """Yield a client, typed as Any so that tests can send any value."""
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0) as client:
        yield client


def message_of(error: anthropic.APIStatusError) -> str:
    """Return the server's message in an error."""
    body: Any = error.body
    return str(body["error"]["message"])
