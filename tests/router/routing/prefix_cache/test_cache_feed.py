"""CacheFeed knows all blocks of a worker exactly, or knows none and requests a snapshot."""

import itertools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.common.block_hash import short_hashes
from penstock.router.routing.prefix_cache import prefix_index
from penstock.router.routing.prefix_cache.cache_events import (
    CacheChange,
    CacheEvents,
    CacheSnapshot,
    ResyncCache,
)
from penstock.router.routing.prefix_cache.cache_feed import (
    MAX_RESYNC_SECONDS,
    SNAPSHOT_SECONDS,
    CacheFeed,
)
from penstock.router.routing.prefix_cache.prefix_index import PrefixIndex
from penstock.workers.scheduling.cache_report import CacheReporter
from penstock.workers.scheduling.kv_pool import BlockPool
from tests.support.cached_blocks import PREFIXES, cache, chain, forget

CAPACITY = 4


def snapshot(*hashes: int, number: int = 0, chunk: int = 0, last: bool = True) -> CacheSnapshot:
    return CacheSnapshot("w", "w-1", number, chunk, last, hashes)


def events(first: int, *changes: CacheChange, incarnation: str = "w-1") -> CacheEvents:
    return CacheEvents("w", incarnation, first, changes)


def stored(parent: int, hashes: Sequence[int]) -> CacheChange:
    return CacheChange(stored=hashes, parents=[parent], lengths=[len(hashes)])


def chains(stored: Sequence[int], parents: Sequence[int], lengths: Sequence[int]) -> CacheEvents:
    return events(0, CacheChange((), stored, parents, lengths))


def evicted(*hashes: int) -> CacheChange:
    return CacheChange(evicted=hashes)


def following(*hashes: int) -> tuple[PrefixIndex, CacheFeed]:
    """Return a feed that has got a snapshot with these blocks."""
    index = PrefixIndex()
    feed = CacheFeed(index)
    feed.worker_up("w", "w-1", CAPACITY, 0.0)
    assert not feed.is_current("w")
    assert feed.apply_snapshot(snapshot(*hashes), 0.0) is None
    assert feed.is_current("w")
    return index, feed


def test_changes_are_applied_in_order() -> None:
    index, feed = following(1, 2)
    both = CacheChange(evicted=[2], stored=[3, 4, 9], parents=[1, 0], lengths=[2, 1])
    assert feed.apply_events(events(0, both, evicted(9), stored(4, [5])), 0.0) is None
    assert index.match([1, 3, 4, 5]) == {"w": 4}
    assert index.num_blocks("w") == 4
    assert feed.apply_events(events(3, evicted(4, 5)), 0.0) is None
    assert index.match([1, 3, 4]) == {"w": 2}


def test_chains_of_one_change_may_continue_each_other_in_any_order() -> None:
    index, feed = following(1)
    assert feed.apply_events(chains([4, 3, 2], [3, 2, 1], [1, 1, 1]), 0.0) is None
    assert index.match([1, 2, 3, 4]) == {"w": 4}


def test_snapshot_arrives_in_chunks() -> None:
    index = PrefixIndex()
    feed = CacheFeed(index)
    feed.worker_up("w", "w-1", CAPACITY, 0.0)
    # Events before the snapshot are ignored.
    assert feed.apply_events(events(3, stored(0, [7])), 0.0) is None
    assert feed.apply_snapshot(snapshot(1, 2, number=5, last=False), 0.0) is None
    assert not feed.is_current("w")
    assert feed.apply_snapshot(snapshot(3, number=5, chunk=1), 0.0) is None
    assert feed.apply_events(events(5, stored(3, [4])), 0.0) is None
    assert index.match([1, 2, 3, 4, 7]) == {"w": 4}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (events(1, stored(0, [3])), "expected cache change 0, received 1"),
        (
            events(0, stored(5, [3])),
            "the worker reported a stored block whose parent block is not in the index",
        ),
        (
            events(0, evicted(3)),
            "the worker reported the eviction of a block that is not in the index",
        ),
        (
            events(0, evicted(1, 1)),
            "the worker reported the eviction of a block that is not in the index",
        ),
        (
            events(0, stored(0, [3, 4, 5])),
            "the worker reported 5 stored blocks, but its cache has only 4 blocks",
        ),
        (chains([3], [], []), "chains of 0 blocks, but it stored 1"),
        (chains([3, 4], [2, 0], [1]), "2 chains of stored blocks, but the lengths of 1"),
        (chains([3, 4], [2], [1]), "chains of 1 blocks, but it stored 2"),
        (chains([3], [2, 0], [1, 0]), "an empty chain of stored blocks"),
        (chains([], [2], [0]), "an empty chain of stored blocks"),
        (chains([3], [3], [1]), "stored blocks that follow themselves"),
        (chains([3, 4], [4], [2]), "stored blocks that follow themselves"),
        (chains([3, 4], [4, 3], [1, 1]), "stored blocks that follow themselves"),
        (chains([1], [0], [1]), "stored a block that is in the index already"),
        (chains([3, 3], [2], [2]), "stored a block that is in the index already"),
        (
            events(0, CacheChange([2], [2], [1], [1])),
            "stored and evicted the same block in one change",
        ),
        (
            events(0, CacheChange([2], [3], [2], [1])),
            "the worker reported a stored block whose parent block is not in the index",
        ),
        (events(0, incarnation="w-0"), "another incarnation of the worker: 'w-0'"),
        (snapshot(1), "a cache snapshot arrived that was not requested"),
    ],
    ids=lambda bad: "" if isinstance(bad, str) else type(bad).__name__,
)
def test_bad_event_leads_to_no_blocks_and_a_request_for_a_snapshot(
    bad: CacheEvents | CacheSnapshot, reason: str
) -> None:
    index, feed = following(1, 2)
    if isinstance(bad, CacheEvents):
        resync = feed.apply_events(bad, 0.0)
    else:
        resync = feed.apply_snapshot(bad, 0.0)
    assert resync is not None
    assert re.search(reason, resync.reason)
    assert index.num_blocks("w") == 0
    # This event was sent before the requested snapshot.
    assert feed.apply_events(events(1, stored(0, [3])), 0.0) is None
    assert index.num_blocks("w") == 0
    assert feed.apply_snapshot(snapshot(1, 3, number=9), 0.0) is None
    assert index.match([1, 3]) == {"w": 2}


@pytest.mark.parametrize(
    "second",
    [
        snapshot(2, chunk=2),
        snapshot(2, chunk=1, number=4),
        snapshot(2, 3, 4, 5, chunk=1),
        snapshot(2, 2, chunk=1),
        snapshot(1, chunk=1),
        snapshot(chunk=1, last=False),
        snapshot(chunk=1),
        events(0, stored(0, [3])),
    ],
)
def test_bad_chunk_of_a_snapshot_leads_to_another_snapshot(
    second: CacheEvents | CacheSnapshot,
) -> None:
    index = PrefixIndex()
    feed = CacheFeed(index)
    feed.worker_up("w", "w-1", CAPACITY, 0.0)
    assert feed.apply_snapshot(snapshot(1, last=False), 0.0) is None
    if isinstance(second, CacheEvents):
        assert feed.apply_events(second, 0.0) is not None
    else:
        assert feed.apply_snapshot(second, 0.0) is not None
    assert index.num_blocks("w") == 0
    assert feed.apply_snapshot(snapshot(1), 0.0) is None
    assert feed.is_current("w")


@pytest.mark.parametrize("has_begun", [False, True])
def test_snapshot_that_does_not_arrive_completely_in_time_is_requested_again(
    has_begun: bool,
) -> None:
    index = PrefixIndex()
    feed = CacheFeed(index)
    feed.worker_up("w", "w-1", CAPACITY, 5.0)
    if has_begun:
        assert feed.apply_snapshot(snapshot(1, last=False), 14.0) is None
    else:
        assert feed.apply_events(events(3, stored(0, [7])), 14.0) is None
    assert feed.due_resyncs(14.9) == []
    (resync,) = feed.due_resyncs(15.1)
    assert resync == ResyncCache("w", "the cache snapshot did not arrive completely within 10 s")
    assert index.num_blocks("w") == 0
    assert feed.due_resyncs(15.2) == []
    assert feed.apply_snapshot(snapshot(1), 15.2) is None
    assert feed.is_current("w")
    assert feed.due_resyncs(99.0) == []


def test_requests_for_a_snapshot_that_never_arrives_become_rare() -> None:
    feed = CacheFeed(PrefixIndex())
    feed.worker_up("w", "w-1", CAPACITY, 0.0)
    times = [tick / 10 for tick in range(6000) if feed.due_resyncs(tick / 10)]
    assert times[0] == pytest.approx(SNAPSHOT_SECONDS + 0.1)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[:2] == pytest.approx([SNAPSHOT_SECONDS, SNAPSHOT_SECONDS], abs=0.11)
    assert pauses[-1] == pytest.approx(MAX_RESYNC_SECONDS)
    assert len(times) < 16


def test_requests_for_snapshots_of_a_lying_worker_become_rare() -> None:
    index, feed = following()
    times = []
    for tick in range(3000):
        now = tick / 10
        resyncs = feed.due_resyncs(now)
        if not feed.is_current("w"):
            feed.apply_snapshot(snapshot(), now)
        resync = feed.apply_events(events(0, evicted(tick)), now)
        times += [now] * (len(resyncs) + (resync is not None))
        assert index.num_blocks("w") == 0
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[:4] == pytest.approx([1, 2, 4, 8])
    assert max(pauses) == pytest.approx(MAX_RESYNC_SECONDS)
    assert len(times) < 12


def test_a_gap_after_a_long_time_without_one_is_repaired_at_once() -> None:
    _, feed = following()
    now = 0.0
    for _ in range(5):
        assert feed.apply_events(events(7), now) is not None
        feed.apply_snapshot(snapshot(), now)
        now += 200.0


def test_lost_worker_has_no_blocks_and_its_late_events_are_ignored() -> None:
    index, feed = following(1)
    feed.worker_lost("w")
    assert index.num_blocks("w") == 0
    assert feed.apply_events(events(0, stored(0, [3])), 0.0) is None
    assert feed.apply_snapshot(snapshot(3), 0.0) is None
    assert feed.due_resyncs(99.0) == []
    assert index.num_blocks("w") == 0


@pytest.mark.parametrize("is_lost", [False, True])
def test_snapshot_is_requested_after_many_old_blocks_were_removed(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many blocks are removed in steps, and the worker may reconnect before the last step."""
    monkeypatch.setattr(prefix_index, "PURGED_BLOCKS", 1)
    index, feed = following(1, 2, 3)
    if is_lost:
        feed.worker_lost("w")
        feed.worker_up("w", "w-1", CAPACITY, 5.0)
        assert feed.apply_snapshot(snapshot(1, 2, 3), 5.0) is None
    else:
        assert feed.apply_events(events(7), 5.0) is None
    while index.is_leaving("w"):
        assert feed.due_resyncs(5.0) == []
        assert index.match([1, 2, 3]) == {}
        index.purge()
    assert len(feed.due_resyncs(5.0)) == 1
    assert feed.apply_snapshot(snapshot(1, 2, 3, number=8), 6.0) is None
    assert feed.is_current("w")
    assert index.match([1, 2, 3]) == {"w": 3}


# ------------------------------------------------------------------ feed and pool together


LAST_NAME = 90
"""Name of the block that the last event stores."""


@dataclass
class Channel:
    """A router's cache feed of the worker, and the messages that the feed has not read."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    feed: CacheFeed = field(init=False)
    messages: deque[CacheEvents | CacheSnapshot] = field(default_factory=deque)
    is_live: bool = False  # True once the worker has answered the last request for a snapshot

    def __post_init__(self) -> None:
        self.feed = CacheFeed(self.index)

    def connect(self, incarnation: str, now: float) -> None:
        self.messages.clear()
        self.is_live = False
        self.feed.worker_up("w", incarnation, CAPACITY, now)

    def read(self, now: float) -> None:
        message = self.messages.popleft()
        if isinstance(message, CacheEvents):
            resync = self.feed.apply_events(message, now)
        else:
            resync = self.feed.apply_snapshot(message, now)
        if resync is not None:
            self.is_live = False


class FeedMachine(RuleBasedStateMachine):
    """A pool and two routers. Messages are lost, duplicated and reordered, and streams end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_starts = 0
        self.routers = [Channel(), Channel()]
        self.start_worker()

    @rule()
    def start_worker(self) -> None:
        self.num_starts += 1
        self.pool = BlockPool(CAPACITY)
        self.reporter = CacheReporter(self.pool.published)
        for router in self.routers:
            router.connect(self.incarnation, self.now)

    @property
    def incarnation(self) -> str:
        return f"w-{self.num_starts}"

    @rule(names=PREFIXES)
    def cache(self, names: tuple[int, ...]) -> None:
        cache(self.pool, names)

    @rule(names=PREFIXES)
    def forget(self, names: tuple[int, ...]) -> None:
        forget(self.pool, self.pool.published.match(chain(*names)))

    @rule(chunk_size=st.integers(1, 3))
    def report(self, chunk_size: int) -> None:
        if not all(router.is_live for router in self.routers):
            self.reporter.request_snapshot()
        report = self.reporter.report()
        if report is None:
            return
        for router in self.routers:
            if router.is_live and (change := report.change) is not None:
                listed = [
                    CacheChange(change.evicted, change.stored, change.parents, change.lengths)
                ]
                router.messages.append(CacheEvents("w", self.incarnation, change.number, listed))
            elif not router.is_live and report.snapshot is not None:
                router.is_live = True
                hashes = short_hashes(report.snapshot.hashes)
                number = report.snapshot.next_number
                for chunk, start in enumerate(range(0, max(len(hashes), 1), chunk_size)):
                    end = start + chunk_size
                    is_last = end >= len(hashes)
                    router.messages.append(
                        CacheSnapshot(
                            "w", self.incarnation, number, chunk, is_last, hashes[start:end]
                        )
                    )

    @rule(number=st.integers(0, 1), count=st.integers(1, 4))
    def read(self, number: int, count: int) -> None:
        router = self.routers[number]
        for _ in range(min(count, len(router.messages))):
            router.read(self.now)

    @rule(number=st.integers(0, 1), fault=st.sampled_from(["lose", "duplicate", "swap"]))
    def disturb(self, number: int, fault: str) -> None:
        """Disturb the first messages.

        The last message stays, or is replaced by a message `without_changes`. Streams
        number their messages, so a router never misses a last message without notice.
        """
        messages = self.routers[number].messages
        if fault == "lose" and messages:
            lost = messages.popleft()
            if not messages and isinstance(lost, CacheEvents):
                messages.append(without_changes(lost))
        elif fault == "duplicate" and messages:
            messages.insert(0, messages[0])
        elif fault == "swap" and len(messages) > 2:
            messages[0], messages[1] = messages[1], messages[0]

    @rule(number=st.integers(0, 1), restarts=st.booleans())
    def reconnect(self, number: int, restarts: bool) -> None:
        if restarts:
            self.routers[number] = Channel()
        self.routers[number].connect(self.incarnation, self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for router in self.routers:
            if router.feed.due_resyncs(self.now):
                router.is_live = False

    def published(self) -> set[int]:
        return set(short_hashes(self.pool.published.hashes()))

    @invariant()
    def unknown_blocks_are_never_counted(self) -> None:
        for router in self.routers:
            assert router.index.num_blocks("w") <= CAPACITY

    def teardown(self) -> None:
        """Once all messages have been read, each router's index equals the worker's pool.

        This holds even if a router then loses the last event.
        """
        self.settle()
        cache(self.pool, (LAST_NAME,))
        self.report(chunk_size=2)
        assert self.routers[0].messages, "the worker reports each new block"
        self.disturb(0, "lose")
        self.settle()

    def settle(self) -> None:
        for _ in range(9):
            self.wait(70.0)
            self.report(chunk_size=2)
            for router in self.routers:
                while router.messages:
                    router.read(self.now)
        for router in self.routers:
            assert router.feed.is_current("w")
            assert_equal(router.index, self.published(), self.all_hashes())

    def all_hashes(self) -> Sequence[int]:
        names: list[tuple[int, ...]] = [(), (0,), (1,), (2,)]
        for _ in range(3):
            names = [*names, *((*one, last) for one in names for last in range(3))]
        names.append((LAST_NAME,))
        return short_hashes({chain(*one)[-1] for one in names if one})


def without_changes(lost: CacheEvents) -> CacheEvents:
    """Return the events that a worker sends instead of changes that a slow router has not read."""
    return replace(lost, first=lost.first + len(lost.changes), changes=())


def assert_equal(index: PrefixIndex, published: set[int], known: Sequence[int]) -> None:
    assert index.num_blocks("w") == len(published)
    assert {digest for digest in known if index.match((digest,))} == published


TestFeedMachine = FeedMachine.TestCase
TestFeedMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
