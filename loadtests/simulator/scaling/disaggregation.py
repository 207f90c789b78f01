"""`penstock simulate disaggregation`: compares the disaggregation rule with two fixed policies.

Prefill and decode pools serve several loads in virtual time. Under the policy "rule", the router's
rule decides for each prompt whether the prefill pool computes it ("apart"). Under "always", the
prefill pool computes all prompts. Under "never", the decode pool computes all prompts. The rule is
judged by the mean time from a request to the end of its answer, and by the share of requests that
meet the goals in `goals`.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.workload import Lengths, Planned
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.cluster import BANDWIDTH, Cluster, ClusterPlan
from penstock.loadtests.simulator.scaling.goals import Figures, figures
from penstock.loadtests.simulator.scaling.scalers import Static
from penstock.loadtests.simulator.scaling.workloads import sinusoid, steps, varying
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
}


@dataclass(frozen=True, slots=True)
class Case:
    """A load with the number of workers that serve it."""

    name: str
    rate: Callable[[float], float]  # maps the time in seconds to requests per second
    most: float
    inputs: str
    outputs: str
    prefill: int = 2
    decode: int = 2
    bandwidth: float = BANDWIDTH


CASES: Sequence[Case] = (
    Case("even", lambda at: 6.0, 6.0, "lognormal:256-4096", "lognormal:16-512"),
    Case("light", lambda at: 0.5, 0.5, "lognormal:256-4096", "lognormal:16-512"),
    Case("bursts", steps(2.0, 24.0, 10.0), 24.0, "lognormal:256-4096", "lognormal:16-256"),
    Case("long prompts", sinusoid(1.0, 9.0, 60.0), 9.0, "lognormal:2048-8192", "32", 1, 3),
    Case("long answers", lambda at: 4.0, 4.0, "lognormal:64-512", "lognormal:256-1024", 1, 3),
    Case(
        "slow network", lambda at: 4.0, 4.0, "lognormal:256-4096", "lognormal:16-512", bandwidth=5e8
    ),
)


@dataclass(frozen=True, slots=True)
class Playing:
    """Duration and seed of a run."""

    seconds: float = option(120.0, "seconds during which requests arrive")
    seed: int = option(0, "the same seed gives the same runs")
    promised: float = option(0.0, "time-to-first-token SLO of the router, seconds; 0: none")


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
    if not 0 < playing.seconds < math.inf or not all(
        0 <= each < 2**63 for each in (playing.seed, playing.promised)
    ):
        message = "--seconds must be above 0; --seed and --promised must not be negative"
        print(f"penstock simulate disaggregation: {message}", file=sys.stderr)
        return 2
    lost: list[str] = []
    print(HEADER)
    try:
        for case in CASES:
            outcomes = {name: play(case, POLICIES[name](), playing) for name in POLICIES}
            for name, outcome in outcomes.items():
                print(row(case.name, name, outcome), flush=True)
            lost += [f"{case.name}: {why}" for why in losses(outcomes)]
    except KeyboardInterrupt:
        return 130
    print("\n".join(lost) or "the rule is nowhere behind")
    return 1 if lost else 0


def play(case: Case, policy: Policy, playing: Playing) -> Outcome:
    """Run one case under one policy until all requests have ended."""
    pools = {"prefill": case.prefill, "decode": case.decode}
    plan = ClusterPlan(
        pools,
        LIMITS,
        Timing(),
        bandwidth=case.bandwidth,
        ttft_slo_seconds=playing.promised,
        reports_step_seconds=True,
    )
    cluster = Cluster(plan, load_of(case, playing), Static(pools), policy)
    cluster.run()
    decided = cluster.router.dispatcher.num_prefill_decisions
    apart = sum(count for what, count in decided.items() if what.startswith("apart"))
    seconds = [call.last - call.planned.due for call in cluster.calls if call.status == "ok"]
    mean = sum(seconds) / max(len(seconds), 1)
    return Outcome(figures(cluster, plan), mean, apart / max(sum(decided.values()), 1))


def load_of(case: Case, playing: Playing) -> list[Planned]:
    inputs, outputs = Lengths.parse(case.inputs), Lengths.parse(case.outputs)
    return varying(case.rate, case.most, playing.seconds, inputs, outputs, playing.seed)


def losses(outcomes: Outcomes) -> list[str]:
    """Return the criteria by which the rule is worse than the better of the two fixed policies."""
    rule, others = outcomes["rule"], [outcomes["always"], outcomes["never"]]
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
