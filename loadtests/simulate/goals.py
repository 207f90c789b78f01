"""What users are promised, how much of it was kept and what that cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from penstock.loadtests.simulate.cluster import Call, Cluster, ClusterPlan
from penstock.loadtests.simulate.timing import Timing
from penstock.loadtests.workload import Planned

TTFT_SECONDS, TTFT_PREFILLS = 2.0, 5.0
"""The first token within two seconds and five times its prompt's time on an idle worker."""
TPOT_TIMES = 2.0
"""Each further one within twice the time of a step on an idle worker."""

BUSY = 0.7
"""Share of its time that a clairvoyant lets a worker be busy."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one simulation; seconds and shares."""

    kept: float  # share of the requests for which both promises were kept
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    worker_hours: float
    most_workers: int
    busy: float  # share of the paid time
    scalings_an_hour: float


def is_kept(call: Call, timing: Timing, chunk: int) -> bool:
    """Whether a call got what it was promised."""
    planned = call.planned
    if call.status != "ok":
        return False
    most = TTFT_SECONDS + TTFT_PREFILLS * timing.prefill(planned.input_len, chunk)
    step = timing.decode(planned.input_len + call.num_tokens / 2)
    return call.ttft <= most and call.tpot <= TPOT_TIMES * step


def figures(cluster: Cluster, plan: ClusterPlan) -> Figures:
    """Sum a simulation up."""
    chunk = plan.limits.max_batched_tokens
    kept = sum(is_kept(call, plan.timing, chunk) for call in cluster.calls)
    good = [call for call in cluster.calls if call.status == "ok"]
    ttft = np.percentile([call.ttft for call in good] or [0.0], [50, 99])
    tpot = np.percentile([call.tpot for call in good if call.num_tokens > 1] or [0.0], [50, 99])
    hours = cluster.clock.now / 3600
    counts = [one.serving + one.pending + one.draining for one in cluster.samples]
    return Figures(
        kept=kept / max(len(cluster.calls), 1),
        ttft_p50=float(ttft[0]),
        ttft_p99=float(ttft[1]),
        tpot_p50=float(tpot[0]),
        tpot_p99=float(tpot[1]),
        worker_hours=cluster.worker_seconds / 3600,
        most_workers=max(counts, default=0),
        busy=cluster.busy_seconds / max(cluster.worker_seconds, 1e-9),
        scalings_an_hour=cluster.num_scalings / hours if hours else 0.0,
    )


def needs(
    load: Sequence[Planned], timing: Timing, chunk: int, batch: int, slot: float
) -> list[int]:
    """Mixed workers that the work arriving in each slot of `slot` seconds needs.

    A prompt costs its time alone; an answer its share of steps of `batch` sequences.
    """
    last = load[-1].due if load else 0.0
    work = np.zeros(int(last / slot) + 1)
    for one in load:
        step = timing.decode(one.input_len + one.output_len / 2, batch) / batch
        work[int(one.due / slot)] += timing.prefill(one.input_len, chunk) + step * one.output_len
    return [max(1, ceil(seconds / slot / BUSY)) for seconds in work.tolist()]
