"""Per-request timings into the figures of a load. Definitions are those of `vllm bench serve`.

- TTFT: from sending a request to the first message with tokens.
- ITL: the gap between two messages with tokens, one sample a gap, however many tokens they bring.
- TPOT: (latency - TTFT) / (tokens - 1), one sample a request with at least two tokens.
- E2EL, the latency: from sending to the last message with tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil

import numpy as np


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; times are seconds on one clock for the whole load."""

    number: int
    due: float  # when it should have been sent
    input_len: int  # tokens, as planned, then as the server counted
    requested_len: int  # tokens of answer asked for
    released: float = 0.0  # when it was its turn, before it waited for a free slot
    start: float = 0.0  # when it was sent
    arrivals: list[float] = field(default_factory=list)  # of each message with tokens
    counts: list[int | None] = field(default_factory=list)  # tokens in each; None: it did not say
    output_len: int = 0  # tokens of answer, as the server counted
    error: str = ""  # why it failed; empty: it did not

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.start

    @property
    def latency(self) -> float:
        return self.arrivals[-1] - self.start

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 for answers of one token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.arrivals)]

    def tokens_per_message(self) -> list[float]:
        """Tokens of each message; what messages do not say is shared out evenly among them."""
        reported = sum(count for count in self.counts if count is not None)
        silent = self.counts.count(None)
        per_message = (self.output_len - reported) / silent if silent else 0.0
        return [per_message if count is None else float(count) for count in self.counts]


@dataclass(frozen=True, slots=True)
class Summary:
    """A distribution, in milliseconds; all zero when there is nothing to sum up."""

    mean: float
    median: float
    std: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Summary":
        values = np.asarray(seconds or [0.0]) * 1000
        median, p90, p99 = np.percentile(values, [50, 90, 99])
        return cls(float(values.mean()), float(median), float(values.std()), float(p90), float(p99))


@dataclass(frozen=True, slots=True)
class Goals:
    """What a request must keep to count as good, in milliseconds; None: anything will do."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def met(self, outcome: Outcome) -> bool:
        pairs = (
            (self.ttft, outcome.ttft),
            (self.tpot, outcome.tpot),
            (self.e2el, outcome.latency),
        )
        return all(goal is None or seconds * 1000 <= goal for goal, seconds in pairs)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a load came to."""

    duration: float  # seconds
    completed: int
    failed: int
    short: int  # answers that ended before the length asked for
    total_input: int  # tokens of the completed requests
    total_output: int
    peak_output: float  # tokens in the best second
    peak_concurrent: int
    good: int | None  # requests that met the goals; None: no goals
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2el: Summary
    lag: Summary  # how late the client itself let requests go

    def per_second(self, count: int) -> float:
        return count / self.duration if self.duration > 0 else 0.0


def figures(outcomes: Sequence[Outcome], duration: float, goals: Goals | None = None) -> Figures:
    """Sum up the requests that ended, in `duration` seconds."""
    done = [outcome for outcome in outcomes if not outcome.error]
    return Figures(
        duration=duration,
        completed=len(done),
        failed=len(outcomes) - len(done),
        short=sum(outcome.output_len < outcome.requested_len for outcome in done),
        total_input=sum(outcome.input_len for outcome in done),
        total_output=sum(outcome.output_len for outcome in done),
        peak_output=peak_output(done),
        peak_concurrent=peak_concurrent(done),
        good=None if goals is None else sum(goals.met(outcome) for outcome in done),
        ttft=Summary.of([outcome.ttft for outcome in done]),
        tpot=Summary.of([outcome.tpot for outcome in done if outcome.output_len > 1]),
        itl=Summary.of([gap for outcome in done for gap in outcome.gaps]),
        e2el=Summary.of([outcome.latency for outcome in done]),
        lag=Summary.of([max(0.0, outcome.released - outcome.due) for outcome in outcomes]),
    )


def peak_output(done: Sequence[Outcome]) -> float:
    """Most tokens that came within one second, counted in whole seconds from the first request."""
    if not done:
        return 0.0
    first = min(outcome.start for outcome in done)
    last = max(outcome.arrivals[-1] for outcome in done)
    seconds = np.zeros(ceil(last - first) + 1)
    for outcome in done:
        buckets = (np.asarray(outcome.arrivals) - first).astype(np.int64)
        np.add.at(seconds, buckets, outcome.tokens_per_message())
    return float(seconds.max())


def peak_concurrent(done: Sequence[Outcome]) -> int:
    """Most requests under way at one time, from sending (included) to the last token (not)."""
    changes = [(outcome.start, 1) for outcome in done]
    changes += [(outcome.arrivals[-1], -1) for outcome in done]
    under_way = np.cumsum([change for _, change in sorted(changes)])
    return int(under_way.max(initial=0))
