"""Derives the effects of injected faults.

These are the affected streams, the recovery times and the errors that the faults allow.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.loadtests.chaos.answers import Stream
from penstock.loadtests.chaos.faults import InjectedFault

LOSSES = 2
"""Number of lost workers after which a request fails: see docs/lifecycle.md."""

NOTICED_SECONDS = {"freeze": 10.0}
"""Time until the router stops using a faulty worker, by kind of fault; default 1 s."""

TRAVEL_SECONDS = 0.25
"""Seconds after its placement in which a request is assumed to need the sender of its blocks.
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """One placement of a request on a worker by the router."""

    at: float  # time of the placement on the router's clock (Unix seconds)
    worker: str
    request: str
    source: str  # worker that sends the request's KV blocks, or empty without a KV transfer


@dataclass(slots=True)
class FaultEffect:
    """Effect of one injected fault."""

    injected: InjectedFault
    streams: list[Stream] = field(default_factory=list)  # streams that needed the faulty process
    # Seconds from the fault to the first token computed after it, for each stream that recovered.
    recoveries: list[float] = field(default_factory=list)


class PlacementHistory:
    """Placements of each request. They show which workers a request needed at a given time."""

    def __init__(self, placements: Sequence[Placement]) -> None:
        self._of: dict[str, list[Placement]] = defaultdict(list)
        for each in sorted(placements, key=lambda one: one.at):
            self._of[each.request].append(each)

    def needs(self, request: str, worker: str, at: float) -> bool:
        """Return whether `request` needed `worker` at time `at`.

        A request needs the worker on which it runs and, shortly after its placement, the worker
        that sends its blocks.
        """
        ever = self._of[request]
        number = bisect_right(ever, at, key=lambda one: one.at)
        if not number:
            return False
        last = ever[number - 1]
        return last.worker == worker or (last.source == worker and at - last.at < TRAVEL_SECONDS)

    def took(self, request: str, worker: str, since: float, until: float) -> bool:
        """Return whether the router placed the request on the worker within [since, until)."""
        return any(one.worker == worker and since <= one.at < until for one in self._of[request])

    def events(self, request: str) -> list[tuple[float, str]]:
        """Return the times of the request's placements with a text that names the worker."""
        return [(one.at, f"to {one.worker}") for one in self._of[request]]

    def next(self, request: str, after: float) -> float | None:
        """Return the time of the request's first placement after `after`, or None."""
        ever = self._of[request]
        number = bisect_right(ever, after, key=lambda one: one.at)
        return ever[number].at if number < len(ever) else None


def effects_of(
    injected: Sequence[InjectedFault], streams: Sequence[Stream], placements: Sequence[Placement]
) -> list[FaultEffect]:
    """Return the effect of each injected fault."""
    holders = PlacementHistory(placements)
    found = [FaultEffect(injection) for injection in injected]
    for hits in found:
        injection = hits.injected
        for stream in streams:
            if stream.began <= injection.at < stream.ended and (
                not injection.worker or holders.needs(stream.name, injection.worker, injection.at)
            ):
                hits.streams.append(stream)
                hits.recoveries += _recovery(stream, injection, holders)
    return found


def _recovery(
    stream: Stream, injection: InjectedFault, holders: PlacementHistory
) -> Iterator[float]:
    """Yield the seconds from the fault to the first token that was computed after the fault.

    Yields nothing if all tokens of the stream had already been computed.
    """
    again = holders.next(stream.name, injection.at)
    if again is None or again >= stream.ended:
        if injection.kills:
            return  # the rest of the answer had been computed before the fault
        again = injection.until
    number = bisect_left(stream.arrivals, again)
    if number < len(stream.arrivals):
        yield stream.arrivals[number] - injection.at


def errors_of(
    streams: Sequence[Stream], hits: Sequence[FaultEffect], placements: Sequence[Placement]
) -> tuple[list[str], list[str]]:
    """Split the errors of streams into unexpected and allowed errors.

    An error is allowed if at least LOSSES workers were lost during the request. An unexpected error
    includes the history of its request.
    """
    holders = PlacementHistory(placements)
    wrong: list[str] = []
    allowed: list[str] = []
    for stream in streams:
        if stream.error:
            losses = [each.injected for each in hits if _lost(stream, each, holders)]
            text = f"{stream.name}: {stream.error}"
            if len(losses) >= LOSSES:
                allowed.append(text)
            else:
                wrong.append(f"{text} ({_describe(stream, hits, holders)})")
    return wrong, allowed


def _lost(stream: Stream, hits: FaultEffect, holders: PlacementHistory) -> bool:
    """Return whether a fault made the stream lose a worker.

    A stream lost the worker if it needed the worker at the time of the fault. It also lost the
    worker if the router placed it on that worker before noticing the fault.
    """
    injection = hits.injected
    if not injection.loses or not injection.worker:
        return False
    noticed = injection.at + NOTICED_SECONDS.get(injection.fault.kind, 1.0)
    return stream in hits.streams or holders.took(
        stream.name, injection.worker, injection.at, noticed
    )


def _describe(stream: Stream, hits: Sequence[FaultEffect], holders: PlacementHistory) -> str:
    """List the placements of a stream and the faults during it.

    Times are in seconds since the start of the stream.
    """
    injections = [each.injected for each in hits]
    fault_events = [
        (one.at, f"{one.fault.kind} {one.title}") for one in injections if _overlaps(stream, one)
    ]
    events = sorted([*holders.events(stream.name), *fault_events])
    return ", ".join(f"{at - stream.began:.2f} s {what}" for at, what in events)


def _overlaps(stream: Stream, injection: InjectedFault) -> bool:
    return injection.at < stream.ended and max(injection.until, injection.at + 10.0) >= stream.began


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return median, 99th percentile and maximum. Each of them is None without values."""
    if not seconds:
        return {"p50": None, "p99": None, "max": None}
    low, high = np.percentile(seconds, [50, 99])
    return {"p50": float(low), "p99": float(high), "max": float(max(seconds))}


def by_kind(hits: Sequence[FaultEffect]) -> dict[str, Mapping[str, Any]]:
    """Summarize the faults by kind: their number, affected streams and recovery times."""
    kinds: dict[str, list[FaultEffect]] = defaultdict(list)
    for each in hits:
        kinds[each.injected.fault.kind].append(each)
    return {kind: _sum(kinds[kind]) for kind in sorted(kinds)} | {"all": _sum(hits)}


def by_moment(hits: Sequence[FaultEffect]) -> dict[str, Mapping[str, Any]]:
    """Summarize the faults by the situation in which each fault was injected."""
    moments: dict[str, list[FaultEffect]] = defaultdict(list)
    for each in hits:
        moments[each.injected.moment].append(each)
    return {moment: _sum(moments[moment]) for moment in sorted(moments)}


def _sum(hits: Sequence[FaultEffect]) -> Mapping[str, Any]:
    recoveries = [seconds for each in hits for seconds in each.recoveries]
    return {
        "faults": len(hits),
        "hit": sum(bool(each.streams) for each in hits),
        "streams": sum(len(each.streams) for each in hits),
        "recovered": len(recoveries),
        "recovery_seconds": percentiles(recoveries),
    }


def table(sums: Mapping[str, Mapping[str, Any]], first: str) -> list[str]:
    """Format summaries as lines of text. `first` is the heading of the first column."""
    lines = [f"{first:<12} faults  hit  streams  recovered  p50 s  p99 s  max s"]
    for name, found in sums.items():
        times = found["recovery_seconds"].values()
        shown = "  ".join("    -" if each is None else f"{each:5.2f}" for each in times)
        lines.append(
            f"{name:<12} {found['faults']:>6} {found['hit']:>4} {found['streams']:>8} "
            f"{found['recovered']:>10}  {shown}"
        )
    return lines
