"""What goes wrong, and when: a plan from a seed. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

WEIGHTS = {"kill": 8, "pause": 5, "freeze": 2, "cut stream": 4, "cut blocks": 1}
"""How often each kind comes; what else there is has to be asked for."""

ON_REQUEST = {"ray kill": 4, "kill router": 2}

MOMENTS = {
    "any": 6,  # as soon as the last fault is over
    "prompt": 2,  # a worker computes a prompt
    "KV transfer": 3,  # blocks are kept for another worker, or reserved for what comes
    "decoding": 3,  # a worker that only decodes has something to
    "back": 2,  # a worker that was replaced has its first request
    "at once": 2,  # no time after the fault before
}
"""How often each moment is waited for."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One that is planned: whom it strikes is known when its moment has come."""

    number: int
    kind: str
    moment: str
    draw: float  # in [0, 1): who of those who could be struck
    seconds: float  # how long a pause lasts


@dataclass(slots=True)
class InjectedFault:
    """A fault that was made."""

    fault: Fault
    moment: str  # at which it was: the one that it waited for, or "any"
    worker: str  # its name; empty: the router
    title: str
    pid: int
    at: float  # seconds since 1970
    until: float  # when it was over: a pause has an end, what is dead has not

    @property
    def kills(self) -> bool:
        """The process does not live on."""
        return self.fault.kind in ("kill", "ray kill", "freeze", "kill router")

    @property
    def loses(self) -> bool:
        """The router loses the worker."""
        return self.kills or self.fault.kind == "cut stream"


def plan_faults(count: int, seed: int, also: Sequence[str]) -> list[Fault]:
    """So many; every kind comes once before any comes twice."""
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
