"""Workers of one machine that share its cores and thereby slow each other down."""

from typing import Protocol


class Runner(Protocol):
    """Interface of a worker's step runner."""

    def catch_up(self) -> None:
        """End a fast-forward, because the durations of its next steps have changed."""
        ...


class SharedCores:
    """The workers of one machine that are computing.

    A worker computes from its first step until it is idle. As in `workers/rank/core_sharing.py`, a
    step keeps its cores until it ends, even if another worker begins or becomes idle meanwhile.

    Args:
        sharing: relative slowdown of a step for each other worker that computes when the step
            begins.
    """

    def __init__(self, sharing: float) -> None:
        self._sharing = sharing
        self._computing: dict[Runner, None] = {}

    def set_computing(self, runner: Runner, is_computing: bool) -> None:
        """Record that a worker begins to compute or becomes idle.

        This ends the fast-forwards of the other workers.
        """
        if is_computing == (runner in self._computing):
            return
        others = [each for each in self._computing if each is not runner]
        if is_computing:
            self._computing[runner] = None
        else:
            del self._computing[runner]
        for other in others:
            other.catch_up()

    def slowdown(self, runner: Runner) -> float:
        """Return the factor by which a step takes longer if the worker begins the step now."""
        return 1 + self._sharing * (len(self._computing) - (runner in self._computing))
