"""The cached leading tokens of one prompt at each worker, computed when they are needed.

With many workers, most have the first blocks of a prompt (its system prompt). Filling a dict with
an entry for each of them would take longer than the rest of a decision.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from penstock.router.routing.prefix_cache.prefix_index import PrefixIndex, Workers, bits

Levels: TypeAlias = Sequence[tuple[int, Workers]]


class CachedPrefix(Mapping[str, int]):
    """Maps workers to numbers of tokens; workers without such tokens are absent.

    Args:
        sources: for each source of knowledge, its index and its levels: pairs of a number of tokens
            and the workers that have at least this number. If a worker is in several levels, the
            largest number counts. The indexes must not change while this object is in use.
    """

    def __init__(self, sources: Sequence[tuple[PrefixIndex, Levels]]) -> None:
        self.sources = [source for source in sources if source[1]]
        self._tokens: dict[str, int] | None = None

    def as_dict(self) -> dict[str, int]:
        """Return this mapping as a dict, which is computed once."""
        if self._tokens is None:
            found: dict[str, int] = {}
            for index, levels in self.sources:
                names = index.workers
                for num_tokens, workers in levels:
                    for slot in bits(workers):
                        name = names[slot]
                        if num_tokens > found.get(name, 0):
                            found[name] = num_tokens
            self._tokens = found
        return self._tokens

    def __getitem__(self, worker: str) -> int:
        return self.as_dict()[worker]

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())

    def __bool__(self) -> bool:
        return bool(self.sources)
