"""Errors that clients receive: one exception whose code each protocol maps to its own status."""

from enum import Enum


class Code(Enum):
    """Why a call is refused or ended; each protocol maps the codes to its own statuses."""

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
        retry_after: seconds after which the client should retry; None: no hint.
    """

    def __init__(
        self, code: Code, message: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after


def invalid(message: str, param: str | None = None) -> ServingError:
    """Return an INVALID error that names the invalid request field `param`."""
    return ServingError(Code.INVALID, message, param)
