"""Errors in the form of Anthropic's API, and the paths that have this form."""

import secrets
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from penstock.router.api.http import error_response, headers_of, json_response
from penstock.router.errors import Code, ServingError
from penstock.router.requests.request import safe_request_id

PATH = "/v1/messages"

STATUSES: Mapping[Code, tuple[int, str]] = {
    Code.INVALID: (400, "invalid_request_error"),
    Code.UNAUTHENTICATED: (401, "authentication_error"),
    Code.FORBIDDEN: (403, "permission_error"),
    Code.NOT_FOUND: (404, "not_found_error"),
    Code.TOO_LARGE: (413, "request_too_large"),
    Code.OVERLOADED: (429, "rate_limit_error"),
    Code.INTERNAL: (500, "api_error"),
    Code.DEADLINE: (504, "timeout_error"),
    Code.UNAVAILABLE: (529, "overloaded_error"),
}
"""For each error code, the HTTP status and the type of the error in Anthropic's API."""


def error_body(error: ServingError, request_id: str) -> Mapping[str, Any]:
    """Return an error in Anthropic's form; its message names the invalid field, if there is one."""
    message, param = error.message, error.param
    if param is not None and param not in message:
        message = f"{param}: {message}"
    kind = STATUSES[error.code][1]
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def anthropic_error(error: ServingError, request_id: str, status: int | None = None) -> Response:
    """Return the response for an error; `status` is by default that of the error's code."""
    headers = {**id_headers(request_id), **headers_of(error)}
    found = STATUSES[error.code][0] if status is None else status
    return json_response(error_body(error, request_id), found, headers)


def error_of_path(scope: Scope, error: ServingError, status: int | None = None) -> Response:
    """Return an error in the form of the API to which the path belongs (an `ErrorFormat`)."""
    path: str = scope["path"]
    if path != PATH and not path.startswith(f"{PATH}/"):
        return error_response(error, status)
    return anthropic_error(error, new_request_id(Headers(scope=scope)), status)


def id_headers(request_id: str) -> Mapping[str, str]:
    """Return the headers with a request id, under Anthropic's name and under the usual name."""
    return {"request-id": request_id, "x-request-id": request_id}


def new_request_id(headers: Headers) -> str:
    """Return the request id that the client sent if the id is safe for logs, else a new id."""
    return safe_request_id(headers.get("x-request-id", "")) or f"req_{secrets.token_hex(12)}"
