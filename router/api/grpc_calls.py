"""The gRPC statuses of the router's errors."""

from collections.abc import Mapping

import grpc

from penstock.protos.serving.call_error import CallError, retry_metadata, to_call_error
from penstock.router.errors import Code, ServingError
from penstock.router.requests.response_stream import ClientDisconnectedError

INLINE_BYTES = 32 << 10
"""Messages up to this size are parsed directly; a helper process first checks larger ones.
"""

STATUSES: Mapping[Code, grpc.StatusCode] = {
    Code.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Code.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Code.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def status_of(error: Exception) -> CallError | None:
    """Return the gRPC status for an exception of a method; None if the client has disconnected."""
    match error:
        case ClientDisconnectedError():
            return None
        case ServingError():
            again = () if error.retry_after is None else retry_metadata(error.retry_after)
            return CallError(STATUSES[error.code], error.message, again)
    return to_call_error(error)
