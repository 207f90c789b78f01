"""What came of a chaos: whom each fault hit, how long it took until tokens came again. Pure."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.loadtests.chaos.answers import Stream
from penstock.loadtests.chaos.faults import InjectedFault

LOSSES = 2
"""A request under which so many workers were lost ends with an error: see docs/lifecycle.md."""

NOTICED_SECONDS = {"freeze": 10.0}
"""After so long one that stands still is given nothing more; one that is dead or cut off: 1 s."""

TRAVEL_SECONDS = 0.25
"""For so long after its blocks were asked for, a worker that has them is counted as needed."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The router gave an attempt at a request to a worker."""

    at: float  # seconds since 1970, on the router's clock
    worker: str
    request: str
    source: str  # the worker that has its blocks; empty: none


@dataclass(slots=True)
class FaultEffect:
    """Of one strike."""

    injected: InjectedFault
    streams: list[Stream] = field(default_factory=list)  # that needed whom it struck
    recoveries: list[float] = field(default_factory=list)  # seconds to the next token of each


class PlacementHistory:
    """Which workers a request needed, and when."""

    def __init__(self, placements: Sequence[Placement]) -> None:
        self._of: dict[str, list[Placement]] = defaultdict(list)
        for each in sorted(placements, key=lambda one: one.at):
            self._of[each.request].append(each)

    def needs(self, request: str, worker: str, at: float) -> bool:
        """Whether it ran there then, or its blocks came from there."""
        ever = self._of[request]
        number = bisect_right(ever, at, key=lambda one: one.at)
        if not number:
            return False
        last = ever[number - 1]
        return last.worker == worker or (last.source == worker and at - last.at < TRAVEL_SECONDS)

    def took(self, request: str, worker: str, since: float, until: float) -> bool:
        """Whether that worker was given it then."""
        return any(one.worker == worker and since <= one.at < until for one in self._of[request])

    def events(self, request: str) -> list[tuple[float, str]]:
        """Who was given it, and when."""
        return [(one.at, f"to {one.worker}") for one in self._of[request]]

    def next(self, request: str, after: float) -> float | None:
        """When it was next given to a worker."""
        ever = self._of[request]
        number = bisect_right(ever, after, key=lambda one: one.at)
        return ever[number].at if number < len(ever) else None


def effects_of(
    injected: Sequence[InjectedFault], streams: Sequence[Stream], placements: Sequence[Placement]
) -> list[FaultEffect]:
    """What each strike did."""
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
    """Seconds until its next token that was computed afterwards; nothing if it needed no more."""
    again = holders.next(stream.name, injection.at)
    if again is None or again >= stream.ended:
        if injection.kills:
            return  # all of its answer was on its way already
        again = injection.until
    number = bisect_left(stream.arrivals, again)
    if number < len(stream.arrivals):
        yield stream.arrivals[number] - injection.at


def errors_of(
    streams: Sequence[Stream], hits: Sequence[FaultEffect], placements: Sequence[Placement]
) -> tuple[list[str], list[str]]:
    """Errors that nobody should see, each with what its request went through; and those of requests
    under which workers were lost twice."""
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
    """Whether a worker was lost under it by that: it was there, or was given to the worker before
    anybody noticed."""
    injection = hits.injected
    if not injection.loses or not injection.worker:
        return False
    noticed = injection.at + NOTICED_SECONDS.get(injection.fault.kind, 1.0)
    return stream in hits.streams or holders.took(
        stream.name, injection.worker, injection.at, noticed
    )


def _describe(stream: Stream, hits: Sequence[FaultEffect], holders: PlacementHistory) -> str:
    """Who had it, and all that was struck meanwhile, with seconds since it began."""
    injections = [each.injected for each in hits]
    fault_events = [
        (one.at, f"{one.fault.kind} {one.title}") for one in injections if _overlaps(stream, one)
    ]
    events = sorted([*holders.events(stream.name), *fault_events])
    return ", ".join(f"{at - stream.began:.2f} s {what}" for at, what in events)


def _overlaps(stream: Stream, injection: InjectedFault) -> bool:
    return injection.at < stream.ended and max(injection.until, injection.at + 10.0) >= stream.began


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """In seconds."""
    if not seconds:
        return {"p50": None, "p99": None, "max": None}
    low, high = np.percentile(seconds, [50, 99])
    return {"p50": float(low), "p99": float(high), "max": float(max(seconds))}


def by_kind(hits: Sequence[FaultEffect]) -> dict[str, Mapping[str, Any]]:
    """Faults made, those that hit somebody, and how long recovery took."""
    kinds: dict[str, list[FaultEffect]] = defaultdict(list)
    for each in hits:
        kinds[each.injected.fault.kind].append(each)
    return {kind: _sum(kinds[kind]) for kind in sorted(kinds)} | {"all": _sum(hits)}


def by_moment(hits: Sequence[FaultEffect]) -> dict[str, Mapping[str, Any]]:
    """The same by the moment that was struck."""
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
    """As lines of text."""
    lines = [f"{first:<12} faults  hit  streams  recovered  p50 s  p99 s  max s"]
    for name, found in sums.items():
        times = found["recovery_seconds"].values()
        shown = "  ".join("    -" if each is None else f"{each:5.2f}" for each in times)
        lines.append(
            f"{name:<12} {found['faults']:>6} {found['hit']:>4} {found['streams']:>8} "
            f"{found['recovered']:>10}  {shown}"
        )
    return lines
