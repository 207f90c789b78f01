"""The sending side of a simulated worker's KV transfers.

Models `workers/kv_transfer/sender`.
"""

from collections.abc import Callable, Sequence
from math import inf

from penstock.loadtests.simulator.world.clock import Process
from penstock.loadtests.simulator.world.network import Network
from penstock.loadtests.simulator.world.rank_pairs import TransferTiming
from penstock.loadtests.simulator.world.transfer_endpoints import (
    Receiver,
    SendChannel,
    TransferCallbacks,
)
from penstock.workers.kv_transfer.protocol.messages import Peer, WorkerId
from penstock.workers.kv_transfer.protocol.peer_table import PeerTable
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.kv_transfer.shards import BlockShape
from penstock.workers.scheduling.sequence import Ints


class Sender:
    """The sending side of a worker's KV transfers, with one channel per destination.

    Args:
        read: returns the contents of blocks.
        find: returns the receiver of a worker, or None while the worker is not running.
    """

    def __init__(
        self,
        process: Process,
        name: WorkerId,
        network: Network,
        shape: BlockShape,
        timing: TransferTiming,
        read: Callable[[Ints], Sequence[int]],
        find: Callable[[WorkerId], Receiver | None],
    ) -> None:
        self._process = process
        self._name = name
        self._network = network
        self._shape = shape
        self._timing = timing
        self._read = read
        self._find = find
        self._table: PeerTable[SendChannel] = PeerTable()
        self._check_time = inf  # time of the next check of connections that were opened early
        # Closed channels whose transfers have not ended, because a rank still sends.
        self._closed: list[SendChannel] = []

    @property
    def num_unfinished(self) -> int:
        """Number of transfers that have not ended at the source."""
        channels = (*self._table.connections(), *self._closed)
        return sum(channel.num_unfinished for channel in channels)

    def send(
        self,
        to: Peer,
        outgoing: OutgoingTransfer,
        on_read: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Send a transfer.

        Args:
            on_read: called once, when the blocks are no longer read.
            on_end: called once when the transfer has ended, with the reason of a failure or "".
        """
        channel, reason = self._table.use(to), "UNAVAILABLE"
        if channel is None:
            has_slot, replaced = self._table.make_slot(to)
            if replaced is not None:
                self._close(replaced, "another destination needs its slot")
            if has_slot:
                channel = self._open(to, early=False)
            else:  # the transfer fails here, while the product would wait for a free slot
                reason = "all channels to other workers are busy"
        if channel is None:
            on_read()
            on_end(reason)
        else:
            channel.send(outgoing, TransferCallbacks(on_read, on_end))

    def set_peers(self, stream: object, peers: Sequence[Peer]) -> None:
        """Connect to the peers that a router lists."""
        self._table.set_peers(stream, peers)
        self._check_soon()

    def forget_peers(self, stream: object) -> None:
        """Remove the peers that a router listed, since the router's stream has ended."""
        self._table.forget(stream)

    def break_channels(self) -> None:
        """Close all channels, as the host of a killed process does."""
        for channel in self._table.connections():
            channel.break_off()

    def _open(self, to: Peer, early: bool) -> SendChannel | None:
        receiver = self._find((to.worker, to.incarnation))
        if receiver is None:
            return None
        channel = SendChannel(
            self._process,
            self._name,
            to,
            receiver,
            self._network,
            self._shape,
            self._timing,
            self._read,
            self._check_soon,
            early,
        )
        self._table.add(channel)
        return channel

    def _close(self, channel: SendChannel, reason: str) -> None:
        channel.close(reason)
        self._closed = [each for each in (*self._closed, channel) if each.num_unfinished]

    def _check_soon(self) -> None:
        self._check_at(self._process.clock.now)

    def _check_at(self, time: float) -> None:
        if time < self._check_time:
            self._check_time = time
            self._process.at(time, lambda: self._check_peers(time))

    def _check_peers(self, time: float) -> None:
        if time != self._check_time:
            return  # the check has been moved to an earlier time
        self._check_time = inf
        due = self._table.due(time)
        for channel, reason in due.closing:
            self._close(channel, reason)
        if due.next_check is not None:
            self._check_at(due.next_check)
        for peer in due.opening:
            if self._open(peer, early=True) is None:
                failure = self._table.failed(peer, "UNAVAILABLE", time)
                self._check_at(time + failure.retry_seconds)
