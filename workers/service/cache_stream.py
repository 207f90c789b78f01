"""Sends routers a snapshot of the cached blocks, and then every change."""

from collections.abc import Iterator

from penstock.common.block_hash import short_hashes
from penstock.protos import worker_pb2 as wire
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.engine_thread import EngineThread
from penstock.workers.scheduling.cache_report import CacheChange, CacheReport, CacheSnapshot
from penstock.workers.service.session import Session

CHUNK_BLOCKS = 1 << 12
"""Largest number of blocks in a message of a snapshot. A router applies a chunk in about two
milliseconds, so that other messages do not wait long."""


class CacheStream:
    """Reports the cached blocks of a worker to routers. Only the event loop may use this object.

    Args:
        incarnation: incarnation of the worker.
        engine: records changes while there is a subscribed router.
    """

    def __init__(self, incarnation: str, engine: EngineThread) -> None:
        self._incarnation = incarnation
        self._engine = engine
        self._awaiting: dict[int, Session] = {}  # sessions that wait for a snapshot, by id
        self._live: dict[int, Session] = {}  # sessions that have a snapshot and get changes

    def open(self, session: Session) -> None:
        """Subscribe a router if its Hello message requests cache events."""
        if session.wants_cache_events:
            self._request_snapshot(session)

    def resync(self, session: Session) -> None:
        """Request a new snapshot for a subscribed router, unless one was requested or is queued."""
        if session.session_id in self._live and not session.has_waiting_snapshot:
            del self._live[session.session_id]
            self._request_snapshot(session)

    def close(self, session: Session) -> None:
        """Unsubscribe a router; without routers, changes are no longer recorded."""
        awaited = self._awaiting.pop(session.session_id, None)
        if self._live.pop(session.session_id, awaited) and not (self._awaiting or self._live):
            self._engine.post(_stop)

    def add_change(self, report: CacheReport | None, steps: dict[int, wire.Step]) -> None:
        """Add a report's change to the next Step of each subscribed router.

        A router without a Step in `steps` gets a Step with only the change.

        Args:
            report: the report; None: there is nothing to send.
            steps: Steps that are sent next, by session id.
        """
        if report is None or report.change is None or not self._live:
            return
        message = encode_change(report.change, self._incarnation)
        for number, session in self._live.items():
            if number in steps:
                steps[number].cache.CopyFrom(message)
            else:
                # Omit the load, because a router without tokens in this step does not need it.
                session.put(wire.ToRouter(step=wire.Step(cache=message)))

    def send_snapshot(self, report: CacheReport | None) -> None:
        """Send a report's snapshot to the routers that wait for one.

        The caller must have sent pending Steps before.
        """
        if report is None or report.snapshot is None:
            return
        for session in self._awaiting.values():
            session.put_snapshot(encode_snapshot(report.snapshot, self._incarnation))
        self._live |= self._awaiting
        self._awaiting.clear()

    def _request_snapshot(self, session: Session) -> None:
        self._awaiting[session.session_id] = session
        self._engine.post(_request_snapshot)


def encode_change(change: CacheChange, incarnation: str) -> wire.CacheEvents:
    """Encode a change as a message."""
    encoded = wire.CacheChange(
        evicted=change.evicted,
        stored=change.stored,
        parents=change.parents,
        lengths=change.lengths,
    )
    return wire.CacheEvents(incarnation=incarnation, first=change.number, changes=[encoded])


def encode_snapshot(snapshot: CacheSnapshot, incarnation: str) -> Iterator[wire.CacheSnapshot]:
    """Yield the chunks of a snapshot as messages; there is at least one."""
    blocks, number = snapshot.hashes, snapshot.next_number
    for chunk, start in enumerate(range(0, max(len(blocks), 1), CHUNK_BLOCKS)):
        end = start + CHUNK_BLOCKS
        yield wire.CacheSnapshot(
            incarnation=incarnation,
            next=number,
            chunk=chunk,
            last=end >= len(blocks),
            blocks=short_hashes(blocks[start:end]),
        )


def _request_snapshot(engine: Engine) -> None:
    engine.cache_reporter.request_snapshot()


def _stop(engine: Engine) -> None:
    engine.cache_reporter.stop()
