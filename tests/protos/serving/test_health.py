"""The health service, which needs no authorization."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.protos.serving.call_handlers import CallHandlers
from penstock.protos.serving.health import HealthService, health_handlers

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def service() -> HealthService:
    return HealthService(max_watches=2)


@pytest_asyncio.fixture
async def channel(service: HealthService) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((health_handlers(service, CallHandlers(60.0)),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def test_check_and_watch_report_the_status(
    service: HealthService, channel: grpc.aio.Channel
) -> None:
    stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
    watch = stub.Watch(request)
    async with asyncio.timeout(60):
        assert (await watch.read()).status == SERVING
        await service.set("", NOT_SERVING)
        assert (await watch.read()).status == NOT_SERVING
        assert (await stub.Check(request)).status == NOT_SERVING
    watch.cancel()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_malformed_message_is_invalid_and_leaves_no_traceback(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    call = channel.unary_stream(f"/grpc.health.v1.Health/{method}")(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = (
        "the message is not a valid grpc.health.v1.HealthCheckRequest: send a message of this type"
    )
    assert caught.value.details() == details
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_method_that_does_not_exist_is_unimplemented(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/grpc.health.v1.Health/List")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
