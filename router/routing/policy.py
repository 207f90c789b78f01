"""Which worker gets a request: the interface, and the least-loaded choice behind it."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from penstock.router.routing.fleet import WorkerView

PENALTY_TOKENS = 2048
"""What having been lost a moment ago weighs in the choice of a prefill worker, in queued tokens."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A request as placement sees it."""

    request: int
    num_tokens: int  # prompt and answer so far
    num_sequences: int
    num_left: int  # the most tokens that it may still get
    has_source: bool = False  # a worker keeps its blocks: only the tokens to come need computing
    unfit: AbstractSet[str] = frozenset()  # workers on which it can never fit
    stays: bool = False  # where its prompt is computed


@dataclass(frozen=True, slots=True)
class Placement:
    """Run on `worker`; with `then`, only until the first token, and there from then on."""

    worker: str
    then: str | None = None

    @property
    def yield_after(self) -> int:
        return 0 if self.then is None else 1


class Policy(Protocol):
    def place(self, demand: Demand, workers: Sequence[WorkerView], now: float) -> Placement | None:
        """Where to run; None while no worker has room. Workers that are not usable (suspect,
        draining), have no room (full, masked) or are unfit must not be chosen."""
        ...


class LeastLoaded:
    """Prefill where the fewest tokens are queued, decode where the smallest share is taken.

    A role is a weight: where one kind of worker is missing, the other kind does all the work.
    """

    def place(self, demand: Demand, workers: Sequence[WorkerView], now: float) -> Placement | None:
        live = [view for view in workers if view.usable and view.name not in demand.unfit]
        decoders = [view for view in live if view.info.role != "prefill"]
        # Choices are sequences of their own, in step only while nobody moves them: they stay. Of
        # a beam search nothing moves but its prompt.
        if demand.has_source or demand.stays:
            whole = _roomiest(decoders or live, demand, now)
            return None if whole is None else Placement(whole.name)
        prefillers = [view for view in live if view.info.role != "decode"]
        first = _shortest_queue(prefillers or live, demand, now)
        if first is None:
            return None
        if first.info.role != "prefill" or not decoders or demand.num_left == 1:
            return Placement(first.name)
        second = _roomiest(decoders, demand, now)
        return None if second is None else Placement(first.name, second.name)


def _with_room(views: Sequence[WorkerView], demand: Demand) -> list[WorkerView]:
    return [view for view in views if view.has_room(demand.num_tokens, demand.num_sequences)]


def _shortest_queue(views: Sequence[WorkerView], demand: Demand, now: float) -> WorkerView | None:
    return min(
        _with_room(views, demand),
        key=lambda view: (
            view.backlog_tokens + PENALTY_TOKENS * view.penalty(now),
            view.num_busy,
            view.num_placed,
            view.name,
        ),
        default=None,
    )


def _roomiest(views: Sequence[WorkerView], demand: Demand, now: float) -> WorkerView | None:
    return min(
        _with_room(views, demand),
        key=lambda view: (
            view.num_busy / view.info.max_sequences + view.penalty(now),
            view.num_blocks / view.info.num_blocks,
            view.num_placed,
            view.name,
        ),
        default=None,
    )
