"""`penstock simulate overload`: measures a cluster at more load than it can serve.

The capacity is the highest rate at which 99% of the requests meet both goals: the first token
within `TTFT_SECONDS`, and each further token within `TPOT_SECONDS` on average. The goodput is the
number of requests per second that meet both goals. The command makes two comparisons in virtual
time:

- `overload`: a load of `factor` times the capacity, compared with a load at the capacity.
- `greedy`: ten tenants, one of which sends `factor` times the capacity, compared with ten equal
  tenants that together send the capacity. The figures are those of the nine other tenants.

The result is one JSON object.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from penstock.loadtests.bench.flags import check_least, option, read_flags
from penstock.loadtests.bench.workload import Lengths, Planned
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.call import Call
from penstock.loadtests.simulator.scaling.cluster import Cluster, ClusterPlan
from penstock.loadtests.simulator.scaling.scalers import Static
from penstock.loadtests.simulator.scaling.workloads import steps, varying
from penstock.router.routing.dispatcher import DispatcherLimits
from penstock.workers.scheduling.config import SchedulerConfig

TTFT_SECONDS, TPOT_SECONDS, KEPT = 1.0, 0.05, 0.99
GOODPUT_GOAL = 0.95
"""Least goodput, as a share of the goodput at the capacity."""
TTFT_GOAL = 2.0
"""Largest p99 of the time to the first token, as a multiple of that at the capacity."""
NUM_TENANTS = 10
GREEDY = "tenant-0"
BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Overload:
    """Cluster and load."""

    workers: int = option(4, "mixed workers")
    max_sequences: int = option(64, "most running sequences per worker")
    max_batched_tokens: int = option(512, "most tokens per step")
    input_len: str = option("lognormal:128-2048", "prompt tokens, as for penstock bench")
    output_len: str = option("32-256", "answer tokens")
    factor: float = option(3.0, "load of the overload, as a multiple of the capacity")
    max_wait: float = option(0.6, "the router's max_wait_seconds")
    seconds: float = option(60.0, "seconds during which requests arrive")
    tries: int = option(7, "simulations for the capacity")
    seed: int = option(0, "the same seed gives the same result")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one simulation. Times are in seconds."""

    rate: float  # requests per second that arrived
    goodput: float  # requests per second that kept both goals
    kept: float  # fraction of the requests that kept both goals
    refused: float  # fraction of the requests that were refused
    ttft_p50: float  # median time to the first token of the served requests
    ttft_p99: float
    tpot_p99: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0 if all goals are reached, 1 if one is missed, 2 for wrong options, 130 after Ctrl-C.
    """
    about = "Measure goodput and first tokens under overload, and beside a greedy tenant."
    (overload,) = read_flags("penstock simulate overload", about, (Overload,), arguments)
    try:
        report = measure(overload)
    except ValueError as error:
        print(f"penstock simulate overload: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(json.dumps(report, indent=2))
    return 0 if report["missed"] == [] else 1


def measure(overload: Overload) -> dict[str, object]:
    """Return the figures of all simulations and the missed goals. Raises ValueError."""
    check_least(overload, 1, ("workers", "max_sequences", "max_batched_tokens", "tries"))
    check_least(overload, 0, ("seed",))
    for flag, seconds in (("--seconds", overload.seconds), ("--max-wait", overload.max_wait)):
        if not 0 < seconds < math.inf:
            raise ValueError(f"{flag} must be above 0 and finite, not {seconds:g}")
    if not 1 <= overload.factor < math.inf:
        raise ValueError(f"--factor must be at least 1 and finite, not {overload.factor:g}")
    rate, capacity = find_capacity(overload)
    tenth = rate / NUM_TENANTS
    above = run(overload, [("", rate * overload.factor)])
    equal = run(overload, [(f"tenant-{n}", tenth) for n in range(NUM_TENANTS)])
    greedy = run(
        overload,
        [(GREEDY, rate * overload.factor), *((f"tenant-{n}", tenth) for n in range(1, 10))],
    )
    outcomes = {"capacity": capacity, "overload": above, "equal": equal, "greedy": greedy}
    return {
        "options": asdict(overload),
        **{name: asdict(outcome) for name, outcome in outcomes.items()},
        "missed": missed(outcomes),
    }


def missed(outcomes: dict[str, Outcome]) -> list[str]:
    """Return a message with figures for each missed goal."""
    capacity, overload = outcomes["capacity"], outcomes["overload"]
    equal, greedy = outcomes["equal"], outcomes["greedy"]
    found = []
    for name, of, base in (("overload", overload, capacity), ("greedy", greedy, equal)):
        ratio = of.goodput / max(base.goodput, 1e-9)
        if ratio < GOODPUT_GOAL:
            found.append(f"{name}: goodput {ratio:.3f} of {GOODPUT_GOAL}")
    times = overload.ttft_p99 / max(capacity.ttft_p99, 1e-9)
    if times > TTFT_GOAL:
        found.append(f"overload: p99 of the first token {times:.2f} of {TTFT_GOAL}")
    return found


def find_capacity(overload: Overload) -> tuple[float, Outcome]:
    """Find the highest rate at which a fraction `KEPT` of the requests keeps its goals."""
    low, high = 0.0, 2.0 * estimate(overload)
    best = Outcome(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for _ in range(overload.tries):
        rate = (low + high) / 2
        outcome = run(overload, [("", rate)])
        if outcome.kept >= KEPT:
            low, best = rate, outcome
        else:
            high = rate
    if not low:
        raise ValueError(
            f"even at {high:.3g} requests/s, the lowest rate tried, fewer than {KEPT:.0%} of the "
            f"requests meet both goals (TTFT {TTFT_SECONDS:g} s, TPOT {TPOT_SECONDS:g} s): lower "
            "--input-len, or raise --tries to try lower rates"
        )
    return low, best


def estimate(overload: Overload) -> float:
    """Return the approximate rate at which the workers are always busy."""
    timing, random = Timing(), np.random.Generator(np.random.Philox(key=[overload.seed, 3]))
    inputs = Lengths.parse(overload.input_len).draw(1000, random).mean()
    outputs = Lengths.parse(overload.output_len).draw(1000, random).mean()
    step = timing.decode(inputs + outputs / 2, overload.max_sequences)
    seconds = timing.prefill(int(inputs), overload.max_batched_tokens)
    return float(overload.workers / (seconds + outputs * step / overload.max_sequences))


def run(overload: Overload, rates: Sequence[tuple[str, float]]) -> Outcome:
    """Simulate tenants at these rates. With several tenants, the greedy one is not counted."""
    limits = SchedulerConfig(
        num_blocks=6250,  # blocks for 400,000 tokens
        max_model_len=1 << 17,
        block_size=BLOCK_SIZE,
        max_sequences=overload.max_sequences,
        max_batched_tokens=overload.max_batched_tokens,
        max_queued=10**6,
    )
    plan = ClusterPlan(
        {"mixed": overload.workers},
        limits,
        Timing(),
        router=DispatcherLimits(max_wait_seconds=overload.max_wait),
    )
    load, tenants = load_of(overload, rates)
    cluster = Cluster(plan, load, Static(plan.pools), tenants=tenants)
    cluster.run()
    counted = [
        call
        for call, tenant in zip(cluster.calls, tenants, strict=True)
        if tenant != GREEDY or len(rates) == 1
    ]
    return outcome_of(counted, overload.seconds)


def load_of(
    overload: Overload, rates: Sequence[tuple[str, float]]
) -> tuple[list[Planned], list[str]]:
    """Return the requests of all tenants, and the tenant of each request."""
    inputs, outputs = Lengths.parse(overload.input_len), Lengths.parse(overload.output_len)
    rows: list[tuple[Planned, str]] = []
    for number, (tenant, rate) in enumerate(rates):
        seed = 1000 * overload.seed + number
        constant = steps(rate, rate, overload.seconds)
        load = varying(constant, rate, overload.seconds, inputs, outputs, seed)
        rows += [(each, tenant) for each in load]
    rows.sort(key=lambda row: row[0].due)
    load = [replace(each, number=number) for number, (each, _) in enumerate(rows)]
    return load, [tenant for _, tenant in rows]


def outcome_of(calls: Sequence[Call], seconds: float) -> Outcome:
    """Summarize calls that arrived within `seconds`."""
    served = [call for call in calls if call.status == "ok"]
    kept = sum(call.ttft <= TTFT_SECONDS and call.tpot <= TPOT_SECONDS for call in served)
    ttft = [call.ttft for call in served] or [0.0]
    tpot = np.percentile([call.tpot for call in served] or [0.0], 99)
    total = max(len(calls), 1)
    return Outcome(
        len(calls) / seconds,
        kept / seconds,
        kept / total,
        sum(call.status == "overloaded" for call in calls) / total,
        float(np.percentile(ttft, 50)),
        float(np.percentile(ttft, 99)),
        float(tpot),
    )


if __name__ == "__main__":
    sys.exit(main())
