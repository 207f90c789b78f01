"""Order of admission; preemption and reclaimed leases when blocks run out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.scheduling.sequence import LeaseGone, StepPlan
from tests.support.batcher_bench import Bench, sequence, transfer_blocks


def test_late_short_request_finishes_before_an_early_long_one() -> None:
    bench = Bench()
    bench.batcher.submit(sequence("long", list(range(30)), 30))
    bench.step()
    bench.batcher.submit(sequence("short", [1, 2, 3], 2))
    bench.run()
    assert bench.finished == ["short", "long"]


def test_sequences_are_served_in_order_of_arrival() -> None:
    bench = Bench(max_sequences=1)
    for key in ("b", "a", "d", "c"):
        bench.batcher.submit(sequence(key, [1], 1))
    bench.run()
    assert bench.finished == ["b", "a", "d", "c"]


def test_lack_of_blocks_preempts_the_youngest_and_changes_no_answer() -> None:
    bench = Bench(num_blocks=10, watermark=0)
    sequences = [sequence(i, [i, 2, 3, 4, 5], 20) for i in range(4)]
    for new in sequences:
        bench.batcher.submit(new)
    bench.run()
    for new in sequences:
        bench.expect(new)
    assert bench.batcher.load().preemptions > 0
    assert bench.finished == [0, 1, 2, 3]


def test_preempted_sequences_do_not_thrash() -> None:
    bench = Bench(num_blocks=16)
    sequences = [sequence(i, [i, 2, 3, 4, 5], 40) for i in range(8)]
    for new in sequences:
        bench.batcher.submit(new)
    bench.run()
    for new in sequences:
        bench.expect(new)
    assert bench.batcher.load().preemptions > 0
    needed = sum(5 + 40 - 1 for _ in sequences)
    assert bench.num_tokens <= 1.5 * needed


def test_watermark_blocks_stay_free_for_running_sequences() -> None:
    for watermark, num_admitted in ((0, 2), (2, 1)):
        bench = Bench(num_blocks=5, watermark=watermark)
        for key in range(2):
            bench.batcher.submit(sequence(key, [key] * 8, 2))
        bench.step()
        assert bench.batcher.load().running == num_admitted
        bench.run()
        assert set(bench.finishes) == {0, 1}


def test_no_sequence_is_admitted_while_the_token_budget_is_used_up() -> None:
    bench = Bench()
    bench.batcher.submit(sequence("long", list(range(32)), 2))
    bench.batcher.submit(sequence("next", list(range(36)), 2))
    bench.step()
    bench.step()
    assert bench.batcher.load().queued == 1
    bench.run()
    assert bench.batcher.load().prompt_tokens_cached == 32


def prompts_of(plan: StepPlan) -> list[tuple[int, bool]]:
    """Return the number of tokens of each prompt in a step, and whether the step begins it."""
    sizes = np.diff(plan.query_starts)
    begins = sizes == plan.context_lens
    return [(size, begin) for size, begin in zip(sizes.tolist(), begins, strict=True) if size > 1]


def test_a_step_with_enough_prompt_tokens_begins_no_further_prompt() -> None:
    bench = Bench(num_blocks=99, max_model_len=99, max_batched_tokens=40, enough_prompt_tokens=20)
    for key, length in enumerate((12, 9, 60, 5)):
        bench.batcher.submit(sequence(key, [key] * length, 3))
    plans = iter(bench.step, None)
    found = [prompts_of(plan) for plan in plans]
    begun, continued = True, False
    assert found[0] == [(12, begun), (9, begun)], "the second prompt reaches the limit"
    assert found[1] == [(38, begun)], "one prompt may use the rest of the token budget"
    assert found[2] == [(22, continued)], "a continued prompt counts"
    assert found[3] == [(5, begun)]
    assert not any(found[4:])


@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=12),
    enough=st.integers(1, 40),
    spare=st.integers(1, 70),
)
def test_a_step_begins_prompts_until_it_has_enough_prompt_tokens(
    lengths: list[int], enough: int, spare: int
) -> None:
    sizes = {"num_blocks": 400, "max_model_len": 99, "max_batched_tokens": 12 + spare}
    bench = Bench(**sizes, max_sequences=12, enough_prompt_tokens=enough)
    sequences = [sequence(key, [key] * length, 2) for key, length in enumerate(lengths)]
    for new in sequences:
        bench.batcher.submit(new)
    while True:
        waiting = bench.batcher.load().queued
        plan = bench.step()
        if plan is None:
            break
        prompts = prompts_of(plan)
        total, last = sum(size for size, _ in prompts), prompts[-1:]
        if last and last[0][1]:
            assert total - last[0][0] < enough, "the last prompt began although it had to wait"
        if total < enough and len(plan.tokens) < sizes["max_batched_tokens"]:
            assert bench.batcher.load().queued == 0 or not waiting, "a prompt waits for nothing"
    for new in sequences:
        bench.expect(new)


def test_oldest_unpinned_lease_is_reclaimed_for_running_sequences() -> None:
    bench = Bench(num_blocks=16, lease_fraction=1.0)
    for key in ("pinned", "old", "young"):
        bench.batcher.submit(sequence(key, [len(key), *range(11)], 9, yield_after=1))
        bench.run()
    bench.batcher.pin("pinned", 0)
    new = sequence("a", [9] * 20, 17)
    bench.batcher.submit(new)
    bench.run()
    bench.expect(new)
    with pytest.raises(LeaseGone):
        bench.batcher.pin("old", 0)
    assert bench.batcher.pin("young", 0).size == 3


def test_leases_are_reclaimed_before_a_sequence_is_preempted() -> None:
    bench = Bench(num_blocks=10, lease_fraction=1.0)
    bench.batcher.submit(sequence("leased", list(range(16)), 9, yield_after=1))
    bench.run()
    for key in range(2):
        bench.batcher.submit(sequence(key, [20 + key], 17))
    bench.run()
    assert bench.batcher.load().preemptions == 0
    with pytest.raises(LeaseGone):
        bench.batcher.pin("leased", 0)


def test_leases_are_reclaimed_for_the_head_of_the_queue_if_no_sequence_runs() -> None:
    bench = Bench(num_blocks=12, lease_fraction=1.0)
    for key in range(2):
        bench.batcher.submit(sequence(key, [key, *range(15)], 9, yield_after=1))
        bench.run()
    new = sequence("big", [7] * 40, 3)
    bench.batcher.submit(new)
    bench.run()
    bench.expect(new)


def test_receiving_sequences_are_not_preempted() -> None:
    prefill, decode = Bench(), Bench(num_blocks=10)
    new = transfer_blocks(prefill, decode, list(range(12)), 12)
    other = sequence("other", list(range(50, 56)), 30)
    decode.batcher.submit(other)
    decode.run()  # `other` takes all free blocks and then needs one more
    assert decode.batcher.load().preemptions == 1
    assert decode.batcher.reserved_blocks("d").size == 3
    decode.batcher.transfer_failed("d")
    decode.run()
    decode.expect(new)
    decode.expect(other)


def test_static_batch_admits_no_sequence_until_all_have_ended() -> None:
    bench = Bench(static=True, max_sequences=3, max_batched_tokens=6)
    sequences = [sequence(n, list(range(n, n + 9)), 2 + 3 * n) for n in range(7)]
    sequences.append(sequence("choices", [4, 5], 3, num_choices=2))
    for new in sequences:
        bench.submit(new)
    num_running: list[int] = []
    while bench.step() is not None:
        num_running.append(bench.batcher.load().running)
    # In a static batch, rows of ended sequences stay empty until the last sequence has ended.
    begins = [
        at for at, (a, b) in enumerate(zip([0, *num_running], num_running, strict=False)) if b > a
    ]
    assert [num_running[at] for at in begins] == [3, 3, 3]
    assert all(at == 0 or num_running[at - 1] == 0 for at in begins)
    for new in sequences:
        bench.expect(new)
