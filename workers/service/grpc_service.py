"""A worker's gRPC service: the streams of routers, and what brings a worker up and down."""

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from torch._C._distributed_c10d import Store

from penstock.protos import transfer_pb2_grpc, worker_pb2_grpc
from penstock.protos import worker_pb2 as wire
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.determinism_check import check_batch_invariance
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.step_times import STEP_BOUNDS
from penstock.workers.health.watchdog import Watchdog
from penstock.workers.kv_transfer.staging import WorkerIdentity
from penstock.workers.rank.rank_runtime import ProgressCallback
from penstock.workers.service.codec import MAX_MESSAGE_BYTES, PROTOCOL
from penstock.workers.service.session import Session
from penstock.workers.service.session_manager import BadCommand, SessionManager

log = logging.getLogger(__name__)

_MAX_MISSED_HEARTBEATS = 10  # so many beats of silence end a stream
_MAX_MISSED_CANARIES = 3  # so many times a canary's seconds without a step: it does not serve
_CHECK_SECONDS = 1.0
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second worker on a port is an error, not a partner
)

Requests = AsyncIterator[wire.ToWorker]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """One stream a router: introduces, numbers, listens and beats."""

    def __init__(
        self, config: WorkerConfig, manager: SessionManager, welcome: wire.Welcome
    ) -> None:
        self._heartbeat_seconds = config.heartbeat_seconds
        self._token = config.token
        self._manager = manager
        self._welcome = welcome
        self._session_ids = count(1)

    async def Attach(self, request_iterator: Requests, context: grpc.aio.ServicerContext) -> None:
        await self._authorize(context)
        hello = await self._read_hello(request_iterator, context)
        session = Session(next(self._session_ids), hello)
        self._manager.open(session)
        reader = asyncio.create_task(self._read(session, request_iterator))
        log.info("router %s has attached", session.router)
        try:
            session.put(wire.ToRouter(welcome=self._welcome_with_load()))
            if self._manager.draining:
                session.put(wire.ToRouter(draining=wire.Draining()))
            while session.stream_end is None:
                message = await session.next(self._heartbeat_seconds)
                if message is not None:
                    await context.write(message)
                elif session.stream_end is None:
                    self._manager.send_heartbeat(session)
        finally:
            reader.cancel()
            self._manager.close(session)
            log.info("router %s has gone: %s", session.router, session.stream_end)
        if session.stream_end.code is not grpc.StatusCode.OK:
            await context.abort(session.stream_end.code, session.stream_end.reason)

    async def _authorize(self, context: grpc.aio.ServicerContext) -> None:
        if self._token is None:
            return
        shown = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not hmac.compare_digest(str(shown).encode(), f"Bearer {self._token}".encode()):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "wrong or no cluster token: a router must show it"
            )

    async def _read_hello(
        self, requests: Requests, context: grpc.aio.ServicerContext
    ) -> wire.Hello:
        try:
            async with asyncio.timeout(_MAX_MISSED_HEARTBEATS * self._heartbeat_seconds):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            first = wire.ToWorker()
        problem = ""
        if first.number != 1 or not first.hello.router:
            problem = "the first message must be Hello, number 1, with the router's name"
        elif first.hello.protocol != PROTOCOL:
            problem = (
                f"the router speaks worker protocol {first.hello.protocol} and this worker "
                f"{PROTOCOL}: run the same version of both"
            )
        if problem:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        return first.hello

    def _welcome_with_load(self) -> wire.Welcome:
        welcome = wire.Welcome()
        welcome.CopyFrom(self._welcome)
        welcome.load.CopyFrom(self._manager.load)
        return welcome

    async def _read(self, session: Session, requests: Requests) -> None:
        """Obey until the router ends the stream, falls silent or says what makes no sense."""
        try:
            async with _HeartbeatTimeout(self._heartbeat_seconds) as silence:
                for number in count(2):
                    message = await anext(requests)
                    silence.message_received()
                    if message.number != number:
                        raise BadCommand(f"message {message.number} came where {number} was due")
                    self._manager.handle(session, message)
        except StopAsyncIteration:
            session.end(grpc.StatusCode.OK, "it closed the stream")
        except TimeoutError:
            seconds = _MAX_MISSED_HEARTBEATS * self._heartbeat_seconds
            session.end(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was heard for {seconds:g} s")
        except BadCommand as error:
            session.end(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception as error:  # the stream cannot be read, or we have a fault here
            log.exception("the stream of router %s broke", session.router)
            session.end(grpc.StatusCode.INTERNAL, f"the stream cannot be read: {error}")


class _HeartbeatTimeout:
    """Ends its block with TimeoutError after ten beats in a row without a message.

    Beats are counted in turns of the event loop: a stall of this process, during which it cannot
    hear anybody, counts as one.
    """

    def __init__(self, heartbeat_seconds: float) -> None:
        self._heartbeat_seconds = heartbeat_seconds  # seconds
        self._num_silent = 0
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._next = asyncio.get_running_loop().call_later(self._heartbeat_seconds, self._tick)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._next.cancel()
        await self._timeout.__aexit__(*error)  # raises TimeoutError when it has expired

    def message_received(self) -> None:
        self._num_silent = 0

    def _tick(self) -> None:
        self._num_silent += 1
        loop = asyncio.get_running_loop()
        if self._num_silent >= _MAX_MISSED_HEARTBEATS:
            self._timeout.reschedule(loop.time())
        else:
            self._next = loop.call_later(self._heartbeat_seconds, self._tick)


class RunningWorker:
    """A worker that serves."""

    def __init__(
        self,
        address: str,
        server: grpc.aio.Server,
        manager: SessionManager,
        health_task: asyncio.Task[None],
    ) -> None:
        self.address = address  # host:port
        self._server = server
        self._manager = manager
        self._health_task = health_task  # ends with it

    @property
    def silence(self) -> float:
        """Seconds since the last step that went well; while nothing is asked, canaries' too."""
        return self._manager.silence

    async def wait(self) -> None:
        """Until it is stopped; RuntimeError if its engine fails."""
        stopped = asyncio.create_task(self._server.wait_for_termination())
        await asyncio.wait((stopped, self._manager.failed), return_when=asyncio.FIRST_COMPLETED)
        if self._manager.failed.done():
            await self._server.stop(0)
            self._manager.failed.result()

    async def drain(self, seconds: float) -> None:
        """Take nothing new, and wait so long for what is here to end."""
        self._manager.drain()
        deadline = time.monotonic() + seconds
        while not self._manager.idle and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End every stream and the engine, and give the port back."""
        self._health_task.cancel()
        self._manager.stop(grpc.StatusCode.UNAVAILABLE, "the worker stops")
        await self._server.stop(0)
        await self._manager.stopped()


async def serve_worker(
    config: WorkerConfig,
    progress: ProgressCallback = lambda done, total: None,
    captured: ProgressCallback = lambda done, total: None,
    store: Store | None = None,
    watchdog: Watchdog | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> RunningWorker:
    """Load, warm up, serve. ValueError or OSError with one clear line where that cannot be.

    `progress` is told of bytes of weights, `captured` of graphs and `tell` of other stages by their
    names, all from another thread; `store`
    is where other ranks are met, if there are any (`RankLost` if they do not come). `watchdog` is
    given what to watch; it is the caller's to start.
    """
    server = grpc.aio.server(options=_OPTIONS)
    address = _bind(server, config)  # first: a taken port is known before the weights are read
    engine = await asyncio.to_thread(_warm_engine, config, progress, captured, store, on_stage)
    identity = WorkerIdentity(
        worker=config.name,
        incarnation=secrets.token_hex(8),
        layout=engine.layout,
        host=config.host,
        secret=secrets.token_urlsafe(32),
    )
    pulse = None
    if watchdog is not None:
        watchdog.state_source, pulse = engine.debug_state, watchdog.timer("the engine")
    times = config.transfer_seconds, config.canary_seconds
    dispatch = SessionManager(engine, identity, address, *times, pulse)
    service = WorkerService(config, dispatch, _welcome(config, engine, identity))
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    transfer_pb2_grpc.add_TransferServicer_to_server(dispatch.kv_transfer.receiver, server)  # type: ignore[no-untyped-call]
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    attending = asyncio.create_task(_watch_health(dispatch, healthy, config.canary_seconds))
    return RunningWorker(address, server, dispatch, attending)


async def _watch_health(
    manager: SessionManager, healthy: health.aio.HealthServicer, canary_seconds: float
) -> None:
    """See to it that canaries are sent; say it where nothing is computed in spite of them."""
    status, serves = health_pb2.HealthCheckResponse, True
    while True:
        await asyncio.sleep(min(_CHECK_SECONDS, canary_seconds))
        manager.maybe_send_canary()
        if serves == (manager.silence < _MAX_MISSED_CANARIES * canary_seconds):
            continue
        serves = not serves
        if serves:
            log.warning("it computes again")
        else:
            log.warning("nothing was computed for %.0f s, a canary neither", manager.silence)
        await healthy.set("", status.SERVING if serves else status.NOT_SERVING)


def _bind(server: grpc.aio.Server, config: WorkerConfig) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        port = server.add_insecure_port(f"{host}:{config.port}")
    except RuntimeError:
        raise OSError(
            f"worker {config.name} cannot listen on {host}:{config.port}: the port is taken, or "
            "the address is not this machine's"
        ) from None
    return f"{host}:{port}"


def _warm_engine(
    config: WorkerConfig,
    progress: ProgressCallback,
    captured: ProgressCallback,
    store: Store | None,
    on_stage: Callable[[str], None],
) -> Engine:
    engine = Engine(config, progress, store, on_stage=on_stage)
    if config.deterministic:
        check_batch_invariance(engine)
    engine.warm_up(captured)
    return engine


def _welcome(config: WorkerConfig, engine: Engine, identity: WorkerIdentity) -> wire.Welcome:
    return wire.Welcome(
        protocol=PROTOCOL,
        worker=config.name,
        incarnation=identity.incarnation,
        role=config.role,
        model=engine.model,
        layout=engine.layout,
        block_size=engine.limits.block_size,
        num_blocks=engine.limits.num_blocks,
        max_model_len=engine.limits.max_model_len,
        max_sequences=engine.limits.max_sequences,
        eos_tokens=engine.spec.eos_tokens,
        vocab_size=engine.spec.vocab_size,
        step_bounds=STEP_BOUNDS,
    )
