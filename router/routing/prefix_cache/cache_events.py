"""Messages about the blocks that workers have cached, as plain records.

Blocks are identified by short hashes: see `short_hash` of `penstock.common.block_hash`. Changes are
numbered without gaps, from the start of a worker's process.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Net change of a worker's cached blocks in a step. Evictions are applied before stores.

    The stored blocks form chains. A chain is a run of consecutive blocks of one sequence.
    """

    evicted: Sequence[int] = ()
    stored: Sequence[int] = ()  # the stored blocks of all chains
    # For each chain, the block before its first block. The value is 0 if there is no such block, or
    # if it is not cached.
    parents: Sequence[int] = ()
    lengths: Sequence[int] = ()  # number of blocks of each chain


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Event: consecutive changes of a worker's cached blocks, in order."""

    worker: str
    incarnation: str
    first: int  # number of the first change
    changes: Sequence[CacheChange]


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Event: one chunk of the list of all blocks that a worker has cached."""

    worker: str
    incarnation: str
    next_number: int  # number of the first change after the snapshot
    chunk: int  # index of the chunk, from 0
    is_last: bool
    hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class ResyncCache:
    """Command: request a snapshot from a worker, because the index of its blocks may be wrong."""

    worker: str
    reason: str
