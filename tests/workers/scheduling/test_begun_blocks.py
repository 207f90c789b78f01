"""Reuse of the first tokens of a cached block by a prompt that differs in later tokens.

The rest of the block may hold other tokens or be empty.
"""

import pytest

from penstock.loadtests.simulator.model.hash_model import HashModel
from penstock.workers.scheduling.block_contents import MAX_COMPARED
from penstock.workers.scheduling.cache_report import CacheReporter
from penstock.workers.scheduling.kv_pool import State
from penstock.workers.scheduling.sequence import Admitted, Ints
from tests.support.batcher_bench import Bench, beams, sequence

SYSTEM = list(range(10))  # two full blocks of four tokens, and two further tokens


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
    """Copies of a step run in any order, so no block is both a source and a destination."""
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
    # The second prompt needs all five blocks, so no block is left to be the source of a copy.
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


def test_next_turn_reuses_the_partly_filled_last_block() -> None:
    bench = Bench()
    served(bench, "first", [1, 2, 3], 4)
    turn = [1, 2, 3, *bench.answers["first"]]  # the last token has no KV
    assert served(bench, "second", [*turn, 70, 71, 72]) == 6


def test_partly_filled_block_is_replaced_by_a_block_with_more_tokens() -> None:
    bench = Bench()
    served(bench, "first", [1, 2], 1)
    assert bench.batcher.load().cached_blocks == 1
    served(bench, "longer", [1, 2, 3], 1)
    assert bench.batcher.load().cached_blocks == 1
    served(bench, "shorter again", [1, 2], 1)
    assert bench.batcher.load().cached_blocks == 1
    served(bench, "full", [1, 2, 3, 4, 5, 6], 1)
    assert bench.batcher.load().cached_blocks == 2  # one full block, and one block with two tokens
    assert len(bench.batcher.pool.published.hashes()) == 1


def test_partly_filled_blocks_are_not_reported_to_routers() -> None:
    bench = Bench()
    reporter = CacheReporter(bench.batcher.pool.published)
    served(bench, "before", [1, 2, 3], 1)
    reporter.request_snapshot()
    report = reporter.report()
    assert report is not None
    assert report.snapshot is not None
    assert not report.snapshot.hashes
    served(bench, "after", [5, 6, 7], 1)
    # This evicts all cached blocks.
    bench.batcher.pool.take(bench.batcher.pool.num_available, State.USED)
    assert reporter.report() is None


def test_prompt_that_returns_after_many_similar_ones_is_published_once() -> None:
    bench = Bench()
    for number, last in enumerate([0, *range(1, MAX_COMPARED + 1), 0]):
        served(bench, f"request {number}", [1, last], 1)
    bench.batcher.check()
    assert bench.batcher.load().cached_blocks == MAX_COMPARED + 1
    # This evicts all cached blocks.
    bench.batcher.pool.take(bench.batcher.pool.num_available, State.USED)


def test_failed_sequence_leaves_no_partly_filled_block() -> None:
    bench = Bench()
    bench.batcher.submit(sequence("bad", [1, 2, 3], 9))
    bench.step()
    bench.batcher.fail("bad")
    assert bench.batcher.load().free_blocks == 32


def test_answers_of_a_beam_search_leave_no_partly_filled_block() -> None:
    bench = Bench()
    bench.submit(beams("search", [1, 2, 3, 4, 5], 2, max_tokens=6))
    bench.run()
    load = bench.batcher.load()
    # The only cached block is the prompt's full block.
    assert (load.cached_blocks, load.free_blocks) == (1, 31)
