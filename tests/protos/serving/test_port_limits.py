"""Limits on clients of a gRPC port: if a client exceeds one, only this client is disconnected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.protos.serving.call_handlers import CallHandlers
from penstock.protos.serving.health import HealthService, health_handlers
from penstock.protos.serving.port_limits import PortLimits, server_options
from tests.support.raw_http2 import (
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    REFUSALS,
    RST_STREAM,
    Frame,
    header_block,
    headers,
    message,
    raw_http2,
    settings,
)

WATCH = "/grpc.health.v1.Health/Watch"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
START = (PREFACE, settings())


class Port:
    """A served health service, and one client whose call stays open during the test."""

    def __init__(self, address: str, service: HealthService, watch: Any) -> None:
        self.address = address
        self._service = service
        self._watch = watch

    async def check_others(self) -> None:
        """Check that the open call of the first client still receives changes."""
        for status in (NOT_SERVING, SERVING):
            await self._service.set("", status)
            async with asyncio.timeout(60):
                assert (await self._watch.read()).status == status


@asynccontextmanager
async def port(**limits: Any) -> AsyncIterator[Port]:
    wide = {
        "max_message_bytes": 1 << 20,
        "max_metadata_bytes": 8 << 10,
        "max_connections": 100,
        "max_connections_per_address": 0,
        "max_calls": 100,
        "handshake_seconds": 60.0,
        "idle_seconds": 60.0,
    }
    service = HealthService(max_watches=1000)
    server = grpc.aio.server(options=server_options(PortLimits(**{**wide, **limits})))
    server.add_generic_rpc_handlers((health_handlers(service, CallHandlers(60.0)),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await service.set("", SERVING)
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        yield Port(address, service, watch)
    await server.stop(0)


@pytest.mark.parametrize("sent", [(), (PREFACE[:9],), (PREFACE,), (PREFACE, b"\x00\x00")])
async def test_connection_that_does_not_start_is_closed(sent: tuple[bytes, ...]) -> None:
    async with port(handshake_seconds=0.2) as served:
        async with raw_http2(served.address, *sent) as silent:
            await silent.until_closed()
        await served.check_others()


@pytest.mark.parametrize("rest", [(), (Frame(HEADERS, 0, 1, header_block(WATCH)),)])
async def test_connection_without_a_complete_call_is_closed(rest: tuple[Frame, ...]) -> None:
    async with port(idle_seconds=0.2) as served:
        async with raw_http2(served.address, *START, *rest) as idle:
            await idle.until_closed()
        await served.check_others()


async def test_connections_beyond_the_limit_are_closed() -> None:
    async with port(max_connections=4) as served, AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(raw_http2(served.address, *START)) for _ in range(5)
        ]
        for beyond in opened[3:]:  # `served` itself has opened the first of the four connections
            await beyond.until_closed()
            assert not beyond.frames
        for within in opened[:3]:
            within.send(headers(1, WATCH), message(1, b""))
            await within.frame(HEADERS, 1)
        await served.check_others()


async def test_calls_beyond_the_limit_are_refused() -> None:
    async with port(max_calls=3) as served:
        calls = [headers(number, WATCH) for number in (1, 3, 5, 7, 9)]
        async with raw_http2(served.address, *START, *calls) as client:
            for number in (7, 9):
                refused = await client.frame(RST_STREAM, number)
                assert int.from_bytes(refused.payload, "big") in REFUSALS
            client.send(message(1, b""))
            await client.frame(HEADERS, 1)
        await served.check_others()


async def test_client_that_pings_without_pause_is_closed() -> None:
    async with port() as served:
        async with raw_http2(served.address, *START, headers(1, WATCH)) as client:
            pings = [Frame(PING, 0, 0, number.to_bytes(8, "big")) for number in range(8)]
            client.send(*pings)
            assert b"too_many_pings" in (await client.frame(GOAWAY)).payload
            await client.until_closed()
        await served.check_others()


async def test_too_large_metadata_ends_its_call() -> None:
    async with port(max_metadata_bytes=1000) as served:
        async with grpc.aio.insecure_channel(served.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Check(
                    health_pb2.HealthCheckRequest(), metadata=(("name", "x" * 20_000),)
                )
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await served.check_others()
