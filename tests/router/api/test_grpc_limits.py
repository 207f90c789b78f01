"""Limits on gRPC clients, and malformed messages of all services."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.protos import inference_pb2
from penstock.protos.serving import connection_guard
from penstock.router.config import RouterConfig
from tests.support.raw_http2 import (
    PREFACE,
    headers,
    message,
    raw_http2,
    settings,
    window_update,
)
from tests.support.served_router import Served, client_of, serving, until
from tests.support.stub_worker import StubWorker

SERVICE = "penstock.v1.Inference"
GENERATE = f"/{SERVICE}/Generate"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
METHODS = [
    *(f"/{SERVICE}/{name}" for name in ("Generate", "Tokenize", "ListModels")),
    *("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", REFLECTION),
]
MALFORMED = b"\xff\xff\xff"


@contextlib.asynccontextmanager
async def limited(config: RouterConfig, **bounds: Any) -> AsyncIterator[grpc.aio.Channel]:
    """Serve with limits on connections; return a channel to the router."""
    small = replace(config, connections=replace(config.connections, **bounds))
    async with serving(small, StubWorker()) as served, channel_to(served) as channel:
        yield channel


def channel_to(served: Served) -> grpc.aio.Channel:
    # Use a separate pool, because channels with equal options share one connection.
    return grpc.aio.insecure_channel(
        served.router.grpc_address, [("grpc.use_local_subchannel_pool", 1)]
    )


async def status_of(call: grpc.aio.StreamStreamCall) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(60):
        return await call.code(), await call.details()


@pytest.mark.parametrize("method", METHODS)
async def test_malformed_messages_are_invalid_and_leave_no_traceback(
    config: RouterConfig, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    async with limited(config) as channel:
        code, details = await status_of(channel.stream_stream(method)(iter([MALFORMED])))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "not a valid" in details
        assert "class" not in details
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_methods_that_do_not_exist_are_unimplemented(config: RouterConfig) -> None:
    async with limited(config) as channel:
        call = channel.stream_stream("/grpc.health.v1.Health/List")(iter([b""]))
        assert (await status_of(call))[0] is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("method", METHODS)
async def test_call_without_a_message_ends(
    config: RouterConfig, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    quick = replace(config, bounds=replace(config.bounds, receive_seconds=0.2))
    async with limited(quick) as channel:
        code, details = await status_of(channel.stream_stream(method)())
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert details == "no message arrived within 0.2 s"
        if method != REFLECTION:
            empty = channel.stream_stream(method)(iter(()))
            assert (await status_of(empty))[0] is grpc.StatusCode.INVALID_ARGUMENT
        cancelled = channel.stream_stream(method)()
        await cancelled.wait_for_connection()
        cancelled.cancel()
        alive = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await alive(b"")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_watches_of_one_address_are_bounded(config: RouterConfig) -> None:
    request = health_pb2.HealthCheckRequest()
    async with limited(config, max_health_watches=2) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        first, second = stub.Watch(request), stub.Watch(request)
        await first.read()
        await second.read()
        assert (await status_of(stub.Watch(request)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        async with asyncio.timeout(60):
            while True:
                again = stub.Watch(request)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert (await again.read()).status == health_pb2.HealthCheckResponse.SERVING
                    break


async def test_calls_of_one_connection_are_bounded(config: RouterConfig) -> None:
    request = health_pb2.HealthCheckRequest()
    async with limited(config, max_grpc_calls=1) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(request)
        await watch.read()
        waiting = asyncio.ensure_future(stub.Check(request))
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.Check(request, timeout=0.3)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        watch.cancel()
        assert (await waiting).status == health_pb2.HealthCheckResponse.SERVING


async def test_call_whose_client_reads_nothing_ends_alone(config: RouterConfig) -> None:
    bounds = replace(config.connections, write_seconds=0.1)
    request = inference_pb2.GenerateRequest(text="hi", sampling={"max_tokens": 2000})
    content = request.SerializeToString()
    async with serving(replace(config, connections=bounds), StubWorker()) as served:
        frontend = served.router.frontend
        # HTTP/2 gives each call of a connection its own window. The third one may be sent.
        calls = [(headers(number, GENERATE), message(number, content)) for number in (1, 3, 5)]
        async with raw_http2(
            served.router.grpc_address,
            *(PREFACE, settings(initial_window_size=0)),
            *(window_update(0, 1 << 24), *calls[0], *calls[1]),
        ) as client:
            await until(lambda: len(served.worker.drops) == 2)
            assert frontend.num_open_requests == 0
            client.send(calls[2][0], window_update(5, 1 << 24), calls[2][1])
            assert await client.status(5) == grpc.StatusCode.OK.value[0]
            client.send(window_update(1, 1 << 24))
            assert await client.status(1) == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert not [frame for frame in client.frames if frame.stream == 3 and frame.flags & 1]


@pytest.mark.parametrize("bound", ["grpc_idle_seconds", "grpc_age_seconds"])
async def test_idle_and_old_connections_are_closed(config: RouterConfig, bound: str) -> None:
    async with limited(config, **{bound: 0.2}) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        await until(lambda: channel.get_state() is grpc.ChannelConnectivity.IDLE)
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING


async def test_address_with_all_its_connections_does_not_keep_others_out(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_guard, "LOOK_SECONDS", 0.01)
    bounds = replace(config.connections, max_connections=8, max_connections_per_address=3)
    small = replace(config, connections=bounds)
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(small, StubWorker()))
        address, sent = served.router.grpc_address, (PREFACE, settings())
        opened = [
            await stack.enter_async_context(raw_http2(address, *sent, source="127.0.0.2"))
            for _ in range(8)
        ]
        await until(lambda: sum(each.is_closed for each in opened) == 5)
        async with channel_to(served) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        async with client_of(served) as http:
            metrics = (await http.get("/metrics")).text
        assert 'penstock_connections_refused_total{port="grpc"} 5.0' in metrics
        assert sum(each.is_closed for each in opened) == 5
