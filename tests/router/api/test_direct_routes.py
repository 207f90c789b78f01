"""POST routes that are called without Starlette's router, and the bodies of their requests."""

from collections.abc import Awaitable, Callable

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from penstock.router.api.http import DirectRoutes, error_handlers, read_body
from penstock.router.config import RequestBounds
from penstock.router.errors import Code, ServingError, invalid

Endpoint = Callable[[Request], Awaitable[Response]]


class Refusal(Response):
    """A response that raises an error before it starts."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise invalid("the answer cannot be made")


async def refuse(request: Request) -> Response:
    raise invalid("the request is wrong")


async def refuse_later(request: Request) -> Response:
    return Refusal()


async def answer(request: Request) -> Response:
    return PlainTextResponse("well")


def app_of(endpoint: Endpoint, is_direct: bool) -> Starlette:
    routes = [Route("/call", endpoint, methods=["POST"])]
    handlers = error_handlers()
    direct = [Middleware(DirectRoutes, routes=routes, handlers=handlers)] if is_direct else []
    return Starlette(routes=routes, middleware=direct, exception_handlers=handlers)


async def call(endpoint: Endpoint, is_direct: bool, method: str, path: str) -> tuple[int, str]:
    transport = httpx.ASGITransport(app_of(endpoint, is_direct))
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as http:
        reply = await http.request(method, path)
        return reply.status_code, reply.text


@pytest.mark.parametrize(
    ("endpoint", "status"), [(answer, 200), (refuse, 400), (refuse_later, 400)]
)
async def test_answers_and_errors_are_those_of_starlette(endpoint: Endpoint, status: int) -> None:
    direct = await call(endpoint, True, "POST", "/call")
    assert direct == await call(endpoint, False, "POST", "/call")
    assert direct[0] == status


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/call", 405), ("POST", "/", 404)])
async def test_other_requests_reach_the_router(method: str, path: str, status: int) -> None:
    assert (await call(answer, True, method, path))[0] == status


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"type": "http.request", "body": bytes(1001), "more_body": False}, Code.TOO_LARGE),
        ({"type": "http.request", "body": b"[", "more_body": True}, Code.INVALID),
        ({"type": "http.disconnect"}, Code.INVALID),
    ],
)
async def test_body_that_has_arrived_is_checked_too(message: Message, code: Code) -> None:
    async def receive() -> Message:
        return message

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(ServingError) as refusal:
        await read_body(Request(scope, receive), RequestBounds(max_body_bytes=1000), True)
    assert refusal.value.code is code
