"""`penstock simulate disaggregation`: compares the disaggregation rule with two fixed policies.

Prefill and decode pools serve several loads in virtual time. Under the policy "rule", the router's
rule decides for each prompt whether the prefill pool computes it ("apart"). Under "always", the
prefill pool computes all prompts. Under "never", the decode pool computes all prompts. "Mixed" has
no pools: as many mixed workers serve the load. The rule is
judged by the mean time from a request to the end of its answer, and by the share of requests that
meet the goals in `goals`. With `--trace`, the load is a whole trace.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from penstock.loadtests.bench.flags import check_least, option, read_flags
from penstock.loadtests.bench.traces import BadTrace
from penstock.loadtests.bench.workload import Lengths, Planned
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.cluster import BANDWIDTH, Cluster, ClusterPlan
from penstock.loadtests.simulator.scaling.goals import Figures, figures
from penstock.loadtests.simulator.scaling.scalers import Static
from penstock.loadtests.simulator.scaling.workloads import from_trace, sinusoid, steps, varying
from penstock.router.routing.placement.disaggregation import (
    DisaggregationPolicy,
    PrefillDecision,
    Reason,
)
from penstock.router.routing.placement.policy import LeastLoaded, Policy
from penstock.router.routing.worker_view import WorkerView
from penstock.workers.scheduling.config import SchedulerConfig

SLACK = 0.02
"""Tolerance of the comparison, as a fraction, because runs differ by chance."""

LIMITS = SchedulerConfig(
    num_blocks=6250,  # blocks for 400,000 tokens
    max_model_len=1 << 17,
    block_size=64,
    max_sequences=64,
    max_batched_tokens=2048,
    max_queued=10**6,
)


class _Fixed(DisaggregationPolicy):
    """A fixed policy. Prefill workers never generate answers."""

    def kept_decision(self, *_: object) -> None:
        return None


class Always(_Fixed):
    """A policy that computes every prompt on a prefill worker."""

    def decide(
        self,
        num_tokens: int,
        prefill: WorkerView,
        decode: WorkerView,
        router_queue_tokens: float = 0.0,
    ) -> PrefillDecision:
        return PrefillDecision(True, Reason.NO_GAIN)


class Never(_Fixed):
    """A policy that computes every prompt on the worker that decodes its answer."""

    def decide(
        self,
        num_tokens: int,
        prefill: WorkerView,
        decode: WorkerView,
        router_queue_tokens: float = 0.0,
    ) -> PrefillDecision:
        return PrefillDecision(False, Reason.NO_GAIN)


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "rule": LeastLoaded,
    "always": lambda: LeastLoaded(Always),
    "never": lambda: LeastLoaded(Never),
    "mixed": LeastLoaded,
}


@dataclass(frozen=True, slots=True)
class Playing:
    """Duration and seed of a run."""

    seconds: float = option(120.0, "seconds during which requests arrive")
    seed: int = option(0, "the same seed gives the same runs")
    promised: float = option(0.0, "time-to-first-token SLO of the router, seconds; 0: none")
    trace: Path | None = option(None, "a whole trace as the only load: JSON lines or an Azure CSV")  # noqa: RUF009
    speed: float = option(1.0, "multiply the speed of the trace by this")
    prefill: int = option(2, "prefill workers for the trace")
    decode: int = option(2, "decode workers for the trace")


@dataclass(frozen=True, slots=True)
class Case:
    """A load with the number of workers that serve it."""

    name: str
    load: Callable[[Playing], Sequence[Planned]]
    prefill: int = 2
    decode: int = 2
    bandwidth: float = BANDWIDTH


def arriving(
    rate: Callable[[float], float], most: float, inputs: str, outputs: str
) -> Callable[[Playing], Sequence[Planned]]:
    """Return a load with random lengths.

    Args:
        rate: maps the time in seconds to requests per second.
        most: the largest rate.
        inputs: lengths of the prompts, as for `penstock bench`.
        outputs: lengths of the answers.
    """
    lengths = Lengths.parse(inputs), Lengths.parse(outputs)
    return lambda playing: varying(rate, most, playing.seconds, *lengths, playing.seed)


LONG = "lognormal:256-4096"
CASES: Sequence[Case] = (
    Case("even", arriving(lambda at: 6.0, 6.0, LONG, "lognormal:16-512")),
    Case("light", arriving(lambda at: 0.5, 0.5, LONG, "lognormal:16-512")),
    Case("bursts", arriving(steps(2.0, 24.0, 10.0), 24.0, LONG, "lognormal:16-256")),
    Case(
        "long prompts",
        arriving(sinusoid(1.0, 9.0, 60.0), 9.0, "lognormal:2048-8192", "32"),
        prefill=1,
        decode=3,
    ),
    Case(
        "long answers",
        arriving(lambda at: 4.0, 4.0, "lognormal:64-512", "lognormal:256-1024"),
        prefill=1,
        decode=3,
    ),
    Case("slow network", arriving(lambda at: 4.0, 4.0, LONG, "lognormal:16-512"), bandwidth=5e8),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one case under one policy."""

    figures: Figures
    seconds: float  # mean seconds from a request to the end of its answer
    apart: float  # fraction of the prompts that a prefill worker computed


Outcomes: TypeAlias = Mapping[str, Outcome]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0 if the rule is never worse than the other policies, 1 if it is worse in some case, 2 for
        wrong options, 130 after Ctrl-C.
    """
    about = "Compare the disaggregation rule with always and never disaggregating."
    (playing,) = read_flags("penstock simulate disaggregation", about, (Playing,), arguments)
    lost: list[str] = []
    try:
        _check(playing)
        cases = cases_of(playing)
        print(HEADER)
        for case in cases:
            outcomes = {}
            for name in POLICIES:
                outcomes[name] = play(case, name, playing)
                print(row(case.name, name, outcomes[name]), flush=True)
            lost += [f"{case.name}: {why}" for why in losses(outcomes)]
    except (ValueError, OSError) as error:
        print(f"penstock simulate disaggregation: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print("\n".join(lost) or "the rule is nowhere behind")
    return 1 if lost else 0


def _check(playing: Playing) -> None:
    if not all(0 < each < math.inf for each in (playing.seconds, playing.speed)):
        raise ValueError("--seconds and --speed must be above 0 and finite")
    if not all(0 <= each < 2**63 for each in (playing.seed, playing.promised)):
        raise ValueError("--seed and --promised must not be negative")
    check_least(playing, 1, ("prefill", "decode"), ValueError)


def cases_of(playing: Playing) -> Sequence[Case]:
    """Return the cases to simulate. Raises BadTrace and OSError."""
    if playing.trace is None:
        return CASES
    trace, speed = playing.trace, playing.speed
    rows = from_trace(trace, math.inf, speed, LIMITS.max_model_len // 2, LIMITS.max_model_len // 2)
    if not rows:
        raise BadTrace(f"{trace} has no requests")
    return [Case(trace.stem, lambda playing: rows, playing.prefill, playing.decode)]


def play(case: Case, name: str, playing: Playing) -> Outcome:
    """Run one case under one policy until all requests have ended."""
    policy = POLICIES[name]()
    pools = {"prefill": case.prefill, "decode": case.decode}
    if name == "mixed":
        pools = {"mixed": case.prefill + case.decode}
    plan = ClusterPlan(
        pools,
        LIMITS,
        Timing(),
        bandwidth=case.bandwidth,
        ttft_slo_seconds=playing.promised,
        reports_step_seconds=True,
    )
    cluster = Cluster(plan, case.load(playing), Static(pools), policy)
    cluster.run()
    decided = cluster.router.dispatcher.num_prefill_decisions
    apart = sum(count for what, count in decided.items() if what.startswith("apart"))
    seconds = [call.last - call.planned.due for call in cluster.calls if call.status == "ok"]
    mean = sum(seconds) / max(len(seconds), 1)
    return Outcome(figures(cluster, plan), mean, apart / max(sum(decided.values()), 1))


def losses(outcomes: Outcomes) -> list[str]:
    """Return the criteria by which the rule is worse than the best of the other arrangements."""
    rule, others = outcomes["rule"], [each for name, each in outcomes.items() if name != "rule"]
    lost = []
    if rule.figures.kept < max(each.figures.kept for each in others) - SLACK:
        lost.append("goals kept")
    if rule.seconds > min(each.seconds for each in others) * (1 + SLACK):
        lost.append("time of a request")
    return lost


HEADER = (
    "| load | policy | apart | goals kept | request, mean | TTFT p50 | p99 | TPOT p50 | p99 |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|--:|"
)


def row(case: str, policy: str, outcome: Outcome) -> str:
    """Return the table row of one case and policy, in Markdown."""
    of = outcome.figures
    cells = (
        *(case, policy, f"{outcome.apart:.0%}", f"{of.kept:.1%}", f"{outcome.seconds:.2f} s"),
        *(f"{of.ttft_p50:.3f} s", f"{of.ttft_p99:.3f} s"),
        *(f"{of.tpot_p50 * 1000:.1f} ms", f"{of.tpot_p99 * 1000:.1f} ms"),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
