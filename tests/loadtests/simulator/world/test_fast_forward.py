"""FastForward: skipping steps leaves the same state as running these steps one by one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loadtests.simulator.world.fast_forward import FastForward
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.sequence import Ints, NewSequence, StepPlan
from tests.support.batcher_bench import limits, sequence

TABLE = (
    *("num_tokens", "num_prompt", "num_computed", "num_published", "num_blocks"),
    *("max_len", "yield_len", "choices"),
)


def state(batcher: Batcher) -> dict[str, Any]:
    """Return everything that determines the batcher's further behaviour."""
    table, pool = batcher.table, batcher.pool
    rows = np.flatnonzero(table.keys != None).tolist()  # noqa: E711
    last = batcher.state.fast_path.last
    return {
        "rows": {row: [int(getattr(table, name)[row]) for name in TABLE] for row in rows},
        "tokens": {row: table.tokens[row, : table.num_tokens[row]].tolist() for row in rows},
        "blocks": {row: table.blocks(row).tolist() for row in rows},
        "pool": [pool.state.tolist(), pool._holders.tolist(), pool._counts, list(pool._lru)],
        "free": pool._free[: pool._counts[-1]].tolist(),
        "cache": [pool.published._block_of, pool.published._hash_of, pool.published.mask.tolist()],
        "load": batcher.load(),
        "steps": batcher.state.totals.steps,
        "last": last and [last.number, last.context_lens.tolist(), last.slots.tolist()],
    }


def drawn_in(batcher: Batcher, rows: Ints, lengths: Ints) -> Ints:
    """Return the next token [n] of each row: only 0 and 1, so that sequences share blocks."""
    keys = batcher.table.keys[rows].tolist()
    drawn = [(key + length) % 2 for key, length in zip(keys, lengths.tolist(), strict=True)]
    return np.array(drawn, np.int32)


def run_step(batcher: Batcher, plan: StepPlan | None = None) -> StepPlan | None:
    """Run the step `plan`, by default a new plan; return the plan, or None if there is no work."""
    plan = plan or batcher.plan()
    if plan is not None:
        rows = plan.sampling_rows
        batcher.commit(plan, drawn_in(batcher, rows, batcher.table.num_tokens[rows]))
    return plan


def skip_steps(batcher: Batcher, most: int) -> int:
    """Run a step and skip up to `most - 1` steps. Return the number of steps, 0 without work."""
    plan = batcher.plan()
    if plan is None:
        return 0
    num = min(FastForward(batcher.state).num_skippable(), most)
    rows, lengths = plan.rows, batcher.table.num_tokens[plan.rows]
    run_step(batcher, plan)
    if num > 1:
        steps = [drawn_in(batcher, rows, lengths + step) for step in range(1, num)]
        FastForward(batcher.state).skip(np.array(steps, np.int32))
    return max(num, 1)


def compare(news: Sequence[NewSequence], most: Sequence[int], **changes: int) -> int:
    """Run `news` step by step and with skips. Compare the states; return the number of skips."""
    num_skipped = 0
    one, many = Batcher(limits(**changes)), Batcher(limits(**changes))
    for number, new in enumerate((*news, None)):
        for batcher in (one, many) if new else ():
            batcher.submit(new)  # type: ignore[arg-type]
        for _ in range(2 if new else 10_000):
            num = skip_steps(many, most[number % len(most)])
            for _ in range(num):
                assert run_step(one) is not None
            assert state(one) == state(many)
            assert one.events() == many.events()
            num_skipped += max(num - 1, 0)
            if not num:
                break
        many.check()
    assert one.plan() is None
    assert many.load().running == 0
    return num_skipped


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=7),
    most=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    num_blocks=st.integers(16, 48),
    block_size=st.sampled_from((1, 4)),
    max_sequences=st.integers(1, 5),
    watermark=st.integers(0, 1),
)
def test_skipped_steps_leave_the_state_of_single_steps(
    lengths: list[tuple[int, int]],
    most: list[int],
    num_blocks: int,
    block_size: int,
    max_sequences: int,
    watermark: int,
) -> None:
    news = [
        sequence(key, [token % 2 for token in range(length)], max_tokens, yield_after=key % 3 * 7)
        for key, (length, max_tokens) in enumerate(lengths)
    ]
    changes = {"block_size": block_size, "max_sequences": max_sequences, "watermark": watermark}
    # Each sequence fits alone, but not all fit together: some wait, others are preempted.
    blocks = num_blocks * 4 // block_size
    compare(news, most, num_blocks=blocks, max_batched_tokens=16, **changes)


def test_most_steps_of_an_unchanged_batch_are_skipped() -> None:
    news = [sequence(key, list(range(3 + key)), 40) for key in range(3)]
    # Only the first step of each sequence must be run; most of the other steps are skipped.
    assert compare(news, [50], num_blocks=64) >= 30


def test_no_step_that_lacks_blocks_is_skipped() -> None:
    batcher = Batcher(limits(num_blocks=8, watermark=0))
    for key in range(2):
        batcher.submit(sequence(key, [key] * 8, 20))
    while True:
        plan = batcher.plan()
        assert plan is not None
        if len(plan.tokens) == len(plan.rows) == 2:
            break
        run_step(batcher, plan)
    num = FastForward(batcher.state).num_skippable()
    assert 1 < num <= 8
    run_step(batcher, plan)
    FastForward(batcher.state).skip(np.zeros((num - 1, 2), np.int32))
    assert batcher.load().preemptions == 0
    while run_step(batcher) is not None:
        pass
    assert batcher.load().preemptions > 0


def test_no_step_is_skipped_if_a_drawn_token_may_end_a_sequence() -> None:
    batcher = Batcher(limits())
    batcher.submit(sequence(1, [1, 2], 20, stop_token_ids=(7,)))
    for _ in range(3):
        plan = batcher.plan()
        assert FastForward(batcher.state).num_skippable() == 0
        run_step(batcher, plan)


def test_skip_is_refused_if_a_scheduling_decision_is_needed() -> None:
    batcher = Batcher(limits())
    with pytest.raises(ValueError, match="a step is in flight"):
        FastForward(batcher.state).skip(np.zeros((1, 1), np.int32))
    batcher.submit(sequence(1, [1, 2], 4))
    for _ in range(2):
        run_step(batcher)
    with pytest.raises(ValueError, match="cannot fast-forward"):
        FastForward(batcher.state).skip(np.zeros((20, 1), np.int32))
