"""Names of the groups of compiled loops that this process does not have yet.

While a group is deferred, a child process compiles it (`kernels/background_compilation.py`), and
the operations of the group use plain torch. Any thread may call these functions.
"""

from collections.abc import Iterable

_deferred: set[str] = set()


def defer(names: Iterable[str]) -> None:
    """Let the operations of these groups use torch until `finish` is called with the name."""
    _deferred.update(names)


def finish(name: str) -> None:
    """Let the operations of this group use the compiled loops, which must be loaded."""
    _deferred.discard(name)


def is_deferred(name: str) -> bool:
    """Return whether the operations of this group must not use the compiled loops yet."""
    return name in _deferred
