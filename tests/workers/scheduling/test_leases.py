"""Sequences that yield, and the leases that keep their blocks."""

import pytest

from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.sequence import Admitted, Finished, LeaseGone, Yielded
from tests.support.batcher_bench import Bench, limits, sequence, transfer_blocks


def test_yield_after_keeps_the_computed_blocks_under_a_lease() -> None:
    bench = Bench()
    bench.batcher.submit(sequence("a", list(range(10)), 9, yield_after=1))
    bench.run()
    assert len(bench.answers["a"]) == 1
    assert bench.batcher.events()[-1] == Yielded("a", 10)
    assert bench.batcher.load().leased_blocks == 3
    assert bench.batcher.load().running == 0
    bench.batcher.drop("a")
    load = bench.batcher.load()
    assert (load.leased_blocks, load.cached_blocks, load.free_blocks) == (0, 3, 29)


def test_sequence_that_finishes_does_not_yield() -> None:
    bench = Bench()
    bench.batcher.submit(sequence("a", [1, 2], 2, yield_after=2))
    bench.run()
    assert bench.batcher.events() == [Admitted("a", 0), Finished("a")]
    assert bench.batcher.load().leased_blocks == 0


def test_yield_requested_during_a_step_takes_effect_at_its_commit() -> None:
    bench = Bench()
    bench.batcher.submit(sequence("a", list(range(20)), 9))
    plan = bench.batcher.plan()
    assert plan is not None
    bench.batcher.request_yield("a")
    assert Yielded("a", 16) not in bench.batcher.events()
    bench.commit(plan)
    assert bench.batcher.events() == [Yielded("a", 16)]
    assert bench.answers == {}


def test_yield_requested_between_steps_takes_effect_at_once() -> None:
    bench = Bench()
    bench.batcher.submit(sequence("a", [1, 2, 3], 9))
    bench.step()
    bench.batcher.request_yield("a")
    assert bench.batcher.events()[-1] == Yielded("a", 3)


def test_queued_sequence_yields_at_once_and_has_no_lease() -> None:
    batcher = Batcher(limits())
    batcher.submit(sequence("a", [1, 2, 3]))
    batcher.request_yield("a")
    batcher.request_yield("never seen")
    assert batcher.events() == [Yielded("a", 0)]
    with pytest.raises(LeaseGone):
        batcher.pin("a", 0)
    batcher.check()


def test_dropped_lease_keeps_its_blocks_until_it_is_unpinned() -> None:
    bench = Bench()
    bench.batcher.submit(sequence("a", list(range(10)), 9, yield_after=1))
    bench.run()
    assert bench.batcher.pin("a", 4).size == 2
    bench.batcher.drop("a")
    assert bench.batcher.load().leased_blocks == 3
    with pytest.raises(LeaseGone):
        bench.batcher.pin("a", 0)
    bench.batcher.unpin("a")
    assert bench.batcher.load().leased_blocks == 0
    bench.batcher.check()


def test_all_leases_together_are_limited_to_lease_fraction() -> None:
    bench = Bench(lease_fraction=0.25)
    for key in range(4):
        bench.batcher.submit(sequence(key, [key, *range(11)], 9, yield_after=1))
        bench.run()
        assert bench.batcher.load().leased_blocks <= 8
    with pytest.raises(LeaseGone):
        bench.batcher.pin(1, 0)
    bench.batcher.pin(2, 0)
    bench.batcher.pin(3, 0)


def test_receiving_sequence_yields_once_its_transfer_has_ended() -> None:
    prefill, decode = Bench(), Bench()
    transfer_blocks(prefill, decode, list(range(14)), 8)
    decode.batcher.request_yield("d")
    assert not any(isinstance(event, Yielded) for event in decode.batcher.events())
    decode.batcher.transfer_done("d")
    assert decode.batcher.events() == [Yielded("d", 14)]
    decode.batcher.check()
