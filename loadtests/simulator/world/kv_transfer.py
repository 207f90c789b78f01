"""A worker's side of KV transfers: sends leased blocks and receives blocks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock.loadtests.simulator.model.executors import Executor
from penstock.loadtests.simulator.world.clock import Process
from penstock.loadtests.simulator.world.network import Network
from penstock.loadtests.simulator.world.sender import Sender
from penstock.loadtests.simulator.world.session import HeldSequence, Key, Session, WorkerShape
from penstock.loadtests.simulator.world.steps import StepRunner
from penstock.loadtests.simulator.world.transfer_endpoints import Receiver
from penstock.router.routing.events import Failed, Ready, Received, Send
from penstock.router.routing.transfer_peers import ConnectPeers, TransferEndpoint
from penstock.workers.kv_transfer.protocol.messages import Peer, WorkerId
from penstock.workers.kv_transfer.protocol.receive import ExpectedTransfer, TransferResult
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.kv_transfer.shards import BlockShape
from penstock.workers.scheduling import sequence as seq
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.kv_pool import State

FindReceiver = Callable[[WorkerId], Receiver | None]


class KvTransfer:
    """Connects the batcher's leases and reserved blocks with the transfer endpoints.

    Args:
        sessions: session of each router's stream, by number.
        peer: returns the receiver of a worker, or None while the worker is not running.
    """

    def __init__(
        self,
        shape: WorkerShape,
        steps: StepRunner,
        batcher: Batcher,
        executor: Executor,
        process: Process,
        network: Network,
        sessions: Mapping[int, Session],
        peer: FindReceiver,
    ) -> None:
        info = shape.info
        self._name = (info.worker, info.incarnation)
        self._endpoint = info.transfer or transfer_endpoint(*self._name)
        self._post = steps.post
        self._batcher = batcher
        self._executor = executor
        self._clock = process.clock
        self._sessions = sessions
        geometry = BlockShape(shape.limits.block_size, shape.bytes_per_block)
        self.receiver = Receiver(process, geometry, shape.transfer_timing, self._write)
        self._sender = Sender(
            process, self._name, network, geometry, shape.transfer_timing, self._read, peer
        )

    def send(self, session: Session, command: Send) -> None:
        """Send the blocks of a lease, or an abort if the lease is gone.

        Must run at a step boundary.
        """
        key = Key(session.number, command.request, command.attempt)
        outgoing = self._pin_lease(session, key, command)

        def on_read() -> None:
            if outgoing is not None:
                self._post(lambda: self._batcher.unpin(key))

        def on_end(broken: str) -> None:
            if broken:
                # The destination may still wait for data, so the router must end its transfer.
                about = (self._name[0], command.request, command.attempt, command.epoch)
                reason = f"{self._name[0]} could not send: {broken}"
                session.send(Failed(*about, reason), self._clock.now)

        to = _peer(command.endpoint)
        self._sender.send(to, outgoing or OutgoingTransfer.aborting(command.epoch), on_read, on_end)

    def set_peers(self, session: Session, command: ConnectPeers) -> None:
        """Connect to the workers that may receive KV from this worker.

        A router has sent the list of these workers.
        """
        self._sender.set_peers(session.number, list(map(_peer, command.destinations)))

    def forget_peers(self, session: Session) -> None:
        """Remove the peers that a router listed, since the router's stream has ended."""
        self._sender.forget_peers(session.number)

    def _pin_lease(self, session: Session, key: Key, command: Send) -> OutgoingTransfer | None:
        """Pin a lease's blocks from position `command.have` on.

        Returns None without a lease, or if the lease has no position from `have` on.
        """
        have, held = command.have, session.held.get(key)
        if held is None or not have < held.kv_len:
            return None
        try:
            blocks = self._batcher.pin(key, have)
        except seq.LeaseGone:
            return None
        about = (session.router, command.request, command.to_attempt, command.epoch)
        outgoing = OutgoingTransfer(*about, have, held.kv_len, blocks)
        held.sends.append(outgoing)
        return outgoing

    def expect(self, key: Key, have: int, stop: int) -> None:
        """Open a transfer into the blocks that the batcher reserved, unless it was cancelled."""
        session = self._sessions.get(key.session)
        held = session.held.get(key) if session is not None else None
        blocks = self._batcher.reserved_blocks(key)
        if session is None or held is None or held.source is None:
            self._post(lambda: self._batcher.transfer_drained(key))
            return
        expected = ExpectedTransfer(
            session.router, key.request, key.attempt, held.source, have, stop, blocks
        )
        held.epoch = epoch = self.receiver.open(expected, partial(self._on_result, session, key))
        ready = Ready(self._name[0], key.request, key.attempt, epoch, have, self._endpoint)
        session.send(ready, self._clock.now)

    def cancel(self, held: HeldSequence) -> None:
        """Abort the incoming transfer and all sends of a sequence."""
        if held.epoch:
            self.receiver.close(held.epoch)
        for outgoing in held.sends:
            outgoing.aborted = True

    def break_channels(self) -> None:
        """Close all connections to other workers, as the host of a killed process does."""
        self.receiver.break_channels()
        self._sender.break_channels()

    def _on_result(self, session: Session, key: Key, result: TransferResult) -> None:
        """Report the end of an incoming transfer. Nothing is written to its blocks afterwards."""
        about = (self._name[0], key.request, key.attempt, result.epoch)
        if key not in session.held:
            self._post(lambda: self._batcher.transfer_drained(key))
        elif not result.reason:
            self._post(lambda: self._batcher.transfer_done(key))
            session.send(Received(*about), self._clock.now)
        else:
            self._post(lambda: self._batcher.transfer_failed(key))
            session.send(Failed(*about, result.reason), self._clock.now)

    # ------------------------------------------------------------ invariants

    def check_rest(self) -> None:
        """Raise AssertionError if a transfer has not ended."""
        assert not self.receiver.num_unfinished, (
            f"worker {self._name[0]} still waits for a KV transfer, although all requests have "
            "ended"
        )
        assert not self._sender.num_unfinished, (
            f"worker {self._name[0]} is still sending a KV transfer, although all requests have "
            "ended"
        )

    def _write(self, blocks: seq.Ints, content: Sequence[int]) -> None:
        """Write received blocks after checking that they are reserved for the transfer."""
        states = self._batcher.pool.state[blocks]
        assert (states == State.RESERVED).all(), (
            "a KV transfer writes blocks that are not in state RESERVED"
        )
        self._executor.write(blocks, content)

    def _read(self, blocks: seq.Ints) -> Sequence[int]:
        """Return the contents of blocks to send, after checking that they are still held."""
        states = self._batcher.pool.state[blocks]
        assert (states <= State.LEASED).all(), (
            "a KV transfer reads blocks that no sequence or lease holds"
        )
        return self._executor.read(blocks)


def transfer_endpoint(worker: str, incarnation: str) -> TransferEndpoint:
    """Return the endpoint at which other simulated workers connect to a worker."""
    return TransferEndpoint(worker, incarnation, "address", "secret")


def _peer(endpoint: TransferEndpoint) -> Peer:
    return Peer(endpoint.worker, endpoint.incarnation, endpoint.address, endpoint.secret)
