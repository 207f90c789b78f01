"""The sending side of a simulated worker's KV transfers, like `workers/kv_transfer/sender`."""

from collections.abc import Callable, Sequence

from penstock.loadtests.simulator.world.clock import Process
from penstock.loadtests.simulator.world.network import Network
from penstock.loadtests.simulator.world.rank_pairs import TransferTiming
from penstock.loadtests.simulator.world.transfer_endpoints import (
    Receiver,
    SendChannel,
    TransferCallbacks,
)
from penstock.workers.kv_transfer.protocol.messages import WorkerId
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.kv_transfer.shards import BlockShape
from penstock.workers.scheduling.sequence import Ints


class Sender:
    """The sending side of a worker's KV transfers: one channel per destination.

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
        self._channels: dict[str, SendChannel] = {}  # by name of the destination

    @property
    def num_unfinished(self) -> int:
        """Number of transfers that have not ended at the source."""
        return sum(channel.num_unfinished for channel in self._channels.values())

    def send(
        self,
        to: WorkerId,
        outgoing: OutgoingTransfer,
        on_read: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Send a transfer.

        Args:
            on_read: called once, when the blocks are no longer read.
            on_end: called once, when the transfer has ended; with the reason if the channel broke.
        """
        channel = self._channels.get(to[0])
        if channel is None or channel.broken or channel.peer != to:
            if channel is not None:
                channel.close(f"worker {to[0]} has restarted")
            receiver = self._find(to)
            if receiver is None:
                on_read()
                on_end("UNAVAILABLE")
                return
            channel = self._channels[to[0]] = self._open(to, receiver)
        channel.send(outgoing, TransferCallbacks(on_read, on_end))

    def break_channels(self) -> None:
        """Close all channels, as the host of a killed process does."""
        for channel in self._channels.values():
            channel.break_off()

    def _open(self, to: WorkerId, receiver: Receiver) -> SendChannel:
        return SendChannel(
            self._process,
            self._name,
            to,
            receiver,
            self._network,
            self._shape,
            self._timing,
            self._read,
        )
