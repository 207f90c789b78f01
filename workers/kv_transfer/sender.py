"""Source side of KV transfers: sends a lease's blocks over the channels to other workers.

A header announces each message; the bytes of the message are sent after the destination's credit. A
credit is binding: even if the transfer is aborted, the bytes are sent or the pair breaks. Each rank
gathers and sends its own shard (`rank_mover`). The lease is unpinned when no rank reads its blocks
any more.
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

MESSAGE_BYTES = 4 << 20  # maximum size of a message


@dataclass(slots=True)
class OutgoingTransfer:
    """One transfer: positions [start, stop) of a sequence.

    `blocks` are the pinned blocks that hold these positions; the first block holds `start`.
    """

    router: str
    request: int
    attempt: int  # attempt number at the destination
    epoch: int
    start: int
    stop: int
    blocks: Ints
    aborted: bool = False  # set by other code to stop the announcement of messages


class KvSender:
    """Sends KV transfers. Create and use it on the event loop."""

    def __init__(self, identity: WorkerIdentity, endpoints: RankEndpoints, seconds: float) -> None:
        self._identity = identity
        self._endpoints = endpoints
        self._seconds = seconds
        self._channels: dict[
            str, PeerChannel
        ] = {}  # by name of the destination worker, least recently used first
        self._channel_idle = asyncio.Event()  # set when a channel may have become idle
        self.bytes_by_pair: Counter[PairKey] = Counter()

    @property
    def bytes_sent(self) -> int:
        return self.bytes_by_pair.total()

    async def send(
        self, peer: Peer, outgoing: OutgoingTransfer, on_read: Callable[[], None]
    ) -> None:
        """Send a transfer; always call `on_read` when no rank reads the blocks any more.

        Raises:
            PairBroken: The connection failed; the destination may still expect the transfer.
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
        # `sent` is empty if `start` is not a multiple of the unit: nothing could be sent.
        aborted = outgoing.aborted or not sent or not all(wanted)
        await link.end(outgoing.epoch, len(sent), aborted)

    async def refuse(self, peer: Peer, epoch: int) -> None:
        """Send an abort to the destination. Raises `PairBroken` if it is unreachable."""
        link = await self._acquire(peer)
        try:
            await link.end(epoch, 0, aborted=True)
        finally:
            self._release(link)

    def stop(self) -> None:
        """Close all channels."""
        for link in self._channels.values():
            link.close("the worker is stopping")

    async def _announce(
        self,
        link: PeerChannel,
        ways: TransferRoutes,
        outgoing: OutgoingTransfer,
        sent: list[asyncio.Future[int]],
    ) -> None:
        """Announce all messages, each when its pair's window has room; add futures to `sent`."""
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
        """Return the channel to a worker, and open it if needed; call `_release` after use."""
        link = self._find(peer)
        if link is None:
            await self._wait_for_slot()
            # Another task may have opened the channel while this task waited.
            link = self._find(peer) or self._new_channel(peer)
        self._channels[peer.worker] = link
        link.num_users += 1
        return link

    def _new_channel(self, peer: Peer) -> PeerChannel:
        return PeerChannel(
            self._identity, peer, self._endpoints, self._seconds, self._channel_idle.set
        )

    def _find(self, peer: Peer) -> PeerChannel | None:
        """Remove and return the channel to `peer`, or close it if it is broken or outdated."""
        link = self._channels.pop(peer.worker, None)
        if link is not None and (link.broken or link.peer != peer):
            link.close(f"worker {peer.worker} has restarted or changed its address")
            return None
        return link

    def _release(self, link: PeerChannel) -> None:
        link.num_users -= 1
        self._channel_idle.set()

    async def _wait_for_slot(self) -> None:
        """Make room for one more channel; if all channels are busy, wait until one becomes idle."""
        try:
            async with asyncio.timeout(self._seconds):
                while not self._evict():
                    self._channel_idle.clear()
                    await self._channel_idle.wait()
        except TimeoutError:
            reason = f"all {MAX_PEERS} channels to other workers are busy for {self._seconds:g} s"
            raise PairBroken(reason) from None

    def _evict(self) -> bool:
        for name, link in list(self._channels.items()):
            if link.broken and not link.num_users:
                del self._channels[name]
        if len(self._channels) < MAX_PEERS:
            return True
        idle = [name for name, link in self._channels.items() if link.idle]
        if idle:
            self._channels.pop(idle[0]).close("it was idle, and another destination needs its slot")
        return bool(idle)


def _messages(ways: TransferRoutes, outgoing: OutgoingTransfer) -> Iterator[tuple[PairKey, Shard]]:
    """Yield all messages of a transfer, alternating between the pairs."""
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
