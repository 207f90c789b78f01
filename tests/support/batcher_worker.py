"""A simulated worker: a batcher, a hash model, planned steps and KV transfers."""

from dataclasses import dataclass

import numpy as np

from penstock.loadtests.simulator.model.hash_model import HashModel, copy_blocks
from penstock.loadtests.simulator.model.hash_model_beams import Answer, HashModelBeams
from penstock.workers.scheduling.batcher import Batcher, SchedulerConfig
from penstock.workers.scheduling.kv_pool import State
from penstock.workers.scheduling.sequence import Ints, Key, StepOutput, StepPlan


class BatcherWorker:
    """A batcher with its hash model and up to two planned steps; asserts the block invariants."""

    def __init__(self, limits: SchedulerConfig) -> None:
        self.batcher = Batcher(limits)
        self.model = HashModel(limits.num_blocks, limits.block_size)
        self.beams = HashModelBeams(limits.max_model_len)
        self.plan: StepPlan | None = None  # step in flight; `commit` reads and writes its slots
        self.next: StepPlan | None = None  # the next step, planned while `plan` is in flight
        # Blocks of dropped sequences that a transfer still writes.
        self.abandoned: dict[Key, Ints] = {}
        self.dropped: set[Key] = set()
        self.num_ahead = 0  # number of steps planned while another step was in flight
        self.num_copies = 0  # number of blocks copied before a sequence wrote to them
        # Number of rows that sampled their first token from another row's logits.
        self.num_forks = 0
        self.num_moved = 0  # number of beams that continued another beam's tokens

    def plan_step(self) -> None:
        """Plan a step. If a step is in flight, plan the next one, unless it is planned already."""
        if self.next is not None:
            return
        pool, limits = self.batcher.pool, self.batcher.limits
        self.model.poison(np.flatnonzero(pool.state == State.FREE).astype(np.int32))
        plan = self.batcher.plan()
        if self.plan is None:
            self.plan = plan
        else:
            self.next = plan
            self.num_ahead += plan is not None
        if plan is not None:
            assert 1 <= len(plan.tokens) <= limits.max_batched_tokens
            assert len(set(plan.slots.tolist())) == len(plan.slots)

    def withdraw(self) -> None:
        if self.next is not None:
            self.batcher.withdraw(self.next)
            self.next = None

    def scored(self) -> list[tuple[Key, int]]:
        """Return the key and the position of each prompt logprob of the step in flight."""
        assert self.plan is not None
        owners = np.searchsorted(self.plan.query_starts, self.plan.scored, side="right") - 1
        keys = self.batcher.table.keys[self.plan.rows[owners]]
        positions = self.plan.positions[self.plan.scored].tolist()
        return [
            (key, position)
            for key, position in zip(keys, positions, strict=True)
            if key not in self.dropped
        ]

    def commit(self) -> tuple[StepOutput, dict[Key, list[Answer]]]:
        """Run the hash model on the step in flight and commit the step.

        Returns the output, and the answers of the beam searches that ended.
        """
        assert self.plan is not None
        plan, table = self.plan, self.batcher.table
        drawn, beams, over = self.beams.draw(plan, table, self.model.hash(plan))
        if self.next is not None:
            assert beams is None
            self.next.fill(drawn)
        if beams is not None:
            self.num_moved += int((beams.parents != beams.rows).sum())
        for key in over:
            self.batcher.finish(key)
        searches = {key: self.beams.close(key) for key in over}
        output = self.batcher.commit(plan, drawn, beams)
        self.num_copies += len(plan.copies)
        self.num_forks += len(plan.forks)
        self.plan, self.next = self.next, None
        assert not self.dropped & set(output.keys)
        return output, searches

    def drop(self, key: Key) -> None:
        self.batcher.drop(key)
        self.beams.close(key)
        self.dropped.add(key)

    def fail(self, key: Key) -> None:
        """Fail a sequence of the step in flight, as if its logits were not finite."""
        self.batcher.fail(key)
        self.beams.close(key)
        self.dropped.add(key)

    def end_abandoned_writes(self) -> None:
        """End the KV transfers to dropped sequences, whose blocks are then free."""
        for key, blocks in self.abandoned.items():
            # Until now the transfer could write to these blocks, so none was reused.
            self.model.poison(blocks)
            self.batcher.transfer_drained(key)
        self.abandoned = {}

    def content(self, blocks: Ints) -> list[int]:
        """Return the slot values of `blocks`."""
        return [self.model.kv[slot] for slot in self.model.slots_of(blocks)]

    def check(self) -> None:
        """Assert the invariants of the blocks."""
        self.batcher.check()
        limits, pool, load = self.batcher.limits, self.batcher.pool, self.batcher.load()
        for plan in filter(None, (self.plan, self.next)):
            written = plan.slots // limits.block_size
            assert (pool.state[written] == State.USED).all()
            assert not pool.is_findable(written).any()
        held = load.leased_blocks + load.reserved_blocks + load.used_blocks
        assert load.free_blocks + load.cached_blocks + held == limits.num_blocks

    def check_rest(self) -> None:
        """Assert that no blocks are held."""
        self.batcher.check()
        load = self.batcher.load()
        assert load.free_blocks + load.cached_blocks == self.batcher.limits.num_blocks


@dataclass(eq=False)
class BlockTransfer:
    """A KV transfer in progress, from a lease to the reserved blocks of another worker."""

    source: BatcherWorker
    lease: Key
    blocks: Ints
    content: list[int]  # slot values of `blocks` when the transfer started
    target: BatcherWorker
    key: Key
    reserved: Ints

    @classmethod
    def start(
        cls, source: BatcherWorker, lease: Key, kv_len: int, target: BatcherWorker, key: Key
    ) -> "BlockTransfer":
        """Pin the leased blocks that `target` lacks; raise LeaseGone if the lease has ended."""
        reserved, size = target.batcher.reserved_blocks(key), source.batcher.limits.block_size
        blocks = source.batcher.pin(lease, (-(-kv_len // size) - len(reserved)) * size)
        return cls(source, lease, blocks, source.content(blocks), target, key, reserved)

    def end(self, complete: bool) -> None:
        """End the transfer: write the blocks if it is complete, and release the lease's pin."""
        assert self.source.content(self.blocks) == self.content
        if complete:
            copy_blocks(self.source.model, self.blocks, self.target.model, self.reserved)
        else:
            self.target.model.poison(self.reserved)
        self.source.batcher.unpin(self.lease)
