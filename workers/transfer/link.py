"""The source's end of what leads to one other worker: its host channel, and its pairs of ranks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import TypeVar

import grpc

from penstock.protos import ranks_pb2, transfer_pb2_grpc
from penstock.protos import transfer_pb2 as wire
from penstock.workers.transfer.ends import (
    MAX_VALUE_BYTES,
    End,
    Ends,
    PairKey,
    check_peer,
    store_value,
)
from penstock.workers.transfer.mover import rectangle_of
from penstock.workers.transfer.shards import BlockShape, Route, routes
from penstock.workers.transfer.staging import PROTOCOL, Identity
from penstock.workers.transfer.transport import PairBroken

log = logging.getLogger(__name__)

T = TypeVar("T")

WINDOW = 4  # messages of a pair that are announced and not yet sent: bounds its staging


@dataclass(frozen=True, slots=True)
class Peer:
    """A destination, and how it is reached."""

    worker: str
    incarnation: str
    address: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Message:
    pair: PairKey
    piece: ranks_pb2.Piece
    sent: asyncio.Future[int]  # so many bytes; 0: the destination did not want it


@dataclass(frozen=True, slots=True)
class Ways:
    """How blocks get from this worker to the other, once that has said what its ranks hold."""

    routes: Sequence[Route]
    unit: BlockShape  # what travels whole


class Link:
    """Belongs to the event loop. Once it breaks it is of no use: another is to be made."""

    def __init__(
        self,
        identity: Identity,
        peer: Peer,
        ends: Ends,
        seconds: float,
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self.peer = peer
        self.broken = ""  # why, once it is
        self.num_users = 0  # transfers that it serves
        self._freed = freed  # called when it may have become idle
        self._open: set[int] = set()  # epochs that the destination has not judged
        self._identity = identity
        self._ranks = ends
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[wire.FromSource] = asyncio.Queue()
        self._announced: dict[tuple[int, int], _Message] = {}
        self._sending: dict[tuple[int, int], _Message] = {}
        self._ends: dict[PairKey, End] = {}
        self._windows: dict[PairKey, asyncio.Semaphore] = {}
        self._connecting: set[PairKey] = set()
        self._ways: Ways | None = None
        self._met: asyncio.Future[Ways] = self._loop.create_future()
        self._task = asyncio.create_task(self._live())

    @property
    def idle(self) -> bool:
        """Whether it may go: what has been sent may still be on its way into blocks."""
        return not self.num_users and not self._open

    def begin(self, epoch: int) -> None:
        """A transfer that lasts until the destination has judged it, or `end` aborts it."""
        self._open.add(epoch)

    async def met(self) -> Ways:
        """Once all pairs are connected."""
        return await self._bounded(asyncio.shield(self._met), "the destination did not answer")

    async def announce(
        self, pair: PairKey, header: wire.Header, piece: ranks_pb2.Piece
    ) -> asyncio.Future[int]:
        """Say what is to be sent. The result comes when nobody reads its blocks any more."""
        window = self._windows[pair]
        await self._bounded(window.acquire(), "the destination gives no credit")
        if self.broken:
            window.release()  # on to the next who waits
            raise PairBroken(self.broken)
        sent: asyncio.Future[int] = self._loop.create_future()
        sent.add_done_callback(lambda _: window.release())
        self._announced[header.epoch, header.index] = _Message(pair, piece, sent)
        self._outbox.put_nowait(wire.FromSource(header=header))
        return sent

    async def settle(self, sent: list[asyncio.Future[int]]) -> None:
        """Until nobody reads the blocks of these any more, whatever happens to the link."""
        if not sent:
            return
        _, late = await asyncio.wait(sent, timeout=self._seconds)
        if late:
            self.close(f"the destination gives no credit for {self._seconds:g} s")
            await asyncio.wait(sent)

    async def end(self, epoch: int, num_messages: int, aborted: bool) -> None:
        if aborted:
            self._open.discard(epoch)
            self._freed()
        await self.met()
        end = wire.End(epoch=epoch, aborted=aborted, messages=num_messages)
        self._outbox.put_nowait(wire.FromSource(end=end))

    def close(self, reason: str) -> None:
        """Break it off: whoever waits for something from it gets `PairBroken`.

        What ranks were told to send already is over when they have said so.
        """
        if self.broken:
            return
        self.broken = reason
        self._task.cancel()
        for end in self._ends.values():
            end.close()
        _fail(self._met, reason)
        for message in self._announced.values():
            _fail(message.sent, reason)

    # ------------------------------------------------------------ the host channel

    async def _live(self) -> None:
        reason = "the destination ended the pair"
        try:
            async with grpc.aio.insecure_channel(self.peer.address) as channel:
                metadata = (("authorization", f"Bearer {self.peer.secret}"),)
                stub = transfer_pb2_grpc.TransferStub(channel)  # type: ignore[no-untyped-call]
                async for message in stub.Pair(self._requests(), metadata=metadata):
                    self._hear(message)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        finally:
            self.close(reason)

    async def _requests(self) -> AsyncIterator[wire.FromSource]:
        introduction = wire.Introduction(
            protocol=PROTOCOL,
            worker=self._identity.worker,
            incarnation=self._identity.incarnation,
            layout=self._identity.layout,
            block_size=self._ranks.shape.block_size,
            ranks=self._ranks.holdings(),
        )
        yield wire.FromSource(introduction=introduction)
        while True:
            yield await self._outbox.get()

    def _hear(self, message: wire.FromDestination) -> None:
        match message.WhichOneof("body"):
            case "accepted":
                self._accepted(message.accepted)
            case "value":
                self._value(message.value)
            case "credit":
                self._credit(message.credit)
            case "outcome":
                self._judged(message.outcome)

    def _judged(self, outcome: wire.Outcome) -> None:
        if not outcome.received:
            log.info("epoch %d: %s", outcome.epoch, outcome.reason)
        self._open.discard(outcome.epoch)
        self._freed()

    def _accepted(self, accepted: wire.Accepted) -> None:
        """Have every rank make its ends of the pairs."""
        ranks = self._ranks
        problem = check_peer(ranks, accepted)
        if accepted.backend != ranks.backend:
            problem = f"its blocks move by {accepted.backend}, and ours by {ranks.backend}"
        if problem or self._ways is not None or self.broken:
            self.close(f"the destination does not fit: {problem or 'it speaks twice'}")
            return
        theirs = [rectangle_of(each) for each in accepted.ranks]
        unit = ranks.shape.cut(gcd(ranks.shape.block_size, accepted.block_size))
        self._ways = Ways(routes(ranks.rectangles, theirs), unit)
        for route in self._ways.routes:
            pair = (route.source, route.destination)
            self._connecting.add(pair)
            self._windows[pair] = asyncio.Semaphore(WINDOW)
            self._ends[pair] = ranks.open(route.source, False, partial(self._report, pair))

    def _value(self, value: wire.StoreValue) -> None:
        end = self._ends.get((value.source_rank, value.destination_rank))
        if end is None or len(value.key) + len(value.value) > MAX_VALUE_BYTES:
            self.close("the destination's ranks do not know how to meet")
        else:
            end.value(value.key, value.value)

    def _credit(self, credit: wire.Credit) -> None:
        name = (credit.epoch, credit.index)
        message = self._announced.pop(name, None)
        if message is None or self.broken:
            self.close("a credit came for a message that was not announced")
        elif credit.discard:
            _give(message.sent, 0)
        else:
            # Told in the order of the credits, which is the order in which it is received.
            self._sending[name] = message
            self._ends[message.pair].send(message.piece)

    # ------------------------------------------------------------ from the ranks

    def _report(self, pair: PairKey, report: ranks_pb2.Report) -> None:
        match report.WhichOneof("body"):
            case "value":
                value = store_value(pair, report.value)
                self._outbox.put_nowait(wire.FromSource(value=value))
            case "met":
                self._connected(pair, report.met.broken)
            case "moved":
                self._moved(report.moved)

    def _connected(self, pair: PairKey, broken: str) -> None:
        self._connecting.discard(pair)
        if broken:
            self.close(broken)
        elif not self._connecting and self._ways is not None:
            _give(self._met, self._ways)

    def _moved(self, outcome: ranks_pb2.Outcome) -> None:
        message = self._sending.pop((outcome.epoch, outcome.index), None)
        if outcome.broken:
            self.close(outcome.broken)
        if message is None:
            return
        if outcome.broken:
            _fail(message.sent, self.broken)  # the first reason
        else:
            _give(message.sent, outcome.bytes)

    async def _bounded(self, wait: Awaitable[T], problem: str) -> T:
        try:
            return await asyncio.wait_for(wait, self._seconds)
        except TimeoutError:
            reason = f"{problem} for {self._seconds:g} s"
            self.close(reason)
            raise PairBroken(reason) from None


def _give(future: asyncio.Future[T], value: T) -> None:
    with suppress(asyncio.InvalidStateError):
        future.set_result(value)


def _fail(future: asyncio.Future[T], reason: str) -> None:
    if not future.done():
        future.set_exception(PairBroken(reason))
        future.exception()  # nobody has to look at it
