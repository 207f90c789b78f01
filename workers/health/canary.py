"""Checks that a worker makes progress: by its steps or, while it is idle, by a canary.

A canary is a sequence of one prompt token that generates two tokens. It is processed like any other
sequence, but is not reported to routers and not counted in totals. This module is pure code; times
are in seconds of a monotonic clock.
"""

from typing import NamedTuple

from penstock.common.sampling_params import SamplingParams
from penstock.workers.scheduling.sequence import NewSequence


class CanaryKey(NamedTuple):
    """Key of the canary, with the fields of `SequenceKey`. No router has session number 0."""

    session: int = 0
    request: int = 0
    attempt: int = 0


KEY = CanaryKey()


def make_canary() -> NewSequence:
    """Return a canary with token 0 as its prompt, because all models have this token."""
    params = SamplingParams(temperature=0.0, max_tokens=2)
    return NewSequence(KEY, [0], 1, params, is_cacheable=False)


class LivenessMonitor:
    """Records the last successful step of the worker, and decides when to send a canary.

    Args:
        idle_seconds: time without a step after which a canary is sent.
        now: start time of the worker.
    """

    def __init__(self, idle_seconds: float, now: float) -> None:
        self._idle_seconds = idle_seconds
        self._computed_at = now
        self._ended_at = now  # time at which the last canary ended
        self._in_flight = False

    def silence(self, now: float) -> float:
        """Return the seconds since the last successful step."""
        return now - self._computed_at

    def due(self, now: float) -> bool:
        """Return True if a canary must be sent now, and count it as in flight."""
        if self._in_flight or now - max(self._computed_at, self._ended_at) < self._idle_seconds:
            return False
        self._in_flight = True
        return True

    def computed(self, now: float) -> None:
        """Record a successful step."""
        self._computed_at = now

    def ended(self, now: float) -> None:
        """Record that the canary has finished, has failed or was refused."""
        self._in_flight, self._ended_at = False, now
