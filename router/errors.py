"""Errors that clients receive: one exception whose code each protocol maps to its own status."""

import re
from collections.abc import Mapping
from enum import Enum

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""The `reason` of errors that a client can avoid by shortening its conversation."""


class Code(Enum):
    """Error codes of refused or ended calls. Each protocol maps them to its own statuses."""

    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    INTERNAL = "internal"


class ServingError(Exception):
    """Raised if a call is refused or if its answer ends early.

    Args:
        code: kind of error.
        message: one line for the client: what was wrong and what to do, without paths and
            tracebacks.
        param: name of the invalid request field, if any.
        retry_after: seconds after which the client should retry, or None if unknown.
        reason: OpenAI's machine-readable code of the error, or None if OpenAI has none.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        param: str | None = None,
        retry_after: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.reason = reason


def renamed(error: ServingError, names: Mapping[str, str]) -> ServingError:
    """Return the error with its invalid field renamed to the client's name for this field.

    `names` maps the router's field names to the client's. Other errors are returned unchanged.
    """
    if error.param is None or error.param not in names:
        return error
    own, name = error.param, names[error.param]
    message = error.message
    # In error messages, "prompt" and "messages" are often ordinary words instead of field names.
    # "messages" is a field name before "has".
    if own == "messages":
        message = re.sub(r"\bmessages has\b", f"{name} has", message)
    elif own != "prompt":
        message = re.sub(rf"\b{own}\b", name, message)
    return ServingError(error.code, message, name, error.retry_after, error.reason)


def shutting_down() -> ServingError:
    """Return the error for calls that arrive while the server stops."""
    text = "the server is shutting down: call again"
    return ServingError(Code.UNAVAILABLE, text, retry_after=1.0)


def invalid(message: str, param: str | None = None, reason: str | None = None) -> ServingError:
    """Return an INVALID error that names the invalid request field `param`."""
    return ServingError(Code.INVALID, message, param, reason=reason)
