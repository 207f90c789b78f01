"""Blocks held for sequences that have no row any more: leases, and what a transfer still writes."""

from dataclasses import dataclass

from penstock.workers.scheduling.kv_pool import BlockPool, State
from penstock.workers.scheduling.sequence import Ints, Key, LeaseGone


@dataclass(slots=True)
class _Lease:
    blocks: Ints
    kv_len: int
    num_pins: int = 0  # sends that read the blocks now
    dropped: bool = False  # goes with its last pin


class Leases:
    """Soft leases of yielded sequences, oldest first: kept until dropped, or taken back for room.

    Together they keep at most `max_blocks`, but for the newest alone and for those being read.
    """

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self._pool = pool
        self._max_blocks = max_blocks
        self._leases: dict[Key, _Lease] = {}
        self._abandoned: dict[Key, Ints] = {}  # reserved by receivers that were dropped

    def __contains__(self, key: Key) -> bool:
        return key in self._leases or key in self._abandoned

    def grant(self, key: Key, blocks: Ints, kv_len: int) -> None:
        """Keep these blocks, which the caller uses, for positions [0, kv_len)."""
        while self._pool.num(State.LEASED) + len(blocks) > self._max_blocks:
            if not self.reclaim():
                break
        self._pool.move(blocks, State.USED, State.LEASED)
        self._leases[key] = _Lease(blocks, kv_len)

    def pin(self, key: Key, have: int, block_size: int) -> Ints:
        """Blocks of positions [have, kv_len), to be read until `unpin`; LeaseGone."""
        lease = self._leases.get(key)
        if lease is None or lease.dropped:
            raise LeaseGone(key)
        lease.num_pins += 1
        return lease.blocks[max(have, 0) // block_size :].copy()

    def unpin(self, key: Key) -> None:
        lease = self._leases.get(key)
        if lease is None or lease.num_pins == 0:
            raise ValueError(f"the lease of {key!r} is not pinned")
        lease.num_pins -= 1
        if lease.dropped and lease.num_pins == 0:
            self._release(key)

    def drop(self, key: Key) -> None:
        """Let go of it, now or with its last pin; unknown: nothing."""
        lease = self._leases.get(key)
        if lease is None:
            return
        lease.dropped = True
        if lease.num_pins == 0:
            self._release(key)

    def reclaim(self) -> bool:
        """Take back the oldest that nobody reads; False if there is none."""
        for key, lease in self._leases.items():
            if lease.num_pins == 0:
                self._release(key)
                return True
        return False

    def abandon(self, key: Key, blocks: Ints) -> None:
        """Keep reserved blocks from everybody while somebody may still write them."""
        self._abandoned[key] = blocks

    def release_abandoned(self, key: Key) -> None:
        """Nobody writes them any more; unknown: nothing."""
        blocks = self._abandoned.pop(key, None)
        if blocks is not None:
            self._pool.release(blocks, State.RESERVED)

    def holders(self) -> tuple[list[Ints], list[Ints]]:
        """Leased and reserved blocks, an array a lease and a transfer, for the ledger."""
        return [lease.blocks for lease in self._leases.values()], list(self._abandoned.values())

    def _release(self, key: Key) -> None:
        self._pool.release(self._leases.pop(key).blocks, State.LEASED)
