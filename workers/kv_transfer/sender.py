"""The source's side of KV transfers: the sending of a lease's blocks, over links to destinations.

A header announces each message; the destination's credit lets its bytes go. A credit is an
obligation: whatever becomes of the transfer, the bytes that were announced are sent, or the pair
breaks. Ranks gather and send what is theirs (`mover`); the lease is let go when none reads it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from penstock.protos import transfer_pb2 as wire
from penstock.workers.kv_transfer.peer_channel import Peer, PeerChannel, TransferRoutes
from penstock.workers.kv_transfer.rank_endpoints import MAX_PEERS, PairKey, RankEndpoints
from penstock.workers.kv_transfer.rank_mover import make_piece
from penstock.workers.kv_transfer.shards import Shard, split
from penstock.workers.kv_transfer.staging import WorkerIdentity, blocks_of
from penstock.workers.kv_transfer.transport import PairBroken
from penstock.workers.scheduling.sequence import Ints

MESSAGE_BYTES = 4 << 20  # of a message, at most


@dataclass(slots=True)
class OutgoingTransfer:
    """One transfer: positions [start, stop) of a sequence. `blocks`, which are pinned, hold them;
    the first of them holds `start`."""

    router: str
    request: int
    attempt: int  # the destination's
    epoch: int
    start: int
    stop: int
    blocks: Ints
    aborted: bool = False  # set by whoever wants no more of it to be sent


class KvSender:
    """Sends transfers out. Made and used on the event loop."""

    def __init__(self, identity: WorkerIdentity, endpoints: RankEndpoints, seconds: float) -> None:
        self._identity = identity
        self._endpoints = endpoints
        self._seconds = seconds
        self._channels: dict[
            str, PeerChannel
        ] = {}  # by the destination's name, the last used at the end
        self._channel_idle = asyncio.Event()  # a link has nothing to do any more
        self.bytes_by_pair: Counter[PairKey] = Counter()

    @property
    def bytes_sent(self) -> int:
        return self.bytes_by_pair.total()

    async def send(
        self, peer: Peer, outgoing: OutgoingTransfer, on_read: Callable[[], None]
    ) -> None:
        """Send it; `read` is called once its blocks are not read any more, whatever happens.

        `PairBroken`: the destination could not be reached, and may not know that nothing comes.
        """
        sent: list[asyncio.Future[int]] = []
        try:
            link = await self._acquire(peer)
            try:
                ways = await link.wait_connected()
                link.begin(outgoing.epoch)
                await self._announce(link, ways, outgoing, sent)
            finally:
                await link.drain(sent)
                self._release(link)
        finally:
            on_read()
        wanted = [each.result() > 0 for each in sent]
        # Nothing of it fits the units that travel, and it is not empty.
        aborted = outgoing.aborted or not sent or not all(wanted)
        await link.end(outgoing.epoch, len(sent), aborted)

    async def refuse(self, peer: Peer, epoch: int) -> None:
        """Tell the destination that nothing will come; `PairBroken` if it cannot be told."""
        link = await self._acquire(peer)
        try:
            await link.end(epoch, 0, aborted=True)
        finally:
            self._release(link)

    def stop(self) -> None:
        """Break off every pair."""
        for link in self._channels.values():
            link.close("the worker stops")

    async def _announce(
        self,
        link: PeerChannel,
        ways: TransferRoutes,
        outgoing: OutgoingTransfer,
        sent: list[asyncio.Future[int]],
    ) -> None:
        """Announce its messages, as many at a time as pairs have room for."""
        unit, size = ways.unit.block_size, self._endpoints.shape.block_size
        if outgoing.start % unit:
            return
        for index, (pair, shard) in enumerate(_messages(ways, outgoing)):
            if outgoing.aborted or any(each.done() and not each.result() for each in sent):
                return
            blocks = blocks_of(shard, outgoing.blocks, outgoing.start, size)
            piece = make_piece(outgoing.epoch, index, blocks, shard, unit)
            header = _header(outgoing, pair, shard, index, ways.unit.num_bytes(shard))
            one = await link.announce(pair, header, piece)
            sent.append(one)
            one.add_done_callback(partial(self._count, pair))

    def _count(self, pair: PairKey, sent: asyncio.Future[int]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            self.bytes_by_pair[pair] += sent.result()

    async def _acquire(self, peer: Peer) -> PeerChannel:
        """The link to that worker, made if there is none: `_release` of it afterwards."""
        link = self._find(peer)
        if link is None:
            await self._wait_for_slot()
            # Another may have made it meanwhile.
            link = self._find(peer) or self._new_channel(peer)
        self._channels[peer.worker] = link
        link.num_users += 1
        return link

    def _new_channel(self, peer: Peer) -> PeerChannel:
        return PeerChannel(
            self._identity, peer, self._endpoints, self._seconds, self._channel_idle.set
        )

    def _find(self, peer: Peer) -> PeerChannel | None:
        """Takes it out."""
        link = self._channels.pop(peer.worker, None)
        if link is not None and (link.broken or link.peer != peer):
            link.close("the destination is another one now")
            return None
        return link

    def _release(self, link: PeerChannel) -> None:
        link.num_users -= 1
        self._channel_idle.set()

    async def _wait_for_slot(self) -> None:
        """For one more link: one that is idle may have to go; waits while there is none."""
        try:
            async with asyncio.timeout(self._seconds):
                while not self._evict():
                    self._channel_idle.clear()
                    await self._channel_idle.wait()
        except TimeoutError:
            reason = f"pairs to {MAX_PEERS} workers are busy for {self._seconds:g} s"
            raise PairBroken(reason) from None

    def _evict(self) -> bool:
        for name, link in list(self._channels.items()):
            if link.broken and not link.num_users:
                del self._channels[name]
        if len(self._channels) < MAX_PEERS:
            return True
        idle = [name for name, link in self._channels.items() if link.idle]
        if idle:
            self._channels.pop(idle[0]).close("another destination needs the room")
        return bool(idle)


def _messages(ways: TransferRoutes, outgoing: OutgoingTransfer) -> Iterator[tuple[PairKey, Shard]]:
    """All of them, those of different pairs by turns."""
    positions = (outgoing.start, outgoing.stop)
    by_route = [
        [
            ((route.source, route.destination), shard)
            for shard in split(route.overlap, *positions, ways.unit, MESSAGE_BYTES)
        ]
        for route in ways.routes
    ]
    for messages in zip_longest(*by_route):
        yield from (each for each in messages if each is not None)


def _header(
    outgoing: OutgoingTransfer, pair: PairKey, shard: Shard, index: int, num_bytes: int
) -> wire.Header:
    rectangle = shard.rectangle
    return wire.Header(
        router=outgoing.router,
        request=outgoing.request,
        attempt=outgoing.attempt,
        epoch=outgoing.epoch,
        index=index,
        start=shard.start,
        stop=shard.stop,
        first_layer=rectangle.first_layer,
        last_layer=rectangle.last_layer,
        first_head=rectangle.first_head,
        last_head=rectangle.last_head,
        bytes=num_bytes,
        source_rank=pair[0],
        destination_rank=pair[1],
    )
