"""Formats the steps of a sweep as lines of text, and explains the knee."""

from collections.abc import Iterator, Sequence

from penstock.loadtests.bench.metrics import Goals
from penstock.loadtests.bench.sweep.run import Result
from penstock.loadtests.bench.sweep.step import Step

HEADER = (
    "  rate/s  done/s  good/s   out tok/s  TTFT ms p50    p99  TPOT ms p50    p99  met the goals"
)
BAR_WIDTH = 40

ADVICE = {
    "ttft": "the time to first token misses its goal first: add prefill workers",
    "tpot": "the time per output token misses its goal first: add decode workers or reduce batches",
    "e2el": "the end-to-end latency misses its goal first: add workers",
    "failed": "requests fail first: look at the errors of the server",
}


def step_line(step: Step) -> str:
    """Return the figures of a step as a line below `HEADER`."""
    measured = step.figures
    return (
        f"{step.rate:8.3g}{measured.per_second(measured.completed):8.3g}"
        f"{measured.per_second(measured.good or 0):8.3g}"
        f"{measured.per_second(measured.total_output):12.1f}"
        f"{measured.ttft.median:13.0f}{measured.ttft.p99:7.0f}"
        f"{measured.tpot.median:13.1f}{measured.tpot.p99:7.1f}"
        f"  {step.attainment:6.1%} {'kept' if step.has_kept else 'missed'}"
    )


def plot(steps: Sequence[Step], knee: Step | None) -> Iterator[str]:
    """Yield the lines of a bar chart: goodput for each offered rate.

    In each bar, `#` is goodput and `.` is the rest of the offered rate.
    """
    most = max(step.rate for step in steps)
    yield "goodput (#) of the offered rate (.), requests/s"
    for step in steps:
        offered = max(1, round(BAR_WIDTH * step.rate / most))
        good = round(offered * step.attainment)
        mark = "  <- knee" if step is knee else ""
        yield f"{step.rate:8.3g} |{'#' * good}{'.' * (offered - good)}{mark}"


def conclusion(result: Result, goals: Goals, attainment: float) -> str:
    """Return the knee of the sweep, with advice, as one line of text."""
    limits = ", ".join(f"{name} {_time(limit)}" for name, limit in goals.limits().items())
    fraction = f"{100 * attainment:g}%"
    knee, missed, early_end = result.knee(), result.first_missed(), result.early_end
    if knee is None:
        reason = f": {early_end}" if early_end else ""
        if missed is None:
            return f"no step was measured{reason}"
        advice = ADVICE.get(missed.worst_goal, "")
        found = f"no rate kept the goals ({limits}) for {fraction} of requests; {advice}"
        return f"{found}. The sweep ended early{reason}" if early_end else found
    found = (
        f"knee: {knee.rate:.3g} requests/s keep {limits} for {fraction} of requests, with "
        f"{knee.figures.per_second(knee.figures.total_output):.0f} output tokens/s"
    )
    if early_end:
        found += f", or more: {early_end}"
    if missed is None:
        end = "; the search ended before a rate missed the goals: raise --rate"
        return found if early_end else found + end
    return (
        f"{found}; at {missed.rate:.3g} requests/s {ADVICE.get(missed.worst_goal, '')}. "
        f"Plan one server like this for each {knee.rate:.3g} requests/s of the peak load"
    )


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1000:g} s" if milliseconds >= 1000 else f"{milliseconds:g} ms"
