"""Coordinates the KV transfers of a worker: connects routers, the engine and the rank pairs.

At the destination, when blocks are reserved, the coordinator opens an epoch and sends Ready to the
router. It later reports the result to the scheduler and to the router: Received or Failed. After
Failed, this worker computes the prompt itself.

At the source, the coordinator pins a lease, sends its blocks and unpins the lease. If the lease
cannot be sent, the coordinator informs the destination, or the router if the destination is
unreachable. All methods run on the event loop.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from penstock.protos import worker_pb2 as wire
from penstock.workers.engine.engine_thread import EngineThread
from penstock.workers.kv_transfer.protocol.messages import Peer
from penstock.workers.kv_transfer.protocol.receive import ExpectedTransfer, TransferResult
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.kv_transfer.rank_endpoints import RankEndpoints
from penstock.workers.kv_transfer.rank_mover import Movers
from penstock.workers.kv_transfer.receiver import KvReceiver
from penstock.workers.kv_transfer.sender import KvSender
from penstock.workers.kv_transfer.staging import WorkerIdentity
from penstock.workers.scheduling.sequence import LeaseGone, Reserved
from penstock.workers.service.codec import SequenceKey, sequence_key
from penstock.workers.service.session import Session

log = logging.getLogger(__name__)


class KvTransfer:
    """Source and destination side of this worker's KV transfers.

    Args:
        address: host:port at which other workers open the control channel to this worker.
        seconds: Timeout of each network operation and of a transfer that makes no progress.

    Attributes:
        endpoint: Address and credentials with which other workers connect to send KV.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        address: str,
        movers: Movers,
        engine: EngineThread,
        seconds: float,
    ) -> None:
        ends = RankEndpoints(movers)
        self.receiver = KvReceiver(identity, ends, seconds)
        self.sender = KvSender(identity, ends, seconds)
        self._identity = identity
        self.endpoint = wire.TransferEndpoint(
            worker=identity.worker,
            incarnation=identity.incarnation,
            address=address,
            secret=identity.secret,
        )
        self._engine = engine
        self._tasks: set[asyncio.Task[None]] = set()

    def source_len(self, source: wire.Source) -> int:
        """Return the number of positions that can be transferred from `source`.

        Return 0 if the cache layout of `source` differs. Also return 0 if `source` is this worker,
        because its prefix cache already has the blocks.
        """
        own = (self._identity.worker, self._identity.incarnation)
        if source.layout != self._identity.layout or (source.worker, source.incarnation) == own:
            return 0
        return source.kv_len

    def stop(self) -> None:
        """Close all channels, and cancel all transfers."""
        for task in self._tasks:
            task.cancel()
        self.sender.stop()
        self.receiver.stop()

    # ------------------------------------------------------------ this worker as destination

    def expect(self, session: Session | None, reserved: Reserved) -> None:
        """Request a transfer into blocks that the scheduler has reserved.

        Release the blocks instead if the session or the request has ended.
        """
        key = sequence_key(reserved.key)
        held = session.held.get(key) if session is not None else None
        if session is None or held is None or held.source is None:
            self._engine.post(lambda engine: engine.batcher.transfer_drained(key))
            return
        expected = ExpectedTransfer(
            session.router,
            key.request,
            key.attempt,
            held.source,
            reserved.have,
            reserved.stop,
            reserved.blocks,
        )
        held.epoch = self.receiver.open(expected, partial(self._on_result, session, key))
        ready = wire.Ready(
            request=key.request,
            attempt=key.attempt,
            epoch=held.epoch,
            have=reserved.have,
            at=self.endpoint,
        )
        session.put(wire.ToRouter(ready=ready))

    def _on_result(self, session: Session, key: SequenceKey, result: TransferResult) -> None:
        """Report the result of a transfer to the engine and the router.

        Called when all ranks have stopped writing the blocks of the transfer.
        """
        about = {"request": key.request, "attempt": key.attempt, "epoch": result.epoch}
        if key not in session.held:
            self._engine.post(lambda engine: engine.batcher.transfer_drained(key))
        elif not result.reason:
            self._engine.post(lambda engine: engine.batcher.transfer_done(key))
            received = wire.Received(**about, bytes=result.num_bytes)
            session.put(wire.ToRouter(received=received))
        else:
            log.warning(
                "request %d: KV transfer failed, computing its prompt here: %s",
                key.request,
                result.reason,
            )
            self._engine.post(lambda engine: engine.batcher.transfer_failed(key))
            session.put(wire.ToRouter(failed=wire.Failed(**about, reason=result.reason)))

    # ------------------------------------------------------------ this worker as source

    def set_peers(self, session: Session, command: wire.ConnectPeers) -> None:
        """Connect to the workers to which a router expects this worker to send KV."""
        self.sender.set_peers(session.session_id, list(map(_peer, command.destinations)))

    def send(self, session: Session, command: wire.Send) -> None:
        """Start a task that sends the blocks of a lease."""
        task = asyncio.create_task(self._send_lease(session, command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_lease(self, session: Session, command: wire.Send) -> None:
        to, peer = command.to, _peer(command.to)
        try:
            outgoing = await self._pin_lease(session, command)
            if outgoing is None:
                await self.sender.refuse(peer, command.epoch)
            else:
                await self.sender.send(peer, outgoing, self._unpin(session, command))
        except Exception as error:
            # The destination may still expect data, so the router must end the transfer at the
            # destination.
            log.warning("KV transfer %d to worker %s failed: %s", command.epoch, to.worker, error)
            failed = wire.Failed(
                request=command.request,
                attempt=command.attempt,
                epoch=command.epoch,
                reason=f"{self._identity.worker} could not send: {error}",
            )
            session.put(wire.ToRouter(failed=failed))

    async def _pin_lease(self, session: Session, command: wire.Send) -> OutgoingTransfer | None:
        """Pin the blocks of the lease that `command` names.

        Return None if the lease is gone, or if the destination already has all its positions.
        """
        key, have = session.key(command.request, command.attempt), command.have
        held = session.held.get(key)
        if held is None or not have < held.kv_len:
            return None
        try:
            blocks = await self._engine.call(lambda engine: engine.batcher.pin(key, have))
        except LeaseGone:
            return None
        outgoing = OutgoingTransfer(
            session.router,
            command.request,
            command.to_attempt,
            command.epoch,
            have,
            held.kv_len,
            blocks,
        )
        # The lease may have been dropped during `pin`; its blocks are kept until `unpin`.
        outgoing.aborted = key not in session.held
        held.sends.append(outgoing)
        return outgoing

    def _unpin(self, session: Session, command: wire.Send) -> Callable[[], None]:
        key = session.key(command.request, command.attempt)
        return partial(self._engine.post, lambda engine: engine.batcher.unpin(key))


def _peer(to: wire.TransferEndpoint) -> Peer:
    return Peer(to.worker, to.incarnation, to.address, to.secret)
