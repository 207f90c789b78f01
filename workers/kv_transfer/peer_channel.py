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
from penstock.workers.kv_transfer.rank_endpoints import (
    MAX_VALUE_BYTES,
    PairKey,
    RankEndpoint,
    RankEndpoints,
    check_peer,
    store_value,
)
from penstock.workers.kv_transfer.rank_mover import rectangle_of
from penstock.workers.kv_transfer.shards import BlockShape, Route, routes
from penstock.workers.kv_transfer.staging import PROTOCOL, WorkerIdentity
from penstock.workers.kv_transfer.transport import PairBroken

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
class TransferRoutes:
    """How blocks get from this worker to the other, once that has said what its ranks hold."""

    routes: Sequence[Route]
    unit: BlockShape  # what travels whole


class PeerChannel:
    """Belongs to the event loop. Once it breaks it is of no use: another is to be made."""

    def __init__(
        self,
        identity: WorkerIdentity,
        peer: Peer,
        endpoints: RankEndpoints,
        seconds: float,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.peer = peer
        self.broken = ""  # why, once it is
        self.num_users = 0  # transfers that it serves
        self._on_idle = on_idle  # called when it may have become idle
        self._open_epochs: set[int] = set()  # epochs that the destination has not judged
        self._identity = identity
        self._rank_endpoints = endpoints
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[wire.FromSource] = asyncio.Queue()
        self._announced: dict[tuple[int, int], _Message] = {}
        self._sending: dict[tuple[int, int], _Message] = {}
        self._endpoints: dict[PairKey, RankEndpoint] = {}
        self._windows: dict[PairKey, asyncio.Semaphore] = {}
        self._connecting: set[PairKey] = set()
        self._routes: TransferRoutes | None = None
        self._ready: asyncio.Future[TransferRoutes] = self._loop.create_future()
        self._task = asyncio.create_task(self._run())

    @property
    def idle(self) -> bool:
        """Whether it may go: what has been sent may still be on its way into blocks."""
        return not self.num_users and not self._open_epochs

    def begin(self, epoch: int) -> None:
        """A transfer that lasts until the destination has judged it, or `end` aborts it."""
        self._open_epochs.add(epoch)

    async def wait_connected(self) -> TransferRoutes:
        """Once all pairs are connected."""
        return await self._bounded(asyncio.shield(self._ready), "the destination did not answer")

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

    async def drain(self, sent: list[asyncio.Future[int]]) -> None:
        """Until nobody reads the blocks of these any more, whatever happens to the link."""
        if not sent:
            return
        _, late = await asyncio.wait(sent, timeout=self._seconds)
        if late:
            self.close(f"the destination gives no credit for {self._seconds:g} s")
            await asyncio.wait(sent)

    async def end(self, epoch: int, num_messages: int, aborted: bool) -> None:
        if aborted:
            self._open_epochs.discard(epoch)
            self._on_idle()
        await self.wait_connected()
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
        for end in self._endpoints.values():
            end.close()
        _fail(self._ready, reason)
        for message in self._announced.values():
            _fail(message.sent, reason)

    # ------------------------------------------------------------ the host channel

    async def _run(self) -> None:
        reason = "the destination ended the pair"
        try:
            async with grpc.aio.insecure_channel(self.peer.address) as channel:
                metadata = (("authorization", f"Bearer {self.peer.secret}"),)
                stub = transfer_pb2_grpc.TransferStub(channel)  # type: ignore[no-untyped-call]
                async for message in stub.Pair(self._requests(), metadata=metadata):
                    self._on_message(message)
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
            block_size=self._rank_endpoints.shape.block_size,
            ranks=self._rank_endpoints.holdings(),
        )
        yield wire.FromSource(introduction=introduction)
        while True:
            yield await self._outbox.get()

    def _on_message(self, message: wire.FromDestination) -> None:
        match message.WhichOneof("body"):
            case "accepted":
                self._on_accepted(message.accepted)
            case "value":
                self._on_value(message.value)
            case "credit":
                self._on_credit(message.credit)
            case "outcome":
                self._on_outcome(message.outcome)

    def _on_outcome(self, outcome: wire.Outcome) -> None:
        if not outcome.received:
            log.info("epoch %d: %s", outcome.epoch, outcome.reason)
        self._open_epochs.discard(outcome.epoch)
        self._on_idle()

    def _on_accepted(self, accepted: wire.Accepted) -> None:
        """Have every rank make its ends of the pairs."""
        ranks = self._rank_endpoints
        problem = check_peer(ranks, accepted)
        if accepted.backend != ranks.backend:
            problem = f"its blocks move by {accepted.backend}, and ours by {ranks.backend}"
        if problem or self._routes is not None or self.broken:
            self.close(f"the destination does not fit: {problem or 'it speaks twice'}")
            return
        theirs = [rectangle_of(each) for each in accepted.ranks]
        unit = ranks.shape.cut(gcd(ranks.shape.block_size, accepted.block_size))
        self._routes = TransferRoutes(routes(ranks.rectangles, theirs), unit)
        for route in self._routes.routes:
            pair = (route.source, route.destination)
            self._connecting.add(pair)
            self._windows[pair] = asyncio.Semaphore(WINDOW)
            self._endpoints[pair] = ranks.open(route.source, False, partial(self._on_report, pair))

    def _on_value(self, value: wire.StoreValue) -> None:
        end = self._endpoints.get((value.source_rank, value.destination_rank))
        if end is None or len(value.key) + len(value.value) > MAX_VALUE_BYTES:
            self.close("the destination's ranks do not know how to meet")
        else:
            end.value(value.key, value.value)

    def _on_credit(self, credit: wire.Credit) -> None:
        name = (credit.epoch, credit.index)
        message = self._announced.pop(name, None)
        if message is None or self.broken:
            self.close("a credit came for a message that was not announced")
        elif credit.discard:
            _resolve(message.sent, 0)
        else:
            # Told in the order of the credits, which is the order in which it is received.
            self._sending[name] = message
            self._endpoints[message.pair].send(message.piece)

    # ------------------------------------------------------------ from the ranks

    def _on_report(self, pair: PairKey, report: ranks_pb2.Report) -> None:
        match report.WhichOneof("body"):
            case "value":
                value = store_value(pair, report.value)
                self._outbox.put_nowait(wire.FromSource(value=value))
            case "met":
                self._on_connected(pair, report.met.broken)
            case "moved":
                self._on_moved(report.moved)

    def _on_connected(self, pair: PairKey, broken: str) -> None:
        self._connecting.discard(pair)
        if broken:
            self.close(broken)
        elif not self._connecting and self._routes is not None:
            _resolve(self._ready, self._routes)

    def _on_moved(self, outcome: ranks_pb2.Outcome) -> None:
        message = self._sending.pop((outcome.epoch, outcome.index), None)
        if outcome.broken:
            self.close(outcome.broken)
        if message is None:
            return
        if outcome.broken:
            _fail(message.sent, self.broken)  # the first reason
        else:
            _resolve(message.sent, outcome.bytes)

    async def _bounded(self, wait: Awaitable[T], problem: str) -> T:
        try:
            return await asyncio.wait_for(wait, self._seconds)
        except TimeoutError:
            reason = f"{problem} for {self._seconds:g} s"
            self.close(reason)
            raise PairBroken(reason) from None


def _resolve(future: asyncio.Future[T], value: T) -> None:
    with suppress(asyncio.InvalidStateError):
        future.set_result(value)


def _fail(future: asyncio.Future[T], reason: str) -> None:
    if not future.done():
        future.set_exception(PairBroken(reason))
        future.exception()  # nobody has to look at it
