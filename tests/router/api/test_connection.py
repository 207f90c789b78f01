"""Limits on the bytes, times and numbers of HTTP connections."""

import asyncio
import contextlib
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from penstock.router.api.connection import (
    BODY_WRITER,
    MAX_COLLECTED,
    BoundedConnection,
)
from penstock.router.api.connection_limits import ConnectionLimits
from penstock.router.config import ConnectionBounds, RequestBounds, RouterConfig
from tests.support.api_keys import user_keys
from tests.support.served_router import Served, client_of, serving, until
from tests.support.stub_worker import StubWorker

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
WITHOUT_END = {
    "url": b"GET /",
    "header value": b"GET / HTTP/1.1\r\nx: ",
    "header name": b"GET / HTTP/1.1\r\n",
    "chunk extension": CHUNKED + b"1;",
    "trailer": CHUNKED + b"1\r\nx\r\n0\r\nx-trailer: ",
    "trailer name": CHUNKED + b"0\r\n",
}
READ = 4096  # size of one read in bytes


class Transport(asyncio.Transport):
    """A transport that records what is written; `unsent` is the size of its send buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.num_writes = 0
        self.unsent = 0
        self.is_aborted = False
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += data
        self.num_writes += 1

    def write_eof(self) -> None:
        pass

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = self.is_aborted = True

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await Response("no", 401)(scope, receive, send)


async def never_respond(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


def connect(
    app: Callable[[Scope, Receive, Send], Awaitable[None]], **bounds: Any
) -> tuple[BoundedConnection, Transport]:
    """Return an open connection whose requests go to `app`."""
    limits = ConnectionLimits(RequestBounds(), replace(ConnectionBounds(), **bounds))
    kind = BoundedConnection.with_limits(limits)
    config = uvicorn.Config(cast(Any, app), lifespan="off", log_config=None, access_log=False)
    connection, transport = kind(config, ServerState(), {}), Transport()
    connection.connection_made(transport)
    return connection, transport


@contextlib.contextmanager
def cancelled_tasks(connection: BoundedConnection) -> Any:
    """End the calls of the application, and the timers, after a test."""
    try:
        yield
    finally:
        for task in connection.tasks:
            task.cancel()
        connection.connection_lost(None)


async def test_calls_that_arrive_together_begin_one_in_each_iteration() -> None:
    begun: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["method"])
        await Response()(scope, receive, send)

    first, _ = connect(app)
    others = [type(first)(first.config, ServerState(), {}) for _ in range(5)]
    for connection in others:
        connection.connection_made(Transport())
    for connection in (first, *others[1:]):
        connection.data_received(HEAD + b"content-length: 0\r\n\r\n")
    others[0].data_received(GET)
    await asyncio.sleep(0)
    assert begun == ["POST", "GET"]  # the health check is not queued behind the other POSTs
    while len(begun) < 6:
        before = len(begun)
        await asyncio.sleep(0)
        assert len(begun) - before <= 1
    for connection in (first, *others):
        connection.connection_lost(None)


START = {"type": "http.response.start", "status": 200, "headers": []}


async def test_collected_parts_above_the_limit_are_written_at_once() -> None:
    counts: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"0", "more_body": True})
        await asyncio.sleep(0)
        body = scope["extensions"][BODY_WRITER]
        for _ in range(8):
            body.write_chunk(b"x" * (MAX_COLLECTED // 4))
            counts.append(transport.num_writes)
        await send({"type": "http.response.body", "body": b""})

    connection, transport = connect(app)
    with cancelled_tasks(connection):
        connection.data_received(HEAD + b"content-length: 0\r\n\r\n")
        await until(lambda: connection.cycle.response_complete)
    assert counts == [1, 1, 1, 2, 2, 2, 2, 3]


async def test_parts_of_one_iteration_are_written_together_and_before_later_sends() -> None:
    counts: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"0", "more_body": True})
        body = scope["extensions"][BODY_WRITER]
        for parts in ((b"1", b"2", b"3"), (b"4", b"5")):
            counts.append(transport.num_writes)
            for part in parts:
                body.write_chunk(part)
            assert transport.num_writes == counts[-1]
            await asyncio.sleep(0)
        counts.append(transport.num_writes)
        body.write_chunk(b"6")
        await send({"type": "http.response.body", "body": b"7"})

    connection, transport = connect(app)
    with cancelled_tasks(connection):
        connection.data_received(HEAD + b"content-length: 0\r\n\r\n")
        await until(lambda: connection.cycle.response_complete)
    assert counts == [0, 1, 2]  # the first write also has the status and the headers
    assert transport.num_writes == 3
    chunks = transport.written.partition(b"\r\n\r\n")[2].split(b"\r\n")
    assert chunks[1:-2:2] == [b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7"]


async def test_much_of_one_iteration_is_not_collected() -> None:
    counts: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for _ in range(8):
            part = bytes(MAX_COLLECTED // 2)
            await send({"type": "http.response.body", "body": part, "more_body": True})
            counts.append(transport.num_writes)
        await send({"type": "http.response.body", "body": b""})

    connection, transport = connect(app)
    with cancelled_tasks(connection):
        connection.data_received(HEAD + b"content-length: 0\r\n\r\n")
        await until(lambda: connection.cycle.response_complete)
    assert counts == [0, 1, 1, 2, 2, 3, 3, 4]


async def test_nothing_is_written_for_a_client_that_has_disconnected() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"0", "more_body": True})
        await until(lambda: transport.written)
        scope["extensions"][BODY_WRITER].write_chunk(b"late")
        connection.connection_lost(None)
        await asyncio.Event().wait()

    connection, transport = connect(app)
    connection.data_received(HEAD + b"content-length: 0\r\n\r\n")
    await until(lambda: transport.written)
    await asyncio.sleep(0)
    assert transport.written.endswith(b"1\r\n0\r\n")
    for task in connection.tasks:
        task.cancel()


@pytest.mark.parametrize("watches_late", [True, False])
async def test_watcher_is_told_of_a_disconnect_before_and_after_it_watches(
    watches_late: bool,
) -> None:
    told: list[bool] = []
    connected = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if not watches_late:
            scope["extensions"][BODY_WRITER].watch(lambda: told.append(True))
        connected.set()
        assert (await receive())["type"] == "http.disconnect"
        if watches_late:
            scope["extensions"][BODY_WRITER].watch(lambda: told.append(True))

    connection, _ = connect(app)
    connection.data_received(HEAD + b"content-length: 9\r\n\r\n")
    await connected.wait()
    assert not told
    connection.connection_lost(None)
    await until(lambda: told)
    assert told == [True]


@pytest.mark.parametrize(
    ("where", "is_answered"),
    [(where, False) for where in WITHOUT_END]
    + [(where, True) for where, start in WITHOUT_END.items() if CHUNKED in start],
)
async def test_endless_head_or_trailer_closes_the_connection(where: str, is_answered: bool) -> None:
    start = WITHOUT_END[where]
    connection, transport = connect(refuse if is_answered else never_respond)
    with cancelled_tasks(connection):
        connection.data_received(start)
        if is_answered:
            await until(lambda: connection.cycle.response_complete)
            assert b"connection: close" in transport.written
        sent, piece = 0, b"y" * READ
        tracemalloc.start()
        try:
            while not transport.is_closing():
                connection.data_received(piece)
                sent += READ
                assert sent <= connection.limits.max_head_bytes + READ
                await asyncio.sleep(0)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert transport.written.startswith(b"HTTP/1.1 4")


async def test_one_large_read_is_refused_like_many_small_ones() -> None:
    connection, transport = connect(never_respond)
    with cancelled_tasks(connection):
        connection.data_received(WITHOUT_END["header value"] + b"y" * (1 << 20))
        assert transport.is_closing()
        assert transport.written.startswith(b"HTTP/1.1 400")


async def test_bodies_are_not_counted_as_heads() -> None:
    connection, transport = connect(never_respond)
    size = 1 << 20
    with cancelled_tasks(connection):
        connection.data_received(HEAD + b"content-length: %d\r\n\r\n" % size)
        for _ in range(size // READ):
            connection.data_received(b"y" * READ)
        assert not transport.is_closing()
        assert not connection.cycle.more_body


async def test_unread_rest_of_a_last_response_is_dropped_after_the_write_timeout() -> None:
    connection, transport = connect(refuse, write_seconds=0.1, linger_seconds=0.1)
    with cancelled_tasks(connection):
        connection.data_received(CHUNKED)
        transport.unsent = 1000
        await until(lambda: transport.is_aborted)


async def test_slow_reader_that_makes_progress_is_kept() -> None:
    connection, transport = connect(never_respond, write_seconds=0.02)
    with cancelled_tasks(connection):
        transport.unsent = 1000
        checks = []

        def read_a_little() -> int:
            transport.unsent -= 1
            checks.append(transport.unsent)
            return transport.unsent

        transport.get_write_buffer_size = read_a_little  # type: ignore[method-assign]
        connection.pause_writing()
        await until(lambda: len(checks) > 5)
        assert not transport.is_closing()
        transport.get_write_buffer_size = lambda: 1000  # type: ignore[method-assign]
        await until(lambda: transport.is_aborted)


async def test_complete_request_is_answered_before_garbage_behind_it() -> None:
    connection, transport = connect(refuse)
    with cancelled_tasks(connection):
        connection.data_received(GET + b"\x00garbage\r\n\r\n")
        assert transport.written == b""
        await until(transport.is_closing)
        assert transport.written.count(b"HTTP/1.1") == 1
        assert transport.written.startswith(b"HTTP/1.1 401")


async def test_upgrade_is_answered_as_plain_http_and_ends_the_connection() -> None:
    connection, transport = connect(refuse)
    with cancelled_tasks(connection):
        connection.data_received(
            b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nPRI * HTTP/2.0"
        )
        await until(transport.is_closing)
        assert transport.written.startswith(b"HTTP/1.1 401")
        assert b"connection: close" in transport.written


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def open_raw(served: Served, source: str = "127.0.0.1") -> AsyncIterator[Streams]:
    host, port = served.router.http_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    try:
        yield reader, writer
    finally:
        writer.close()


async def read_end(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes that arrive until the server closes the connection."""
    received = b""
    async with asyncio.timeout(60):
        # The server closes without reading everything, so the client may get a reset.
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                received += piece
    return received


@contextlib.asynccontextmanager
async def sending(writer: asyncio.StreamWriter, piece: bytes) -> AsyncIterator[None]:
    """Send a piece again and again, until the connection is closed."""

    async def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)

    task = asyncio.create_task(send())
    try:
        yield
    finally:
        task.cancel()


def with_times(config: RouterConfig, **seconds: Any) -> RouterConfig:
    return replace(config, connections=replace(config.connections, **seconds))


async def test_empty_lines_do_not_keep_a_connection_open(config: RouterConfig) -> None:
    short = with_times(config, idle_seconds=0.2)
    async with serving(short) as served, open_raw(served) as (reader, writer):
        writer.write(GET)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 503")
        async with sending(writer, b"\r\n"):
            await read_end(reader)


async def test_idle_connection_serves_until_its_timeout(config: RouterConfig) -> None:
    short = with_times(config, idle_seconds=0.2)
    async with serving(short) as served, open_raw(served) as (reader, writer):
        for _ in range(3):
            writer.write(GET)
            await reader.readuntil(b"no worker")
        assert b"HTTP/1.1" not in await read_end(reader)


async def test_old_connection_is_closed_after_its_next_response(config: RouterConfig) -> None:
    for seconds, num_answers in ((600.0, 3), (0.0, 1)):
        old = with_times(config, http_age_seconds=seconds, idle_seconds=0.2)
        async with serving(old) as served, open_raw(served) as (reader, writer):
            writer.write(GET * 3)
            answers = await read_end(reader)
            assert answers.count(b"HTTP/1.1 503") == num_answers
            assert answers.count(b"connection: close") == (num_answers == 1)


async def test_answer_before_the_end_of_a_body_closes_the_connection(config: RouterConfig) -> None:
    keyed = with_times(replace(config, api_keys=user_keys("a-key")), linger_seconds=0.2)
    async with serving(keyed) as served, open_raw(served) as (reader, writer):
        writer.write(HEAD + b"content-length: 4000000\r\n\r\n")
        async with sending(writer, b" "):
            answer = await read_end(reader)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in answer


async def test_early_refusal_reaches_a_client_that_still_sends(config: RouterConfig) -> None:
    keyed = replace(config, api_keys=user_keys("a-key"))
    async with serving(keyed) as served, httpx.AsyncClient(base_url=served.url) as http:
        for size in (10, 1 << 20, 3 << 20):
            response = await http.post("/v1/completions", json={"prompt": "x" * size})
            assert response.status_code == 401


async def test_slow_body_is_refused_and_its_connection_closed(config: RouterConfig) -> None:
    bounds = replace(config.bounds, receive_seconds=0.2)
    slow = with_times(replace(config, bounds=bounds), linger_seconds=0.1)
    async with serving(slow, StubWorker()) as served, open_raw(served) as (reader, writer):
        writer.write(HEAD + b"content-length: 4000000\r\n\r\n")
        async with sending(writer, b" "):
            answer = await read_end(reader)
    assert b"did not arrive within" in answer
    assert b"connection: close" in answer


async def test_client_that_reads_nothing_is_disconnected_alone(config: RouterConfig) -> None:
    bounds = replace(config.bounds, max_unread_tokens=1 << 30)
    unread = with_times(replace(config, bounds=bounds), write_seconds=0.2)
    worker = StubWorker(step_seconds=0.001)
    async with (
        serving(unread, worker) as served,
        httpx.AsyncClient(base_url=served.url, timeout=60) as http,
        asyncio.TaskGroup() as group,
    ):
        body = {"prompt": "x", "max_tokens": 300}
        other = group.create_task(http.post("/v1/completions", json=body))
        host, port = served.router.http_address.rsplit(":", 1)
        client_socket = socket.socket()
        client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client_socket.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client_socket, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=client_socket, limit=1024)
        wanted = b'{"prompt":"hi","max_tokens":2000,"stream":true,"n":8,"logprobs":20}'
        writer.write(HEAD + b"content-length: %d\r\n\r\n%s" % (len(wanted), wanted))
        await until(lambda: worker.drops)
        answer = await other
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 300
        assert b"[DONE]" not in await read_end(reader)
        writer.close()


async def test_connections_beyond_the_limits_are_refused(config: RouterConfig) -> None:
    few = replace(
        config, connections=ConnectionBounds(max_connections=3, max_connections_per_address=2)
    )
    async with serving(few) as served, contextlib.AsyncExitStack() as stack:

        async def answer(source: str) -> bytes:
            reader, writer = await stack.enter_async_context(open_raw(served, source))
            writer.write(GET)
            with contextlib.suppress(OSError):
                return await reader.readuntil(b"}")
            raise AssertionError("the connection was closed without an answer")

        async with open_raw(served) as (first, writer):
            writer.write(GET)
            assert b"no worker" in await first.readuntil(b"}")
            assert b"no worker" in await answer("127.0.0.1")
            assert b"too many connections" in await answer("127.0.0.1")
            assert b"no worker" in await answer("127.0.0.2")
            assert b"too many connections" in await answer("127.0.0.3")
        for _ in range(200):  # the server may notice late that a connection was closed
            last = await answer("127.0.0.1")
            if b"no worker" in last:
                break
            await asyncio.sleep(0.01)
        assert b"no worker" in last


async def test_address_with_all_its_connections_does_not_keep_others_out(
    config: RouterConfig,
) -> None:
    few = replace(
        config, connections=ConnectionBounds(max_connections=8, max_connections_per_address=3)
    )
    async with serving(few, StubWorker()) as served, contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(open_raw(served, "127.0.0.2")) for _ in range(8)]
        for reader, _ in opened[3:]:
            assert b"too many connections" in await read_end(reader)
        async with client_of(served) as http:
            assert (await http.get("/health")).status_code == 200
            metrics = (await http.get("/metrics")).text
        assert 'penstock_connections_refused_total{port="http"} 5.0' in metrics
        assert 'penstock_connections_refused_total{port="admin"} 0.0' in metrics
        assert not any(reader.at_eof() for reader, _ in opened[:3])


async def test_zero_means_no_bound_for_each_address(config: RouterConfig) -> None:
    few = replace(
        config, connections=ConnectionBounds(max_connections=8, max_connections_per_address=0)
    )
    async with serving(few) as served, contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            reader, writer = await stack.enter_async_context(open_raw(served, "127.0.0.2"))
            writer.write(GET)
            assert b"no worker" in await reader.readuntil(b"}")
        reader, _ = await stack.enter_async_context(open_raw(served, "127.0.0.3"))
        assert b"too many connections" in await read_end(reader)
