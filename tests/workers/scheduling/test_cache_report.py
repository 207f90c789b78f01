"""CacheReporter: a router that replays all reports knows exactly the published blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.common.block_hash import short_hashes
from penstock.workers.scheduling.cache_report import CacheChange, CacheReporter
from penstock.workers.scheduling.kv_pool import BlockPool, State
from tests.support.cached_blocks import PREFIXES, cache, chain, forget


def change_of(reporter: CacheReporter) -> CacheChange:
    report = reporter.report()
    assert report is not None
    assert report.change is not None
    return report.change


def recording(num_blocks: int) -> tuple[BlockPool, CacheReporter]:
    """Return a pool and its reporter, from which the first snapshot has been taken."""
    pool = BlockPool(num_blocks)
    reporter = CacheReporter(pool.published)
    reporter.request_snapshot()
    reporter.report()
    return pool, reporter


def test_stored_blocks_are_reported_as_chains_with_their_parent() -> None:
    pool, reporter = recording(8)
    cache(pool, (1, 2))
    first, second = short_hashes(chain(1, 2))
    assert change_of(reporter) == CacheChange(0, (), [first, second], [0], [2])
    cache(pool, (1, 2, 3))
    cache(pool, (4,))
    third, other = short_hashes([chain(1, 2, 3)[-1], chain(4)[-1]])
    assert change_of(reporter) == CacheChange(1, (), [third, other], [second, 0], [1, 1])
    assert reporter.report() is None


def test_evicted_blocks_are_reported_with_what_is_stored() -> None:
    pool, reporter = recording(2)
    cache(pool, (1, 2))
    assert change_of(reporter).number == 0
    cache(pool, (3,))
    evicted, stored = short_hashes([chain(1, 2)[-1], chain(3)[0]])
    assert change_of(reporter) == CacheChange(1, [evicted], [stored], [0], [1])


def test_block_that_is_stored_and_evicted_between_two_reports_is_not_reported() -> None:
    pool, reporter = recording(1)
    cache(pool, (1,))
    cache(pool, (2,))
    change = change_of(reporter)
    assert (change.evicted, change.stored) == ((), short_hashes(chain(2)))
    cache(pool, (3,))
    cache(pool, (2,))
    assert reporter.report() is None


def test_parent_that_was_evicted_is_not_named() -> None:
    pool, reporter = recording(4)
    blocks = cache(pool, (1,))
    change_of(reporter)
    forget(pool, blocks)
    taken = pool.take(1, State.USED)
    pool.publish(taken.tolist(), chain(1, 2)[1:], chain(1))
    first, second = short_hashes(chain(1, 2))
    assert change_of(reporter) == CacheChange(1, [first], [second], [0], [1])


def test_nothing_is_recorded_before_a_snapshot_and_after_stop() -> None:
    pool = BlockPool(4)
    reporter = CacheReporter(pool.published)
    cache(pool, (1,))
    assert pool.published.changes is None
    assert reporter.report() is None
    reporter.request_snapshot()
    report = reporter.report()
    assert report is not None
    assert report.change is None
    assert report.snapshot is not None
    assert report.snapshot.hashes == chain(1)
    reporter.stop()
    cache(pool, (2,))
    assert pool.published.changes is None
    assert reporter.report() is None


@pytest.mark.parametrize("is_recorded", [False, True])
def test_router_with_a_snapshot_from_before_a_stop_notices_the_missing_changes(
    is_recorded: bool,
) -> None:
    """The snapshot is on its way to one router; this router leaves, and another one subscribes.

    The worker sends the snapshot to the second router. The blocks that were cached around the stop
    are in no change.
    """
    pool = BlockPool(4)
    reporter = CacheReporter(pool.published)
    reporter.request_snapshot()
    report = reporter.report()
    assert report is not None
    assert report.snapshot is not None
    if is_recorded:
        cache(pool, (1,))
    reporter.stop()
    if not is_recorded:
        cache(pool, (1,))
    reporter.request_snapshot()
    reporter.report()
    cache(pool, (2,))
    assert change_of(reporter).number > report.snapshot.next_number


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["cache", "forget", "report", "snapshot"]), PREFIXES)))
def test_reports_replay_to_the_published_blocks(actions: list[tuple[str, tuple[int, ...]]]) -> None:
    pool, reporter = recording(5)
    known, next_number = set[int](), 0
    for action, names in [*actions, ("report", ())]:
        if action == "cache":
            cache(pool, names)
        elif action == "forget":
            forget(pool, pool.published.match(chain(*names)))
        if action == "snapshot":
            reporter.request_snapshot()
        if action not in ("report", "snapshot") or (report := reporter.report()) is None:
            continue
        if (change := report.change) is not None:
            assert change.number == next_number
            next_number += 1
            assert known.issuperset(change.evicted)
            known.difference_update(change.evicted)
            assert known.isdisjoint(change.stored)
            known.update(change.stored)
            assert known.issuperset(parent for parent in change.parents if parent)
            assert sum(change.lengths) == len(change.stored)
            assert len(change.lengths) == len(change.parents)
            assert len(known) <= pool.num_blocks
        if report.snapshot is not None:
            assert report.snapshot.next_number == next_number
            assert set(short_hashes(report.snapshot.hashes)) == known
    assert known == set(short_hashes(pool.published.hashes()))
