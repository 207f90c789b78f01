"""Latency and throughput metrics of a load, defined as in `vllm bench serve`.

- TTFT: time from sending a request to the first message with tokens.
- ITL: time between two consecutive messages with tokens, however many tokens they contain.
- TPOT: (E2EL - TTFT) / (tokens - 1); one sample per request with at least two tokens.
- E2EL (end-to-end latency): time from sending a request to the last message with tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np


@dataclass(slots=True)
class Outcome:
    """Measurements of one request. All times are in seconds since the start of the load."""

    number: int
    due: float  # scheduled time of sending
    input_len: int  # planned prompt tokens, later the number that the server counted
    requested_len: int  # requested number of answer tokens
    released: float = 0.0  # time at which the client was ready to send, before it waited for a slot
    start: float = 0.0  # actual time of sending
    arrivals: list[float] = field(default_factory=list)  # arrival times of messages with tokens
    counts: list[int | None] = field(default_factory=list)  # tokens per message; None if unknown
    output_len: int = 0  # number of answer tokens as counted by the server
    error: str = ""  # reason of the failure, or empty if the request succeeded

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.start

    @property
    def latency(self) -> float:
        return self.arrivals[-1] - self.start

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for an answer of one token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.arrivals)]

    def tokens_per_message(self) -> list[float]:
        """Return the number of tokens in each message.

        If some messages did not report a token count, the remaining tokens of the answer are
        divided evenly among these messages.
        """
        reported = sum(count for count in self.counts if count is not None)
        silent = self.counts.count(None)
        per_message = (self.output_len - reported) / silent if silent else 0.0
        return [per_message if count is None else float(count) for count in self.counts]


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, standard deviation and percentiles in milliseconds. All are 0 without samples."""

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
    """Latency limits in milliseconds. Only requests within all limits count as goodput.

    None means no limit.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def limits(self) -> dict[str, float]:
        """Return the limits that are set, by name."""
        named = {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2el}
        return {name: limit for name, limit in named.items() if limit is not None}

    def missed(self, outcome: Outcome) -> list[str]:
        """Return the names of the limits that a completed request exceeds."""
        seconds = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
        return [name for name, limit in self.limits().items() if seconds[name] * 1000 > limit]

    def met(self, outcome: Outcome) -> bool:
        return not self.missed(outcome)


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of a load."""

    duration: float  # duration of the load, in seconds
    completed: int
    failed: int
    short: int  # number of answers with fewer tokens than requested
    total_input: int  # prompt tokens of the completed requests
    total_output: int
    peak_output: float  # largest number of tokens received within one second
    peak_concurrent: int
    good: int | None  # number of requests that met the goals, or None without goals
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2el: Summary
    lag: Summary  # delays of sending that the client itself caused

    def per_second(self, count: int) -> float:
        return count / self.duration if self.duration > 0 else 0.0


def figures(outcomes: Sequence[Outcome], duration: float, goals: Goals | None = None) -> Figures:
    """Summarize the finished requests of a load that took `duration` seconds."""
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
    """Return the largest number of tokens received in one second.

    The seconds are counted from the sending of the first request.
    """
    if not done:
        return 0.0
    first = min(outcome.start for outcome in done)
    arrivals = np.concatenate([outcome.arrivals for outcome in done])
    tokens = np.concatenate([outcome.tokens_per_message() for outcome in done])
    # A load may take days, so count only the seconds in which tokens arrived.
    _, second = np.unique(np.floor(arrivals - first), return_inverse=True)
    return float(np.bincount(second, weights=tokens).max())


def peak_concurrent(done: Sequence[Outcome]) -> int:
    """Return the largest number of requests in flight at the same time.

    A request is in flight from its sending until its last token arrives.
    """
    changes = [(outcome.start, 1) for outcome in done]
    changes += [(outcome.arrivals[-1], -1) for outcome in done]
    under_way = np.cumsum([change for _, change in sorted(changes)])
    return int(under_way.max(initial=0))
