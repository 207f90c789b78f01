"""Latency goals, the share of requests that meet both goals, and the cost in worker time."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.call import Call
from penstock.loadtests.simulator.scaling.cluster import Cluster, ClusterPlan

TTFT_SECONDS, TTFT_PREFILLS = 2.0, 5.0
"""TTFT goal: 2 s plus five times the prompt's prefill time on an idle worker."""
TPOT_TIMES = 2.0
"""TPOT goal: twice the time of a decode step on an idle worker."""

BUSY = 0.9
"""Target utilization of workers under the clairvoyant scaler."""
WINDOW_SECONDS = 60.0
"""Longest burst, in seconds, for which `workers_needed` provides capacity."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one simulation. Times are in seconds, and shares are from 0 to 1."""

    kept: float  # share of requests that met both goals
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    worker_hours: float
    most_workers: int
    busy: float  # share of worker time in which steps ran
    scalings_an_hour: float


def is_kept(call: Call, timing: Timing, chunk: int) -> bool:
    """Return True if a call met both latency goals."""
    planned = call.planned
    if call.status != "ok":
        return False
    most = TTFT_SECONDS + TTFT_PREFILLS * timing.prefill(planned.input_len, chunk)
    step = timing.decode(planned.input_len + call.num_tokens / 2)
    return call.ttft <= most and call.tpot <= TPOT_TIMES * step


def figures(cluster: Cluster, plan: ClusterPlan) -> Figures:
    """Summarize a finished simulation."""
    hours = cluster.clock.now / 3600
    counts = [one.serving + one.pending + one.draining for one in cluster.samples]
    return figures_of(
        cluster.calls,
        plan,
        worker_seconds=cluster.worker_seconds,
        busy_seconds=cluster.busy_seconds,
        most_workers=max(counts, default=0),
        scalings_an_hour=cluster.num_scalings / hours if hours else 0.0,
    )


def figures_of(
    calls: Sequence[Call],
    plan: ClusterPlan,
    worker_seconds: float,
    busy_seconds: float,
    most_workers: int,
    scalings_an_hour: float,
) -> Figures:
    """Summarize finished calls. `worker_seconds` is the sum of the running times of workers."""
    chunk = plan.limits.max_batched_tokens
    kept = sum(is_kept(call, plan.timing, chunk) for call in calls)
    good = [call for call in calls if call.status == "ok"]
    ttft = np.percentile([call.ttft for call in good] or [0.0], [50, 99])
    tpot = np.percentile([call.tpot for call in good if call.num_tokens > 1] or [0.0], [50, 99])
    return Figures(
        kept=kept / max(len(calls), 1),
        ttft_p50=float(ttft[0]),
        ttft_p99=float(ttft[1]),
        tpot_p50=float(tpot[0]),
        tpot_p99=float(tpot[1]),
        worker_hours=worker_seconds / 3600,
        most_workers=most_workers,
        busy=busy_seconds / max(worker_seconds, 1e-9),
        scalings_an_hour=scalings_an_hour,
    )


def workers_needed(
    load: Sequence[Planned], timing: Timing, chunk: int, slot: float, busy: float = BUSY
) -> list[int]:
    """Return the number of mixed workers needed in each slot of `slot` seconds.

    All arrivals must be known. The work of a request is the prefill time of its prompt, plus the
    time of its answer tokens. An answer token takes 1/`chunk` of a step of `chunk` tokens. The work
    that arrives within a window of slots must be done within the window plus `TTFT_SECONDS`.
    Workers compute for the fraction `busy` of this time. All windows of up to `WINDOW_SECONDS` are
    considered.
    """
    last = load[-1].due if load else 0.0
    work = np.zeros(int(last / slot) + 1)
    answered = timing.token + timing.launch / chunk
    for one in load:
        work[int(one.due / slot)] += (
            timing.prefill(one.input_len, chunk) + answered * one.output_len
        )
    total = np.concatenate([[0.0], work.cumsum()])
    workers = np.zeros(len(work))
    for width in range(1, min(int(WINDOW_SECONDS / slot), len(work)) + 1):
        rates = (total[width:] - total[:-width]) / (width * slot + TTFT_SECONDS) / busy
        for first in range(width):
            window = workers[first : first + len(rates)]
            np.maximum(window, rates, out=window)
    return [max(1, ceil(each - 1e-9)) for each in workers.tolist()]
