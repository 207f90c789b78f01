"""The product's autoscaler, and the scalers with which it is compared."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from penstock.cluster.autoscaling.autoscaler import (
    Autoscaler,
    PoolInputs,
    PoolLimits,
    ScalingPolicy,
)

INTERVAL_SECONDS = 5.0
"""Seconds between decisions."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """State of a pool at the time of a scaling decision."""

    state: PoolInputs
    utilization: float  # fraction of worker time with running steps since the last decision


class Scaler(Protocol):
    def decide(self, pools: Mapping[str, PoolView], now: float) -> Mapping[str, int]:
        """Return the number of workers that each pool should have."""
        ...


class Static:
    """A scaler that keeps a fixed number of workers."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def decide(self, pools: Mapping[str, PoolView], now: float) -> Mapping[str, int]:
        return self._counts


class PenstockScaler:
    """Penstock's own autoscaler."""

    def __init__(
        self, limits: Mapping[str, PoolLimits], policy: ScalingPolicy | None = None
    ) -> None:
        self._autoscaler = Autoscaler(limits, policy=policy)

    def decide(self, pools: Mapping[str, PoolView], now: float) -> Mapping[str, int]:
        states = {name: sight.state for name, sight in pools.items()}
        return {one.pool: one.desired for one in self._autoscaler.decide(states, now)}


class QueueThreshold:
    """Adds a worker if more than `most` requests are queued per worker.

    It removes a worker after 60 s without queued requests.
    """

    def __init__(self, limits: Mapping[str, PoolLimits], most: int = 4) -> None:
        self._limits = limits
        self._most = most
        self._quiet_since: dict[str, float] = {}

    def decide(self, pools: Mapping[str, PoolView], now: float) -> Mapping[str, int]:
        return {name: self._count(name, sight, now) for name, sight in pools.items()}

    def _count(self, name: str, sight: PoolView, now: float) -> int:
        state, limits = sight.state, self._limits[name]
        queued = state.waiting + sum(each.load.queued_tokens > 0 for each in state.workers)
        if queued > self._most * state.count:
            self._quiet_since.pop(name, None)
            return min(state.count + 1, limits.most)
        if queued:
            self._quiet_since.pop(name, None)
            return state.count
        if now - self._quiet_since.setdefault(name, now) < 60.0:
            return state.count
        self._quiet_since[name] = now
        return max(state.count - 1, limits.least)


class CpuTarget:
    """Kubernetes' HPA on utilization.

    The target is 70%, the tolerance 10%, and the window for scaling down 300 s.
    """

    TARGET, TOLERANCE, WINDOW = 0.7, 0.1, 300.0

    def __init__(self, limits: Mapping[str, PoolLimits]) -> None:
        self._limits = limits
        self._wanted: dict[str, deque[tuple[float, int]]] = {name: deque() for name in limits}

    def decide(self, pools: Mapping[str, PoolView], now: float) -> Mapping[str, int]:
        return {name: self._count(name, sight, now) for name, sight in pools.items()}

    def _count(self, name: str, sight: PoolView, now: float) -> int:
        count, limits = sight.state.count, self._limits[name]
        ratio = sight.utilization / self.TARGET
        steady = abs(ratio - 1) <= self.TOLERANCE
        wanted = count if steady else ceil(len(sight.state.workers) * ratio)
        wanted = min(max(wanted, limits.least), limits.most, max(4, 2 * count))
        past = self._wanted[name]
        past.append((now, wanted))
        while past[0][0] < now - self.WINDOW:
            past.popleft()
        return max(most for _, most in past) if wanted < count else wanted


class Clairvoyant:
    """A scaler that knows all arrivals and provides the workers needed in the near future.

    Args:
        needs: for each pool, the number of workers needed in each slot of `slot` seconds.
        ahead: seconds to look ahead: a cold start and the time between decisions.
        most: largest number of workers in a pool.
    """

    def __init__(
        self, needs: Mapping[str, Sequence[int]], slot: float, ahead: float, most: int
    ) -> None:
        self._needs = needs
        self._most = most
        self._slot = slot
        self._ahead = ahead

    def decide(self, pools: Mapping[str, PoolView], now: float) -> Mapping[str, int]:
        first = max(int(now / self._slot) - 1, 0)  # the work of the previous slot may still run
        last = int((now + self._ahead) / self._slot) + 1
        return {
            name: min(max(needs[first : last + 1], default=1), self._most)
            for name, needs in self._needs.items()
        }
