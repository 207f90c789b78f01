"""Handlers of gRPC calls: malformed messages, missing first messages and errors get a status."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from penstock.router.api.grpc_check import malformed
from penstock.router.errors import Code, ServingError, invalid
from penstock.router.requests.response_stream import ClientDisconnectedError

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext

CheckLarge: TypeAlias = Callable[[type[Message], bytes, Context], Awaitable[bytes]]
"""Checks a large serialized message; returns one that is fast to parse, or raises INVALID."""

INLINE_BYTES = 32 << 10
"""Messages up to this size are parsed at once; larger ones are first checked by `check_large`."""

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


class CallHandlers:
    """Builds the handlers of gRPC methods.

    All handlers are registered for a stream of requests, also those of methods with one request:
    gRPC itself would wait without a limit for the request of a method with one.

    Args:
        receive_seconds: time limit for each request message of a call.
        check_large: checks the messages that are larger than `INLINE_BYTES`.
    """

    def __init__(self, receive_seconds: float, check_large: CheckLarge) -> None:
        self._receive_seconds = receive_seconds
        self._check_large = check_large

    def unary(
        self, kind: type[Message], method: Callable[[Any, Context], Awaitable[Message | bytes]]
    ) -> grpc.RpcMethodHandler:
        """Return the handler of a method with one request, of type `kind`, and one reply.

        The reply may already be serialized.
        """

        async def reply(requests: AsyncIterator[bytes], context: Context) -> Message | bytes:
            try:
                return await method(await self._first(kind, requests, context), context)
            except Exception as error:
                await _abort_with(context, error)

        return grpc.stream_unary_rpc_method_handler(reply, None, _write)

    def streaming(
        self, kind: type[Message], method: Callable[[Any, Context], Awaitable[None]]
    ) -> grpc.RpcMethodHandler:
        """Return the handler of a method with one request; `method` writes the replies."""

        async def stream(requests: AsyncIterator[bytes], context: Context) -> None:
            try:
                await method(await self._first(kind, requests, context), context)
            except ClientDisconnectedError:
                return
            except Exception as error:
                await _abort_with(context, error)

        return grpc.stream_stream_rpc_method_handler(stream, None, _write)

    def bidirectional(
        self, kind: type[Message], method: Callable[[Any, Context], AsyncIterator[Message]]
    ) -> grpc.RpcMethodHandler:
        """Return the handler of a method that yields replies to a stream of requests."""

        async def stream(requests: AsyncIterator[bytes], context: Context) -> None:
            try:
                async for reply in method(self._all(kind, requests, context), context):
                    await context.write(reply)
            except Exception as error:
                await _abort_with(context, error)

        return grpc.stream_stream_rpc_method_handler(stream, None, _write)

    async def _first(
        self, kind: type[Message], requests: AsyncIterator[bytes], context: Context
    ) -> Message:
        async for request in self._all(kind, requests, context):
            return request
        raise invalid(f"the call has no message: send a {kind.DESCRIPTOR.full_name}")

    async def _all(
        self, kind: type[Message], requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[Message]:
        incoming = aiter(requests)
        while True:
            try:
                async with asyncio.timeout(self._receive_seconds):
                    data = await anext(incoming)
            except StopAsyncIteration:
                return
            except TimeoutError:
                seconds = f"{self._receive_seconds:g} s"
                raise ServingError(Code.DEADLINE, f"no message arrived within {seconds}") from None
            if len(data) > INLINE_BYTES:
                data = await self._check_large(kind, data, context)
            yield _parse(kind, data)


def _parse(kind: type[Message], data: bytes) -> Message:
    """Return a message from its serialized form; raise INVALID if it is malformed."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise malformed(kind.DESCRIPTOR.full_name) from None


def _write(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


async def abort(context: Context, error: ServingError) -> NoReturn:
    """End the call with an error."""
    metadata = []
    if error.retry_after is not None:
        metadata.append(("grpc-retry-pushback-ms", str(round(error.retry_after * 1000))))
        metadata.append(("retry-after", str(max(1, math.ceil(error.retry_after)))))
    try:
        await context.abort(STATUSES[error.code], error.message, tuple(metadata))
    except grpc.aio.InternalError as failure:  # the client has disconnected; see `_abort_with`
        raise asyncio.CancelledError from failure
    raise AssertionError("abort always raises")


async def _abort_with(context: Context, error: Exception) -> NoReturn:
    """End the call with the status that corresponds to an exception.

    An InternalError means that the client has disconnected. gRPC may not know this yet, and would
    log the error; a cancelled call it ends without a log message.
    """
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from error
    if not isinstance(error, ServingError):
        log.error("gRPC call failed", exc_info=error)
        error = ServingError(Code.INTERNAL, "internal error: see the server's log")
    await abort(context, error)
