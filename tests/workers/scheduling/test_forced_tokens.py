"""Forced tokens follow sampled tokens and are computed together in one step, within all limits."""

from typing import Any

import numpy as np
import pytest

from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.sequence import FinishReason, StepOutput, StepPlan, Yielded
from tests.support.batcher_bench import limits, sequence


def planned(batcher: Batcher) -> StepPlan:
    plan = batcher.plan()
    assert plan is not None
    return plan


def first_step(forced: list[int], **changes: Any) -> tuple[Batcher, StepOutput]:
    """Run a prompt of three tokens; sample token 9, which the tokens `forced` follow."""
    batcher = Batcher(limits())
    batcher.submit(sequence("a", [5, 6, 7], **{"max_tokens": 20, **changes}))
    plan = planned(batcher)
    row = int(plan.rows[0])
    return batcher, batcher.commit(plan, np.array([9], np.int32), forced={row: forced})


def columns(output: StepOutput) -> list[tuple[object, int, int, int]]:
    indices, tokens, finishes = output.indices, output.tokens, output.finishes
    return list(zip(output.keys, indices.tolist(), tokens.tolist(), finishes.tolist(), strict=True))


def test_next_step_computes_sampled_and_forced_tokens_together() -> None:
    batcher, output = first_step([1, 2, 3])
    assert columns(output) == [("a", 0, 9, 0), ("a", 1, 1, 0), ("a", 2, 2, 0), ("a", 3, 3, 0)]
    plan = planned(batcher)
    assert plan.tokens.tolist() == [9, 1, 2, 3]
    assert plan.positions.tolist() == [3, 4, 5, 6]
    assert plan.samples.tolist() == [True]
    assert columns(batcher.commit(plan, np.array([4], np.int32))) == [("a", 4, 4, 0)]
    assert planned(batcher).tokens.tolist() == [4]
    batcher.check()


def test_answer_ends_at_a_forced_stop_token_or_at_its_limit() -> None:
    batcher, output = first_step([1, 2, 3], stop_token_ids=(2,))
    assert columns(output)[-1] == ("a", 2, 2, FinishReason.STOP)
    assert batcher.plan() is None
    batcher, output = first_step([1, 2, 3], max_tokens=3)
    assert columns(output)[-1] == ("a", 2, 2, FinishReason.LENGTH)
    assert batcher.plan() is None
    _, output = first_step([1, 2, 3], max_tokens=1)
    assert columns(output) == [("a", 0, 9, FinishReason.LENGTH)]


def test_sequence_yields_behind_the_forced_token_that_makes_it_due() -> None:
    batcher, output = first_step([1, 2, 3], yield_after=2)
    assert [token for _, _, token, _ in columns(output)] == [9, 1]
    assert [event for event in batcher.events() if isinstance(event, Yielded)] == [Yielded("a", 3)]


def test_row_in_a_step_that_was_planned_ahead_takes_no_forced_tokens() -> None:
    batcher, _ = first_step([])
    plan = planned(batcher)
    ahead = planned(batcher)
    assert ahead.ahead
    output = batcher.commit(plan, np.array([4], np.int32), forced={int(plan.rows[0]): [1, 2]})
    assert columns(output) == [("a", 1, 4, 0)]
    ahead.fill(output.tokens)
    assert columns(batcher.commit(ahead, np.array([1], np.int32))) == [("a", 2, 1, 0)]


def test_row_with_forced_tokens_counts_as_decoding() -> None:
    batcher, _ = first_step([1, 2, 3])
    (row,) = planned(batcher).rows
    assert batcher.table.decode_len[row] == 4
    batcher.drop("a")
    batcher, _ = first_step([])
    (row,) = planned(batcher).rows
    assert batcher.table.decode_len[row] == 1


def test_only_the_row_that_has_forced_tokens_takes_them() -> None:
    batcher = Batcher(limits())
    for key in "abc":
        batcher.submit(sequence(key, [5, 6], 20, stop_token_ids=(8,)))
    plan = planned(batcher)
    a, b, c = plan.sampling_rows.tolist()
    output = batcher.commit(plan, np.array([9, 8, 7], np.int32), forced={c: [1], b: [2], a: [3, 4]})
    found = columns(output)
    assert found[:3] == [("a", 0, 9, 0), ("b", 0, 8, FinishReason.STOP), ("c", 0, 7, 0)]
    assert found[3:] == [("a", 1, 3, 0), ("c", 1, 1, 0), ("a", 2, 4, 0)]
    assert planned(batcher).tokens.tolist() == [9, 3, 4, 7, 1]
    batcher.check()


@pytest.mark.parametrize(("num_others", "num_forced"), [(0, 1), (1, 4), (2, 8)])
def test_forced_tokens_are_left_out_if_too_few_for_the_other_rows(
    num_others: int, num_forced: int
) -> None:
    for missing in (0, 1):
        batcher = Batcher(limits())
        for key in range(num_others + 1):
            batcher.submit(sequence(key, [5, 6], 20))
        plan = planned(batcher)
        drawn = np.full(num_others + 1, 9, np.int32)
        forced = {int(plan.rows[0]): [1] * (num_forced - missing)}
        output = batcher.commit(plan, drawn, forced=forced)
        num_taken = 0 if missing else num_forced
        assert len(output.keys) == num_others + 1 + num_taken
        assert planned(batcher).tokens.tolist() == [9, *[1] * num_taken, *[9] * num_others]
