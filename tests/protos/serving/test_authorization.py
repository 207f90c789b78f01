"""Authorization of gRPC calls: a refused call ends before any of its messages is read."""

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from penstock.protos.serving.authorization import (
    AuthInterceptor,
    CallMetadata,
    ThreadedAuthInterceptor,
    check_secret,
)

METHODS = ["/test.Service/Unary", "/test.Service/Stream", "/test.Service/Unknown"]


def authorize(method: str, metadata: CallMetadata) -> None:
    check_secret(metadata, "secret", "wrong token")


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Two gRPC methods that echo their messages: one takes a single request, one a stream."""

    def __init__(self, unary: Callable[..., Any], stream: Callable[..., Any]) -> None:
        self._methods = {
            METHODS[0]: grpc.unary_unary_rpc_method_handler(unary),
            METHODS[1]: grpc.stream_stream_rpc_method_handler(stream),
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._methods.get(handler_call_details.method)


async def unary(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return request


async def stream(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    async for request in requests:
        await context.write(request)


@pytest_asyncio.fixture(params=["asyncio", "threads"])
async def channel(request: pytest.FixtureRequest) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server that runs in an event loop ("asyncio") or in one thread ("threads")."""
    with ThreadPoolExecutor(1) as threads:
        if request.param == "asyncio":
            server = grpc.aio.server(interceptors=[AuthInterceptor(authorize)])
            handlers = Handlers(unary, stream)
        else:
            server = grpc.server(threads, interceptors=[ThreadedAuthInterceptor(authorize)])
            handlers = Handlers(
                lambda request, context: request, lambda requests, context: requests
            )
        server.add_generic_rpc_handlers((handlers,))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        started, stopped = server.start(), None
        if started is not None:
            await started
        async with grpc.aio.insecure_channel(address) as channel:
            yield channel
        stopped = server.stop(0)
        if request.param == "asyncio":
            await stopped
        else:
            stopped.wait()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shown", [None, "", "Bearer wrong", "Bearer secret2", "secret", "Bearer"])
async def test_call_without_the_secret_ends_although_it_sends_no_message(
    channel: grpc.aio.Channel, method: str, shown: str | None
) -> None:
    metadata = () if shown is None else (("authorization", shown),)
    silent = channel.stream_stream(method)(metadata=metadata, timeout=60)
    assert await silent.code() is grpc.StatusCode.UNAUTHENTICATED
    assert await silent.details() == "wrong token"


async def test_call_with_the_secret_reaches_its_method(channel: grpc.aio.Channel) -> None:
    metadata = (("authorization", "Bearer secret"),)
    assert await channel.unary_unary(METHODS[0])(b"x", metadata=metadata) == b"x"
    call = channel.stream_stream(METHODS[1])(iter([b"y"]), metadata=metadata)
    assert await call.read() == b"y"
    unknown = channel.stream_stream(METHODS[2])(metadata=metadata)
    assert await unknown.code() is grpc.StatusCode.UNIMPLEMENTED
