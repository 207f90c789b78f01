"""Common parts of all HTTP routes: authentication, size limits, errors in OpenAI's format."""

import asyncio
import json
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.common.api_key import Role
from penstock.common.loopback import is_loopback
from penstock.router.api.auth import CLIENTS, ApiKeys
from penstock.router.config import RequestBounds
from penstock.router.errors import Code, ServingError, invalid
from penstock.router.requests.request import safe_request_id

Json: TypeAlias = Mapping[str, Any]

STATUSES: Mapping[Code, int] = {
    Code.INVALID: 400,
    Code.UNAUTHENTICATED: 401,
    Code.FORBIDDEN: 403,
    Code.NOT_FOUND: 404,
    Code.TOO_LARGE: 413,
    Code.OVERLOADED: 429,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE: 504,
}

ERROR_TYPES: Mapping[Code, str] = {
    Code.INVALID: "invalid_request_error",
    Code.UNAUTHENTICATED: "authentication_error",
    Code.FORBIDDEN: "permission_error",
    Code.NOT_FOUND: "not_found_error",
    Code.TOO_LARGE: "invalid_request_error",
    Code.OVERLOADED: "rate_limit_error",
    Code.INTERNAL: "internal_error",
    Code.UNAVAILABLE: "service_unavailable_error",
    Code.DEADLINE: "timeout_error",
}

PORT = re.compile(r":\d*$")
NO_ROLES: Mapping[str, frozenset[Role]] = {}
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def header_of(scope: Scope, name: bytes) -> str | None:
    """Return the value of a request's first header `name` (in lower case); None if it is absent.

    This takes a third of the time of Starlette's `Headers`, and each request needs eight headers.
    """
    for known, value in scope["headers"]:
        if known == name:
            return str(value, "latin-1")
    return None


def json_response(
    content: Json, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return Response(body, status, headers, media_type="application/json")


def error_body(error: ServingError, status: int | None = None) -> Json:
    """Return an error in OpenAI's format."""
    return {
        "error": {
            "message": error.message,
            "type": ERROR_TYPES[error.code],
            "param": error.param,
            "code": error.reason or (STATUSES[error.code] if status is None else status),
        }
    }


def error_response(error: ServingError, status: int | None = None) -> Response:
    status = STATUSES[error.code] if status is None else status
    return json_response(error_body(error, status), status, headers_of(error))


def headers_of(error: ServingError) -> Mapping[str, str]:
    """Return the headers of the response for an error."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return headers


class ErrorFormat(Protocol):
    """Makes the response for an error, in the format of the API that was called."""

    def __call__(self, scope: Scope, error: ServingError, status: int | None = None) -> Response:
        """Return the response. By default, `status` is the HTTP status of the error's code."""
        ...


def openai_error(scope: Scope, error: ServingError, status: int | None = None) -> Response:
    """Return an error in OpenAI's format (an `ErrorFormat`)."""
    return error_response(error, status)


Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
ErrorHandlers: TypeAlias = dict[Any, Callable[[Request, Exception], Awaitable[Response]]]


def error_handlers(respond: ErrorFormat = openai_error) -> ErrorHandlers:
    """Return Starlette's exception handlers, which convert exceptions of routes to responses."""

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, ServingError):
            return respond(request.scope, error)
        if isinstance(error, HTTPException):
            code = Code.NOT_FOUND if error.status_code == 404 else Code.INVALID
            what = f"{request.method} {request.url.path[:80]}"
            serving_error = ServingError(code, f"{what}: {error.detail}")
            response = respond(request.scope, serving_error, error.status_code)
            response.headers.update(error.headers or {})
            return response
        # The server logs the traceback of the error.
        return respond(request.scope, internal_error())

    return {ServingError: on_error, HTTPException: on_error, Exception: on_error}


def internal_error() -> ServingError:
    return ServingError(Code.INTERNAL, "internal error: see the server's log")


def add_common_headers(headers: list[tuple[bytes, bytes]], request_id: str) -> None:
    """Add the headers that all responses have; keep a request id that `headers` already has.

    Args:
        headers: headers of a response; their names are in lower case.
        request_id: the client's id of the request; if it is empty, a new id is used.
    """
    headers.append((b"x-content-type-options", b"nosniff"))
    if not any(name == b"x-request-id" for name, _ in headers):
        request_id = request_id or f"req-{secrets.token_hex(12)}"
        headers.append((b"x-request-id", request_id.encode()))


class CommonHeadersMiddleware:
    """Middleware that adds a request id and `X-Content-Type-Options: nosniff` to all responses.

    The request id is the one that the client has sent, if it is safe for logs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_id = safe_request_id(header_of(scope, b"x-request-id") or "")
                headers = list(message.get("headers", ()))
                add_common_headers(headers, request_id)
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_headers)


class CorsMiddleware:
    """Middleware that lets web pages of other origins call the paths below /v1/.

    Args:
        app: the application.
        origins: allowed origins, such as "https://chat.example"; "*" allows all.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._with_cors = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("x-request-id", "request-id", "retry-after"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_client_path = scope["type"] == "http" and scope["path"].startswith("/v1/")
        await (self._with_cors if is_client_path else self._app)(scope, receive, send)


class DirectRoutes:
    """Middleware that calls the handlers of POST requests without Starlette's router.

    This saves time, because Starlette's router and its exception handling wrap each message of a
    response twice. Requests of other methods, and paths with parameters, still use Starlette's
    router.

    Args:
        app: the application.
        routes: the routes of the application.
        handlers: Starlette's exception handlers of the application.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Route], handlers: ErrorHandlers) -> None:
        self._app = app
        self._endpoints: Mapping[str, Endpoint] = {
            route.path: route.endpoint
            for route in routes
            if route.methods == {"POST"} and not route.param_convertors
        }
        self._handlers = {kind: handlers[kind] for kind in handlers if kind is not Exception}
        self._handled = tuple(self._handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
            await response(scope, receive, send)
        except self._handled as error:
            kind = next(each for each in self._handled if isinstance(error, each))
            refusal = await self._handlers[kind](request, error)
            await refusal(scope, receive, send)


class AuthMiddleware:
    """Middleware that checks the host name and API key of each HTTP request.

    Args:
        app: the protected application.
        keys: API keys, needed on all paths except the public ones.
        host: address to which the server is bound. On loopback the Host header must be a loopback
            name, so that a web page cannot reach the server through DNS rebinding.
        public: paths that can be called without a key.
        roles: by path, the roles whose keys may call the path.
        other_roles: the roles whose keys may call the paths that `roles` does not contain.
        respond: makes the response to a refused request.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        host: str,
        public: frozenset[str] = frozenset(),
        roles: Mapping[str, frozenset[Role]] = NO_ROLES,
        other_roles: frozenset[Role] = CLIENTS,
        respond: ErrorFormat = openai_error,
    ) -> None:
        self._app = app
        self._keys = keys
        self._public = public
        self._roles = roles
        self._other_roles = other_roles
        self._respond = respond
        self._names = LOOPBACK_NAMES | {host} if is_loopback(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ServingError as error:
                await self._respond(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        name = PORT.sub("", header_of(scope, b"host") or "")
        if self._names is not None and name.lower() not in self._names:
            raise ServingError(
                Code.FORBIDDEN,
                f"the Host header is {name[:80]!r}, but this server is bound to loopback: call it "
                "as localhost",
            )
        if scope["path"] not in self._public:
            roles = self._roles.get(scope["path"], self._other_roles)
            is_loopback = self._names is not None
            caller = self._keys.authenticate(authorization_of(scope), roles, is_loopback)
            scope.setdefault("state", {}).update(
                tenant=caller.tenant,
                key_name=caller.name,
                is_operator=caller.role == "operator",
            )


def authorization_of(scope: Scope) -> str | None:
    """Return the Authorization header.

    Anthropic's clients send the header `x-api-key` instead; its key is returned as a bearer token.
    """
    given, key = header_of(scope, b"authorization"), header_of(scope, b"x-api-key")
    return f"Bearer {key}" if given is None and key is not None else given


async def read_body(request: Request, bounds: RequestBounds, has_arrived: bool = False) -> bytes:
    """Return the body of a request with content type JSON.

    Args:
        request: the request.
        bounds: limits on the size of the body and on the time until it is complete.
        has_arrived: whether the whole body has been received, so that no time limit is needed.

    Raises:
        ServingError: TOO_LARGE if the body is too large; INVALID if the content type is not JSON,
            or if the body is incomplete or late.
    """
    kind = (header_of(request.scope, b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid(
            f"the content type is {kind[:80]!r}: send JSON, with the header 'Content-Type: "
            "application/json'"
        )
    too_large = ServingError(
        Code.TOO_LARGE, f"the body is larger than {bounds.max_body_bytes} bytes, the maximum"
    )
    length = header_of(request.scope, b"content-length") or "0"
    if not length.isdecimal() or int(length[:20]) > bounds.max_body_bytes:
        raise too_large
    if has_arrived:
        message = await request.receive()
        if message["type"] != "http.request" or message["more_body"]:
            raise invalid("the connection ended before the whole body had arrived")
        if len(message["body"]) > bounds.max_body_bytes:
            raise too_large
        return bytes(message["body"])
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(bounds.receive_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > bounds.max_body_bytes:
                    raise too_large
                chunks.append(chunk)
    except ClientDisconnect as error:
        raise invalid("the connection ended before the whole body had arrived") from error
    except TimeoutError as error:
        limit = f"{bounds.receive_seconds:g} s"
        raise invalid(f"the whole body did not arrive within {limit}: send it faster") from error
    return b"".join(chunks)
