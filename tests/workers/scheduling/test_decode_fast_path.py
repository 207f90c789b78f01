"""DecodeFastPath derives a plan from the previous plan, even if that plan's step is in flight."""

from dataclasses import fields

import numpy as np
import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.simulator.model.hash_model import reference_answer
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.sequence import Finished, FinishReason, StepPlan
from tests.support.batcher_bench import Bench, limits, sequence


def first_decode(bench: Bench, *lengths: int, max_tokens: int = 40) -> StepPlan:
    """Submit prompts of these lengths; return the first plan that only decodes, uncommitted."""
    for length in lengths:
        prompt = list(range(length, 2 * length))
        bench.batcher.submit(sequence(length, prompt, max_tokens))
    while True:
        plan = bench.batcher.plan()
        assert plan is not None
        if len(plan.tokens) == len(plan.rows) == len(lengths):
            return plan
        bench.commit(plan)


def assert_same(plan: StepPlan, other: StepPlan, block_size: int) -> None:
    for name in {each.name for each in fields(StepPlan)} - {"block_tables", "ahead", "number"}:
        assert getattr(plan, name).tolist() == getattr(other, name).tolist(), name
    for b, length in enumerate(plan.context_lens.tolist()):
        used = -(-length // block_size)
        assert plan.block_tables[b, :used].tolist() == other.block_tables[b, :used].tolist()


def test_derived_plan_equals_the_plan_made_from_the_tables() -> None:
    ahead, from_tables = Bench(num_blocks=64), Bench(num_blocks=64)
    plan, other = first_decode(ahead, 3, 5, 8), first_decode(from_tables, 3, 5, 8)
    for _ in range(30):
        following = ahead.batcher.plan()
        assert following is not None
        assert following.ahead
        drawn = ahead.model.run(plan)
        following.fill(drawn)
        ahead.batcher.commit(plan, drawn)
        from_tables.commit(other)
        # A yield of an unknown sequence has no effect. `invalidate` forces a full plan.
        from_tables.batcher.request_yield("unknown")
        from_tables.batcher._fast_path.invalidate()
        plan, fresh = following, from_tables.batcher.plan()
        assert fresh is not None
        other = fresh
        assert_same(plan, other, 4)
        published = [bench.batcher.table.num_published.tolist() for bench in (ahead, from_tables)]
        assert published[0] == published[1]


def test_token_of_a_finished_sequence_in_the_next_step_is_discarded() -> None:
    answer, _ = reference_answer([1, 2, 3], SamplingParams(max_tokens=40), 64)
    length = next(n for n in range(3, 40) if answer[n] not in answer[:n])
    bench = Bench()
    bench.batcher.submit(sequence("a", [1, 2, 3], 40, stop_token_ids=(answer[length],)))
    bench.batcher.submit(sequence("b", [7], 40))
    plan, behind = bench.batcher.plan(), bench.batcher.plan()
    while True:
        assert plan is not None
        drawn = bench.model.run(plan)
        if behind is not None:
            behind.fill(drawn)
        output = bench.batcher.commit(plan, drawn)
        if FinishReason.STOP in output.finishes.tolist():
            break
        plan, behind = behind or bench.batcher.plan(), bench.batcher.plan()
    assert behind is not None
    used = bench.batcher.load().used_blocks
    assert Finished("a") in bench.batcher.events()
    assert bench.batcher.plan() is None  # no plan is possible until the step in flight is committed
    bench.batcher.check()
    output = bench.batcher.commit(behind, bench.model.run(behind))
    assert output.keys == ["b"]
    assert bench.batcher.load().used_blocks < used
    bench.batcher.check()


def test_no_step_is_planned_beyond_a_known_length_limit() -> None:
    bench = Bench()
    plan = first_decode(bench, 3, max_tokens=3)
    behind = bench.batcher.plan()
    assert behind is not None
    behind.fill(bench.model.run(plan))
    bench.commit(plan)
    assert bench.batcher.plan() is None
    bench.commit(behind)
    assert bench.finishes == {3: FinishReason.LENGTH}


@pytest.mark.parametrize("blocked", ["blocks", "newcomer"])
def test_no_step_is_planned_ahead_if_the_commit_is_needed_first(blocked: str) -> None:
    bench = Bench(num_blocks=3 if blocked == "blocks" else 32, max_model_len=16, watermark=0)
    plan = first_decode(bench, 3, 4, max_tokens=8)
    if blocked == "newcomer":
        bench.batcher.submit(sequence("new", [1, 2], 4))
    behind = bench.batcher.plan()
    for _ in range(4):
        if behind is None:
            break
        drawn = bench.model.run(plan)
        behind.fill(drawn)
        bench.batcher.commit(plan, drawn)
        plan, behind = behind, bench.batcher.plan()
    assert behind is None
    bench.commit(plan)
    plan = bench.step() or plan
    assert bench.batcher.load().preemptions == (blocked == "blocks")


def test_withdrawn_step_is_planned_again_with_new_sequences() -> None:
    bench = Bench()
    plan = first_decode(bench, 3, 4)
    behind = bench.batcher.plan()
    assert behind is not None
    bench.batcher.submit(sequence("new", [1, 2], 4))
    bench.batcher.withdraw(behind)
    assert bench.batcher.plan() is None
    bench.commit(plan)
    again = bench.batcher.plan()
    assert again is not None
    assert len(again.rows) == 3
    bench.commit(again)
    bench.run()
    for length in (3, 4):
        bench.expect(sequence(length, list(range(length, 2 * length)), 40))


def test_sequence_dropped_during_two_steps_keeps_its_blocks_until_both_end() -> None:
    bench = Bench()
    first = first_decode(bench, 3, 4)
    second = bench.batcher.plan()
    assert second is not None
    bench.batcher.drop(3)
    for plan in (first, second):
        used = bench.batcher.load().used_blocks
        output = bench.batcher.commit(plan, np.zeros(2, np.int32))
        assert output.keys == [4]
    assert bench.batcher.load().used_blocks < used
    bench.batcher.check()


def test_rows_array_of_an_unchanged_batch_is_reused() -> None:
    batcher = Batcher(limits())
    batcher.submit(sequence("a", [1, 2], 40))
    plans = []
    for _ in range(3):
        plan = batcher.plan()
        assert plan is not None
        plans.append(plan)
        batcher.commit(plan, np.array([9], np.int32))
    assert plans[0].rows is plans[1].rows is plans[2].rows
    assert plans[2].tokens.tolist() == [9]
