"""Handlers of gRPC calls, with the health service as an example."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from penstock.protos.serving.call_handlers import CallHandlers


async def test_client_that_goes_while_its_call_is_refused_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gone = grpc.aio.InternalError("the client has cancelled the call")

    async def refuse(request: Any, context: Any) -> Any:
        raise gone

    async def request() -> AsyncIterator[bytes]:
        yield b""

    calls = CallHandlers(receive_seconds=60.0)
    for handler in (
        calls.unary(health_pb2.HealthCheckRequest, refuse).stream_unary,
        calls.streaming(health_pb2.HealthCheckRequest, refuse).stream_stream,
    ):
        with pytest.raises(asyncio.CancelledError):
            await handler(request(), None)
    assert caplog.records == []
