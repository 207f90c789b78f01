"""Leaps: after quiet steps taken at once everything is as after the same steps one by one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.sequence import Ints, NewSequence, StepPlan
from tests.support.fold_bench import limits, sequence

TABLE = (
    *("num_tokens", "num_prompt", "num_computed", "num_published", "num_blocks"),
    *("max_len", "yield_len", "choices"),
)


def state(batcher: Batcher) -> dict[str, Any]:
    """All that decides what it does from here on."""
    table, pool = batcher.table, batcher.pool
    rows = np.flatnonzero(table.keys != None).tolist()  # noqa: E711
    last = batcher._fast_path._last
    return {
        "rows": {row: [int(getattr(table, name)[row]) for name in TABLE] for row in rows},
        "tokens": {row: table.tokens[row, : table.num_tokens[row]].tolist() for row in rows},
        "blocks": {row: table.blocks(row).tolist() for row in rows},
        "pool": [pool.state.tolist(), pool._holders.tolist(), pool._counts, list(pool._lru)],
        "free": pool._free[: pool._counts[-1]].tolist(),
        "cache": [pool._block_of, pool._hash_of, pool._hashed.tolist()],
        "load": batcher.load(),
        "steps": batcher._totals.steps,
        "last": last and [last.number, last.context_lens.tolist(), last.slots.tolist()],
    }


def drawn_in(batcher: Batcher, rows: Ints, lengths: Ints) -> Ints:
    """[n] what these rows draw at these lengths: few tokens, so that sequences come to agree."""
    keys = batcher.table.keys[rows].tolist()
    drawn = [(key + length) % 2 for key, length in zip(keys, lengths.tolist(), strict=True)]
    return np.array(drawn, np.int32)


def single(batcher: Batcher, plan: StepPlan | None = None) -> StepPlan | None:
    """One step, planned already or not."""
    plan = plan or batcher.plan(0.0)
    if plan is not None:
        rows = plan.sampling_rows
        batcher.commit(plan, drawn_in(batcher, rows, batcher.table.num_tokens[rows]))
    return plan


def leap(batcher: Batcher, most: int) -> int:
    """As many steps at once as are quiet, `most` at most; how many; 0: there is nothing to do."""
    plan = batcher.plan(0.0)
    if plan is None:
        return 0
    num = min(batcher.fast_forward.num_skippable(), most)
    rows, lengths = plan.rows, batcher.table.num_tokens[plan.rows]
    single(batcher, plan)
    if num > 1:
        steps = [drawn_in(batcher, rows, lengths + step) for step in range(1, num)]
        batcher.fast_forward.skip(np.array(steps, np.int32))
    return max(num, 1)


def play(news: Sequence[NewSequence], most: Sequence[int], **changes: int) -> int:
    """Play them in both ways; how many steps were taken together."""
    together = 0
    one, many = Batcher(limits(**changes)), Batcher(limits(**changes))
    for number, new in enumerate((*news, None)):
        for batcher in (one, many) if new else ():
            batcher.submit(new)  # type: ignore[arg-type]
        for _ in range(2 if new else 10_000):
            num = leap(many, most[number % len(most)])
            for _ in range(num):
                assert single(one) is not None
            assert state(one) == state(many)
            assert one.events() == many.events()
            together += max(num - 1, 0)
            if not num:
                break
        many.check()
    assert one.plan(0.0) is None
    assert many.load().running == 0
    return together


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=7),
    most=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    num_blocks=st.integers(16, 48),
    block_size=st.sampled_from((1, 4)),
    max_sequences=st.integers(1, 5),
    watermark=st.integers(0, 1),
)
def test_a_leap_leaves_everything_as_single_steps_do(
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
    # Each fits alone, not all at once: some wait, some are preempted.
    blocks = num_blocks * 4 // block_size
    play(news, most, num_blocks=blocks, max_batched_tokens=16, **changes)


def test_most_steps_of_a_steady_batch_are_taken_together() -> None:
    news = [sequence(key, list(range(3 + key)), 40) for key in range(3)]
    # Each is admitted and draws twice before the next one comes; then there are three ends.
    assert play(news, [50], num_blocks=64) >= 30


def test_no_leap_goes_beyond_the_blocks_that_there_are() -> None:
    batcher = Batcher(limits(num_blocks=8, watermark=0))
    for key in range(2):
        batcher.submit(sequence(key, [key] * 8, 20))
    while True:
        plan = batcher.plan(0.0)
        assert plan is not None
        if len(plan.tokens) == len(plan.rows) == 2:
            break
        single(batcher, plan)
    num = batcher.fast_forward.num_skippable()
    assert 1 < num <= 8
    single(batcher, plan)
    batcher.fast_forward.skip(np.zeros((num - 1, 2), np.int32))
    assert batcher.load().preemptions == 0
    while single(batcher) is not None:
        pass
    assert batcher.load().preemptions > 0


def test_what_may_end_by_what_is_drawn_is_not_quiet() -> None:
    batcher = Batcher(limits())
    batcher.submit(sequence(1, [1, 2], 20, stop_token_ids=(7,)))
    for _ in range(3):
        plan = batcher.plan(0.0)
        assert batcher.fast_forward.num_skippable() == 0
        single(batcher, plan)


def test_a_leap_into_nothing_is_refused() -> None:
    batcher = Batcher(limits())
    with pytest.raises(ValueError, match="between two steps"):
        batcher.fast_forward.skip(np.zeros((1, 1), np.int32))
    batcher.submit(sequence(1, [1, 2], 4))
    for _ in range(2):
        single(batcher)
    with pytest.raises(ValueError, match="not quiet"):
        batcher.fast_forward.skip(np.zeros((20, 1), np.int32))
