"""Checks the invariants of a worker's blocks."""

import numpy as np

from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.kv_pool import State
from penstock.workers.scheduling.sequence import StepPlan


def check(batcher: Batcher, plan: StepPlan | None) -> None:
    """Raise AssertionError if block counts are wrong, or if a sequence writes a shared block."""
    batcher.check()
    load, limits = batcher.load(), batcher.limits
    held = load.used_blocks + load.leased_blocks + load.reserved_blocks
    assert held + load.free_blocks + load.cached_blocks == limits.num_blocks, (
        "the numbers of KV blocks by state do not add up to all blocks of the worker"
    )
    if plan is None:
        return
    table, pool = batcher.table, batcher.pool
    written = np.unique(plan.slots // limits.block_size)
    assert (pool.state[written] == State.USED).all(), (
        "a step writes KV blocks that are not in state USED"
    )
    occupied = np.flatnonzero(table.keys != None)  # noqa: E711
    owned = np.concatenate([table.blocks(row) for row in occupied.tolist()])
    owners = np.bincount(owned, minlength=limits.num_blocks)
    assert (owners[written] == 1).all(), "a step writes a KV block that several sequences share"


def check_rest(batcher: Batcher, name: str) -> None:
    """Raise AssertionError if a worker holds blocks or sequences after all requests have ended."""
    batcher.check()
    load, total = batcher.load(), batcher.limits.num_blocks
    assert load.free_blocks + load.cached_blocks == total, (
        f"worker {name} still holds KV blocks, although all requests have ended"
    )
    assert load.running == load.queued == 0, (
        f"worker {name} still has running or queued sequences, although all requests have ended"
    )
