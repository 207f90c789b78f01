"""The destination's side of hand-overs: epochs, and the pairs that lead here.

All of it lives on the event loop, so that commands and arrivals are seen in one order; only bytes
are moved elsewhere, in each pair's thread. Bytes land in staging, are verified there, and only then
copied into blocks that the scheduler has reserved: what was closed meanwhile is never written.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from threading import Lock

import grpc

from penstock.kernels.checksum import checksum
from penstock.protos import transfer_pb2 as wire
from penstock.protos import transfer_pb2_grpc
from penstock.workers.parallel.communicator import backend_for
from penstock.workers.scheduling.sequence import Ints
from penstock.workers.transfer.shards import BadShard, Coverage, Rectangle, Shard
from penstock.workers.transfer.staging import PROTOCOL, Identity, Staging, blocks_of
from penstock.workers.transfer.transport import DESTINATION, MirrorStore, RankPair


@dataclass(frozen=True, slots=True)
class Expected:
    """What one transfer is to bring: positions [start, stop) into `blocks`."""

    router: str
    request: int
    attempt: int
    source: tuple[str, str]  # the worker that has it, and its incarnation
    start: int
    stop: int
    blocks: Ints


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a transfer ended: all is in (`reason` empty), or nothing of it counts."""

    epoch: int
    num_bytes: int
    reason: str = ""


class WriteGate:
    """Lets writers into a transfer's blocks until it is closed; says when the last one has left."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_inside = 0
        self._after: Callable[[], None] | None = None
        self._closed = False

    def enter(self) -> bool:
        with self._lock:
            self._num_inside += not self._closed
            return not self._closed

    def leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            after = self._after if self._num_inside == 0 else None
        if after is not None:
            after()

    def close(self, after: Callable[[], None]) -> None:
        """Nobody enters from now on; `after` is called once nobody is inside, in any thread."""
        with self._lock:
            self._closed = True
            if self._num_inside:
                self._after = after
                return
        after()


@dataclass(slots=True)
class _Transfer:
    expected: Expected
    coverage: Coverage
    done: Callable[[Verdict], None]
    deadline: float  # on the loop's clock: the end of a silence that is too long
    gate: WriteGate = field(default_factory=WriteGate)
    pair: "_Incoming | None" = None  # that brings it, once it has said so
    num_bytes: int = 0


Outbox = asyncio.Queue[wire.FromDestination | None]


@dataclass(frozen=True, slots=True, eq=False)
class _Incoming:
    """One pair that leads here, and what waits to be said to its source."""

    source: tuple[str, str]
    generation: int
    pair: RankPair
    outbox: Outbox

    def close(self) -> None:
        self.pair.close()
        self.outbox.put_nowait(None)


class Destination(transfer_pb2_grpc.TransferServicer):
    """Takes transfers in. Made and used on the event loop."""

    def __init__(self, identity: Identity, staging: Staging, seconds: float) -> None:
        self._identity = identity
        self._staging = staging
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._epochs = count(1)
        self._generations = count(1)
        self._transfers: dict[int, _Transfer] = {}
        self._incoming: dict[str, _Incoming] = {}  # by the source's name
        self._watch: asyncio.TimerHandle | None = None
        self.bytes_received = 0

    # ------------------------------------------------------------ what the worker asks

    def open(self, expected: Expected, done: Callable[[Verdict], None]) -> int:
        """Expect a transfer under a new epoch, which is returned.

        `done` is called exactly once, on the loop, when nothing of it is being written any more.
        """
        epoch = next(self._epochs)
        coverage = Coverage(
            self._staging.rectangle, expected.start, expected.stop, self._staging.shape
        )
        deadline = self._loop.time() + self._seconds
        self._transfers[epoch] = _Transfer(expected, coverage, done, deadline)
        if self._watch is None:
            self._watch = self._loop.call_later(self._seconds, self._look)
        return epoch

    def close(self, epoch: int) -> None:
        """Take no more of that transfer: its verdict comes soon, if it has not come."""
        self._end_with(epoch, "dropped")

    def stop(self) -> None:
        """Break off every pair."""
        if self._watch is not None:
            self._watch.cancel()
        for incoming in list(self._incoming.values()):
            self._part(incoming, "the worker stops")

    # ------------------------------------------------------------ the host channel

    async def Pair(
        self, request_iterator: AsyncIterator[wire.FromSource], context: grpc.aio.ServicerContext
    ) -> None:
        await self._authorize(context)
        introduction = await self._introduction(request_iterator, context)
        incoming = self._meet(introduction)
        reader = asyncio.create_task(self._read(request_iterator, incoming))
        try:
            accepted = wire.Accepted(
                generation=incoming.generation, backend=backend_for(self._staging.device)
            )
            await context.write(wire.FromDestination(accepted=accepted))
            while (message := await incoming.outbox.get()) is not None:
                await context.write(message)
        finally:
            reader.cancel()
            self._part(incoming, "its source has ended it")

    async def _authorize(self, context: grpc.aio.ServicerContext) -> None:
        shown = dict(context.invocation_metadata() or ()).get("authorization", "")
        wanted = f"Bearer {self._identity.secret}"
        if not hmac.compare_digest(str(shown).encode(), wanted.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or no transfer secret")

    async def _introduction(
        self, messages: AsyncIterator[wire.FromSource], context: grpc.aio.ServicerContext
    ) -> wire.Introduction:
        try:
            first = await asyncio.wait_for(anext(messages), self._seconds)
        except (TimeoutError, StopAsyncIteration):
            first = wire.FromSource()
        introduction = first.introduction
        problem = ""
        if not introduction.worker:
            problem = "the first message must be an introduction"
        elif introduction.protocol != PROTOCOL:
            problem = f"transfer protocol {introduction.protocol}, not {PROTOCOL}: upgrade one side"
        elif introduction.layout != self._identity.layout:
            problem = "the layouts differ: another model, dtype or block size"
        if problem:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        return introduction

    def _meet(self, introduction: wire.Introduction) -> _Incoming:
        """Start to connect; whatever led here from that worker before is over."""
        earlier = self._incoming.pop(introduction.worker, None)
        if earlier is not None:
            self._part(earlier, "its source has opened another")
        outbox: Outbox = asyncio.Queue()

        def publish(key: str, value: bytes) -> None:
            message = wire.FromDestination(value=wire.StoreValue(key=key, value=value))
            self._loop.call_soon_threadsafe(outbox.put_nowait, message)

        store = MirrorStore(publish, self._seconds)
        pair = RankPair(
            DESTINATION, store, self._staging.device, self._identity.host, self._seconds
        )
        source = (introduction.worker, introduction.incarnation)
        incoming = _Incoming(source, next(self._generations), pair, outbox)
        self._incoming[introduction.worker] = incoming
        pair.connected().add_done_callback(
            lambda met: self._loop.call_soon_threadsafe(self._met, incoming, met.exception())
        )
        return incoming

    def _met(self, incoming: _Incoming, error: BaseException | None) -> None:
        if error is not None:
            self._part(incoming, str(error))

    async def _read(self, messages: AsyncIterator[wire.FromSource], incoming: _Incoming) -> None:
        try:
            async for message in messages:
                match message.WhichOneof("body"):
                    case "value":
                        incoming.pair.store.receive(message.value.key, message.value.value)
                    case "header":
                        self._header(message.header, incoming)
                    case "end":
                        self._end(message.end, incoming)
        finally:
            incoming.close()

    def _part(self, incoming: _Incoming, reason: str) -> None:
        """A pair is over, and with it what it was bringing or was to bring."""
        incoming.close()
        if self._incoming.get(incoming.source[0]) is incoming:
            del self._incoming[incoming.source[0]]
        for epoch, transfer in list(self._transfers.items()):
            expected = transfer.pair is None and transfer.expected.source == incoming.source
            if expected or transfer.pair is incoming:
                self._end_with(epoch, f"the pair with {incoming.source[0]} broke: {reason}")

    # ------------------------------------------------------------ messages of bytes

    def _header(self, header: wire.Header, incoming: _Incoming) -> None:
        transfer = self._find(header.epoch, incoming)
        problem = "" if transfer is None else _check(transfer, header)
        if problem:
            self._end_with(header.epoch, problem)
        discard = transfer is None or bool(problem)
        credit = wire.Credit(epoch=header.epoch, index=header.index, discard=discard)
        incoming.outbox.put_nowait(wire.FromDestination(credit=credit))
        if transfer is None or problem:
            return
        transfer.deadline = self._loop.time() + self._seconds
        # Asked for in the order of the credits, which is the order in which the source sends.
        taken = incoming.pair.run(lambda: self._take(transfer, header, incoming.pair))
        taken.add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(self._taken, header, incoming, taken)
        )

    def _find(self, epoch: int, incoming: _Incoming) -> _Transfer | None:
        """The open transfer of that epoch, if it is this pair that may bring it."""
        transfer = self._transfers.get(epoch)
        if transfer is None or transfer.expected.source != incoming.source:
            return None
        transfer.pair = incoming
        return transfer

    def _take(self, transfer: _Transfer, header: wire.Header, pair: RankPair) -> str:
        """In the pair's thread. Returns what is wrong with the bytes, if anything is."""
        data = self._staging.empty(header.bytes)
        pair.receive(data)
        if checksum(data) != header.checksum:
            return "the checksum of a message does not fit its bytes"
        if not transfer.gate.enter():
            return ""  # closed meanwhile: thrown away
        try:
            shard, expected = _shard(header), transfer.expected
            size = self._staging.shape.block_size
            blocks = blocks_of(shard, expected.blocks, expected.start, size)
            self._staging.scatter(blocks, shard, data)
        finally:
            transfer.gate.leave()
        return ""

    def _taken(self, header: wire.Header, incoming: _Incoming, taken: Future[str]) -> None:
        if taken.exception() is not None:
            self._part(incoming, str(taken.exception()))
            return
        transfer = self._transfers.get(header.epoch)
        if transfer is None:
            return
        if taken.result():
            self._end_with(header.epoch, taken.result())
            return
        transfer.deadline = self._loop.time() + self._seconds
        transfer.coverage.fill(_shard(header))
        transfer.num_bytes += header.bytes
        self.bytes_received += header.bytes
        if transfer.coverage.complete:
            self._end_with(header.epoch, "")

    def _end(self, end: wire.End, incoming: _Incoming) -> None:
        transfer = self._find(end.epoch, incoming)
        if transfer is not None and end.aborted:
            self._end_with(end.epoch, "the source gave up")
        elif transfer is not None and not transfer.coverage.announced:
            self._end_with(end.epoch, "the source ended before everything was sent")

    def _end_with(self, epoch: int, reason: str) -> None:
        """Close the epoch; an empty reason: everything is in."""
        transfer = self._transfers.pop(epoch, None)
        if transfer is None:
            return
        if transfer.pair is not None:
            outcome = wire.Outcome(epoch=epoch, received=not reason, reason=reason)
            transfer.pair.outbox.put_nowait(wire.FromDestination(outcome=outcome))
        verdict = Verdict(epoch, transfer.num_bytes, reason)
        done = transfer.done
        transfer.gate.close(lambda: _soon(self._loop, done, verdict))

    def _look(self) -> None:
        """Give up what has been silent for too long."""
        now = self._loop.time()
        for epoch, transfer in list(self._transfers.items()):
            if transfer.deadline <= now:
                self._end_with(epoch, f"nothing came for {self._seconds:g} s")
        deadlines = [transfer.deadline for transfer in self._transfers.values()]
        self._watch = self._loop.call_at(min(deadlines), self._look) if deadlines else None


def _check(transfer: _Transfer, header: wire.Header) -> str:
    """What is wrong with a header, if anything is; otherwise it is announced."""
    expected = transfer.expected
    named = (header.router, header.request, header.attempt)
    if named != (expected.router, expected.request, expected.attempt):
        return "a message of another request came under this epoch"
    try:
        transfer.coverage.announce(_shard(header), header.bytes)
    except BadShard as error:
        return str(error)
    return ""


def _soon(
    loop: asyncio.AbstractEventLoop, done: Callable[[Verdict], None], verdict: Verdict
) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody is there to be told
        loop.call_soon_threadsafe(done, verdict)


def _shard(header: wire.Header) -> Shard:
    part = Rectangle(header.first_layer, header.last_layer, header.first_head, header.last_head)
    return Shard(part, header.start, header.stop)
