"""The cached leading tokens of one prompt at each worker, computed on demand.

Most workers of a large cluster have cached the first blocks of a prompt (its system prompt). Making
a dict with an entry for each of them would take longer than the rest of a placement decision.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.router.routing.prefix_cache.worker_slots import Workers, WorkerSlots, bits

Levels: TypeAlias = Sequence[tuple[int, Workers]]
"""Pairs of a depth and the workers that have at least this depth, in ascending order of depth.
Each set of workers contains the next one."""


class CachedPrefix(Mapping[str, int]):
    """Maps each worker to its number of cached leading tokens.

    Workers without such tokens are absent.

    Args:
        slots: numbers of the workers in `levels`. They must not change while this object is used.
        levels: the workers by depth.
        unit: number of tokens per unit of depth.
        is_reported: whether the workers have reported all of these tokens, and a unit is a block.
    """

    __slots__ = ("_tokens", "is_reported", "levels", "slots", "unit")

    def __init__(
        self, slots: WorkerSlots, levels: Levels, unit: int = 1, is_reported: bool = False
    ) -> None:
        self.slots = slots
        self.levels = levels
        self.unit = unit
        self.is_reported = is_reported
        self._tokens: dict[str, int] | None = None

    def as_dict(self) -> dict[str, int]:
        """Return this mapping as a dict, which is computed only once."""
        if self._tokens is None:
            found: dict[str, int] = {}
            names, above = self.slots.names, 0
            for depth, workers in reversed(self.levels):
                num_tokens = depth * self.unit
                for slot in bits(workers & ~above):
                    found[names[slot]] = num_tokens
                above = workers
            self._tokens = found
        return self._tokens

    def __getitem__(self, worker: str) -> int:
        num_tokens: int = self.get(worker, 0)
        if not num_tokens:
            raise KeyError(worker)
        return num_tokens

    def get(self, worker: str, default: Any = None) -> Any:
        """Return the number of cached leading tokens of a worker, or `default` if it has none."""
        slot = self.slots.find(worker)
        if slot is not None:
            for depth, workers in reversed(self.levels):
                if workers >> slot & 1:
                    return depth * self.unit
        return default

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())

    def __bool__(self) -> bool:
        return bool(self.levels)


def merge_levels(sources: Sequence[tuple[int, Levels]]) -> Levels:
    """Merge the levels of several sources into one list of levels, with depths in tokens.

    Args:
        sources: pairs of the number of tokens per unit of depth, and the levels. If several sources
            contain the same worker, its largest number of tokens counts.
    """
    found = [(unit * depth, workers) for unit, levels in sources for depth, workers in levels]
    found.sort(reverse=True)
    merged: list[tuple[int, Workers]] = []
    deeper = 0
    for num_tokens, workers in found:
        those = deeper | workers
        if those == deeper:
            continue
        if merged and merged[-1][0] == num_tokens:
            merged.pop()
        merged.append((num_tokens, those))
        deeper = those
    merged.reverse()
    return merged
