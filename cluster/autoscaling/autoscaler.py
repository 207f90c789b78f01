"""Decides how many workers each pool should have, from the router queues and the worker loads.

This module does no I/O. The caller passes the loads and the time, and starts or drains workers. The
desired size of a pool is the larger of two terms, the queue term and the occupancy term:

- Prefill, queue term: queued tokens / (tokens per second of a worker * allowed wait).
- Prefill, occupancy term: arriving tokens per second / (tokens per second of a worker * target
  share of busy time), as in TokenScale (arXiv 2512.03416). A new worker becomes ready only after
  the burst for which it was started. The term therefore also covers the largest recent burst, plus
  `headroom` times the difference between this burst and the average rate. Bursts are remembered
  longer if workers start slowly.
- Prefill with a TTFT SLO: the largest burst is replaced by the smallest size that would have
  computed nearly all recent prompts in time (see `late_work`). At first, a pool also keeps at least
  a share of its initial size. This share decreases with time.
- Decode, queue term: (running + waiting sequences) / sequences that a worker can run at once.
- Decode, occupancy term: sum of the KV usage of all workers / target KV usage.

A mixed pool gets the larger of its prefill size and its decode size.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from statistics import median

from penstock.cluster.autoscaling.arrival_rate import ArrivalRate
from penstock.cluster.autoscaling.gpu_budget import GrowthRequest, grant
from penstock.cluster.autoscaling.late_work import LateWorkModel
from penstock.common.worker_load import NO_LOAD, WorkerLoad

CALIBRATED_SECONDS = 1.0
"""Seconds that a worker must have spent on computing prompts before its rate is used."""
MEMORY_COLD_STARTS = 20
"""A burst is remembered for this many times the cold start time of the pool."""
INITIAL_SIZE_FADE_SECONDS = 7200.0
"""Seconds in which the share `hedge` of a pool's initial size decreases linearly to 0."""
NEARLY_FULL = 0.9
"""With a TTFT SLO, the queued requests of a mixed pool count as decode load only if the running
sequences reach this share of the largest number of sequences that the pool can run at once."""
MAX_WORKERS = 10**6
"""Upper limit of the number of workers that is computed as the need of a pool."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of a pool's size, and the load at which its workers should run."""

    # Minimum number of workers. If it is 0, the pool may be empty until a request is queued.
    least: int = 1
    most: int = 1
    gpus: int = 0  # GPUs of one worker, which count against the GPU budget
    wait_seconds: float = 1.0  # seconds that a prompt may wait in the queue
    busy: float = 0.8  # target share of the time in which a worker computes prompts
    kv: float = 0.8  # target share of a worker's KV blocks that are in use


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """Parameters that limit how fast pool sizes change. Times are in seconds."""

    stale: float = 10.0  # reported loads older than this are ignored
    rate_window: float = 30.0  # length of the interval over which the arrival rate is measured
    up: float = 15.0  # the size of a pool at most doubles within this time
    down: float = 120.0  # a pool shrinks once it has needed fewer workers for this long
    down_step: float = 15.0  # minimum time between the drains of two workers of a pool
    # Fraction of (largest burst - average rate) for which spare workers are kept.
    headroom: float = 0.25
    # Share of the initial size that is kept at first. If it is 0, `headroom` is used instead.
    hedge: float = 0.0
    late: float = 0.0  # Share of the work that may be late. Used only if `hedge` is not 0.

    def memory(self, cold_start: float) -> float:
        """Return for how many seconds a burst is remembered.

        The result is 20 times `cold_start`, but at least 2.5 times and at most 15 times `down`.
        """
        return min(max(MEMORY_COLD_STARTS * cold_start, 2.5 * self.down), 15 * self.down)


TTFT_SLO_POLICY = ScalingPolicy(rate_window=60.0, down=30.0, down_step=5.0, hedge=0.85, late=0.03)
"""The scaling policy for clusters with a TTFT SLO.

Routers order queued prompts by deadline, so that a burst makes few prompts late. A worker that is
started for a burst serves only after the burst. A pool therefore keeps as many workers as would
have met nearly all recent deadlines. At first, the pool also keeps most of its initial size.
"""
TTFT_SLO_WAIT_SECONDS, TTFT_SLO_UTILIZATION = 4.0, 0.95
"""Values of `PoolLimits.wait_seconds` and `PoolLimits.busy` in clusters with a TTFT SLO."""


@dataclass(frozen=True, slots=True)
class ServingWorker:
    """A serving worker and the load that it reported last."""

    name: str
    reported_at: float  # time of the last load report
    load: WorkerLoad = NO_LOAD
    # Number of running sequences. In a decode pool, also the queued sequences of the worker.
    sequences: int = 0
    max_sequences: int = 1  # largest number of sequences that the worker can run at once


@dataclass(frozen=True, slots=True)
class PoolInputs:
    """State of a pool for one decision. Totals count from the start of the routers."""

    workers: Sequence[ServingWorker] = ()  # the serving workers, in any order
    pending: int = 0  # number of workers that were requested but do not serve yet
    draining: int = 0
    # Number of workers that serve another role for now. They hold GPUs, but are not drained.
    reassigned: int = 0
    waiting: int = 0  # number of requests that are queued at routers for this pool
    waiting_tokens: int = 0  # number of uncached prompt tokens of the queued requests
    arrived_tokens: int = 0  # total number of uncached prompt tokens that have arrived
    # Measured seconds from requesting a worker until it serves, or 0 if unknown.
    cold_start: float = 0.0

    @property
    def count(self) -> int:
        """Number of workers that serve or have been requested."""
        return len(self.workers) + self.pending


@dataclass(frozen=True, slots=True)
class Decision:
    """The size that a pool should have, with the reason."""

    pool: str
    desired: int
    count: int  # present number of serving and requested workers
    queue_term: float
    occupancy_term: float
    reason: str
    blocked_by: str = ""  # the limit that prevented a larger change, or "" if there was none

    def __str__(self) -> str:
        change = f"{self.count} to {self.desired}" if self.desired != self.count else "stays"
        blocked = f"; held by {self.blocked_by}" if self.blocked_by else ""
        return f"{self.pool}: {change}: {self.reason}{blocked}"


@dataclass(frozen=True, slots=True)
class _Need:
    queue: float
    occupancy: float
    reason: str

    @property
    def workers(self) -> int:
        # Subtract 1e-9, so that a rounding error does not add a worker.
        return ceil(min(max(self.queue, self.occupancy), MAX_WORKERS) - 1e-9)


@dataclass(slots=True)
class _PoolHistory:
    """State of a pool that the autoscaler keeps between decisions."""

    arrivals: ArrivalRate
    late_work: LateWorkModel
    # Pairs of a time and the number of workers needed at that time.
    needs: deque[tuple[float, int]] = field(default_factory=deque)
    rate: float | None = None  # median of the workers' rates, in prompt tokens per second
    # Pairs of a time and the number of workers in the pool at that time.
    grown: deque[tuple[float, int]] = field(default_factory=deque)
    shrunk_at: float = -inf
    started_at: float = inf  # time of the first decision for this pool
    first_count: int = 0  # number of workers of this pool at `started_at`


class Autoscaler:
    """Decides the sizes of all pools of a cluster together, because the pools share its GPUs.

    Args:
        pools: limits of each pool, by pool name ("prefill", "decode" or "mixed").
        gpu_budget: largest number of GPUs that all pools may use together, or None for no limit.
        policy: limits on how fast pool sizes may change. None stands for `ScalingPolicy()`.
    """

    def __init__(
        self,
        pools: Mapping[str, PoolLimits],
        gpu_budget: int | None = None,
        policy: ScalingPolicy | None = None,
    ) -> None:
        self._limits = dict(pools)
        self._budget = gpu_budget
        self._policy = policy or ScalingPolicy()
        window = self._policy.rate_window
        self._histories = {
            name: _PoolHistory(ArrivalRate(window), LateWorkModel(limits.most, limits.wait_seconds))
            for name, limits in pools.items()
        }

    def decide(self, states: Mapping[str, PoolInputs], now: float) -> list[Decision]:
        """Return a decision for each known pool in `states`. `now` is a monotonic time [s]."""
        decisions = [self._decide(name, states[name], now) for name in self._limits & states.keys()]
        decisions.sort(key=lambda decision: decision.pool)
        if self._budget is None:
            return decisions
        requests = [
            GrowthRequest(
                each.count,
                each.desired,
                self._limits[each.pool].gpus,
                states[each.pool].draining + states[each.pool].reassigned,
            )
            for each in decisions
        ]
        reason = f"the budget of {self._budget} GPUs"
        return [
            each if num == each.desired else replace(each, desired=num, blocked_by=reason)
            for each, num in zip(decisions, grant(requests, self._budget), strict=True)
        ]

    def _decide(self, pool: str, state: PoolInputs, now: float) -> Decision:
        limits, memory = self._limits[pool], self._histories[pool]
        if memory.started_at > now:
            memory.started_at, memory.first_count = now, state.count
        fresh = [each for each in state.workers if now - each.reported_at <= self._policy.stale]
        _calibrate(memory, state)
        if state.workers and not fresh:
            return _unchanged(pool, state, limits, "a lack of recent loads from its workers")
        need = self._need(pool, state, fresh, now)
        wanted, blocked = self._rate_limited(pool, state, need, now)
        bounded = min(max(wanted, limits.least), limits.most)
        if bounded < wanted:
            blocked = f"its maximum of {limits.most}"
        elif bounded > wanted:
            blocked = f"its minimum of {limits.least}"
        return Decision(
            pool, bounded, state.count, need.queue, need.occupancy, need.reason, blocked
        )

    # ------------------------------------------------------------ number of workers needed

    def _need(self, pool: str, state: PoolInputs, fresh: list[ServingWorker], now: float) -> _Need:
        needs = []
        if pool != "decode":
            needs.append(self._prefill_need(pool, state, fresh, now))
        if pool != "prefill":
            needs.append(self._decode_need(pool, state, fresh))
        return max(needs, key=lambda need: max(need.queue, need.occupancy))

    def _prefill_need(
        self, pool: str, state: PoolInputs, fresh: list[ServingWorker], now: float
    ) -> _Need:
        limits, memory = self._limits[pool], self._histories[pool]
        came = memory.arrivals.count(now, state.arrived_tokens)
        rates = memory.arrivals.rates(self._policy.memory(state.cold_start))
        rate, arriving = memory.rate, rates.recent
        queued = _extrapolated_sum(state, fresh, [each.load.queued_tokens for each in fresh])
        backlog = state.waiting_tokens + queued
        if rate is None:
            # As long as no worker's rate is known, request one worker per queued request.
            queue = float(state.waiting)
            return _Need(queue, 0.0, f"{state.waiting} requests wait (prefill rate not known yet)")
        queue = _queue_term(state, backlog / rate, limits.wait_seconds)
        occupancy = arriving / (rate * limits.busy)
        reason = f"{backlog:.0f} prompt tokens wait and {arriving:.0f} arrive per second"
        if self._policy.hedge:
            provided, why = self._slo_need(memory, state, came / rate, now)
        else:
            burst = rates.burst
            provided = (burst + self._policy.headroom * max(burst - rates.average, 0.0)) / rate
            kept = self._policy.memory(state.cold_start)
            why = f", {burst:.0f} in the largest burst of the last {kept:.0f} s"
        # A past burst alone must not prevent an idle pool from draining its last worker.
        if provided > max(queue, occupancy, 1.0):
            reason += why
            occupancy = provided
        return _Need(queue, occupancy, f"{reason}; a worker computes {rate:.0f}")

    def _slo_need(
        self, history: _PoolHistory, state: PoolInputs, work: float, now: float
    ) -> tuple[float, str]:
        """Return how many workers to keep for bursts, and the reason as text.

        Args:
            work: prompt work that arrived since the last decision, in worker-seconds.
        """
        history.late_work.observe(now, work, state.cold_start)
        enough = history.late_work.smallest_size(self._policy.late)
        left = max(1 - (now - history.started_at) / INITIAL_SIZE_FADE_SECONDS, 0.0)
        stay = int(self._policy.hedge * left * history.first_count)
        if stay > enough:
            why = f", {stay} of the initial {history.first_count} workers are kept for now"
            return float(stay), why
        why = f", with {enough} workers at most {self._policy.late:.0%} of the work would be late"
        return float(enough), why

    def _decode_need(self, pool: str, state: PoolInputs, fresh: list[ServingWorker]) -> _Need:
        limits = self._limits[pool]
        kv = _extrapolated_sum(state, fresh, [each.load.kv_usage for each in fresh])
        running = _extrapolated_sum(state, fresh, [each.sequences for each in fresh])
        max_sequences = median(each.max_sequences for each in fresh) if fresh else inf
        waiting = state.waiting
        if pool == "mixed" and self._policy.hedge and fresh:
            # Queued requests of a mixed pool wait for decode only if the pool is nearly full.
            waiting *= running >= NEARLY_FULL * max_sequences * len(state.workers)
        queue = (running + waiting) / max_sequences if fresh else float(waiting > 0)
        return _Need(
            queue,
            kv / limits.kv,
            f"{kv:.2f} workers' KV caches in use, {running:.0f} sequences run and {waiting} wait",
        )

    # ------------------------------------------------------------ limits on how fast sizes change

    def _rate_limited(
        self, pool: str, state: PoolInputs, need: _Need, now: float
    ) -> tuple[int, str]:
        memory = self._histories[pool]
        wanted = max(need.workers, int(_is_needed(state)))
        _remember(memory.needs, now, wanted, self._policy.down)
        _remember(memory.grown, now, state.count, self._policy.up)
        if wanted > state.count:
            most = max(1, 2 * min(count for _, count in memory.grown))
            held = f"the limit of doubling in {self._policy.up:g} s" if wanted > most else ""
            return max(min(wanted, most), state.count), held
        if wanted < state.count:
            return self._scale_down(pool, state, now)
        return wanted, ""

    def _scale_down(self, pool: str, state: PoolInputs, now: float) -> tuple[int, str]:
        memory = self._histories[pool]
        kept = self._policy.memory(state.cold_start)
        new = not self._policy.hedge and now - memory.started_at < kept
        if pool != "decode" and state.count > 1 and new:
            return state.count, f"too little history of bursts (less than {kept:g} s)"
        oldest = memory.needs[0][0]
        if now - oldest < self._policy.down:
            return state.count, f"the wait of {self._policy.down:g} s before a pool shrinks"
        if max(need for _, need in memory.needs) >= state.count:
            return state.count, f"a larger need within the last {self._policy.down:g} s"
        if state.draining or now - memory.shrunk_at < self._policy.down_step:
            return state.count, "the drain of one worker at a time"
        if state.count > self._limits[pool].least:
            memory.shrunk_at = now
        return state.count - 1, ""


def _queue_term(state: PoolInputs, seconds: float, wait: float) -> float:
    """Return the number of workers that are needed to compute the queued prompts in time.

    The function first subtracts, from the queued work, the work that the serving workers can do
    during a cold start. It then subtracts the workers that were requested but do not serve yet.
    Otherwise a queue that grows during a cold start would request the same workers again.

    Args:
        seconds: queued work, in worker-seconds.
        wait: seconds that a prompt may wait.
    """
    cold_start = state.cold_start
    left = max(seconds - len(state.workers) * cold_start, 0.0) / (wait + cold_start)
    return max(left - state.pending, min(seconds / wait, state.count))


def _calibrate(history: _PoolHistory, state: PoolInputs) -> None:
    """Update the median prompt rate of the pool's workers, in tokens per second.

    The old rate is kept if no worker has computed prompts for `CALIBRATED_SECONDS` yet.
    """
    rates = [
        each.load.prompt_tokens_computed / each.load.prompt_seconds
        for each in state.workers
        if each.load.prompt_seconds >= CALIBRATED_SECONDS
    ]
    if rates:
        history.rate = median(rates) or None


def _extrapolated_sum(
    state: PoolInputs, fresh: list[ServingWorker], values: Sequence[float]
) -> float:
    """Estimate the sum of a quantity over all workers of a pool.

    Args:
        fresh: the workers whose load report is recent.
        values: the quantity for each worker of `fresh`.
    """
    return sum(values) * len(state.workers) / len(fresh) if fresh else 0.0


def _is_needed(state: PoolInputs) -> bool:
    """Return True if the pool has work, so that it needs at least one worker."""
    busy = (each.sequences or each.load.queued_tokens for each in state.workers)
    return bool(state.waiting or any(busy))


def _remember(past: deque[tuple[float, int]], now: float, value: int, seconds: float) -> None:
    """Append (`now`, `value`); drop entries whose next entry is at least `seconds` old."""
    past.append((now, value))
    while len(past) > 1 and past[1][0] <= now - seconds:
        past.popleft()


def _unchanged(pool: str, state: PoolInputs, limits: PoolLimits, why: str) -> Decision:
    count = min(max(state.count, limits.least), limits.most)
    return Decision(pool, count, state.count, 0.0, 0.0, "no recent load", why)
