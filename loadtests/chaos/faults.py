"""Plans faults, and the situations in which they are injected, from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

WEIGHTS = {"kill": 8, "pause": 5, "freeze": 2, "cut stream": 4, "cut blocks": 1}
"""Relative frequency of each kind of fault that is enabled by default."""

# Relative frequencies of the kinds of faults that need an option.
ON_REQUEST = {"ray kill": 4, "kill router": 2}

MOMENTS = {
    "any": 6,  # any worker that has requests
    "prompt": 2,  # a prefill or mixed worker that has running sequences
    "KV transfer": 3,  # a worker that has leased or reserved blocks
    "decoding": 3,  # a decode or mixed worker that has running sequences
    "back": 2,  # a worker that was just restarted and has requests again
    "at once": 2,  # any worker that has requests, 0.25 s after the previous fault
}
"""Relative frequency of the situations in which faults are injected."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault. Its target is chosen only when the fault is injected."""

    number: int
    kind: str
    moment: str
    draw: float  # random number in [0, 1) that selects the target among the candidates
    seconds: float  # duration in seconds if the fault is a pause


@dataclass(slots=True)
class InjectedFault:
    """A fault that was injected."""

    fault: Fault
    moment: str  # situation of the injection: the planned one, or "any"
    worker: str  # name of the worker, or empty for the router
    title: str
    pid: int
    at: float  # time of the injection (Unix timestamp in seconds)
    until: float  # end of a pause; for other faults the same as `at`

    @property
    def kills(self) -> bool:
        """True if the fault ends the process. A frozen process counts: it is killed later."""
        return self.fault.kind in ("kill", "ray kill", "freeze", "kill router")

    @property
    def loses(self) -> bool:
        """True if the fault disconnects the worker from the router."""
        return self.kills or self.fault.kind == "cut stream"


def plan_faults(count: int, seed: int, also: Sequence[str]) -> list[Fault]:
    """Plan `count` faults. Every kind occurs once before any kind is repeated.

    `also` names the kinds of ON_REQUEST to include.
    """
    weights = {**WEIGHTS, **{kind: ON_REQUEST[kind] for kind in also}}
    order = Random(f"kinds {seed}")
    kinds = order.sample(list(weights), len(weights))
    kinds += order.choices(list(weights), list(weights.values()), k=max(0, count - len(kinds)))
    return [_fault(seed, number, kind) for number, kind in enumerate(kinds[:count])]


def _fault(seed: int, number: int, kind: str) -> Fault:
    rng = Random(f"fault {seed} {number}")
    (moment,) = rng.choices(list(MOMENTS), list(MOMENTS.values()))
    if kind == "cut blocks":
        moment = "KV transfer"
    elif number == 0 and moment == "at once":
        moment = "any"
    return Fault(number, kind, moment, rng.random(), rng.uniform(0.1, 1.5))
