"""Handlers of gRPC calls. A malformed message or an exception ends the call with a status."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from penstock.protos.serving.call_error import CallError, abort, to_call_error
from penstock.protos.serving.lost_calls import ignore_lost_calls

Context: TypeAlias = grpc.aio.ServicerContext

Inspect: TypeAlias = Callable[[type[Message], bytes, Context], Awaitable[bytes]]
"""Function that checks a serialized message before it is parsed.

The function returns the serialized message that is parsed in place of its argument.
"""


class CallHandlers:
    """Builds the handlers of gRPC methods.

    All handlers are registered for streams of requests, even if the method has a single request,
    because gRPC's own handlers of single requests wait for the request without a time limit.

    Args:
        receive_seconds: time limit for each request message of a call.
        status_of: returns the status for an exception of a method, or None if the client has
            disconnected.
        inspect: checks each message before it is parsed.
    """

    def __init__(
        self,
        receive_seconds: float,
        status_of: Callable[[Exception], CallError | None] = to_call_error,
        inspect: Inspect | None = None,
    ) -> None:
        self._receive_seconds = receive_seconds
        self._status_of = status_of
        self._inspect = inspect
        ignore_lost_calls()

    def unary(
        self, kind: type[Message], method: Callable[[Any, Context], Awaitable[Message | bytes]]
    ) -> grpc.RpcMethodHandler:
        """Return the handler of a method with one request and one reply.

        Args:
            kind: type of the request.
            method: computes the reply, as a message or as serialized bytes.
        """

        async def reply(requests: AsyncIterator[bytes], context: Context) -> Message | bytes:
            try:
                return await method(await self._first(kind, requests, context), context)
            except Exception as error:
                await self._end(context, error)

        return grpc.stream_unary_rpc_method_handler(reply, None, _write)

    def streaming(
        self, kind: type[Message], method: Callable[[Any, Context], Awaitable[None]]
    ) -> grpc.RpcMethodHandler:
        """Return the handler of a method with one request and a stream of replies.

        Args:
            kind: type of the request.
            method: writes the replies to the context of the call.
        """

        async def stream(requests: AsyncIterator[bytes], context: Context) -> None:
            try:
                await method(await self._first(kind, requests, context), context)
            except Exception as error:
                await self._end(context, error)

        return grpc.stream_stream_rpc_method_handler(stream, None, _write)

    def bidirectional(
        self, kind: type[Message], method: Callable[[Any, Context], AsyncIterator[Message]]
    ) -> grpc.RpcMethodHandler:
        """Return the handler of a method with a stream of requests and a stream of replies.

        Args:
            kind: type of the requests.
            method: yields the replies.
        """

        async def stream(requests: AsyncIterator[bytes], context: Context) -> None:
            try:
                async for reply in method(self._all(kind, requests, context), context):
                    await context.write(reply)
            except Exception as error:
                await self._end(context, error)

        return grpc.stream_stream_rpc_method_handler(stream, None, _write)

    async def _first(
        self, kind: type[Message], requests: AsyncIterator[bytes], context: Context
    ) -> Message:
        message = await self._next(kind, aiter(requests), context)
        if message is None:
            details = f"the call has no message: send a {kind.DESCRIPTOR.full_name}"
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, details)
        return message

    async def _all(
        self, kind: type[Message], requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[Message]:
        incoming = aiter(requests)
        while (message := await self._next(kind, incoming, context)) is not None:
            yield message

    async def _next(
        self, kind: type[Message], incoming: AsyncIterator[bytes], context: Context
    ) -> Message | None:
        """Return the next message, or None if the client has sent all messages."""
        try:
            async with asyncio.timeout(self._receive_seconds):
                data = await anext(incoming)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            raise CallError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"no message arrived within {self._receive_seconds:g} s",
            ) from None
        if self._inspect is not None:
            data = await self._inspect(kind, data, context)
        return _parse(kind, data)

    async def _end(self, context: Context, error: Exception) -> NoReturn:
        """End a call with the status that corresponds to an exception.

        An InternalError means that the client has disconnected (see `abort`).
        """
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, grpc.aio.InternalError):
            raise asyncio.CancelledError from error
        status = self._status_of(error)
        if status is None:
            raise asyncio.CancelledError from error
        await abort(context, status)


def _parse(kind: type[Message], data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        details = f"the message is not a valid {name}: send a message of this type"
        raise CallError(grpc.StatusCode.INVALID_ARGUMENT, details) from None


def _write(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
