"""JSON texts in fragments, each of which takes at most a few milliseconds to make.

A caller can let the event loop run other callbacks between two fragments. Empty fragments serve
only this purpose.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from penstock.router.requests.json_text import dumps as dumps  # part of this module's interface

# Serializing one fragment takes about 1 ms if each token has 20 alternatives.
TOKENS_PER_FRAGMENT = 32
IDS_PER_FRAGMENT = 4096


def items_of(values: Sequence[object]) -> str:
    """Return the items of a JSON array, without the brackets."""
    return dumps(values)[1:-1]


def array(*fragments: Iterable[str]) -> Iterator[str]:
    """Yield a JSON array of the items in all fragments.

    Each fragment is a list without brackets.
    """
    separator = "["
    for fragment in chain(*fragments):
        if fragment:
            yield separator + fragment
            separator = ","
    yield "[]" if separator == "[" else "]"


def ids(tokens: Sequence[int]) -> Iterator[str]:
    """Yield a JSON array of token ids."""
    starts = range(0, len(tokens), IDS_PER_FRAGMENT)
    return array(items_of(list(tokens[start : start + IDS_PER_FRAGMENT])) for start in starts)


class Columns:
    """Named JSON arrays of equal length, in fragments; `append` adds items to all of the arrays."""

    def __init__(self, names: Iterable[str]) -> None:
        self.fragments: Mapping[str, list[str]] = {name: [] for name in names}

    def append(self, values: Mapping[str, Sequence[object]]) -> None:
        """Append values to each array."""
        for name, column in self.fragments.items():
            column.append(items_of(values[name]))

    def after(self, before: "Columns | None") -> Iterator[str]:
        """Yield the arrays as one JSON object; each array begins with its items in `before`."""
        separator = "{"
        for name, column in self.fragments.items():
            yield f'{separator}"{name}":'
            yield from array(() if before is None else before.fragments[name], column)
            separator = ","
        yield "}"
