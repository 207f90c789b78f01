"""Replays a list of requests against an engine in this process, and times every token.

Times are those of the host. The time of a token is the moment at which the engine returned it. Both
engines of a comparison run in the same loop.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

Prompt = Sequence[int]


@dataclass(frozen=True, slots=True)
class Request:
    """A request that arrives `arrival` seconds after the start of its load.

    Attributes:
        after: index of an earlier request. The later request arrives no earlier than the first
            token of the earlier one.
        background: whether to leave the latency of this request's first token out of the figures.
    """

    prompt_len: int
    output_len: int
    arrival: float = 0.0
    after: int | None = None
    background: bool = False


class TokenEngine(Protocol):
    """An engine that generates greedily, driven step by step by `replay`."""

    def submit(self, number: int, prompt: Prompt, max_tokens: int) -> None:
        """Queue a request that generates exactly `max_tokens` tokens."""

    def advance(self) -> list[tuple[int, int]]:
        """Wait for a step and return its tokens as (number of the request, token)."""


@dataclass(slots=True)
class Answer:
    """Tokens of one request and their arrival times, in seconds from the start of the load."""

    arrived: float = 0.0  # time at which the request was due
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


def replay(
    engine: TokenEngine,
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Answer]:
    """Run all requests to their ends. Return their answers in the same order."""
    answers = [Answer() for _ in requests]
    waiting, live, began = list(range(len(requests))), 0, clock()
    while waiting or live:
        now = clock() - began
        due = {number: _due(requests[number], answers) for number in waiting}
        for number in [number for number, moment in due.items() if moment <= now]:
            waiting.remove(number)
            answers[number].arrived = due[number]
            engine.submit(number, prompts[number], requests[number].output_len)
            live += 1
        if not live:
            sleep(min(due.values()) - now)
            continue
        tokens = engine.advance()
        now = clock() - began
        for number, token in tokens:
            answers[number].tokens.append(token)
            answers[number].times.append(now)
            live -= len(answers[number].tokens) == requests[number].output_len
    return answers


def _due(request: Request, answers: Sequence[Answer]) -> float:
    """Return when a request arrives, or infinity while request `after` has no token."""
    if request.after is None:
        return request.arrival
    times = answers[request.after].times
    return max(request.arrival, times[0]) if times else float("inf")


def summary(requests: Sequence[Request], answers: Sequence[Answer]) -> dict[str, float]:
    """Return throughput and latencies of a load; a figure without samples is left out.

    `tokens_per_second` counts tokens of prompts and answers. `first_token` is the time from the
    arrival of a request to its first token. `per_token` is the time between two tokens of one
    request.
    """
    pairs = list(zip(requests, answers, strict=True))
    last = max(answer.times[-1] for answer in answers)
    first = min(answer.arrived for answer in answers)
    tokens = sum(request.prompt_len + request.output_len for request in requests)
    samples = {
        "first_token": [
            answer.times[0] - answer.arrived for request, answer in pairs if not request.background
        ],
        "per_token": [gap for answer in answers for gap in np.diff(answer.times).tolist()],
    }
    figures = {
        "requests_per_second": len(requests) / (last - first),
        "tokens_per_second": tokens / (last - first),
    }
    for name, values in samples.items():
        if values:
            p50, p99 = np.percentile(values, [50, 99])
            figures |= {f"{name}_p50_us": float(p50) * 1e6, f"{name}_p99_us": float(p99) * 1e6}
    return figures


def speed_ratios(ours: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return our speed divided by the other engine's, for each figure.

    A value above 1 means that our engine is faster.
    """
    return {
        name: other[name] / value if name.endswith("_us") else value / other[name]
        for name, value in ours.items()
        if value and other[name]
    }
