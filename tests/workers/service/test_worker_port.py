"""The port of a worker: its limits, and what a peer may do before it is authorized.

These peers must not disturb another router's stream.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.protos import worker_pb2 as wire
from penstock.protos.serving import connection_guard
from penstock.protos.worker_codec import PROTOCOL, pack_tokens
from penstock.workers.config import WorkerConfig
from penstock.workers.service import grpc_service, session, worker_port
from penstock.workers.service.grpc_service import RunningWorker, serve_worker
from tests.support.attached_router import AttachedRouter, greedy
from tests.support.raw_http2 import (
    DATA,
    PREFACE,
    REFUSALS,
    RST_STREAM,
    headers,
    message,
    raw_http2,
    settings,
    window_update,
)
from tests.support.served_router import until
from tests.support.tiny import tiny_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

ATTACH, STEPS = "/penstock.worker.v1.Worker/Attach", "/penstock.worker.v1.Worker/Steps"
PAIR = "/penstock.transfer.v1.Transfer/Pair"
TOKEN = (("authorization", "Bearer secret"),)
PROMPT = list(range(3, 40))
HEARTBEAT_SECONDS = 0.1
NEW_CONNECTION = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
)
MAX_CALLS = 5
MAX_CONNECTIONS, MAX_PER_ADDRESS = 16, 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningWorker]:
    """A worker with short time limits."""
    config = WorkerConfig(
        "w0",
        tiny_checkpoint(tmp_path_factory.mktemp("tiny")),
        kv_cache_mib=1,
        token="secret",
        heartbeat_seconds=HEARTBEAT_SECONDS,
    )
    limits = replace(
        worker_port.LIMITS,
        max_connections=MAX_CONNECTIONS,
        max_connections_per_address=MAX_PER_ADDRESS,
        max_calls=MAX_CALLS,
        handshake_seconds=0.5,
        idle_seconds=0.5,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_port, "LIMITS", limits)
        patch.setattr(grpc_service, "RECEIVE_SECONDS", 0.2)
        patch.setattr(connection_guard, "LOOK_SECONDS", 0.01)
        running = await serve_worker(config)
    yield running
    await running.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def router(worker: RunningWorker) -> AsyncIterator[AttachedRouter]:
    """A router whose stream is open during the test, and still works after the test."""
    attached = await AttachedRouter(worker.address, "secret").open(heartbeat_seconds=0.05)
    yield attached
    await attached.submit(1000, PROMPT, greedy(3))
    assert len(await attached.answer(1000)) == 3
    await attached.close()


async def status_of(call: grpc.aio.StreamStreamCall) -> grpc.StatusCode:
    async with asyncio.timeout(60):
        return await call.code()


@pytest.mark.parametrize("method", [ATTACH, STEPS, PAIR, f"{STEPS}s", "/other.Service/Call"])
async def test_call_without_a_secret_ends_before_its_first_message(
    worker: RunningWorker, router: AttachedRouter, method: str
) -> None:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        silent = channel.stream_stream(method)()
        assert await status_of(silent) is grpc.StatusCode.UNAUTHENTICATED


async def test_tokens_of_routers_and_secrets_of_workers_are_not_exchangeable(
    worker: RunningWorker, router: AttachedRouter
) -> None:
    transfer = (("authorization", f"Bearer {router.welcome.transfer.secret}"),)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        for method, secret in ((ATTACH, transfer), (STEPS, transfer), (PAIR, TOKEN)):
            call = channel.stream_stream(method)(metadata=secret)
            assert await status_of(call) is grpc.StatusCode.UNAUTHENTICATED


async def test_authorized_call_without_a_message_ends(
    worker: RunningWorker, router: AttachedRouter
) -> None:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        silent = channel.stream_stream(STEPS)(metadata=TOKEN)
        assert await status_of(silent) is grpc.StatusCode.DEADLINE_EXCEEDED
        malformed = channel.stream_stream(STEPS)(iter([b"\xff\xff"]), metadata=TOKEN)
        assert await status_of(malformed) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("sent", [(), (PREFACE,), (PREFACE, settings())])
async def test_connection_without_calls_is_closed(
    worker: RunningWorker, router: AttachedRouter, sent: tuple[bytes, ...]
) -> None:
    async with raw_http2(worker.address, *sent) as silent:
        await silent.until_closed()


async def test_address_with_all_its_connections_does_not_keep_others_out(
    worker: RunningWorker, router: AttachedRouter
) -> None:
    watch = (
        headers(1, "/grpc.health.v1.Health/Watch"),
        message(1, b""),
    )  # This call needs no token and stays open.
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(
                raw_http2(worker.address, PREFACE, settings(), *watch, source="127.0.0.2")
            )
            for _ in range(MAX_CONNECTIONS)
        ]
        async with grpc.aio.insecure_channel(worker.address, NEW_CONNECTION) as channel:
            silent = channel.stream_stream(STEPS)(metadata=TOKEN, wait_for_ready=True)
            # The worker sets this status.
            assert await status_of(silent) is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "no message arrived" in await silent.details()
        await until(lambda: sum(not each.is_closed for each in opened) == MAX_PER_ADDRESS)


async def test_calls_of_one_connection_are_bounded(
    worker: RunningWorker, router: AttachedRouter
) -> None:
    numbers = range(1, 2 * MAX_CALLS + 4, 2)
    calls = [headers(number, ATTACH, *TOKEN) for number in numbers]
    async with raw_http2(worker.address, PREFACE, settings(), *calls) as client:
        for number in numbers[MAX_CALLS:]:
            refused = await client.frame(RST_STREAM, number)
            assert int.from_bytes(refused.payload, "big") in REFUSALS


async def test_watches_of_one_address_are_bounded(
    worker: RunningWorker, router: AttachedRouter
) -> None:
    request = health_pb2.HealthCheckRequest()
    watches = []
    channels = [grpc.aio.insecure_channel(worker.address, NEW_CONNECTION) for _ in range(4)]
    for number in range(worker_port.MAX_HEALTH_WATCHES):
        watches.append(health_pb2_grpc.HealthStub(channels[number // MAX_CALLS]).Watch(request))
        assert (await watches[-1].read()).status == health_pb2.HealthCheckResponse.SERVING
    beyond = health_pb2_grpc.HealthStub(channels[-1]).Watch(request)
    assert await status_of(beyond) is grpc.StatusCode.RESOURCE_EXHAUSTED
    for channel in channels:
        await channel.close()


@pytest.mark.parametrize(
    ("has_heartbeats", "status"),
    [
        (True, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (False, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
async def test_router_that_reads_nothing_is_ended_alone(
    worker: RunningWorker,
    router: AttachedRouter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_heartbeats: bool,
    status: grpc.StatusCode,
) -> None:
    caplog.set_level(logging.INFO)
    if has_heartbeats:
        monkeypatch.setattr(session, "MAX_TOKENS_WAITING", 20)
    submit = wire.Submit(request=1, attempt=1, prompt=pack_tokens(PROMPT), params=greedy(200))
    messages = [
        wire.ToWorker(number=1, hello=wire.Hello(protocol=PROTOCOL, router="slow")),
        wire.ToWorker(number=2, submit=submit),
    ]
    async with raw_http2(
        worker.address,
        *(PREFACE, settings(initial_window_size=0), headers(1, ATTACH, *TOKEN)),
        *(message(1, each.SerializeToString()) for each in messages),
    ) as slow:
        async with asyncio.timeout(60):
            number = 2
            # Wait until the worker has dropped this router's sequences.
            while "router slow detached" not in caplog.text:
                await asyncio.sleep(HEARTBEAT_SECONDS / 2)
                number += 1
                heartbeat = wire.ToWorker(number=number, heartbeat=wire.Heartbeat())
                slow.send(*[message(1, heartbeat.SerializeToString())] * has_heartbeats)
        assert not [frame for frame in slow.frames if frame.kind == DATA]
        slow.send(window_update(1, 1 << 20))
        await slow.frame(DATA, 1)
        assert await slow.status(1) == status.value[0]


@pytest.mark.parametrize("reads_later", [True, False])
async def test_silent_reader_is_ended_and_then_disconnected(
    worker: RunningWorker,
    router: AttachedRouter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reads_later: bool,
) -> None:
    """A router with heartbeats that reads no message is treated as lost, though little waits."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(grpc_service, "WRITE_SECONDS", 60.0 if reads_later else 0.2)
    hello = wire.ToWorker(number=1, hello=wire.Hello(protocol=PROTOCOL, router="silent"))
    async with raw_http2(
        worker.address,
        *(PREFACE, settings(initial_window_size=0), headers(1, ATTACH, *TOKEN)),
        message(1, hello.SerializeToString()),
    ) as silent:
        number = 1
        while not silent.is_closed and not (reads_later and number > 20):
            await asyncio.sleep(HEARTBEAT_SECONDS / 4)
            number += 1
            heartbeat = wire.ToWorker(number=number, heartbeat=wire.Heartbeat())
            silent.send(message(1, heartbeat.SerializeToString()))
        if reads_later:
            silent.send(window_update(1, 1 << 20))
            await silent.frame(DATA, 1)
            assert "router silent detached" not in caplog.text
    assert silent.is_closed is not reads_later
    if not reads_later:
        assert "the router has read nothing for 0.2 s" in caplog.text
