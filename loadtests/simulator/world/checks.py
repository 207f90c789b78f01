"""What must always be true of a worker's blocks."""

import numpy as np

from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.kv_pool import State
from penstock.workers.scheduling.sequence import StepPlan


def check(batcher: Batcher, plan: StepPlan | None) -> None:
    """AssertionError unless the ledger balances and nobody else reads what a step writes."""
    batcher.check()
    load, limits = batcher.load(), batcher.limits
    held = load.used_blocks + load.leased_blocks + load.reserved_blocks
    assert held + load.free_blocks + load.cached_blocks == limits.num_blocks, "blocks are lost"
    if plan is None:
        return
    table, pool = batcher.table, batcher.pool
    written = np.unique(plan.slots // limits.block_size)
    assert (pool.state[written] == State.USED).all(), "a step writes what it does not use"
    occupied = np.flatnonzero(table.keys != None)  # noqa: E711
    owned = np.concatenate([table.blocks(row) for row in occupied.tolist()])
    owners = np.bincount(owned, minlength=limits.num_blocks)
    assert (owners[written] == 1).all(), "a block that is written has two readers"


def check_rest(batcher: Batcher, name: str) -> None:
    """AssertionError if a worker holds blocks or sequences though nobody wants anything."""
    batcher.check()
    load, total = batcher.load(), batcher.limits.num_blocks
    assert load.free_blocks + load.cached_blocks == total, f"{name} leaks blocks"
    assert load.running == load.queued == 0, f"{name} runs for nobody"
