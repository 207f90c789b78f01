"""Decides for each prompt whether a prefill worker or the decode worker computes it.

The two alternatives are named "apart" (a prefill worker computes the prompt, a decode worker the
answer) and "together" (one worker computes both) in metrics. Their costs are in seconds of waiting
time, summed over all affected clients:

    apart     wait for the prefill worker + time to compute the prompt there, counted once for the
              request and once for each answer that the worker generates + KV transfer
    together  wait for the worker + time to compute the prompt there, counted once for the
              request and once for each running sequence that is delayed

"Together" means a decode worker, or a prefill worker that also generates the answer. For a prefill
worker, the comparison also includes the difference between the times to generate the answer on this
worker and on the decode worker. Prefill workers compute all prompts until prefill rates and KV
transfers have been measured.

These costs are not compared if all workers share the cores of one machine (`ignores_roles`).
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from penstock.router.routing.placement.answer_cost import prefers_one_worker
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.fleet import Fleet, mean_speed
from penstock.router.routing.worker_view import WorkerView, has_busy_peer

MAX_COST_RATIO = 0.9
"""Prompts are computed on the decode worker only if the cost there is below this share of the cost
on a prefill worker: a margin, because both costs are estimates."""


class Reason(Enum):
    """Main reason of a decision. Each comment begins with the worker that computes the prompt."""

    # Prefill worker: speeds or transfer times are unknown.
    UNMEASURED = "unmeasured"
    INTERFERENCE = "harm"  # prefill worker: sequences of the decode worker would be delayed
    DECODE_QUEUE = "decode queue"  # prefill worker: the decode worker has a queue
    # Prefill worker: sequences of the decode worker would exceed the SLO of the time per token.
    TPOT_SLO = "tpot slo"
    NO_GAIN = "even"  # prefill worker: the decode worker is hardly faster
    # Decode worker: prefill workers have long queues.
    PREFILL_QUEUE = "prefill queue"
    TRANSFER = "transfer"  # decode worker: the KV transfer would take too long
    PROMPT = "prompt"  # decode worker: it computes the prompt faster
    ANSWER = "answer"  # prefill worker: it also generates the answer, since this is faster
    CORES = "cores"  # single worker: it uses all cores of its machine for prompt and answer
    # Any worker: all workers share the cores of one machine, so a KV transfer gains nothing.
    SHARED_CORES = "shared cores"


class PrefillDecision(NamedTuple):
    """The choice between prefill and decode worker, its reason, and the estimated costs."""

    is_disaggregated: bool
    reason: Reason
    disaggregated_seconds: float = 0.0
    colocated_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{'apart' if self.is_disaggregated else 'together'}: {self.reason.value}"


EXPECTED_TOKENS = 256
"""Largest answer length that estimates assume, because few answers reach their limit."""

ALL_DECISIONS = (
    *(PrefillDecision(True, reason) for reason in list(Reason)[:5]),
    *(PrefillDecision(False, reason) for reason in list(Reason)[5:]),
)
"""All possible decisions, without costs."""


class DisaggregationPolicy:
    """Chooses between prefill and decode worker for each prompt, from estimated costs.

    Args:
        workers: candidate workers. A worker without a measured prefill rate is assumed to have the
            mean rate of the others. A worker without measured decode steps is assumed to have the
            step times of another worker.
        transfer_costs: cost model of KV transfers.
        cached_tokens: number of prompt tokens that each worker has cached; None if unknown.
    """

    def __init__(
        self,
        workers: Sequence[WorkerView],
        transfer_costs: TransferCostModel,
        cached_tokens: Mapping[str, int] | None = None,
    ) -> None:
        self._cached_tokens = cached_tokens
        self._workers = workers
        if isinstance(workers, Fleet):
            first = workers.first_with_steps
            self._mean_rate = workers.mean_speed
        else:
            first = next((view for view in workers if view.answer_rate.is_calibrated), None)
            rates = [view.prefill_rate for view in sorted(workers, key=lambda view: view.name)]
            speeds = [rate.tokens_per_second if rate.is_calibrated else 0.0 for rate in rates]
            self._mean_rate = mean_speed(np.array(speeds))
        self._steps = None if first is None else first.answer_rate
        self._transfer_costs = transfer_costs

    @property
    def mean_rate(self) -> float:
        """Mean prefill rate of the workers with a measured rate; 0 if no worker has one."""
        return self._mean_rate

    @property
    def is_measured(self) -> bool:
        """Whether prefill rates and transfer costs are known."""
        return self._mean_rate > 0 and self._transfer_costs.is_calibrated

    def decide(
        self,
        num_tokens: int,
        prefill: WorkerView,
        decode: WorkerView,
        router_queue_tokens: float = 0.0,
    ) -> PrefillDecision:
        """Decide whether `prefill` or `decode` computes a prompt whose answer `decode` generates.

        Args:
            num_tokens: length of the prompt.
            prefill: the candidate prefill worker.
            decode: the worker that generates the answer.
            router_queue_tokens: prompt tokens that wait at the router for `prefill`.
        """
        if not self.is_measured:
            return PrefillDecision(True, Reason.UNMEASURED)
        wait_there, compute_there = self._prompt_cost(num_tokens, prefill, router_queue_tokens)
        wait_here, compute_here = self._prompt_cost(num_tokens, decode)
        # A KV transfer leaves out the blocks that the decode worker has cached.
        known = self._cached_tokens.get(decode.name, 0) if self._cached_tokens else 0
        transfer = self._transfer_costs.seconds(num_tokens - known)
        harm = decode.num_busy * compute_here
        # The prompt also delays the answers that the prefill worker generates.
        disaggregated = wait_there + compute_there * (1 + prefill.num_answers) + transfer
        together = wait_here + compute_here + harm
        if together < MAX_COST_RATIO * disaggregated:
            gain = compute_there - compute_here
            if wait_there >= max(transfer, gain):
                reason = Reason.PREFILL_QUEUE
            else:
                reason = Reason.TRANSFER if transfer >= gain else Reason.PROMPT
            return PrefillDecision(False, reason, disaggregated, together)
        if together < disaggregated or harm == wait_here == 0:
            reason = Reason.NO_GAIN
        else:
            reason = Reason.INTERFERENCE if harm >= wait_here else Reason.DECODE_QUEUE
        return PrefillDecision(True, reason, disaggregated, together)

    def kept_decision(
        self,
        num_tokens: int,
        num_remaining: int,
        prefill: WorkerView,
        other: PrefillDecision | None,
        decode: WorkerView | None,
        now: float,
    ) -> PrefillDecision | None:
        """Return the decision to compute prompt and answer on `prefill`, or None if it costs more.

        Args:
            num_tokens: length of the prompt.
            num_remaining: largest length of the answer.
            prefill: a prefill worker with room for the request.
            other: the decision if `decode` generates the answer; None if no worker has room.
            decode: the worker that would generate the answer instead of `prefill`.
            now: the time, in seconds of the router's monotonic clock.
        """
        if not self.is_measured or self._steps is None:
            return None
        wait, compute = self._prompt_cost(num_tokens, prefill)
        here = wait + compute * (1 + prefill.num_answers)
        if other is None or decode is None:
            return PrefillDecision(False, Reason.ANSWER, 0.0, here)
        length = min(num_remaining, EXPECTED_TOKENS)
        faster = self._answer_seconds(decode, now) - self._answer_seconds(prefill, now)
        there = other.disaggregated_seconds if other.is_disaggregated else other.colocated_seconds
        if here >= MAX_COST_RATIO * there + length * faster:
            return None
        return PrefillDecision(False, Reason.ANSWER, there, here)

    def keeps_tpot(
        self, num_tokens: int, worker: WorkerView, slo_seconds: float, now: float
    ) -> bool:
        """Return whether a worker's answers meet their SLO if the worker computes a new prompt.

        The answers are delayed while the worker computes the new prompt.

        Args:
            num_tokens: length of the prompt.
            worker: the worker that would compute the prompt.
            slo_seconds: bound of the time per token; 0 means no bound.
            now: the time, in seconds of the router's monotonic clock.

        Returns:
            True if the time per token stays within `slo_seconds`. Also True if there is no SLO, no
            running answer or no measured prefill rate.
        """
        if not slo_seconds or not worker.num_answers or not self._mean_rate:
            return True
        stall = sum(self._prompt_cost(num_tokens, worker))
        return self._token_seconds(worker, 0, now, stall) <= slo_seconds

    def pays_to_move(
        self,
        num_tokens: int,
        num_remaining: int,
        source: WorkerView,
        target: WorkerView,
        slo_seconds: float,
        now: float,
    ) -> bool:
        """Return whether a running answer should move from a prefill worker to a decode worker.

        An answer that exceeds the bound of its time per token moves if it would be within the bound
        on `target`. Any other answer moves if the move saves clearly more time than the KV transfer
        takes.

        Args:
            num_tokens: tokens of the prompt and of the answer so far.
            num_remaining: largest number of tokens still to generate.
            source: the worker that generates the answer.
            target: a worker with room for the answer.
            slo_seconds: bound of the time per token; 0 means no bound.
            now: the time, in seconds of the router's monotonic clock.
        """
        rates = source.answer_rate, target.answer_rate
        if not self.is_measured or not all(rate.is_calibrated for rate in rates):
            return False
        stall, _ = self._prompt_cost(0, source)
        here = self._token_seconds(source, 0, now, stall)
        stall, _ = self._prompt_cost(0, target)
        there = self._token_seconds(target, 1, now, stall)
        if slo_seconds and here > slo_seconds:
            return there <= slo_seconds
        saved = min(num_remaining, EXPECTED_TOKENS) * (MAX_COST_RATIO * here - there)
        return saved > self._transfer_costs.seconds(num_tokens)

    def _token_seconds(self, view: WorkerView, more: int, now: float, stall: float) -> float:
        is_shared = has_busy_peer(view, self._workers)
        return view.answer_rate.token_seconds(view.num_busy + more, is_shared, now, stall)

    def colocated_seconds(self, num_tokens: int, decode: WorkerView) -> float:
        """Return the cost in seconds of computing a prompt on `decode`; 0 if no rate is known."""
        if not self._mean_rate:
            return 0.0
        speed, uncached = self._speed(num_tokens, decode)
        return (decode.backlog_tokens + uncached * (1 + decode.num_busy)) / speed

    def _prompt_cost(
        self, num_tokens: int, view: WorkerView, router_queue_tokens: float = 0.0
    ) -> tuple[float, float]:
        """Return the seconds that a prompt waits for a worker, and its compute time there."""
        speed, uncached = self._speed(num_tokens, view)
        queued: float = view.backlog_tokens
        # The router's queue includes cached tokens, while the workers' backlogs do not.
        if router_queue_tokens:
            queued += router_queue_tokens * view.prefill_rate.uncached_fraction
        return queued / speed, uncached / speed

    def _speed(self, num_tokens: int, view: WorkerView) -> tuple[float, float]:
        """Return a worker's prompt tokens per second, and the number of uncached prompt tokens."""
        rate = view.prefill_rate
        speed = rate.tokens_per_second if rate.is_calibrated else self._mean_rate
        if self._cached_tokens is None:
            return speed, num_tokens * rate.uncached_fraction
        uncached = num_tokens - self._cached_tokens.get(view.name, 0)
        return speed, uncached if uncached > 1 else 1

    def _answer_seconds(self, view: WorkerView, now: float) -> float:
        """Return the seconds per token that one more answer on a worker costs all its answers."""
        is_shared = has_busy_peer(view, self._workers)
        rate, steps = view.answer_rate, self._steps
        assert steps is not None
        known = rate if rate.is_calibrated else steps
        return rate.seconds_per_token(view.num_busy, is_shared, now, known)


def ignores_roles(views: Sequence[WorkerView]) -> bool:
    """Return whether every worker should get prompts and answers, whatever its role is.

    This holds if all workers share the cores of one machine, unless an operator made one of them a
    prefill worker. Only workers with the same weights can exchange KV, so a prompt takes the same
    work on every worker that could compute it, and a KV transfer takes time of the same cores. No
    measured speed or transfer is therefore needed. Each worker keeps the SLO of the time per token
    itself (`workers/scheduling/step_budget.py`).
    """
    machine = views[0].info.machine if views else ""
    return bool(machine) and not any(
        view.info.machine != machine or view.is_shedding for view in views
    )


def single_worker(views: Sequence[WorkerView], now: float) -> WorkerView | None:
    """Return the worker that should generate all answers of one machine, or None.

    The busiest worker is chosen, so that the others become idle and leave their cores to it. The
    result is None if several workers generate the answers faster, if the times are unknown, or if
    roles matter (see `ignores_roles`).
    """
    if not ignores_roles(views):
        return None
    rates, running = [view.answer_rate for view in views], [view.num_busy for view in views]
    if not prefers_one_worker(rates, running, now):
        return None
    return max(views, key=lambda view: (view.num_busy, view.role != "prefill", view.name))
