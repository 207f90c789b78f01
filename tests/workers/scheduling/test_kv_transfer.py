"""Sequences whose KV blocks come from another worker."""

import pytest

from penstock.loadtests.simulator.model.hash_model import copy_blocks
from penstock.workers.scheduling.sequence import Admitted, Finished, Preempted, Reserved
from tests.support.batcher_bench import Bench, sequence, transfer_blocks


def test_received_blocks_are_read_as_if_they_were_computed() -> None:
    for length in (1, 3, 4, 5, 8, 33):
        prefill, decode = Bench(), Bench()
        new = transfer_blocks(prefill, decode, list(range(length)), 8)
        reserved = decode.batcher.events()[-1]
        into = decode.batcher.reserved_blocks("d")
        assert reserved == Reserved("d", 0, new.source_len, into)
        assert isinstance(reserved, Reserved)
        assert reserved.blocks.tolist() == into.tolist()
        copy_blocks(prefill.model, prefill.batcher.pin("p", 0), decode.model, into)
        assert decode.batcher.load().reserved_blocks == into.size
        assert decode.batcher.load().receiving == 1
        decode.batcher.transfer_done("d")
        assert decode.batcher.load().receiving == 0
        prefill.batcher.unpin("p")
        decode.run()
        decode.expect(new)
        assert decode.batcher.load().prompt_tokens_computed == 0


def test_only_uncached_blocks_are_received() -> None:
    prefill, decode = Bench(), Bench()
    decode.batcher.submit(sequence("before", list(range(9)), 2))
    decode.run()
    new = transfer_blocks(prefill, decode, list(range(14)), 8)
    into = decode.batcher.reserved_blocks("d")
    assert decode.batcher.events()[-1] == Reserved("d", 8, new.source_len, into)
    copy_blocks(prefill.model, prefill.batcher.pin("p", 8), decode.model, into)
    decode.batcher.transfer_done("d")
    decode.run()
    decode.expect(new)


def test_no_blocks_are_received_if_all_are_cached() -> None:
    prefill, decode = Bench(), Bench()
    decode.batcher.submit(sequence("before", list(range(9)), 2))
    decode.run()
    decode.batcher.events()
    new = transfer_blocks(prefill, decode, list(range(8)), 8)
    assert decode.batcher.events() == [Admitted("d", 0, num_cached=8), Finished("d")]
    decode.expect(new)


def test_prompt_is_computed_if_its_transfer_fails() -> None:
    prefill, decode = Bench(), Bench()
    new = transfer_blocks(prefill, decode, list(range(14)), 8)
    decode.batcher.transfer_failed("d")
    decode.run()
    decode.expect(new)
    assert decode.batcher.load().prompt_tokens_computed == 14
    with pytest.raises(KeyError):
        decode.batcher.reserved_blocks("d")


def test_blocks_are_not_transferred_again_after_a_preemption() -> None:
    prefill, decode = Bench(), Bench(num_blocks=10, watermark=0)
    decode.batcher.submit(sequence("first", list(range(40, 44)), 30))
    decode.step()
    prefill.batcher.submit(sequence("p", list(range(8)), 20, yield_after=1))
    prefill.run()
    log = tuple(prefill.answers["p"])
    new = sequence("d", list(range(8)), 20, log=log, source_len=8)
    decode.batcher.submit(new)
    decode.step()
    into = decode.batcher.reserved_blocks("d")
    copy_blocks(prefill.model, prefill.batcher.pin("p", 0), decode.model, into)
    decode.batcher.transfer_done("d")
    decode.run()
    decode.expect(new)
    assert decode.batcher.load().preemptions == 1
    kinds = [type(event) for event in decode.batcher.events() if event.key == "d"]
    assert kinds == [Admitted, Reserved, Preempted, Admitted, Finished]


def test_reserved_blocks_of_a_sequence_dropped_before_its_events_are_taken_are_free() -> None:
    decode = Bench()
    decode.batcher.submit(sequence("running", [1, 2, 3], 8))
    decode.step()
    decode.batcher.plan()
    decode.batcher.events()
    decode.batcher.submit(sequence("d", list(range(14)), 8, source_len=13))
    decode.batcher.plan()  # planned ahead, so that the events stay pending while commands arrive
    assert decode.batcher.load().reserved_blocks == 4
    decode.batcher.drop("d")
    assert decode.batcher.events() == []
    assert decode.batcher.load().reserved_blocks == 0
    decode.batcher.check()


def test_reserved_blocks_of_a_dropped_sequence_stay_until_the_transfer_drains() -> None:
    prefill, decode = Bench(), Bench()
    transfer_blocks(prefill, decode, list(range(14)), 8)
    decode.batcher.events()  # from now on, a transfer may write to the reserved blocks
    decode.batcher.drop("d")
    decode.batcher.transfer_done("d")
    decode.batcher.transfer_failed("d")
    assert decode.batcher.load().reserved_blocks == 4
    assert decode.batcher.load().running == 0
    decode.batcher.check()
    decode.batcher.transfer_drained("d")
    decode.batcher.transfer_drained("d")
    assert decode.batcher.load().free_blocks == 32
