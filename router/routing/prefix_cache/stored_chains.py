"""Checks the chains of stored blocks of a change, which a faulty worker may report wrongly."""

from collections.abc import Callable, Sequence

from penstock.router.routing.prefix_cache.cache_events import CacheChange


def error_in_chains(change: CacheChange, holds: Callable[[int], bool]) -> str:
    """Return why no correct worker can report the stored blocks of a change, or an empty string.

    Args:
        change: the change.
        holds: returns whether the worker already has a block, after the evictions of the change.
    """
    num, lengths = len(change.stored), change.lengths
    if len(change.parents) != len(lengths):
        return (
            f"the worker reported the parents of {len(change.parents)} chains of stored blocks, "
            f"but the lengths of {len(lengths)}"
        )
    if 0 in lengths:
        return "the worker reported an empty chain of stored blocks"
    if sum(lengths) != num:
        return f"the worker reported chains of {sum(lengths)} blocks, but it stored {num}"
    if change.evicted and not set(change.evicted).isdisjoint(change.stored):
        return "the worker stored and evicted the same block in one change"
    parents = [0 if parent and holds(parent) else parent for parent in change.parents]
    return _error_in_new_parents(change, parents) if any(parents) else ""


def _error_in_new_parents(change: CacheChange, parents: Sequence[int]) -> str:
    """Return why the parents of chains are wrong, or an empty string.

    Args:
        change: the change.
        parents: the parent of each chain, or 0 if the chain needs none of this change.
    """
    chain_of = {}
    start = 0
    for number, length in enumerate(change.lengths):
        chain_of.update(dict.fromkeys(change.stored[start : start + length], number))
        start += length
    if any(parent and parent not in chain_of for parent in parents):
        return "the worker reported a stored block whose parent block is not in the index"
    before = [chain_of[parent] if parent else None for parent in parents]
    checked: set[int] = set()  # chains that are known not to lead into a circle
    for first in range(len(before)):
        path: set[int] = set()
        chain: int | None = first
        while chain is not None and chain not in checked:
            if chain in path:
                return "the worker reported stored blocks that follow themselves"
            path.add(chain)
            chain = before[chain]
        checked |= path
    return ""
