"""How many workers each pool should have, from what the routers' queues and the workers' loads say.

Pure: loads and the time in, decisions out; the caller makes and drains workers. A pool wants

    desired = max(queue term, occupancy term)

Prefill is a rate: tokens that wait, over what a worker computes a second and the wait allowed; and
tokens that arrive, over the share of its time that a worker should be busy (the method of
TokenScale, arXiv 2512.03416). Bursts are over before a new worker serves: so many tokens a second
as came in the largest of late, and some more, are provided for, the longer the longer a worker
takes to start. The more evenly tokens arrive the less is provided for nothing. Or, where first
tokens are promised, so that a burst costs few of them: as many workers as would have been late for
few of the prompts of late (`late_work`), and of what the pool began with a share that fades.
Decode is an occupancy: KV in use over the share wanted in use, and sequences, those that wait for a
place included, over a worker's places. A mixed pool wants the most of these.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import median

from penstock.cluster.autoscaling.arrival_rate import ArrivalRate
from penstock.cluster.autoscaling.late_work import LateWorkModel
from penstock.common.worker_load import NO_LOAD, WorkerLoad

CALIBRATED_SECONDS = 1.0
"""Of computing prompts, before a worker's rate is believed."""
MEMORY_COLD_STARTS = 20
"""Where a worker is long in coming, what one burst costs pays for long waiting for the next."""
INITIAL_SIZE_FADE_SECONDS = 7200.0
"""Within so long the share of the first size that stays fades away, evenly."""
NEARLY_FULL = 0.9
"""Of a pool's places taken: then what waits waits for a place."""
MAX_WORKERS = 10**6
"""No pool wants more workers."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How far one pool may go, and what it aims at."""

    least: int = 1  # 0: the pool may end its last worker; a queue makes one again
    most: int = 1
    gpus: int = 0  # of a worker, counted against the budget
    wait_seconds: float = 1.0  # for a prompt in the queue
    busy: float = 0.8  # share of a prefilling worker's time
    kv: float = 0.8  # share of a decoding worker's KV


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """How fast counts may change; all in seconds."""

    stale: float = 10.0  # a load older than this says nothing
    rate_window: float = 30.0  # over which arrivals are measured
    up: float = 15.0  # a pool at most doubles in this time
    down: float = 120.0  # less must have been enough for this long
    down_step: float = 15.0  # from one worker less to the next
    headroom: float = 0.25  # over the largest burst of late, of what that was above the usual
    hedge: float = 0.0  # share of what the pool began with that stays at first; 0: see `headroom`
    late: float = 0.0  # share of what comes that may be late, where there is a hedge

    def memory(self, cold_start: float) -> float:
        """Seconds for which a burst is remembered: 20 cold starts, from 2.5 to 15 times `down`."""
        return min(max(MEMORY_COLD_STARTS * cold_start, 2.5 * self.down), 15 * self.down)


TTFT_SLO_POLICY = ScalingPolicy(rate_window=60.0, down=30.0, down_step=5.0, hedge=0.85, late=0.03)
"""Where what waits is ordered by when first tokens are promised: a burst costs few promises, and
workers made for it come when it is over. What is kept against the next one is what would have kept
most of the promises of late, and, as long as little is known, most of what the pool began with."""
TTFT_SLO_WAIT_SECONDS, TTFT_SLO_UTILIZATION = 4.0, 0.95
"""Then `PoolLimits.wait_seconds` and `busy`."""


@dataclass(frozen=True, slots=True)
class ServingWorker:
    """One worker that serves, with the load that it reported last."""

    name: str
    reported_at: float  # when it reported
    load: WorkerLoad = NO_LOAD
    sequences: int = 0  # that take a place there, or wait for one
    max_sequences: int = 1  # sequences that may run at once


@dataclass(frozen=True, slots=True)
class PoolInputs:
    """A pool as it is. Totals are since the start of the routers."""

    workers: Sequence[ServingWorker] = ()  # those that serve, in no order
    pending: int = 0  # asked for, not serving yet
    draining: int = 0
    waiting: int = 0  # requests in the routers' queues for this pool
    waiting_tokens: int = 0  # their uncached prompt tokens
    arrived_tokens: int = 0  # total of uncached prompt tokens
    cold_start: float = 0.0  # seconds that a new worker takes to serve, as measured; 0: not known

    @property
    def count(self) -> int:
        """Workers that are, or will be, of use."""
        return len(self.workers) + self.pending


@dataclass(frozen=True, slots=True)
class Decision:
    """What a pool should be brought to, and why."""

    pool: str
    desired: int
    count: int  # serving and pending now
    queue_term: float
    occupancy_term: float
    reason: str
    blocked_by: str = ""  # what kept it from more, or from less; empty: nothing

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
        # What rounding errors add to a whole number is no worker.
        return ceil(min(max(self.queue, self.occupancy), MAX_WORKERS) - 1e-9)


@dataclass(slots=True)
class _PoolHistory:
    """What is remembered of a pool between decisions."""

    arrivals: ArrivalRate
    late_work: LateWorkModel
    needs: deque[tuple[float, int]] = field(default_factory=deque)
    rate: float | None = None  # prompt tokens a second, of the usual worker
    grown: deque[tuple[float, int]] = field(default_factory=deque)  # counts within the up window
    shrunk_at: float = -inf
    started_at: float = inf
    first_count: int = 0  # workers then


class Autoscaler:
    """Decides for all pools of a cluster together, since they share its GPUs.

    Args:
        pools: name ("prefill", "decode" or "mixed") to limits.
        gpu_budget: GPUs that all pools together may hold; None: no bound.
        pace: how fast counts may change.
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
        """What each pool should be brought to; a pool without a state is left as it is."""
        decisions = [self._decide(name, states[name], now) for name in self._limits & states.keys()]
        decisions.sort(key=lambda decision: decision.pool)
        leaving = sum(
            self._limits[each.pool].gpus * states[each.pool].draining for each in decisions
        )
        return self._within_budget(decisions, leaving)

    def _decide(self, pool: str, state: PoolInputs, now: float) -> Decision:
        limits, memory = self._limits[pool], self._histories[pool]
        if memory.started_at > now:
            memory.started_at, memory.first_count = now, state.count
        fresh = [each for each in state.workers if now - each.reported_at <= self._policy.stale]
        _calibrate(memory, state)
        if state.workers and not fresh:
            return _unchanged(pool, state, limits, "no worker has said anything lately")
        need = self._need(pool, state, fresh, now)
        wanted, blocked = self._rate_limited(pool, state, need, now)
        bounded = min(max(wanted, limits.least), limits.most)
        if bounded < wanted:
            blocked = f"its most, {limits.most}"
        elif bounded > wanted:
            blocked = f"its least, {limits.least}"
        return Decision(
            pool, bounded, state.count, need.queue, need.occupancy, need.reason, blocked
        )

    # ------------------------------------------------------------ need

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
            # Until a worker's rate is known: the plain length of the queue.
            queue = float(state.waiting)
            return _Need(queue, 0.0, f"{state.waiting} requests wait (rate not known yet)")
        queue = _queue_term(state, backlog / rate, limits.wait_seconds)
        occupancy = arriving / (rate * limits.busy)
        reason = f"{backlog:.0f} prompt tokens wait and {arriving:.0f} arrive a second"
        if self._policy.hedge:
            provided, why = self._slo_need(memory, state, came / rate, now)
        else:
            burst = rates.burst
            provided = (burst + self._policy.headroom * max(burst - rates.average, 0.0)) / rate
            kept = self._policy.memory(state.cold_start)
            why = f", {burst:.0f} in the largest burst of {kept:.0f} s"
        # The last worker is not held for a burst: it goes when there is nothing to do.
        if provided > max(queue, occupancy, 1.0):
            reason += why
            occupancy = provided
        return _Need(queue, occupancy, f"{reason}, where a worker computes {rate:.0f}")

    def _slo_need(
        self, history: _PoolHistory, state: PoolInputs, work: float, now: float
    ) -> tuple[float, str]:
        """Workers against the next burst, and why; `work` [s of one worker] came just now."""
        history.late_work.observe(now, work, state.cold_start)
        enough = history.late_work.smallest_size(self._policy.late)
        left = max(1 - (now - history.started_at) / INITIAL_SIZE_FADE_SECONDS, 0.0)
        stay = int(self._policy.hedge * left * history.first_count)
        if stay > enough:
            return float(stay), f", {stay} of the first {history.first_count} workers stay for now"
        return float(enough), f", {enough} would be late for {self._policy.late:.0%} of it at most"

    def _decode_need(self, pool: str, state: PoolInputs, fresh: list[ServingWorker]) -> _Need:
        limits = self._limits[pool]
        kv = _extrapolated_sum(state, fresh, [each.load.kv_usage for each in fresh])
        running = _extrapolated_sum(state, fresh, [each.sequences for each in fresh])
        max_sequences = median(each.max_sequences for each in fresh) if fresh else inf
        waiting = state.waiting
        if pool == "mixed" and self._policy.hedge and fresh:
            # Else they wait for their prompts' turn, not for a place.
            waiting *= running >= NEARLY_FULL * max_sequences * len(state.workers)
        queue = (running + waiting) / max_sequences if fresh else float(waiting > 0)
        return _Need(
            queue,
            kv / limits.kv,
            f"KV of {kv:.2f} workers in use, {running:.0f} sequences run and {waiting} wait",
        )

    # ------------------------------------------------------------ pace

    def _rate_limited(
        self, pool: str, state: PoolInputs, need: _Need, now: float
    ) -> tuple[int, str]:
        memory = self._histories[pool]
        wanted = max(need.workers, int(_is_needed(state)))
        _remember(memory.needs, now, wanted, self._policy.down)
        _remember(memory.grown, now, state.count, self._policy.up)
        if wanted > state.count:
            most = max(1, 2 * min(count for _, count in memory.grown))
            held = f"doubling at most in {self._policy.up:g} s" if wanted > most else ""
            return max(min(wanted, most), state.count), held
        if wanted < state.count:
            return self._scale_down(pool, state, now)
        return wanted, ""

    def _scale_down(self, pool: str, state: PoolInputs, now: float) -> tuple[int, str]:
        memory = self._histories[pool]
        kept = self._policy.memory(state.cold_start)
        new = not self._policy.hedge and now - memory.started_at < kept
        if pool != "decode" and state.count > 1 and new:
            return state.count, f"bursts of {kept:g} s are not known yet"
        oldest = memory.needs[0][0]
        if now - oldest < self._policy.down:
            return state.count, f"{self._policy.down:g} s of less need first"
        if max(need for _, need in memory.needs) >= state.count:
            return state.count, f"more was needed within {self._policy.down:g} s"
        if state.draining or now - memory.shrunk_at < self._policy.down_step:
            return state.count, "one worker leaves at a time"
        if state.count > self._limits[pool].least:
            memory.shrunk_at = now
        return state.count - 1, ""

    # ------------------------------------------------------------ budget

    def _within_budget(self, decisions: list[Decision], leaving: int) -> list[Decision]:
        """Pools grow in turn, the one that lacks most first, while the budget has GPUs; workers
        that drain hold theirs still."""
        if self._budget is None:
            return decisions
        granted = {each.pool: min(each.desired, each.count) for each in decisions}
        held = leaving + sum(self._limits[pool].gpus * count for pool, count in granted.items())
        left = max(self._budget - held, 0)
        while True:
            short = [
                each
                for each in decisions
                if granted[each.pool] < each.desired and self._limits[each.pool].gpus <= left
            ]
            if not short:
                break
            worst = max(short, key=lambda each: each.desired / max(granted[each.pool], 0.5))
            granted[worst.pool] += 1
            left -= self._limits[worst.pool].gpus
        return [_granted(each, granted[each.pool], self._budget) for each in decisions]


def _queue_term(state: PoolInputs, seconds: float, wait: float) -> float:
    """Workers that compute the queue, `seconds` of one worker's work, in time.

    Those who serve compute at it until a new one comes, and who is on its way will take its part:
    a queue that grows during a cold start must not ask for the same workers again.
    """
    cold_start = state.cold_start
    left = max(seconds - len(state.workers) * cold_start, 0.0) / (wait + cold_start)
    return max(left - state.pending, min(seconds / wait, state.count))


def _calibrate(history: _PoolHistory, state: PoolInputs) -> None:
    """The median worker's prompt tokens a second; kept while there is no worker."""
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
    """The sum over all workers: those that say nothing are like the others."""
    return sum(values) * len(state.workers) / len(fresh) if fresh else 0.0


def _is_needed(state: PoolInputs) -> bool:
    """Whether there is anything to do: the last worker stays, or a first one is made."""
    busy = (each.sequences or each.load.queued_tokens for each in state.workers)
    return bool(state.waiting or any(busy))


def _remember(past: deque[tuple[float, int]], now: float, value: int, seconds: float) -> None:
    """Append; what is kept spans at least `seconds` once that much time has passed."""
    past.append((now, value))
    while len(past) > 1 and past[1][0] <= now - seconds:
        past.popleft()


def _unchanged(pool: str, state: PoolInputs, limits: PoolLimits, why: str) -> Decision:
    count = min(max(state.count, limits.least), limits.most)
    return Decision(pool, count, state.count, 0.0, 0.0, "nothing is known", why)


def _granted(decision: Decision, count: int, budget: int) -> Decision:
    if count == decision.desired:
        return decision
    return Decision(
        decision.pool,
        count,
        decision.count,
        decision.queue_term,
        decision.occupancy_term,
        decision.reason,
        f"the budget of {budget} GPUs",
    )
