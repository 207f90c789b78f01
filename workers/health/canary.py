"""Whether a worker still computes: seen by its steps, and by a canary where nothing is asked of it.

A canary is a sequence of one prompt token that decodes another one. It goes the way of all others;
no router hears of it and no total counts it. Pure: times are seconds of a clock that never goes
back.
"""

from typing import NamedTuple

from penstock.common.sampling_params import SamplingParams
from penstock.workers.scheduling.sequence import NewSequence


class CanaryKey(NamedTuple):
    """As the keys of routers' sequences are, but of a stream that there is not."""

    session: int = 0
    request: int = 0
    attempt: int = 0


KEY = CanaryKey()


def make_canary() -> NewSequence:
    """It needs one block, which no other sequence can find; of tokens that any model has."""
    params = SamplingParams(temperature=0.0, max_tokens=2)
    return NewSequence(KEY, [0], 1, params, salt=b"\0canary")


class LivenessMonitor:
    """When a worker last computed something, and when it is to show that it still can.

    Args:
        idle_seconds: without a step, after which a canary is sent.
        now: when the worker begins.
    """

    def __init__(self, idle_seconds: float, now: float) -> None:
        self._idle_seconds = idle_seconds
        self._computed_at = now
        self._ended_at = now  # of the last canary
        self._in_flight = False

    def silence(self, now: float) -> float:
        """Seconds since the last step that went well."""
        return now - self._computed_at

    def due(self, now: float) -> bool:
        """Whether to send a canary now; it is under way from then on."""
        if self._in_flight or now - max(self._computed_at, self._ended_at) < self._idle_seconds:
            return False
        self._in_flight = True
        return True

    def computed(self, now: float) -> None:
        """A step went well."""
        self._computed_at = now

    def ended(self, now: float) -> None:
        """The canary has decoded its token, has failed, or was not taken."""
        self._in_flight, self._ended_at = False, now
