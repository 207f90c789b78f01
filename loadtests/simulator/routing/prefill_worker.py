"""A simulated worker that computes prompts one after the other at a fixed rate.

The worker's prefix cache is the product's block pool. An answer consists of one token.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from penstock.common.block_hash import short_hash, short_hashes
from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.events import Finish, Stepped, Submit, TokenColumns, WorkerInfo
from penstock.router.routing.prefix_cache.prefix_index import START, PrefixIndex
from penstock.workers.scheduling.kv_pool import BlockPool, State
from penstock.workers.scheduling.published_blocks import BlockChanges

CHUNK_TOKENS = 2048
"""Prompt tokens of a step; the worker reports its load after each step."""

Schedule: TypeAlias = Callable[[float, Callable[[float], None]], None]
"""Schedules a call: (virtual time in seconds, function to call with that time)."""


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt that waits at the worker."""

    request: int
    attempt: int
    num_tokens: int
    digests: Sequence[bytes]
    num_uncached: int  # uncached tokens of the prompt at its arrival


class PrefillWorker:
    """A worker that serves first come, first served, with an LRU prefix cache.

    Args:
        info: name and size.
        tokens_per_second: rate of prompt computation.
        index: prefix index that gets the stored and evicted blocks when a prompt ends.
        schedule: calls a function at a later time.
        report: called with the worker's messages.
    """

    def __init__(
        self,
        info: WorkerInfo,
        tokens_per_second: float,
        index: PrefixIndex,
        schedule: Schedule,
        report: Callable[[Stepped, float], None],
    ) -> None:
        self.info = info
        self._rate = tokens_per_second
        self._index = index
        self._schedule = schedule
        self._report = report
        self._pool = BlockPool(info.num_blocks)
        self._pool.published.changes = self._changes = BlockChanges()
        self._jobs: deque[Job] = deque()
        self._left = 0  # uncached tokens of the first job that are still to be computed
        self._num_steps = 0
        self.computed_tokens = 0
        self.cached_tokens = 0

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def submit(self, command: Submit, now: float) -> None:
        """Queue the prompt of a request."""
        num_tokens = len(command.request.prompt)
        hashes = command.request.prompt_hashes[self.info.block_size]
        digests = [digest_of(each) for each in hashes]
        num_cached = len(self._pool.published.match(digests)) * self.info.block_size
        job = Job(
            command.request.id,
            command.attempt,
            num_tokens,
            digests,
            max(num_tokens - num_cached, 1),
        )
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._start(now)

    def _start(self, now: float) -> None:
        """Start the first job: take its blocks, and begin to compute its uncached tokens."""
        job = self._jobs[0]
        found = self._pool.published.match(job.digests)
        self._pool.retain(found, State.USED)
        num_blocks = -(-job.num_tokens // self.info.block_size)
        self._held = [*found, *self._pool.take(num_blocks - len(found), State.USED)]
        self._num_found = len(found)
        self._left = max(job.num_tokens - len(found) * self.info.block_size, 1)
        self.computed_tokens += self._left
        self.cached_tokens += job.num_tokens - self._left
        self._step(now)

    def _step(self, now: float) -> None:
        tokens = min(self._left, CHUNK_TOKENS)
        self._schedule(now + tokens / self._rate, self._end_step)

    def _end_step(self, now: float) -> None:
        self._left -= min(self._left, CHUNK_TOKENS)
        self._num_steps += 1
        columns = TokenColumns()
        if not self._left:
            job = self._jobs.popleft()
            self._release(job)
            length = [int(Finish.LENGTH)]
            columns = TokenColumns([job.request], [job.attempt], [0], [0], [7], length)
        waiting = list(self._jobs)[1:] if self._left else self._jobs
        queued = self._left + sum(job.num_uncached for job in waiting)
        load = WorkerLoad(
            queued=len(waiting),
            queued_tokens=queued,
            running=int(self._left > 0),
            free_blocks=self._pool.num(State.FREE),
            cached_blocks=self._pool.num(State.CACHED),
            used_blocks=self._pool.num(State.USED),
            num_steps=self._num_steps,
        )
        if self._left:
            self._step(now)
        elif self._jobs:
            self._start(now)
        self._report(Stepped(self.info.worker, columns, load), now)

    def _release(self, job: Job) -> None:
        """Publish the full blocks of a computed prompt and add the changes to the index."""
        full = len(job.digests)
        num_found = self._num_found
        parents = [b"", *job.digests][num_found:full]
        self._pool.publish(self._held[num_found:full], job.digests[num_found:], parents)
        self._pool.release(np.array(self._held, np.int32), State.USED)
        self._index.evict(self.info.worker, short_hashes(self._changes.evicted))
        self._pool.published.changes = self._changes = BlockChanges()
        parent = short_hash(job.digests[num_found - 1]) if num_found else START
        stored = [short_hash(digest) for digest in job.digests[num_found:]]
        self._index.store(self.info.worker, stored, parent)


def digest_of(number: int) -> bytes:
    """Return a digest whose `short_hash` is `number`."""
    return number.to_bytes(8, "little") + bytes(8)
