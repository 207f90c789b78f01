"""Steps of `penstock bench --sweep` with made-up results, for tests."""

from penstock.loadtests.bench.metrics import Goals, Outcome
from penstock.loadtests.bench.sweep.step import Step, step_of


def outcome(number: int, ttft: float, tpot: float, error: str = "") -> Outcome:
    """Return a request that got an answer of two tokens. The arguments are times in seconds."""
    made = Outcome(number, due=0.0, input_len=8, requested_len=2, error=error)
    if not error:
        made.arrivals, made.counts, made.output_len = [ttft, ttft + tpot], [1, 1], 2
    return made


def step(rate: float, ttft: float = 0.1, tpot: float = 0.01, goals: Goals | None = None) -> Step:
    """Return a step of 10 s with two equal requests; `ttft` and `tpot` are in seconds."""
    outcomes = [outcome(number, ttft, tpot) for number in range(2)]
    return step_of(rate, outcomes, 10.0, goals or Goals(ttft=1000.0), 0.99)
