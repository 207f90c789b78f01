"""Sends routers the cached blocks of a simulated worker.

Models `workers/service/cache_stream`.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from penstock.common.block_hash import short_hashes
from penstock.loadtests.simulator.world.clock import Act, Clock
from penstock.loadtests.simulator.world.session import Session
from penstock.router.routing.events import WorkerInfo
from penstock.router.routing.prefix_cache.cache_events import (
    CacheChange,
    CacheEvents,
    CacheSnapshot,
)
from penstock.workers.scheduling import cache_report
from penstock.workers.scheduling.cache_report import CacheReporter
from penstock.workers.scheduling.kv_pool import BlockPool

CHUNK_BLOCKS = 8
"""Blocks in a message of a snapshot; few, so that small pools have several messages."""

CONTRADICTIONS = (
    CacheChange(evicted=[1]),
    CacheChange(stored=[1]),
    CacheChange(stored=[1], parents=[1], lengths=[1]),
    CacheChange(stored=[1, 2], parents=[2, 1], lengths=[1, 1]),
    CacheChange(stored=[1, 1], parents=[0], lengths=[2]),
    CacheChange(stored=[1], parents=[2], lengths=[1]),
    CacheChange(stored=range(1, 1000), parents=[0], lengths=[999]),
)
"""Changes that no worker can report. Block hashes are almost never this small."""


class CacheStream:
    """Sends the cached blocks of one worker to the routers that subscribe.

    Args:
        info: name and incarnation of the worker.
        pool: the block pool of the worker.
        clock: the virtual clock.
        post: runs a command at the next step boundary.
    """

    def __init__(
        self, info: WorkerInfo, pool: BlockPool, clock: Clock, post: Callable[[Act], None]
    ) -> None:
        self._info = info
        self._clock = clock
        self._post = post
        self._reporter = CacheReporter(pool.published)
        self._awaiting: dict[int, Session] = {}
        self._live: dict[int, Session] = {}
        self._next_number = 0  # number of the next change of the cache
        # For each router, how many faults of each kind are left.
        self._faults: dict[str, Counter[str]] = {}
        self._omitted: set[int] = set()  # sessions whose last changes were omitted

    def open(self, session: Session) -> None:
        """Subscribe a router."""
        self._awaiting[session.number] = session
        self._post(self._reporter.request_snapshot)

    def resync(self, session: Session) -> None:
        """Send a new snapshot to a router, unless a snapshot is already on its way."""
        if self._live.pop(session.number, None) is not None:
            self.open(session)

    def close(self, session: Session) -> None:
        """Unsubscribe a router."""
        waited = self._awaiting.pop(session.number, None)
        if self._live.pop(session.number, waited) and not (self._awaiting or self._live):
            self._post(self._reporter.stop)

    def send(self) -> None:
        """Send the changes since the last call, and snapshots to the routers that need one."""
        report = self._reporter.report()
        if report is None:
            return
        if (change := report.change) is not None:
            self._next_number = change.number + 1
            changes = [CacheChange(change.evicted, change.stored, change.parents, change.lengths)]
            for session in self._live.values():
                self._send_changes(session, self._events(change.number, changes))
        if report.snapshot is not None:
            for session in self._awaiting.values():
                self._send_snapshot(session, report.snapshot)
            self._live |= self._awaiting
            self._awaiting.clear()

    def add_fault(self, router: str, how: str) -> None:
        """Apply a fault to the next changes for a router.

        Args:
            router: name of the router.
            how: "lose": drop the changes, as for a router that reads too slowly. "omit": drop the
                changes without notice. "repeat": send them twice. "forge": send as many changes of
                another incarnation. "corrupt": send a change that contradicts the cached blocks.
        """
        self._faults.setdefault(router, Counter())[how] += 1

    def reveal_omissions(self) -> None:
        """Send an empty list of changes to the routers whose latest changes were omitted.

        The list has the number of the next change, so these routers see a gap. Without this call,
        they would see it only at the next change.
        """
        for number in self._omitted & self._live.keys():
            self._live[number].send(self._events(self._next_number, []), self._clock.now)
        self._omitted.clear()

    def _send_changes(self, session: Session, events: CacheEvents) -> None:
        faults, now = self._faults.pop(session.router, Counter()), self._clock.now
        self._omitted.discard(session.number)
        if faults["omit"]:
            self._omitted.add(session.number)
            return
        if faults["forge"]:
            changes = [
                CacheChange(stored=[number + 1], parents=[0], lengths=[1])
                for number in range(len(events.changes))
            ]
            events = self._events(events.first, changes, incarnation="forged")
        if faults["corrupt"]:
            change = CONTRADICTIONS[events.first % len(CONTRADICTIONS)]
            events = self._events(events.first, [change])
        if faults["lose"]:
            events = self._events(self._next_number, [])
        for _ in range(2 if faults["repeat"] else 1):
            session.send(events, now)

    def _send_snapshot(self, session: Session, snapshot: cache_report.CacheSnapshot) -> None:
        info, hashes = self._info, short_hashes(snapshot.hashes)
        for chunk, start in enumerate(range(0, max(len(hashes), 1), CHUNK_BLOCKS)):
            end = start + CHUNK_BLOCKS
            message = CacheSnapshot(
                info.worker,
                info.incarnation,
                snapshot.next_number,
                chunk,
                end >= len(hashes),
                hashes[start:end],
            )
            session.send(message, self._clock.now)

    def _events(
        self, first: int, changes: Sequence[CacheChange], incarnation: str = ""
    ) -> CacheEvents:
        return CacheEvents(self._info.worker, incarnation or self._info.incarnation, first, changes)
