"""The status with which a server ends a gRPC call."""

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

import grpc
import grpc.aio

log = logging.getLogger(__name__)

Metadata: TypeAlias = Sequence[tuple[str, str]]


class CallError(Exception):
    """Raised to end a call with a status.

    Args:
        code: the status code.
        details: one line of text for the client.
        metadata: trailing metadata of the call.
    """

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.metadata = tuple(metadata)


def retry_metadata(seconds: float) -> Metadata:
    """Return trailing metadata that asks the client to retry the call after `seconds`."""
    return (
        ("grpc-retry-pushback-ms", str(round(seconds * 1000))),
        ("retry-after", str(max(1, math.ceil(seconds)))),
    )


def to_call_error(error: Exception) -> CallError:
    """Return the status for an exception that a method has raised.

    Any exception other than a CallError is a bug, so it is logged and becomes INTERNAL.
    """
    if isinstance(error, CallError):
        return error
    log.error("gRPC call failed", exc_info=error)
    return CallError(grpc.StatusCode.INTERNAL, "internal error: see the server's log")


async def abort(context: grpc.aio.ServicerContext, error: CallError) -> NoReturn:
    """End a call with an error.

    If the client has disconnected, gRPC raises an InternalError. gRPC would log this error, so it
    is replaced by a CancelledError, which gRPC does not log.
    """
    try:
        await context.abort(error.code, error.details, error.metadata)
    except grpc.aio.InternalError as failure:
        raise asyncio.CancelledError from failure
    raise AssertionError("abort always raises")
