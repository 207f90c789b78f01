"""Reuse of a cached block by a prompt that agrees with its first tokens only."""

import pytest

from penstock.loadtests.simulator.model.hash_model import HashModel
from penstock.workers.scheduling.kv_pool import State
from penstock.workers.scheduling.sequence import Admitted, Ints
from tests.support.batcher_bench import Bench, sequence

SYSTEM = list(range(10))  # two blocks of four tokens and the begin of a third


def served(bench: Bench, key: str, prompt: list[int], max_tokens: int = 6) -> int:
    """Run a sequence alone, check its answer, and return its number of cached tokens."""
    new = sequence(key, prompt, max_tokens)
    bench.batcher.submit(new)
    bench.run()
    bench.expect(new)
    (cached,) = [each.num_cached for each in bench.batcher.events() if isinstance(each, Admitted)]
    return cached


def test_common_tokens_of_a_differing_block_are_copied() -> None:
    bench = Bench()
    assert served(bench, "first", [*SYSTEM, 50, 51, 52]) == 0
    assert served(bench, "second", [*SYSTEM, 60, 61, 62]) == 10
    assert bench.num_copies == 1
    assert served(bench, "first again", [*SYSTEM, 50, 51, 52]) == 12
    assert bench.num_copies == 1


def test_first_block_is_reused_under_the_same_salt_only() -> None:
    bench = Bench()
    assert served(bench, "first", [1, 2, 3, 4, 5]) == 0
    assert served(bench, "same", [1, 2, 9, 9, 9]) == 2
    new = sequence("other", [1, 2, 3, 7, 7], 2, salt=b"other")
    bench.batcher.submit(new)
    bench.run()
    bench.expect(new)
    assert bench.batcher.load().prompt_tokens_cached == 2


class MissingCopies(HashModel):
    """Hash model that skips block copies."""

    def copy(self, pairs: Ints) -> None: ...


def test_without_the_copy_the_answer_is_wrong() -> None:
    bench = Bench()
    bench.model = MissingCopies(bench.limits.num_blocks, bench.limits.block_size)
    served(bench, "first", [*SYSTEM, 50, 51, 52])
    with pytest.raises(AssertionError):
        served(bench, "second", [*SYSTEM, 60, 61, 62])


def test_no_block_of_a_step_is_both_copied_and_overwritten() -> None:
    """Copies of one step may run in any order, so no block is both a source and a destination."""
    bench = Bench(num_blocks=16, max_sequences=4)
    served(bench, "first", [*SYSTEM, 50, 51, 52])
    news = [sequence(key, [*SYSTEM, 60 + key], 3) for key in range(4)]
    for new in news:
        bench.batcher.submit(new)
    plan = bench.step()
    assert plan is not None
    sources, targets = plan.copies.T.tolist()
    assert len(sources) > 1
    assert not set(sources) & set(targets)
    assert len(set(targets)) == len(targets)
    bench.run()
    for new in news:
        bench.expect(new)


def test_prompt_that_fits_only_without_the_begun_block_computes_all_of_it() -> None:
    bench = Bench(num_blocks=5, max_sequences=1)
    served(bench, "first", list(range(14)))
    # The other prompt needs all five blocks, so the source of a copy cannot be held beside them.
    assert served(bench, "second", [*range(7), *range(30, 40)], 3) == 4
    assert served(bench, "third", [*range(7), *range(40, 47)], 3) == 7


def test_choices_of_a_resumed_request_share_a_begun_block() -> None:
    bench = Bench(max_batched_tokens=8)
    served(bench, "first", [*SYSTEM, 50, 51, 52])
    new = sequence("choices", [*SYSTEM, 60], 6, num_choices=3)
    bench.batcher.submit(new)
    bench.run()
    bench.expect(new)
    assert bench.batcher.load().used_blocks == 0
    assert bench.batcher.pool.num(State.FREE) + bench.batcher.pool.num(State.CACHED) == 32


def test_rows_with_blocks_of_their_own_are_not_examined_again() -> None:
    bench = Bench()
    served(bench, "first", [*SYSTEM, 50, 51, 52])
    bench.batcher.submit(sequence("second", [*SYSTEM, 60], 12))
    bench.step()
    assert bench.num_copies == 1
    assert not bench.batcher.state.batch.block_growth.shared_rows
