"""Runs a sweep: one load after another, at the rates that the search returns."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from penstock.loadtests.bench.clients import Client
from penstock.loadtests.bench.load import Load
from penstock.loadtests.bench.metrics import Goals, Outcome
from penstock.loadtests.bench.options import Sweep, Work, WrongOptions, check_file, plan_of
from penstock.loadtests.bench.sweep.rate_search import RateSearch
from penstock.loadtests.bench.sweep.step import Step, step_of
from penstock.loadtests.bench.workload import Planned, Prompts

MIN_REQUESTS = 20
"""A step has at least this many requests, even if they take longer than the step's seconds."""

MAX_LAG_MS = 100.0
"""Limit of the 99th percentile of the delays with which this client sends a step's requests.

The sweep ends at a step that exceeds the limit, because the client is too slow for its rate. The
step does not count: late requests may keep or miss the goals because of the client.
"""

CLIENT_LATE = (
    "this client could not send the requests of the next step in time: run several clients, or use "
    "a faster machine"
)
TOO_FEW_REQUESTS = (
    "the dataset or the trace has too few requests for the next step: lower --step-seconds, or use "
    "a larger file"
)

Progress = Callable[[int], AbstractContextManager[Callable[[Outcome], None]]]
"""Returns a context manager that shows the progress of a step with the given number of requests.

The context manager yields the function to call with the outcome of each finished request.
"""


@dataclass(slots=True)
class Result:
    """Steps of a sweep in the order in which they ran."""

    steps: list[Step] = field(default_factory=list)
    interrupted: bool = False
    # Why the sweep ended before the search: CLIENT_LATE, TOO_FEW_REQUESTS or "" (it did not).
    early_end: str = ""

    @property
    def by_rate(self) -> list[Step]:
        return sorted(self.steps, key=lambda step: step.rate)

    def knee(self) -> Step | None:
        """Return the step at the knee (see `RateSearch.knee`), or None if there is no knee."""
        ceiling = min((step.rate for step in self.steps if not step.has_kept), default=math.inf)
        kept = [step for step in self.steps if step.has_kept and step.rate < ceiling]
        return max(kept, key=lambda step: step.rate, default=None)

    def first_missed(self) -> Step | None:
        """Return the step of the lowest rate that missed the goals, or None."""
        missed = [step for step in self.steps if not step.has_kept]
        return min(missed, key=lambda step: step.rate, default=None)


def check_sweep(sweep: Sweep, work: Work, goals: Goals | None) -> None:
    """Check the options of a sweep before it starts. Raises WrongOptions."""
    if not sweep.sweep:
        if sweep.save_svg is not None:
            raise WrongOptions("--save-svg requires --sweep")
        return
    if goals is None:
        raise WrongOptions("--sweep needs a goal, such as --goal ttft:2s --goal tpot:50ms")
    if work.num_requests is not None or work.concurrency is not None:
        raise WrongOptions(
            "--num-requests and --concurrency cannot be used with --sweep: leave them out"
        )
    if work.trace_speed != 1:
        raise WrongOptions("--trace-speed cannot be used with --sweep: leave it out")
    if work.rate is not None and math.isinf(work.rate):
        raise WrongOptions("--rate inf cannot be used with --sweep: give a finite first rate")
    if work.rate is None and work.num_warmups == 0:
        raise WrongOptions(
            "--sweep has no first rate: give --rate, or set --num-warmups to 1 or more"
        )
    _check_search(sweep)
    check_file("--save-svg", sweep.save_svg)


def _check_search(sweep: Sweep) -> None:
    """Check the options of the search for the highest rate. Raises WrongOptions."""
    if not 0 < sweep.step_seconds < math.inf:
        raise WrongOptions(f"--step-seconds must be above 0 and finite, not {sweep.step_seconds:g}")
    if not 0 < sweep.attainment <= 1:
        raise WrongOptions(f"--attainment must be above 0 and at most 1, not {sweep.attainment:g}")
    if not 1 < sweep.precision < math.inf:
        raise WrongOptions(f"--precision must be above 1 and finite, not {sweep.precision:g}")


def step_plan(
    work: Work, sweep: Sweep, rate: float, number: int, num_used: int
) -> list[Planned] | None:
    """Plan step `number` (from 0) at `rate`. Its prompts differ from those of other steps.

    Args:
        num_used: number of requests of the earlier steps.

    Returns None if the dataset or the trace has too few requests.
    """
    count = max(MIN_REQUESTS, math.ceil(rate * sweep.step_seconds))
    # The steps take their prompts from a dataset one after another, so all use the same order.
    seed = work.seed if work.dataset is not None else work.seed + number
    step = dataclasses.replace(work, rate=rate, num_requests=count, seed=seed)
    plan = plan_of(step, num_used)
    return plan if len(plan) == count else None


async def run_sweep(
    client: Client,
    work: Work,
    sweep: Sweep,
    goals: Goals,
    vocabulary: range,
    first_rate: float,
    progress: Progress,
    on_step: Callable[[Step], None],
) -> Result:
    """Measure steps until the search ends, or until the task is cancelled.

    After a cancellation, the step that was running is not in the result.
    """
    search, result = RateSearch(first_rate, sweep.precision), Result()
    num_used = 0
    while (rate := search.next_rate()) is not None:
        number = len(result.steps)
        plan = step_plan(work, sweep, rate, number, num_used)
        if plan is None:
            result.early_end = TOO_FEW_REQUESTS
            return result
        num_used += len(plan)
        with progress(len(plan)) as on_done:
            load = Load(client, Prompts(vocabulary, work.seed + number), plan, on_done=on_done)
            await load.run()
        if load.interrupted:
            result.interrupted = True
            return result
        step = step_of(rate, load.outcomes, load.duration, goals, sweep.attainment)
        if step.figures.lag.p99 > MAX_LAG_MS:
            result.early_end = CLIENT_LATE
            return result
        search.record(rate, step.has_kept)
        result.steps.append(step)
        on_step(step)
    return result
