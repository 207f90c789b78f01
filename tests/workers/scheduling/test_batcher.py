"""Batcher: contents of a step, ends of sequences, and dropped sequences."""

import numpy as np
import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.simulator.model.hash_model import reference_answer
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.sequence import Admitted, Finished, FinishReason
from tests.support.batcher_bench import Bench, limits, sequence


def test_concurrent_sequences_equal_the_reference() -> None:
    bench = Bench()
    sequences = [sequence(i, list(range(i, i + 3 + 5 * i)), 5 + i) for i in range(7)]
    for new in sequences:
        bench.batcher.submit(new)
    bench.run()
    for new in sequences:
        bench.expect(new)
    load = bench.batcher.load()
    assert load.used_blocks == load.leased_blocks == load.reserved_blocks == load.queued == 0


def test_plan_describes_one_ragged_batch() -> None:
    batcher = Batcher(limits())
    batcher.submit(sequence("a", [5, 6, 7], 4))
    plan = batcher.plan()
    assert plan is not None
    batcher.commit(plan, np.array([9], np.int32))
    batcher.submit(sequence("b", list(range(20)), 4))
    plan = batcher.plan()
    assert plan is not None
    a, b = plan.rows.tolist()
    assert plan.number == 2
    assert plan.tokens.tolist() == [9, *range(15)]
    assert plan.positions.tolist() == [3, *range(15)]
    assert plan.query_starts.tolist() == [0, 1, 16]
    assert plan.context_lens.tolist() == [4, 15]
    assert plan.samples.tolist() == [True, False]
    table = batcher.table.block_table
    slots = [table[a, 0] * 4 + 3, *(table[b, p // 4] * 4 + p % 4 for p in range(15))]
    assert plan.slots.tolist() == slots
    assert plan.block_tables[1, :4].tolist() == table[b, :4].tolist()
    for array in (plan.rows, plan.tokens, plan.positions, plan.query_starts, plan.context_lens):
        assert array.dtype == np.int32
    assert plan.slots.dtype == plan.block_tables.dtype == np.int32


def test_peak_of_used_blocks_counts_shared_blocks_once() -> None:
    bench = Bench(max_batched_tokens=64)
    prefix = list(range(12))
    first = sequence("first", [*prefix, 1], 9)
    others = [sequence(i, [*prefix, 50 + i], 8) for i in range(3)]
    bench.batcher.submit(first)
    bench.step()
    for new in others:
        bench.batcher.submit(new)
    bench.run()
    # Lengths are 13 + 9 - 1 and 13 + 8 - 1: an answer's last token has no KV.
    assert bench.peak_used == 6 + 3 * 5 - 3 * 3
    assert bench.batcher.load().prompt_tokens_cached == 36


def test_sequences_share_nothing_across_salts() -> None:
    bench = Bench()
    for salt in (b"a", b"b"):
        bench.batcher.submit(sequence(salt, list(range(12)), 2, salt=salt))
        bench.run()
    assert bench.batcher.load().prompt_tokens_cached == 0


def test_at_least_one_token_is_computed_however_much_is_cached() -> None:
    bench = Bench()
    for key in range(3):
        new = sequence(key, list(range(12)), 3)
        bench.batcher.submit(new)
        bench.run()
        bench.expect(new)
    load = bench.batcher.load()
    assert load.prompt_tokens_cached == 2 * 11
    assert load.prompt_tokens_computed == 12 + 2 * 1


def test_answers_are_cached_too() -> None:
    bench = Bench()
    first = sequence("first", [1, 2, 3], 10)
    bench.batcher.submit(first)
    bench.run()
    second = sequence("second", [1, 2, 3, *bench.answers["first"]], 2)
    bench.batcher.submit(second)
    bench.run()
    bench.expect(second)
    assert bench.batcher.load().prompt_tokens_cached == 12


def test_stop_token_ends_a_sequence_of_at_least_min_tokens() -> None:
    prompt = [3, 1, 4]
    answer, _ = reference_answer(prompt, SamplingParams(max_tokens=10), 64)
    bench = Bench()
    stops = (*range(1000, 1010), 2**32 - 1, answer[2])
    first = answer.index(answer[2]) + 1
    for key, least in (("at once", 0), ("exactly", first), ("too early", first + 1)):
        new = sequence(key, prompt, 10, stop_token_ids=stops, min_tokens=least)
        bench.batcher.submit(new)
        bench.run()
        bench.expect(new)
    assert bench.answers["exactly"] == bench.answers["at once"] == answer[:first]
    assert bench.finishes["exactly"] is FinishReason.STOP
    assert len(bench.answers["too early"]) > first


def test_answer_ends_at_max_model_len() -> None:
    bench = Bench()
    new = sequence("a", list(range(60)), 1000)
    bench.batcher.submit(new)
    bench.run()
    bench.expect(new)
    assert len(bench.answers["a"]) == 4


def test_token_log_counts_towards_max_tokens_and_indices_continue() -> None:
    bench = Bench()
    answer, _ = reference_answer([1, 2, 3], SamplingParams(max_tokens=6), 64)
    bench.batcher.submit(sequence("a", [1, 2, 3], 6, log=tuple(answer[:4])))
    plan = bench.batcher.plan()
    assert plan is not None
    output = bench.batcher.commit(plan, bench.model.run(plan))
    assert output.indices.tolist() == [4]
    assert output.tokens.tolist() == [answer[4]]


def test_events_report_admission_and_end() -> None:
    bench = Bench()
    bench.batcher.submit(sequence("a", [1, 2], 2))
    bench.step()
    assert bench.batcher.events() == [Admitted("a", 0)]
    bench.step()
    assert bench.batcher.events() == [Finished("a")]
    assert bench.batcher.events() == []


def test_load_counts_uncomputed_tokens() -> None:
    bench = Bench(max_sequences=2)
    for length in (40, 5, 9):
        bench.batcher.submit(sequence(length, list(range(length, 2 * length)), 3))
    assert bench.batcher.load().queued_tokens == 54
    bench.step()  # computes the first 16 tokens of the first prompt
    assert bench.batcher.load().queued_tokens == 38
    bench.step()
    bench.step()  # computes the last 8 tokens of the first prompt, and all of the second prompt
    load = bench.batcher.load()
    assert (load.running, load.queued, load.queued_tokens) == (2, 1, 9)
    assert load.prompt_tokens_computed == 45


def test_cached_answer_tokens_are_not_counted_as_prompt() -> None:
    bench = Bench()
    bench.batcher.submit(sequence("a", [1, 2, 3], 12))
    bench.run()
    log = tuple(bench.answers["a"][:8])
    bench.batcher.submit(sequence("b", [1, 2, 3], 12, log=log))
    bench.run()
    assert bench.batcher.load().prompt_tokens_cached == 3


def test_admission_reports_the_cached_tokens_of_the_prompt() -> None:
    bench = Bench()
    prompt = list(range(10))
    # The last prompt token of "b" is computed although it is cached.
    for key, num_cached in (("a", 0), ("b", 9)):
        bench.batcher.submit(sequence(key, prompt, 2))
        bench.step()
        (admitted,) = bench.batcher.events()
        assert isinstance(admitted, Admitted)
        assert (admitted.key, admitted.num_cached) == (key, num_cached)
        bench.run()
        bench.batcher.events()
    log = tuple(bench.answers["a"][:1])
    bench.batcher.submit(sequence("c", prompt[:7], 9, log=(*prompt[7:], *log)))
    bench.step()
    admitted = bench.batcher.events()[0]
    assert isinstance(admitted, Admitted)
    assert admitted.num_cached == 7  # of the 10 cached positions, 7 belong to the prompt


def test_all_choices_of_a_prompt_report_the_same_cached_tokens() -> None:
    bench = Bench()
    prompt = list(range(10))
    bench.batcher.submit(sequence("a", prompt, 2))
    bench.run()
    bench.batcher.events()
    bench.batcher.submit(sequence("b", prompt, 2, num_choices=3))
    bench.step()
    admitted = [event for event in bench.batcher.events() if isinstance(event, Admitted)]
    assert [(each.choice, each.num_cached) for each in admitted] == [(0, 9), (1, 9), (2, 9)]


def test_dropping_queued_sequences_leaves_the_queue_empty() -> None:
    batcher = Batcher(limits())
    for key in range(40):
        batcher.submit(sequence(key, [1, 2, 3]))
    for key in range(40):
        batcher.drop(key)
    batcher.drop("never seen")
    assert batcher.plan() is None
    assert batcher.load().queued == batcher.load().queued_tokens == 0
    batcher.check()


def test_dropped_sequence_has_no_events_and_no_lease() -> None:
    bench = Bench()
    for key in ("a", "b"):
        bench.batcher.submit(sequence(key, [1, 2, 3], 9))
    bench.step()
    bench.batcher.request_yield("a")
    bench.batcher.drop("a")
    assert bench.batcher.events() == [Admitted("b", 1)]
    assert bench.batcher.load().leased_blocks == 0


def test_sequence_dropped_in_flight_keeps_its_blocks_until_the_commit() -> None:
    bench = Bench()
    bench.batcher.submit(sequence("a", [1, 2, 3], 9))
    bench.batcher.submit(sequence("b", [4, 5, 6], 9))
    plan = bench.batcher.plan()
    assert plan is not None
    bench.batcher.drop("a")
    assert bench.batcher.load().used_blocks == 2
    bench.batcher.check()
    output = bench.batcher.commit(plan, bench.model.run(plan))
    answer, _ = reference_answer([4, 5, 6], SamplingParams(max_tokens=9), 64)
    assert (output.keys, output.tokens.tolist()) == (["b"], answer[:1])
    assert bench.batcher.load().used_blocks == 1
    bench.batcher.drop("b")
    load = bench.batcher.load()
    # "a" was dropped before its step was committed, so only the three tokens of "b" are cached.
    assert (load.used_blocks, load.cached_blocks, load.free_blocks) == (0, 1, 31)
    bench.batcher.check()


def test_block_is_published_once_its_last_position_is_computed() -> None:
    for num_steps, num_published in ((1, 0), (2, 1)):
        bench = Bench()
        bench.batcher.submit(sequence("a", [1, 2, 3], 9))
        for _ in range(num_steps):  # After one step, the last token of the block has no KV yet.
            bench.step()
        bench.batcher.drop("a")
        assert len(bench.batcher.pool.published.hashes()) == num_published


def test_failed_sequence_is_not_cached() -> None:
    bench = Bench()
    bench.batcher.submit(sequence("bad", list(range(20)), 9))
    bench.step()
    plan = bench.batcher.plan()
    assert plan is not None
    bench.batcher.fail("bad")
    bench.batcher.commit(plan, bench.model.run(plan))
    bench.batcher.check()
    load = bench.batcher.load()
    assert load.free_blocks == 32
    assert load.cached_blocks == 0


def test_steps_are_committed_oldest_first_and_at_most_two_in_flight() -> None:
    batcher = Batcher(limits())
    batcher.submit(sequence("a", [1], 9))
    first = batcher.plan()
    second = batcher.plan()
    assert first is not None
    assert second is not None
    with pytest.raises(ValueError, match="2 steps"):
        batcher.plan()
    with pytest.raises(ValueError, match="not the oldest"):
        batcher.commit(second, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="expected"):
        batcher.commit(first, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="not the newest"):
        batcher.withdraw(first)
    batcher.commit(first, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="not the oldest"):
        batcher.commit(first, np.zeros(1, np.int32))
