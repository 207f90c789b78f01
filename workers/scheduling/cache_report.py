"""Reports of the blocks that a worker has cached: changes since the last report, and snapshots.

A report contains at most one change. Changes are numbered from 0, and a router must apply them in
this order. A snapshot contains the number of the first change that it does not include.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.common.block_hash import HASH_BYTES, short_hashes
from penstock.workers.scheduling.published_blocks import BlockChanges, PublishedBlocks

_NO_BLOCK = bytes(HASH_BYTES)


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Net change of the cached blocks since the last report; blocks are named by short hashes.

    The stored blocks form chains: in a chain, each block follows the previous one in a sequence.
    """

    number: int
    evicted: Sequence[int]
    stored: Sequence[int]  # the blocks of all chains, one chain after the other
    # for each chain, the block before its first block; 0: none, or not cached
    parents: Sequence[int]
    lengths: Sequence[int]  # number of blocks of each chain


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """All blocks that a worker has cached at one time."""

    next_number: int  # number of the first change after the snapshot
    # The full block hashes. Shortening a million of them would delay a step of the engine.
    hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class CacheReport:
    """A report: the change since the last report, and a snapshot if a router needs one."""

    change: CacheChange | None
    snapshot: CacheSnapshot | None


class CacheReporter:
    """Makes the reports of a pool's blocks; records no changes before `request_snapshot`.

    A block that is stored and evicted again between two reports is not reported.
    """

    def __init__(self, published: PublishedBlocks) -> None:
        self._published = published
        self._next_number = 0
        self._snapshot_wanted = False

    def request_snapshot(self) -> None:
        """Record changes from now on, and add a snapshot to the next report."""
        if self._published.changes is None:
            self._published.changes = BlockChanges()
        self._snapshot_wanted = True

    def stop(self) -> None:
        """Stop recording changes, because no router is subscribed.

        One change number is skipped. A snapshot that was made before this call may still reach a
        router that subscribes afterwards. This router then sees a gap in the numbers, and requests
        a new snapshot.
        """
        self._published.changes = None
        self._snapshot_wanted = False
        self._next_number += 1

    def report(self) -> CacheReport | None:
        """Return what has changed since the last call; None if there is nothing to report."""
        change = self._take_change()
        snapshot = None
        if self._snapshot_wanted:
            self._snapshot_wanted = False
            snapshot = CacheSnapshot(self._next_number, self._published.hashes())
        if change is None and snapshot is None:
            return None
        return CacheReport(change, snapshot)

    def _take_change(self) -> CacheChange | None:
        recorded = self._published.changes
        if not recorded:
            return None
        self._published.changes = BlockChanges()
        evicted = short_hashes(recorded.evicted) if recorded.evicted else ()
        number, self._next_number = self._next_number, self._next_number + 1
        return CacheChange(number, evicted, *self._chains(recorded.stored))

    def _chains(self, stored: dict[bytes, bytes]) -> tuple[list[int], list[int], list[int]]:
        """Return blocks, parents and lengths of chains; `stored` maps each block to its parent."""
        if not stored:
            return [], [], []
        starts, parents, last = [], [], b"-"
        for index, (digest, parent) in enumerate(stored.items()):
            if parent != last:
                starts.append(index)
                # A parent that was evicted is unknown to the router.
                parents.append(parent if self._published.has_hash(parent) else _NO_BLOCK)
            last = digest
        lengths = [end - start for start, end in pairwise([*starts, len(stored)])]
        return short_hashes(stored), short_hashes(parents), lengths
