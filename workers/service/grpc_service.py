"""The gRPC service of a worker: the streams of routers, and start and stop of the worker."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from torch._C._distributed_c10d import Store

from penstock.protos import transfer_pb2_grpc
from penstock.protos import worker_pb2 as wire
from penstock.protos.serving.call_error import CallError, abort
from penstock.protos.serving.call_handlers import CallHandlers
from penstock.protos.serving.connection_guard import ConnectionGuard
from penstock.protos.serving.health import HealthService, health_handlers
from penstock.protos.serving.unread_calls import until_written
from penstock.protos.worker_codec import PROTOCOL
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.determinism_check import check_batch_invariance
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.step_times import STEP_BOUNDS, STEP_TOKEN_BOUNDS
from penstock.workers.health.watchdog import Watchdog
from penstock.workers.kv_transfer.staging import WorkerIdentity
from penstock.workers.rank.follower import SERVING_KEY
from penstock.workers.rank.rank_runtime import ProgressCallback
from penstock.workers.service.codec import step_records_message
from penstock.workers.service.session import Session
from penstock.workers.service.session_manager import BadCommand, SessionManager
from penstock.workers.service.worker_port import (
    MAX_HEALTH_WATCHES,
    RECEIVE_SECONDS,
    bind,
    guard,
    new_server,
)

log = logging.getLogger(__name__)

_MAX_MISSED_HEARTBEATS = 10  # a stream ends after this many silent heartbeat intervals
_MAX_MISSED_CANARIES = 3  # health is NOT_SERVING after this many `canary_seconds` without a step
_CHECK_SECONDS = 1.0
WRITE_SECONDS = 60.0  # a stream ends if the write of one message takes longer

Requests = AsyncIterator[wire.ToWorker]


class WorkerService:
    """gRPC service with one stream per router: handshake, numbered messages and heartbeats.

    `worker_port` authorizes the callers.
    """

    def __init__(
        self, config: WorkerConfig, manager: SessionManager, welcome: wire.Welcome, port: int
    ) -> None:
        self._port = port
        self._heartbeat_seconds = config.heartbeat_seconds
        self._manager = manager
        self._welcome = welcome
        self._session_ids = count(1)

    async def Attach(self, request_iterator: Requests, context: grpc.aio.ServicerContext) -> None:
        """Serve a router's stream until the router or the worker ends it."""
        hello = await self._read_hello(request_iterator, context)
        session = Session(next(self._session_ids), hello)
        self._manager.open(session)
        log.info("router %s attached", session.router)
        session.put(wire.ToRouter(welcome=self._welcome_with_load()))
        if self._manager.draining:
            session.put(wire.ToRouter(draining=wire.Draining()))
        reader = asyncio.create_task(self._read(session, request_iterator))
        writer = asyncio.create_task(self._write(session, context))
        try:
            end = await session.ended()
        except asyncio.CancelledError:
            session.end(grpc.StatusCode.CANCELLED, "the router has disconnected")
            raise
        finally:
            reader.cancel()
            self._manager.close(session)
            log.info("router %s detached: %s", session.router, session.stream_end)
        # The status can be sent only after the last message has been written.
        await until_written(writer, context, self._port, WRITE_SECONDS)
        if end.code is not grpc.StatusCode.OK:
            await abort(context, CallError(end.code, end.reason))

    async def Steps(
        self, request: wire.StepsRequest, context: grpc.aio.ServicerContext
    ) -> wire.StepRecords:
        """Return the latest steps, for the calibration of the simulator."""
        return step_records_message(await self._manager.step_records())

    async def _read_hello(
        self, requests: Requests, context: grpc.aio.ServicerContext
    ) -> wire.Hello:
        try:
            async with asyncio.timeout(_MAX_MISSED_HEARTBEATS * self._heartbeat_seconds):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration, DecodeError):
            first = wire.ToWorker()
        problem = ""
        if first.number != 1 or not first.hello.router:
            problem = "the first message must be Hello, number 1, with the router's name"
        elif first.hello.protocol != PROTOCOL:
            problem = (
                f"the router has worker protocol {first.hello.protocol} and this worker "
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
        """Handle messages until the stream ends, is silent too long or has an invalid message."""
        try:
            async with _HeartbeatTimeout(self._heartbeat_seconds) as silence:
                for number in count(2):
                    message = await anext(requests)
                    silence.message_received()
                    if message.number != number:
                        raise BadCommand(
                            f"got message number {message.number} from the router, expected "
                            f"{number}: a message was lost or repeated"
                        )
                    self._manager.handle(session, message)
        except StopAsyncIteration:
            session.end(grpc.StatusCode.OK, "the router closed the stream")
        except TimeoutError:
            seconds = _MAX_MISSED_HEARTBEATS * self._heartbeat_seconds
            session.end(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"the router sent no message for {seconds:g} s"
            )
        except BadCommand as error:
            session.end(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except DecodeError:
            session.end(grpc.StatusCode.INVALID_ARGUMENT, "a message is not a valid ToWorker")
        except Exception as error:  # the stream broke, or this process has a bug
            log.exception("the stream of router %s failed", session.router)
            session.end(grpc.StatusCode.INTERNAL, f"the stream failed: {error}")

    async def _write(self, session: Session, context: grpc.aio.ServicerContext) -> None:
        """Write messages and heartbeats until the stream ends."""
        loop = asyncio.get_running_loop()
        unread = f"the router has read nothing for {WRITE_SECONDS:g} s"
        try:
            while session.stream_end is None:
                message = await session.next(self._heartbeat_seconds)
                if message is not None:
                    timer = loop.call_later(
                        WRITE_SECONDS, session.end, grpc.StatusCode.RESOURCE_EXHAUSTED, unread
                    )
                    try:
                        await context.write(message)
                    finally:
                        timer.cancel()
                elif session.stream_end is None:
                    self._manager.send_heartbeat(session)
        except grpc.aio.InternalError:
            session.end(grpc.StatusCode.CANCELLED, "the router has disconnected")
        except Exception as error:  # this is a bug in this process
            log.exception("the stream of router %s failed", session.router)
            session.end(grpc.StatusCode.INTERNAL, f"the stream failed: {error}")


def worker_handlers(service: WorkerService, calls: CallHandlers) -> grpc.GenericRpcHandler:
    """Return the handlers of the service for routers."""
    methods = {
        "Attach": grpc.stream_stream_rpc_method_handler(
            service.Attach, wire.ToWorker.FromString, wire.ToRouter.SerializeToString
        ),
        "Steps": calls.unary(wire.StepsRequest, service.Steps),
    }
    name = wire.DESCRIPTOR.services_by_name["Worker"].full_name
    return grpc.method_handlers_generic_handler(name, methods)


class _HeartbeatTimeout:
    """Async context that raises TimeoutError after ten heartbeat intervals without a message.

    The event loop counts the intervals. While this process stalls, it cannot receive messages, so a
    stall of any length counts as one interval.
    """

    def __init__(self, heartbeat_seconds: float) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        self._num_silent = 0
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._next = asyncio.get_running_loop().call_later(self._heartbeat_seconds, self._tick)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._next.cancel()
        await self._timeout.__aexit__(*error)  # raises TimeoutError if the timeout has expired

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
    """A worker that is serving, with methods to wait for it, drain it and stop it."""

    def __init__(
        self,
        address: str,
        server: grpc.aio.Server,
        manager: SessionManager,
        health_task: asyncio.Task[None],
        guard: ConnectionGuard,
    ) -> None:
        self.address = address  # host:port
        self._server = server
        self._manager = manager
        self._health_task = health_task  # task that `stop` cancels
        self._guard = guard  # closed by `stop`

    @property
    def silence(self) -> float:
        """Seconds since the last successful step, including steps of canaries."""
        return self._manager.silence

    async def wait(self) -> None:
        """Wait until the worker is stopped. Raises RuntimeError if its engine fails."""
        stopped = asyncio.create_task(self._server.wait_for_termination())
        await asyncio.wait((stopped, self._manager.failed), return_when=asyncio.FIRST_COMPLETED)
        if self._manager.failed.done():
            self._guard.close()
            await self._server.stop(0)
            self._manager.failed.result()

    async def drain(self, seconds: float) -> None:
        """Refuse new sequences, and wait at most `seconds` for the current sequences to end."""
        self._manager.drain()
        deadline = time.monotonic() + seconds
        while not self._manager.idle and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End every stream and the engine, and release the port."""
        self._health_task.cancel()
        self._guard.close()
        self._manager.stop(grpc.StatusCode.UNAVAILABLE, "the worker is stopping")
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
    """Load the model, warm up and serve. The callbacks are called from another thread.

    Args:
        config: settings of the worker.
        progress: called with the number of bytes of weights that have been read, and their total.
        captured: called with the number of captured CUDA graphs, and their total.
        store: rendezvous of the worker's ranks, if there are several.
        watchdog: gets a timer and the state of the engine. The caller starts the watchdog.
        on_stage: called with the name of each start-up stage except loading and graph capture.

    Raises:
        ValueError, OSError: the worker cannot start, for a reason given in one line.
        RankLost: another rank did not connect.
    """
    transfer_secret = secrets.token_urlsafe(32)
    server = new_server(config.token, transfer_secret)
    # bind before the weights are loaded, to report a taken port early
    address = bind(server, config)
    engine = await asyncio.to_thread(_warm_engine, config, progress, captured, store, on_stage)
    identity = WorkerIdentity(
        worker=config.name,
        incarnation=secrets.token_hex(8),
        layout=engine.layout,
        host=config.host,
        secret=transfer_secret,
    )
    pulse = None
    if watchdog is not None:
        watchdog.state_source, pulse = engine.debug_state, watchdog.timer("the engine")
    times = config.transfer_seconds, config.canary_seconds
    dispatch = SessionManager(engine, identity, address, *times, pulse)
    welcome = _welcome(config, engine, dispatch.kv_transfer.endpoint)
    service = WorkerService(config, dispatch, welcome, int(address.rpartition(":")[2]))
    transfer_pb2_grpc.add_TransferServicer_to_server(dispatch.kv_transfer.receiver, server)  # type: ignore[no-untyped-call]
    healthy = HealthService(MAX_HEALTH_WATCHES)
    calls = CallHandlers(RECEIVE_SECONDS)
    server.add_generic_rpc_handlers(
        (worker_handlers(service, calls), health_handlers(healthy, calls))
    )
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    attending = asyncio.create_task(_watch_health(dispatch, healthy, config.canary_seconds))
    return RunningWorker(address, server, dispatch, attending, guard(address))


async def _watch_health(
    manager: SessionManager, healthy: HealthService, canary_seconds: float
) -> None:
    """Send canaries, and set gRPC health to NOT_SERVING while no step succeeds."""
    status, serves = health_pb2.HealthCheckResponse, True
    while True:
        await asyncio.sleep(min(_CHECK_SECONDS, canary_seconds))
        manager.maybe_send_canary()
        if serves == (manager.silence < _MAX_MISSED_CANARIES * canary_seconds):
            continue
        serves = not serves
        if serves:
            log.warning("the worker reports SERVING again: steps succeed")
        else:
            log.warning(
                "the worker reports NOT_SERVING: no step has succeeded for %.0f s, not even a "
                "canary step",
                manager.silence,
            )
        await healthy.set("", status.SERVING if serves else status.NOT_SERVING)


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
    if store is not None:
        store.set(SERVING_KEY, "1")
    return engine


def _welcome(config: WorkerConfig, engine: Engine, endpoint: wire.TransferEndpoint) -> wire.Welcome:
    return wire.Welcome(
        protocol=PROTOCOL,
        worker=config.name,
        incarnation=endpoint.incarnation,
        role=config.role,
        model=engine.model,
        layout=engine.layout,
        block_size=engine.limits.block_size,
        num_blocks=engine.limits.num_blocks,
        max_model_len=engine.limits.max_model_len,
        max_sequences=engine.limits.max_sequences,
        max_batched_tokens=engine.limits.max_batched_tokens,
        enough_prompt_tokens=engine.limits.enough_prompt_tokens,
        eos_tokens=engine.spec.eos_tokens,
        vocab_size=engine.spec.vocab_size,
        step_bounds=STEP_BOUNDS,
        step_token_bounds=STEP_TOKEN_BOUNDS,
        machine=engine.machine,
        transfer=endpoint,
    )
