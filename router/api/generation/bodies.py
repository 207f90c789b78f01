"""Reads the request bodies of all HTTP APIs."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from penstock.router.api.connection import BODY_WRITER
from penstock.router.api.generation.parsed_body import (
    BODY_KIND,
    INLINE_BYTES,
    ParsedBody,
    job_items,
    parse_body,
    read_parsed,
)
from penstock.router.api.http import header_of, read_body
from penstock.router.frontend import Frontend
from penstock.router.requests.prompt_encoder import INLINE_CHARS
from penstock.router.requests.response_stream import ClientDisconnectedError

T = TypeVar("T")


async def read_request(name: str, request: Request, frontend: Frontend) -> ParsedBody[Any]:
    """Return the parsed body of a request; `name` is a key of `BODIES`.

    Raises:
        ServingError: INVALID or TOO_LARGE if the body is not valid, or one of its lists is too
            long; OVERLOADED or UNAVAILABLE if no helper process can parse it.
        ClientDisconnectedError: the client has disconnected.
    """
    bounds, model = frontend.config.bounds, frontend.model
    writer = request.scope.get("extensions", {}).get(BODY_WRITER)
    has_arrived = writer is not None and not writer.cycle.more_body
    data = await read_body(request, bounds, has_arrived)
    if len(data) <= INLINE_BYTES:
        return parse_body(name, data, bounds, model)
    job = job_items(name, data, model)
    tenant = request.state.tenant
    parsing = frontend.helpers.run(BODY_KIND, job, tenant, "the body")
    return await read_parsed(await while_connected(request, parsing))


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which processes the request's body; cancel it on a disconnect.

    Raises:
        ClientDisconnectedError: the client disconnected; `work` was cancelled.
    """
    length = header_of(request.scope, b"content-length") or ""
    if length.isdecimal() and int(length) <= INLINE_CHARS:
        # For a small body, `work` ends sooner than the two tasks below could be created.
        return await work
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_until_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnectedError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Return a response that is not sent, because the client has disconnected."""
    return Response(status_code=499)
