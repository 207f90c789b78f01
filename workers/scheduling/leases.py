"""Blocks kept without a table row: leases, and blocks to which a KV transfer still writes."""

from dataclasses import dataclass

from penstock.workers.scheduling.kv_pool import BlockPool, State
from penstock.workers.scheduling.sequence import Ints, Key, LeaseGone


@dataclass(slots=True)
class _Lease:
    blocks: Ints
    kv_len: int
    num_pins: int = 0  # number of KV transfers that are reading the blocks
    dropped: bool = False  # True: the lease is released when its last pin is removed


class Leases:
    """Leases of yielded sequences, oldest first; each is kept until it is dropped or reclaimed.

    All leases together hold at most `max_blocks` blocks. Only pinned leases and the newest lease
    may exceed this limit.
    """

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self._pool = pool
        self._max_blocks = max_blocks
        self._leases: dict[Key, _Lease] = {}
        self._abandoned: dict[Key, Ints] = {}  # reserved blocks of dropped receiving sequences

    def __contains__(self, key: Key) -> bool:
        return key in self._leases or key in self._abandoned

    def grant(self, key: Key, blocks: Ints, kv_len: int) -> None:
        """Turn used blocks into a lease of positions [0, kv_len); reclaim old leases if needed."""
        while self._pool.num(State.LEASED) + len(blocks) > self._max_blocks:
            if not self.reclaim():
                break
        self._pool.move(blocks, State.USED, State.LEASED)
        self._leases[key] = _Lease(blocks, kv_len)

    def pin(self, key: Key, have: int, block_size: int) -> Ints:
        """Pin a lease and return its blocks of positions [have, kv_len). Raises LeaseGone."""
        lease = self._leases.get(key)
        if lease is None or lease.dropped:
            raise LeaseGone(key)
        lease.num_pins += 1
        return lease.blocks[max(have, 0) // block_size :].copy()

    def unpin(self, key: Key) -> None:
        """Undo one `pin`; release the lease if it was dropped and no pin is left."""
        lease = self._leases.get(key)
        if lease is None or lease.num_pins == 0:
            raise ValueError(f"the lease of {key!r} is not pinned: each unpin needs an earlier pin")
        lease.num_pins -= 1
        if lease.dropped and lease.num_pins == 0:
            self._release(key)

    def drop(self, key: Key) -> None:
        """Release a lease now, or when its last pin is removed; ignore an unknown key."""
        lease = self._leases.get(key)
        if lease is None:
            return
        lease.dropped = True
        if lease.num_pins == 0:
            self._release(key)

    def reclaim(self) -> bool:
        """Release the oldest lease that is not pinned; return False if there is none."""
        for key, lease in self._leases.items():
            if lease.num_pins == 0:
                self._release(key)
                return True
        return False

    def abandon(self, key: Key, blocks: Ints) -> None:
        """Keep a dropped receiver's blocks reserved while its transfer may still write them."""
        self._abandoned[key] = blocks

    def release_abandoned(self, key: Key) -> None:
        """Free the blocks kept by `abandon`, after all writes have ended; ignore an unknown key."""
        blocks = self._abandoned.pop(key, None)
        if blocks is not None:
            self._pool.release(blocks, State.RESERVED)

    def holders(self) -> tuple[list[Ints], list[Ints]]:
        """Return leased and reserved blocks for `BlockPool.check`: one array per holder."""
        return [lease.blocks for lease in self._leases.values()], list(self._abandoned.values())

    def _release(self, key: Key) -> None:
        self._pool.release(self._leases.pop(key).blocks, State.LEASED)
