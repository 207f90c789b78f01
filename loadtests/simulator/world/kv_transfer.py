"""A worker's side of KV transfers: sends leased blocks and receives blocks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock.loadtests.simulator.model.executors import Executor
from penstock.loadtests.simulator.world.clock import Process
from penstock.loadtests.simulator.world.network import Network
from penstock.loadtests.simulator.world.session import HeldSequence, Key, Session, WorkerShape
from penstock.loadtests.simulator.world.steps import StepRunner
from penstock.loadtests.simulator.world.transfer_endpoints import (
    ExpectedTransfer,
    OutgoingTransfer,
    Receiver,
    Sender,
    WorkerId,
)
from penstock.router.routing.events import Failed, Ready, Received, Send, TransferEndpoint
from penstock.workers.kv_transfer.shards import BlockShape
from penstock.workers.scheduling import sequence as seq
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.kv_pool import State

Peer = Callable[[WorkerId], tuple[Process, Receiver] | None]


class KvTransfer:
    """Connects the batcher's leases and reserved blocks with the transfer endpoints.

    Args:
        sessions: session of each router's stream, by number.
        peer: returns the process and the receiver of a worker, or None while it is not running.
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
        peer: Peer,
    ) -> None:
        info = shape.info
        self._name = (info.worker, info.incarnation)
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
        """Send the blocks of a lease; must be called at a step boundary."""
        key = Key(session.number, command.request, command.attempt)
        held = session.held.get(key)
        size = self._batcher.limits.block_size
        if held is None or not command.have < held.kv_len or command.have % size:
            self._sender.refuse(command)
            return
        try:
            blocks = self._batcher.pin(key, command.have)
        except seq.LeaseGone:
            self._sender.refuse(command)
            return
        unpin = partial(self._post, lambda: self._batcher.unpin(key))
        outgoing = OutgoingTransfer(command, session.router, held.kv_len, blocks, unpin)
        held.sends.append(outgoing)
        self._sender.send(outgoing)

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
        judge = partial(self._on_result, session, key)
        held.epoch = epoch = self.receiver.open(expected, lambda why: judge(epoch, why))
        at = TransferEndpoint(*self._name, "address", "secret")
        ready = Ready(self._name[0], key.request, key.attempt, epoch, have, at)
        session.send(ready, self._clock.now)

    def cancel(self, held: HeldSequence) -> None:
        """Abort the incoming transfer and all sends of a sequence."""
        if held.epoch:
            self.receiver.close(held.epoch)
        for outgoing in held.sends:
            outgoing.aborted = True

    def _on_result(self, session: Session, key: Key, epoch: int, reason: str) -> None:
        """Report the end of an incoming transfer; nothing is written to its blocks afterwards."""
        about = (self._name[0], key.request, key.attempt, epoch)
        if key not in session.held:
            self._post(lambda: self._batcher.transfer_drained(key))
        elif not reason:
            self._post(lambda: self._batcher.transfer_done(key))
            session.send(Received(*about), self._clock.now)
        else:
            self._post(lambda: self._batcher.transfer_failed(key))
            session.send(Failed(*about, reason), self._clock.now)

    # ------------------------------------------------------------ invariants

    def _write(self, blocks: seq.Ints, content: Sequence[int]) -> None:
        """Write received blocks; check that they are reserved for the transfer."""
        states = self._batcher.pool.state[blocks]
        assert (states == State.RESERVED).all(), "a transfer writes blocks that are not its own"
        self._executor.write(blocks, content)

    def _read(self, blocks: seq.Ints) -> Sequence[int]:
        """Read blocks to send; check that they are still held."""
        states = self._batcher.pool.state[blocks]
        assert (states <= State.LEASED).all(), "a transfer reads blocks that are not held"
        return self._executor.read(blocks)
