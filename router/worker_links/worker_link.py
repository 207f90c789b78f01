"""The router's end of the gRPC stream to one worker, with reconnection and heartbeats."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from penstock.common.worker_load import WorkerLoad
from penstock.protos import worker_pb2 as pb
from penstock.protos import worker_pb2_grpc
from penstock.protos.worker_codec import PROTOCOL, decode_worker_load
from penstock.router.observability.step_records import StepColumns, step_columns
from penstock.router.routing import events as ev
from penstock.router.worker_links import codec

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
# Interval for idle workers. It must be below 5 s, because a worker closes a stream that is silent
# for 5 s.
IDLE_HEARTBEAT_SECONDS = 2.0
STEPS_SECONDS = 5.0  # timeout of a call that fetches step records
CONNECT_SECONDS = 10.0  # longest time from opening the call to the worker's Welcome message
# Shortest and longest pause between attempts to connect.
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.05, 2.0
# Maximum number of messages that wait to be sent; beyond it, the stream is closed.
MAX_UNSENT = 65536
# Maximum number of tokens of one `Stepped` event. Handling them takes about 0.5 ms, or 2.5 ms if
# each token is the first or last one of its request.
MAX_EVENT_TOKENS = 128
OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)


class LinkBroken(Exception):
    """Raised if the stream must be closed. The message is the reason."""


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """Name, incarnation and token with which a router identifies itself to workers."""

    router: str
    incarnation: str
    token: str | None


class WorkerLink:
    """A connection to one worker that reconnects until `stop` is called.

    For each stream, the link first posts `WorkerUp`, then the worker's messages as events, and at
    the end `WorkerLost`.

    Args:
        worker: expected name of the worker; a worker with another name is refused.
        address: `host:port`.
        identity: name, incarnation and token that this router sends to the worker.
        post: receives the events; called in the event loop and must not block.
        on_welcome: receives the Welcome message before `WorkerUp` is posted; raises `ValueError` if
            the worker cannot be used.
    """

    def __init__(
        self,
        worker: str,
        address: str,
        identity: RouterIdentity,
        post: Callable[[ev.Event], None],
        on_welcome: Callable[[pb.Welcome], None],
    ) -> None:
        self.worker = worker
        self.address = address
        # The worker's properties from its last Welcome message.
        self.info: ev.WorkerInfo | None = None
        self.load: WorkerLoad | None = None  # last reported load, or None while not connected
        self._identity = identity
        self._post = post
        self._on_welcome = on_welcome
        self._stub: worker_pb2_grpc.WorkerStub | None = None  # gRPC stub of the open stream, if any
        self._unsent: deque[pb.ToWorker] = deque()
        self._has_sent = False  # whether a command was queued since the last heartbeat
        self._wake = asyncio.Event()
        self._is_up = False
        self._refusal = ""  # why router or worker refused the last stream; empty if neither did
        self._close_reason = ""  # reason passed to `close`, or empty if `close` was not called
        self._stream: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._reconnect_loop(), name=f"link to {worker}")

    def send(self, command: ev.WorkerCommand) -> None:
        """Queue a command.

        If no stream is open, the command is discarded, because a worker drops all requests of a
        router when their stream ends.
        """
        if not self._is_up or self._close_reason:
            return
        if len(self._unsent) >= MAX_UNSENT:
            self.close(f"the worker does not read its stream: {MAX_UNSENT} messages are queued")
            return
        self._unsent.append(codec.encode_command(command))
        self._has_sent = True
        self._wake.set()

    async def steps(self) -> StepColumns | None:
        """Return the worker's latest steps, or None if the worker sends no valid step records."""
        if self._stub is None or not self._is_up:
            return None
        try:
            found = await self._stub.Steps(
                pb.StepsRequest(), metadata=self._metadata(), timeout=STEPS_SECONDS
            )
            return step_columns(found)
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
        except ValueError as error:
            why = str(error)
        log.warning("worker %s sent no valid step records: %s", self.worker, why)
        return None

    def close(self, reason: str) -> None:
        """Close the stream, if it has not ended. The link opens a new one after a backoff."""
        if self._stream is None or self._stream.done():
            return
        if not self._close_reason:
            self._close_reason = reason
            self._stream.cancel()

    async def stop(self) -> None:
        """Close the stream and stop reconnecting."""
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _reconnect_loop(self) -> None:
        pause, warned_of = MIN_BACKOFF_SECONDS, ""
        while True:
            self._stream = asyncio.create_task(self._open_stream(), name=f"stream to {self.worker}")
            was_up, why = await self._wait_closed(self._stream)
            pause = MIN_BACKOFF_SECONDS if was_up else min(pause * 2, MAX_BACKOFF_SECONDS)
            # The next attempts usually fail for the same reason, so warn of it only once.
            is_new_refusal = why == self._refusal and why != warned_of
            warned_of = "" if was_up else self._refusal
            level = logging.WARNING if was_up or is_new_refusal else logging.DEBUG
            log.log(level, "worker %s at %s: %s", self.worker, self.address, why)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _wait_closed(self, stream: asyncio.Task[None]) -> tuple[bool, str]:
        """Wait until the stream ends; return whether it had been open, and why it ended."""
        why, link = "the stream ended", asyncio.current_task()
        assert link is not None
        try:
            await stream
        except asyncio.CancelledError:
            if link.cancelling():  # otherwise, `close` has cancelled only the stream
                stream.cancel()
                await asyncio.wait((stream,))
                self._on_disconnect()
                raise
            why = self._close_reason
        except TimeoutError:
            why = self._refusal = f"no Welcome message within {CONNECT_SECONDS:g} s"
        except (LinkBroken, ValueError) as error:
            why = str(error)
            if not self._is_up:
                self._refusal = why
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._refusal = why
        except Exception:  # an unexpected error must not stop the reconnect loop
            log.exception("stream to worker %s failed", self.worker)
        was_up = self._is_up
        self._on_disconnect()
        return was_up, why

    def _on_disconnect(self) -> None:
        self._unsent.clear()
        self._close_reason = ""
        self._stub = None
        self.load = None
        if self._is_up:
            self._is_up = False
            self._post(ev.WorkerLost(self.worker))

    async def _open_stream(self) -> None:
        async with grpc.aio.insecure_channel(self.address, options=OPTIONS) as channel:
            self._stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            call = self._stub.Attach(metadata=self._metadata())
            hello = pb.Hello(
                protocol=PROTOCOL,
                router=self._identity.router,
                incarnation=self._identity.incarnation,
                cache_events=True,
            )
            async with asyncio.timeout(CONNECT_SECONDS) as limit:
                await call.write(pb.ToWorker(number=1, hello=hello))
                first = await call.read()
                limit.reschedule(None)
            self._accept_welcome(first)
            await self._exchange(call)

    def _metadata(self) -> Sequence[tuple[str, str]]:
        token = self._identity.token
        return () if token is None else (("authorization", f"Bearer {token}"),)

    def _accept_welcome(self, first: pb.ToRouter | object) -> None:
        if first is grpc.aio.EOF or not isinstance(first, pb.ToRouter):
            raise LinkBroken("the worker closed the stream before its Welcome message")
        welcome, kind = first.welcome, first.WhichOneof("body")
        if kind != "welcome":
            raise LinkBroken(f"expected a Welcome message from the worker, received {kind!r}")
        if welcome.protocol != PROTOCOL:
            raise LinkBroken(
                f"the worker uses version {welcome.protocol} of the protocol, and this router uses "
                f"version {PROTOCOL}: run router and workers from one release"
            )
        if welcome.worker != self.worker:
            raise LinkBroken(
                f"another worker, {welcome.worker!r}, answers at this address: check the addresses"
            )
        info, load = codec.decode_welcome(welcome), decode_worker_load(welcome.load)
        self._on_welcome(welcome)
        self._is_up = True
        self.info, self.load = info, load
        self._post(ev.WorkerUp(self.info, self.load))

    async def _exchange(self, call: grpc.aio.StreamStreamCall) -> None:
        writer = asyncio.create_task(self._write(call))
        try:
            await self._read(call)
        finally:
            writer.cancel()
            call.cancel()
            await asyncio.wait((writer,))
            if not writer.cancelled():
                # Read the error, so that asyncio logs no warning; `_read` raises the same error.
                writer.exception()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        expected = 2
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                raise LinkBroken(
                    f"the worker closed the stream ({await call.details() or 'no reason given'})"
                )
            if message.number != expected:
                raise LinkBroken(
                    f"a message of the worker is missing: expected number {expected}, received "
                    f"{message.number}"
                )
            expected += 1
            # The cache events are posted before the Step event. The load in the Step event may
            # cause placements, and these need the current prefix index.
            if message.step.HasField("cache"):
                self._post(codec.decode_cache_events(self.worker, message.step.cache))
            event = codec.decode_event(self.worker, message)
            if isinstance(event, ev.Stepped):
                if event.load is not None:
                    self.load = event.load
                if len(event.tokens) > MAX_EVENT_TOKENS:
                    await self._post_in_slices(event)
                    continue
            self._post(event)

    async def _post_in_slices(self, event: ev.Stepped) -> None:
        """Post a large step as several events, so that the event loop can run other callbacks."""
        for each in codec.slices_of(event, MAX_EVENT_TOKENS):
            # Pause before the first event too, because decoding has already taken time.
            await asyncio.sleep(0)
            self._post(each)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        number = 1
        while True:
            self._wake.clear()
            while self._unsent:
                number += 1
                message = self._unsent.popleft()
                message.number = number
                await call.write(message)
            try:
                async with asyncio.timeout(_heartbeat_interval(self.load, self._has_sent)):
                    await self._wake.wait()
            except TimeoutError:
                self._has_sent = False
                self._unsent.append(pb.ToWorker(heartbeat=pb.Heartbeat()))


def _heartbeat_interval(load: WorkerLoad | None, has_sent: bool) -> float:
    """Return the seconds until the next heartbeat.

    Idle workers get fewer heartbeats: each heartbeat costs the router time, and most workers of a
    large cluster (a thousand workers) may be idle.

    Args:
        load: last reported load of the worker, or None if it is unknown.
        has_sent: whether a command was sent since the last heartbeat.
    """
    is_idle = load is not None and not (
        has_sent or load.running or load.queued or load.leased_blocks or load.reserved_blocks
    )
    return IDLE_HEARTBEAT_SECONDS if is_idle else HEARTBEAT_SECONDS
