"""The source's side of hand-overs: pairs to destinations, and the sending of a lease's blocks.

A header announces each message; the destination's credit lets its bytes go. A credit is an
obligation: whatever becomes of the transfer, the bytes that were announced are sent, or the pair
breaks.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import torch

from penstock.kernels.checksum import checksum
from penstock.protos import transfer_pb2 as wire
from penstock.protos import transfer_pb2_grpc
from penstock.workers.scheduling.sequence import Ints
from penstock.workers.transfer.shards import Shard, split
from penstock.workers.transfer.staging import PROTOCOL, Identity, Staging, blocks_of
from penstock.workers.transfer.transport import SOURCE, MirrorStore, PairBroken, RankPair

log = logging.getLogger(__name__)

T = TypeVar("T")

MESSAGE_BYTES = 4 << 20  # of a message, at most
WINDOW = 4  # messages of a pair that are announced and not yet sent: bounds its staging


@dataclass(frozen=True, slots=True)
class Peer:
    """A destination, and how it is reached."""

    worker: str
    incarnation: str
    address: str
    secret: str = field(repr=False)


@dataclass(slots=True)
class Outgoing:
    """One transfer: positions [start, stop) of a sequence, out of `blocks`, which are pinned."""

    router: str
    request: int
    attempt: int  # the destination's
    epoch: int
    start: int
    stop: int
    blocks: Ints
    aborted: bool = False  # set by whoever wants no more of it to be sent


@dataclass(frozen=True, slots=True)
class _Announced:
    data: torch.Tensor
    sent: asyncio.Future[bool]  # False: the destination did not want it


class _Link:
    """The source's end of one pair: its host channel, and the pair once both sides have met."""

    def __init__(self, identity: Identity, peer: Peer, device: torch.device, seconds: float):
        self.peer = peer
        self.broken = ""  # why, once it is
        self._identity = identity
        self._device = device
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[wire.FromSource] = asyncio.Queue()
        self._announced: dict[tuple[int, int], _Announced] = {}
        self._window = asyncio.Semaphore(WINDOW)
        self._pair: RankPair | None = None
        self._met: asyncio.Future[RankPair] = self._loop.create_future()
        self._task = asyncio.create_task(self._live())

    async def pair(self) -> RankPair:
        """The pair, once it is connected."""
        return await self._bounded(asyncio.shield(self._met), "the destination did not answer")

    async def announce(
        self, header: wire.Header, gather: Callable[[], torch.Tensor]
    ) -> asyncio.Future[bool]:
        """Gather a message and announce it. The result comes when it is sent, or not wanted."""
        pair = await self.pair()
        await self._bounded(self._window.acquire(), "the destination gives no credit")
        if self.broken:
            self._window.release()  # on to the next who waits
            raise PairBroken(self.broken)

        def work() -> tuple[torch.Tensor, int]:
            data = gather()
            return data, checksum(data)

        data, header.checksum = await asyncio.wrap_future(pair.run(work))
        sent: asyncio.Future[bool] = self._loop.create_future()
        sent.add_done_callback(lambda _: self._window.release())
        self._announced[header.epoch, header.index] = _Announced(data, sent)
        self._outbox.put_nowait(wire.FromSource(header=header))
        return sent

    async def wait_sent(self, sent: list[asyncio.Future[bool]]) -> bool:
        """Whether all of these were wanted."""
        done = asyncio.gather(*sent)
        return all(await self._bounded(done, "the destination gives no credit"))

    async def end(self, epoch: int, num_messages: int, aborted: bool) -> None:
        await self.pair()
        end = wire.End(epoch=epoch, aborted=aborted, messages=num_messages)
        self._outbox.put_nowait(wire.FromSource(end=end))

    def close(self, reason: str) -> None:
        """Break it off: whoever waits for something from it gets `PairBroken`."""
        if self.broken:
            return
        self.broken = reason
        self._task.cancel()
        if self._pair is not None:
            self._pair.close()
        _fail(self._met, reason)
        for entry in self._announced.values():
            _fail(entry.sent, reason)

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
        )
        yield wire.FromSource(introduction=introduction)
        while True:
            yield await self._outbox.get()

    def _hear(self, message: wire.FromDestination) -> None:
        match message.WhichOneof("body"):
            case "accepted":
                self._connect()
            case "value" if self._pair is not None:
                self._pair.store.receive(message.value.key, message.value.value)
            case "credit":
                self._credit(message.credit)
            case "outcome" if not message.outcome.received:
                log.info("epoch %d: %s", message.outcome.epoch, message.outcome.reason)

    def _connect(self) -> None:
        def publish(key: str, value: bytes) -> None:
            message = wire.FromSource(value=wire.StoreValue(key=key, value=value))
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)

        store = MirrorStore(publish, self._seconds)
        self._pair = pair = RankPair(
            SOURCE, store, self._device, self._identity.host, self._seconds
        )

        def met(error: BaseException | None) -> None:
            if error is not None:
                self.close(str(error))
            else:
                _give(self._met, pair)

        pair.connected().add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(met, done.exception())
        )

    def _credit(self, credit: wire.Credit) -> None:
        entry = self._announced.pop((credit.epoch, credit.index), None)
        if entry is None or self._pair is None:
            self.close("a credit came for a message that was not announced")
        elif credit.discard:
            _give(entry.sent, False)
        else:
            # Sent in the order of the credits, which is the order in which it is received.
            self._push(self._pair, entry)

    def _push(self, pair: RankPair, entry: _Announced) -> None:
        def pushed(error: BaseException | None) -> None:
            if error is not None:
                self.close(str(error))
                _fail(entry.sent, str(error))
            else:
                _give(entry.sent, True)

        pair.run(lambda: pair.send(entry.data)).add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(pushed, done.exception())
        )

    async def _bounded(self, wait: Awaitable[T], problem: str) -> T:
        try:
            return await asyncio.wait_for(wait, self._seconds)
        except TimeoutError:
            reason = f"{problem} for {self._seconds:g} s"
            self.close(reason)
            raise PairBroken(reason) from None


def _give(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], reason: str) -> None:
    if not future.done():
        future.set_exception(PairBroken(reason))
        future.exception()  # nobody has to look at it


class Source:
    """Sends transfers out. Made and used on the event loop."""

    def __init__(self, identity: Identity, staging: Staging, seconds: float) -> None:
        self._identity = identity
        self._staging = staging
        self._seconds = seconds
        self._links: dict[str, _Link] = {}  # by the destination's name
        self.bytes_sent = 0

    async def send(self, peer: Peer, outgoing: Outgoing, read: Callable[[], None]) -> None:
        """Send it; `read` is called once its blocks are not read any more, whatever happens.

        `PairBroken`: the destination could not be reached, and may not know that nothing comes.
        """
        link = self._link(peer)
        sent: list[asyncio.Future[bool]] = []
        try:
            for shard in self._plan(outgoing):
                if outgoing.aborted or any(done.done() and not done.result() for done in sent):
                    break
                sent.append(await self._announce(link, outgoing, shard, len(sent)))
        finally:
            read()
        wanted = await link.wait_sent(sent)
        await link.end(outgoing.epoch, len(sent), outgoing.aborted or not wanted)

    async def refuse(self, peer: Peer, epoch: int) -> None:
        """Tell the destination that nothing will come; `PairBroken` if it cannot be told."""
        await self._link(peer).end(epoch, 0, aborted=True)

    def stop(self) -> None:
        """Break off every pair."""
        for link in self._links.values():
            link.close("the worker stops")

    def _plan(self, outgoing: Outgoing) -> list[Shard]:
        staging = self._staging
        positions = (outgoing.start, outgoing.stop)
        return list(split(staging.rectangle, *positions, staging.shape, MESSAGE_BYTES))

    async def _announce(
        self, link: _Link, outgoing: Outgoing, shard: Shard, index: int
    ) -> asyncio.Future[bool]:
        staging = self._staging
        blocks = blocks_of(shard, outgoing.blocks, outgoing.start, staging.shape.block_size)
        header = _header(outgoing, shard, index, staging.shape.num_bytes(shard))
        sent = await link.announce(header, lambda: staging.gather(blocks, shard))

        def counted(done: asyncio.Future[bool]) -> None:
            if not done.cancelled() and done.exception() is None and done.result():
                self.bytes_sent += header.bytes

        sent.add_done_callback(counted)
        return sent

    def _link(self, peer: Peer) -> _Link:
        link = self._links.get(peer.worker)
        if link is not None and (link.broken or link.peer != peer):
            link.close("the destination is another one now")
            link = None
        if link is None:
            link = _Link(self._identity, peer, self._staging.device, self._seconds)
            self._links[peer.worker] = link
        return link


def _header(outgoing: Outgoing, shard: Shard, index: int, num_bytes: int) -> wire.Header:
    part = shard.rectangle
    return wire.Header(
        router=outgoing.router,
        request=outgoing.request,
        attempt=outgoing.attempt,
        epoch=outgoing.epoch,
        index=index,
        start=shard.start,
        stop=shard.stop,
        first_layer=part.first_layer,
        last_layer=part.last_layer,
        first_head=part.first_head,
        last_head=part.last_head,
        bytes=num_bytes,
    )
