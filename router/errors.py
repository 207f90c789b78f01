"""What a client can be told instead of an answer: one exception, one catalogue of codes."""

from enum import Enum


class Code(Enum):
    """Why a call is refused or ended; every protocol maps these to its own statuses."""

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
    """A call that gets no answer, or no more of it.

    Args:
        code: what kind of refusal it is.
        message: one line for the client: what was wrong and what to do. Never a path, never a
            traceback.
        param: the request's field that was wrong, if one was.
        retry_after: seconds after which it makes sense to call again, if it does.
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
    """A refusal of what the client asked, naming the field."""
    return ServingError(Code.INVALID, message, param)
