"""Keeps the prefix index equal to the blocks that workers report.

A worker sends a snapshot after its stream has opened, and then every change. If a change is missing
or contradicts the index, the feed removes all blocks of the worker from the index and requests a
new snapshot. Until the snapshot has arrived, the worker is treated as a worker without cached
blocks. While the chunks of the snapshot arrive, the index has the blocks of the chunks so far.
Placement may then miss a cached prefix, but never expects one that does not exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from penstock.router.routing.prefix_cache.cache_events import (
    CacheChange,
    CacheEvents,
    CacheSnapshot,
    ResyncCache,
)
from penstock.router.routing.prefix_cache.prefix_index import PrefixIndex
from penstock.router.routing.prefix_cache.stored_chains import error_in_chains

MIN_RESYNC_SECONDS, MAX_RESYNC_SECONDS = 1.0, 60.0
"""Smallest and largest pause after a request for a snapshot of one worker. The pause doubles with
each request, so that a worker that sends wrong events causes little work. It is reset to the
smallest one if no request follows for `MAX_RESYNC_SECONDS` after the end of a pause."""

SNAPSHOT_SECONDS = 10.0
"""Time limit for a complete snapshot, from its request. After this time, it is requested again."""


class _State(Enum):
    AWAITING = auto()  # no snapshot yet, so changes are ignored
    LOADING = auto()  # some chunks of the snapshot have arrived, and the index has their blocks
    LIVE = auto()  # the index has all blocks that the worker has reported
    STALE = auto()  # the index was wrong, and the next request for a snapshot is not due yet


@dataclass(slots=True)
class _Feed:
    """State of one worker's feed."""

    incarnation: str
    capacity: int  # number of KV blocks of the worker
    awaiting_since: float
    state: _State = _State.AWAITING
    next_number: int = 0  # number of the next expected change
    next_chunk: int = 0  # number of the next expected chunk of the snapshot
    reason: str = ""  # why the index of the worker is stale
    # Earliest time of the next request for a snapshot, in seconds of the router's monotonic clock.
    resync_at: float = 0.0
    # Pause that follows the next request for a snapshot, in seconds.
    resync_seconds: float = MIN_RESYNC_SECONDS


class _Inconsistent(Exception):
    """Raised if events contradict the index. The message is the reason."""


class CacheFeed:
    """Applies the events of all connected workers to an index.

    The argument `now` is the time in seconds on any monotonic clock.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._feeds: dict[str, _Feed] = {}

    def worker_up(self, worker: str, incarnation: str, num_blocks: int, now: float) -> None:
        """Add a connected worker with `num_blocks` blocks, and wait for its snapshot.

        If the index still has blocks of the worker's previous stream, these are removed first, and
        the snapshot is requested afterwards.
        """
        self._index.forget(worker)
        self._feeds[worker] = feed = _Feed(incarnation, num_blocks, now)
        if self._index.is_leaving(worker):
            feed.state, feed.resync_at = _State.STALE, now
            feed.reason = "the blocks of the worker's previous stream had to be removed first"

    def worker_lost(self, worker: str) -> None:
        """Forget a worker whose stream has ended."""
        self._index.forget(worker)
        self._feeds.pop(worker, None)

    def is_current(self, worker: str) -> bool:
        """Return True if the index has all blocks that the worker has reported so far."""
        feed = self._feeds.get(worker)
        return feed is not None and feed.state is _State.LIVE

    def apply_events(self, events: CacheEvents, now: float) -> ResyncCache | None:
        """Apply changes; return a command if a snapshot is needed."""
        feed = self._feeds.get(events.worker)
        if feed is None or feed.state in (_State.STALE, _State.AWAITING):
            return None
        try:
            self._check_incarnation(feed, events.incarnation)
            if feed.state is _State.LOADING:
                raise _Inconsistent("cache changes arrived between the chunks of a snapshot")
            missing = events.first - feed.next_number
            if missing:
                raise _Inconsistent(
                    f"expected cache change {feed.next_number}, received {events.first}"
                )
            for change in events.changes:
                self._apply(events.worker, change, feed)
        except _Inconsistent as error:
            return self._resync(events.worker, feed, str(error), now)
        feed.next_number += len(events.changes)
        return None

    def apply_snapshot(self, snapshot: CacheSnapshot, now: float) -> ResyncCache | None:
        """Apply a chunk of a snapshot; return a command if another snapshot is needed."""
        worker, feed = snapshot.worker, self._feeds.get(snapshot.worker)
        if feed is None or feed.state is _State.STALE:
            return None
        try:
            self._check_incarnation(feed, snapshot.incarnation)
            self._check_chunk(feed, snapshot)
            self._store(worker, snapshot.hashes, feed)
        except _Inconsistent as error:
            return self._resync(worker, feed, str(error), now)
        feed.next_number = snapshot.next_number
        feed.next_chunk += 1
        feed.state = _State.LIVE if snapshot.is_last else _State.LOADING
        return None

    def due_resyncs(self, now: float) -> Sequence[ResyncCache]:
        """Return the requests for snapshots that are due now.

        These are delayed requests, and requests for snapshots that did not arrive in time.
        """
        due = []
        for worker, feed in self._feeds.items():
            is_expected = feed.state in (_State.AWAITING, _State.LOADING)
            if is_expected and now - feed.awaiting_since > SNAPSHOT_SECONDS:
                reason = "the cache snapshot did not arrive completely within "
                self._forget(worker, feed, f"{reason}{SNAPSHOT_SECONDS:g} s")
            if feed.state is _State.STALE and self._is_due(worker, feed, now):
                due.append(self._request(worker, feed, now))
        return due

    def distrust(self, worker: str, now: float) -> ResyncCache | None:
        """Forget a worker whose reports are wrong; return a command if a snapshot is needed now.

        See `CacheClaims`.
        """
        feed = self._feeds.get(worker)
        if feed is None or feed.state is not _State.LIVE:
            return None
        reason = "the worker found fewer cached tokens than it had reported, for several requests"
        return self._resync(worker, feed, reason, now)

    # -------------------------------------------------------------- checks

    def _apply(self, worker: str, change: CacheChange, feed: _Feed) -> None:
        index = self._index
        if change.evicted:
            before = index.num_blocks(worker)
            index.evict(worker, change.evicted)
            if index.num_blocks(worker) != before - len(change.evicted):
                raise _Inconsistent(
                    "the worker reported the eviction of a block that is not in the index"
                )
        if error := error_in_chains(change, partial(index.holds, worker)):
            raise _Inconsistent(error)
        if change.stored:
            self._store(worker, change.stored, feed)

    def _store(self, worker: str, hashes: Sequence[int], feed: _Feed) -> None:
        """Add blocks to the index; the worker must have none of them yet, and room for them all."""
        index = self._index
        num = index.num_blocks(worker) + len(hashes)
        if num > feed.capacity:
            raise _Inconsistent(
                f"the worker reported {num} stored blocks, but its cache has only {feed.capacity} "
                "blocks"
            )
        index.store(worker, hashes)
        if index.num_blocks(worker) != num:
            raise _Inconsistent("the worker stored a block that is in the index already")

    def _check_incarnation(self, feed: _Feed, incarnation: str) -> None:
        if incarnation != feed.incarnation:
            raise _Inconsistent(
                f"cache events come from another incarnation of the worker: {incarnation[:40]!r}"
            )

    def _check_chunk(self, feed: _Feed, snapshot: CacheSnapshot) -> None:
        if feed.state is _State.LIVE:
            raise _Inconsistent("a cache snapshot arrived that was not requested")
        if snapshot.chunk != feed.next_chunk:
            raise _Inconsistent(
                f"expected chunk {feed.next_chunk} of a cache snapshot, received {snapshot.chunk}"
            )
        if feed.next_chunk and snapshot.next_number != feed.next_number:
            raise _Inconsistent(
                "chunks of different cache snapshots arrived where one snapshot was expected"
            )
        if not snapshot.hashes and not (snapshot.is_last and snapshot.chunk == 0):
            raise _Inconsistent("a cache snapshot has an empty chunk")

    # -------------------------------------------------------------- requests for snapshots

    def _resync(self, worker: str, feed: _Feed, reason: str, now: float) -> ResyncCache | None:
        """Remove a worker's blocks and request a snapshot.

        The request is sent now, or after the current pause between requests.
        """
        self._forget(worker, feed, reason)
        return self._request(worker, feed, now) if self._is_due(worker, feed, now) else None

    def _is_due(self, worker: str, feed: _Feed, now: float) -> bool:
        return now >= feed.resync_at and not self._index.is_leaving(worker)

    def _forget(self, worker: str, feed: _Feed, reason: str) -> None:
        """Remove a worker's blocks. Its events are ignored until a snapshot is requested."""
        self._index.forget(worker)
        feed.state, feed.reason = _State.STALE, reason

    def _request(self, worker: str, feed: _Feed, now: float) -> ResyncCache:
        if now - feed.resync_at > MAX_RESYNC_SECONDS:
            feed.resync_seconds = MIN_RESYNC_SECONDS
        feed.resync_at = now + feed.resync_seconds
        feed.resync_seconds = min(2 * feed.resync_seconds, MAX_RESYNC_SECONDS)
        feed.state, feed.awaiting_since, feed.next_chunk = _State.AWAITING, now, 0
        return ResyncCache(worker, feed.reason)
