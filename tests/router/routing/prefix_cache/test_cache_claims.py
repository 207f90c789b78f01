"""A worker that does not use the blocks which it has reported is asked for a snapshot."""

from collections.abc import Sequence

import pytest

from penstock.router.routing.events import Command, Finish, Stepped
from penstock.router.routing.prefix_cache.cache_claims import MAX_CONTRADICTIONS
from penstock.router.routing.prefix_cache.cache_events import (
    CacheChange,
    CacheEvents,
    CacheSnapshot,
    ResyncCache,
)
from tests.support.columns import NewToken, columns_of
from tests.support.router_harness import M, Router, submits

SIZE = M.block_size
BLOCKS = [11, 12, 13]
ALL = len(BLOCKS) * SIZE


class Cached:
    """A router whose only worker has reported `BLOCKS`."""

    def __init__(self) -> None:
        self.router = Router(M)
        self.num_changes = self.num_requests = 0
        self.change(CacheChange((), BLOCKS, [0], [len(BLOCKS)]))

    def change(self, change: CacheChange) -> list[Command]:
        number, self.num_changes = self.num_changes, self.num_changes + 1
        return self.router(CacheEvents("m", M.incarnation, number, [change]))

    def serve(
        self,
        num_found: int,
        num_prompt: int = ALL + 1,
        evicted: Sequence[int] = (),
        log: Sequence[int] = (),
    ) -> list[Command]:
        """Run a request whose prompt begins with the blocks.

        Args:
            num_found: number of tokens that the worker has found in its cache.
            num_prompt: length of the prompt.
            evicted: blocks that the worker evicts before it admits the request.
            log: the tokens that the client of the request already has.
        """
        self.num_requests += 1
        number = self.num_requests
        arrival = self.router.arrive(
            number, num_prompt, prompt_hashes={SIZE: BLOCKS}, log=(log,) if log else ()
        )
        ((_, _, attempt),) = submits(arrival)
        if evicted:
            self.change(CacheChange(evicted=evicted))
        last = columns_of([NewToken(number, attempt, 0, len(log), 5, Finish.STOP)])
        commands = self.router(Stepped("m", last, cached=[(number, attempt, num_found)]))
        self.router.now += 10.0  # afterwards, this request no longer counts as a recent prompt
        return [each for each in commands if isinstance(each, ResyncCache)]


@pytest.mark.parametrize("num_found", [0, SIZE, ALL - 1])
def test_worker_that_finds_too_little_several_times_in_a_row_is_resynchronized(
    num_found: int,
) -> None:
    cached = Cached()
    for _ in range(MAX_CONTRADICTIONS - 1):
        assert cached.serve(num_found) == []
    (resync,) = cached.serve(num_found)
    assert isinstance(resync, ResyncCache)
    assert "fewer cached tokens than it had reported" in resync.reason
    assert cached.router.dispatcher.prefix_index.num_blocks("m") == 0
    cached.router(CacheSnapshot("m", M.incarnation, 1, 0, True, BLOCKS))
    assert cached.router.dispatcher.cache_feed.is_current("m")
    assert cached.serve(num_found) == []


def test_one_hit_restores_the_trust() -> None:
    cached = Cached()
    for found in [0] * (MAX_CONTRADICTIONS - 1) + [ALL] + [0] * (MAX_CONTRADICTIONS - 1):
        assert cached.serve(found) == []


def test_evictions_explain_what_a_worker_does_not_find() -> None:
    cached = Cached()
    for _ in range(2 * MAX_CONTRADICTIONS):
        assert cached.serve(2 * SIZE, evicted=BLOCKS[2:]) == []
        cached.change(CacheChange((), BLOCKS[2:], BLOCKS[1:2], [1]))


def test_last_token_of_a_prompt_is_always_computed() -> None:
    cached = Cached()
    for _ in range(2 * MAX_CONTRADICTIONS):
        assert cached.serve(2 * SIZE, num_prompt=ALL) == []


def test_resumed_requests_and_unknown_prompts_prove_nothing() -> None:
    cached = Cached()
    for _ in range(2 * MAX_CONTRADICTIONS):
        assert cached.serve(0, log=(3,)) == []
        assert cached.serve(0, num_prompt=SIZE) == []
