"""Bounds on the connections of each address to a gRPC port, with real sockets.

All addresses that begin with 127 belong to the loopback interface, so clients of one machine can
have several addresses.
"""

import os
import socket
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.protos.serving import connection_guard
from penstock.protos.serving.call_handlers import CallHandlers
from penstock.protos.serving.connection_guard import ConnectionGuard, num_descriptors
from penstock.protos.serving.health import HealthService, health_handlers
from penstock.protos.serving.port_limits import PortLimits, server_options
from penstock.protos.serving.refused_connections import RefusedConnections
from tests.support.raw_http2 import (
    HEADERS,
    PREFACE,
    RawHttp2,
    headers,
    message,
    raw_http2,
    settings,
)
from tests.support.served_router import until

CHECK = "/grpc.health.v1.Health/Check"
START = (PREFACE, settings())
CALL = (headers(1, CHECK), message(1, b""))
STRANGER = "127.0.0.2"
MAX_CONNECTIONS, MAX_PER_ADDRESS = 8, 3
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 50))


class Port:
    """A served health service whose connections are bounded for each address."""

    def __init__(self, number: int, guard: ConnectionGuard, refused: RefusedConnections) -> None:
        self.address = f"127.0.0.1:{number}"
        self.guard = guard
        self.refused = refused

    async def fill(self, stack: AsyncExitStack) -> list[RawHttp2]:
        """Open, from one address, as many connections as the port allows for all addresses."""
        return [
            await stack.enter_async_context(raw_http2(self.address, *START, source=STRANGER))
            for _ in range(MAX_CONNECTIONS)
        ]

    async def check_other_address(self) -> None:
        """Check that a new client with another address gets an answer."""
        async with grpc.aio.insecure_channel(self.address, OPTIONS) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def port(
    host: str = "127.0.0.1", max_per_address: int = MAX_PER_ADDRESS
) -> AsyncIterator[Port]:
    service = HealthService(max_watches=100)
    limits = PortLimits(
        max_message_bytes=1 << 20,
        max_metadata_bytes=8 << 10,
        max_connections=MAX_CONNECTIONS,
        max_connections_per_address=max_per_address,
        max_calls=100,
        handshake_seconds=600.0,
        idle_seconds=600.0,
    )
    server = grpc.aio.server(options=server_options(limits))
    server.add_generic_rpc_handlers((health_handlers(service, CallHandlers(60.0)),))
    number = server.add_insecure_port(f"{host}:0")
    await server.start()
    await service.set("", health_pb2.HealthCheckResponse.SERVING)
    refused = RefusedConnections("test")
    guard = ConnectionGuard(number, max_per_address, refused)
    try:
        yield Port(number, guard, refused)
    finally:
        guard.close()
        await server.stop(0)


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "LOOK_SECONDS", 0.01)


async def closed_ones(opened: list[RawHttp2], count: int) -> list[RawHttp2]:
    """Wait until the server has closed this number of connections, and return them."""
    await until(lambda: sum(each.is_closed for each in opened) >= count)
    return [each for each in opened if each.is_closed]


async def is_answered(client: RawHttp2) -> bool:
    client.send(*CALL)
    return bool((await client.frame(HEADERS, 1)).payload)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::]"])  # [::] also accepts IPv4 clients
async def test_address_with_all_connections_does_not_keep_others_out(host: str) -> None:
    async with port(host) as served, AsyncExitStack() as stack:
        opened = await served.fill(stack)
        num_beyond = MAX_CONNECTIONS - MAX_PER_ADDRESS
        closed = await closed_ones(opened, num_beyond)
        await served.check_other_address()
        for each in opened:
            assert each in closed or await is_answered(each)
        assert len(closed) == served.refused.total == num_beyond


async def test_open_connections_stay_and_only_new_ones_are_closed() -> None:
    async with port() as served, AsyncExitStack() as stack:
        first = [
            await stack.enter_async_context(raw_http2(served.address, *START, source=STRANGER))
            for _ in range(MAX_PER_ADDRESS)
        ]
        for each in first:
            assert await is_answered(each)
        for number in range(1, 6):
            beyond = raw_http2(served.address, *START, source=STRANGER)
            await (await stack.enter_async_context(beyond)).until_closed()
            assert served.refused.total == number
        assert not any(each.is_closed for each in first)


async def test_closed_connection_makes_room_for_another_of_its_address() -> None:
    async with port() as served, AsyncExitStack() as stack:
        opened = await served.fill(stack)
        closed = await closed_ones(opened, MAX_CONNECTIONS - MAX_PER_ADDRESS)
        await next(each for each in opened if each not in closed).close()
        while True:  # until the server has noticed the closed connection
            again = raw_http2(served.address, *START, *CALL, source=STRANGER)
            client = await stack.enter_async_context(again)
            await until(lambda: client.is_closed or client.frames[2:])  # noqa: B023
            if not client.is_closed:
                break


async def test_connections_of_the_process_to_others_and_other_ports_are_not_counted() -> None:
    async with port() as served, AsyncExitStack() as stack:
        other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for _ in range(2 * MAX_PER_ADDRESS):
            client = stack.enter_context(socket.create_connection(other.getsockname()))
            stack.enter_context(other.accept()[0])
            client.setblocking(False)
        await served.check_other_address()
        # If gRPC still counts the connection of the other address, it closes one of these new
        # connections.
        await closed_ones(await served.fill(stack), MAX_CONNECTIONS - MAX_PER_ADDRESS)
        with pytest.raises(BlockingIOError):
            client.recv(1)


async def test_guard_without_a_bound_and_closed_guard_have_no_thread() -> None:
    def names() -> list[str]:
        return [each.name for each in threading.enumerate()]

    async with port(max_per_address=0):
        assert "connections" not in names()
    async with port() as served:
        assert "connections" in names()
        served.guard.close()
        assert "connections" not in names()


@pytest.mark.parametrize("reports_number", [True, False])
def test_number_of_descriptors_is_known(
    monkeypatch: pytest.MonkeyPatch, reports_number: bool
) -> None:
    if not reports_number:  # before 6.2, Linux reports the size 0
        old = SimpleNamespace(stat=lambda path: SimpleNamespace(st_size=0), listdir=os.listdir)
        monkeypatch.setattr(connection_guard, "os", old)
    before = num_descriptors()
    with socket.socket(), socket.socket():
        assert num_descriptors() == before + 2
    assert num_descriptors() == before


async def test_sockets_are_searched_only_with_more_descriptors_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = deque([MAX_PER_ADDRESS], maxlen=100)

    def number() -> int:
        counts.append(counts[-1])
        return counts[-1]

    monkeypatch.setattr(connection_guard, "num_descriptors", number)
    async with port() as served, AsyncExitStack() as stack:
        await served.fill(stack)
        counts.clear()
        counts.append(MAX_PER_ADDRESS)
        await until(lambda: len(counts) > 3)
        assert not served.refused.total
        counts.append(MAX_PER_ADDRESS + 1)
        await until(lambda: served.refused.total == MAX_CONNECTIONS - MAX_PER_ADDRESS)


async def test_reused_number_of_a_counted_socket_is_not_counted_again() -> None:
    """After a descriptor was listed, it may be closed, and another guard may reuse its number."""
    listener = socket.create_server(("127.0.0.1", 0))
    refused = RefusedConnections("test")
    guard = ConnectionGuard(listener.getsockname()[1], 1, refused)
    guard.close()  # end its thread: this test calls the check itself
    with listener, socket.create_connection(listener.getsockname()) as client:
        served, _ = listener.accept()
        with served:
            num_open: Counter[str] = Counter()
            guard._admit(served.fileno(), num_open)
            guard._admit(served.dup().detach(), num_open)
            assert num_open == {"127.0.0.1": 1}
            assert refused.total == 0
            served.sendall(b"open")
            assert client.recv(4) == b"open"
