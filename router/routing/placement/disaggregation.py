"""Decides for each prompt whether a prefill worker or the decode worker computes it.

The two alternatives are named "apart" (prefill worker) and "together" (decode worker) in metrics.
Their costs are in seconds of waiting time, summed over all affected clients:

    apart     wait for the prefill worker + time to compute the prompt there + KV transfer
    together  wait for the decode worker + time to compute the prompt there, counted once for the
              request and once for each running sequence that is delayed

Prefill workers compute all prompts until prefill rates and KV transfers have been measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.worker_registry import WorkerView

MAX_COST_RATIO = 0.9
"""Prompts are computed on the decode worker only if its cost is below this share of the cost on a
prefill worker: a margin, because both are estimates."""


class Reason(Enum):
    """Main reason of a decision."""

    UNMEASURED = "unmeasured"  # on a prefill worker: speed or KV transfer time is unknown
    INTERFERENCE = "harm"  # on a prefill worker: running sequences would be delayed
    DECODE_QUEUE = "decode queue"  # on a prefill worker: the decode worker has a queue
    NO_GAIN = "even"  # on a prefill worker: the decode worker is hardly faster
    PREFILL_QUEUE = "prefill queue"  # on the decode worker: long wait for prefill workers
    TRANSFER = "transfer"  # on the decode worker: the KV transfer takes too long
    PROMPT = "prompt"  # on the decode worker: it computes the prompt faster


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    """The choice of prefill or decode worker, its reason, and the estimated costs in seconds."""

    is_disaggregated: bool
    reason: Reason
    disaggregated_seconds: float = 0.0
    colocated_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{'apart' if self.is_disaggregated else 'together'}: {self.reason.value}"


ALL_DECISIONS = (
    *(PrefillDecision(True, reason) for reason in list(Reason)[:4]),
    *(PrefillDecision(False, reason) for reason in list(Reason)[4:]),
)
"""All possible decisions, without costs."""


@dataclass(frozen=True, slots=True)
class _PromptCost:
    """Estimated seconds that a prompt waits for a worker, and then takes to compute there."""

    wait: float
    compute: float


class DisaggregationPolicy:
    """Policy that estimates prompt costs on workers and chooses prefill or decode worker.

    Args:
        workers: candidate workers; a worker without a measured prefill rate is assumed to have the
            mean rate of the other workers.
        transfer_costs: cost model of KV transfers.
    """

    def __init__(self, workers: Sequence[WorkerView], transfer_costs: TransferCostModel) -> None:
        speeds = [
            view.prefill_rate.tokens_per_second
            for view in workers
            if view.prefill_rate.is_calibrated
        ]
        self._mean_rate = sum(speeds) / len(speeds) if speeds else 0.0
        self._transfer_costs = transfer_costs

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
        there, here = (
            self._prompt_cost(num_tokens, prefill, router_queue_tokens),
            self._prompt_cost(num_tokens, decode),
        )
        transfer = self._transfer_costs.seconds(num_tokens)
        harm = decode.num_busy * here.compute
        disaggregated = there.wait + there.compute + transfer
        together = here.wait + here.compute + harm
        if together < MAX_COST_RATIO * disaggregated:
            saved = {
                Reason.PREFILL_QUEUE: there.wait,
                Reason.TRANSFER: transfer,
                Reason.PROMPT: there.compute - here.compute,
            }
            reason = max(saved, key=lambda each: saved[each])
        elif together < disaggregated or harm == here.wait == 0:
            reason = Reason.NO_GAIN
        else:
            reason = Reason.INTERFERENCE if harm >= here.wait else Reason.DECODE_QUEUE
        return PrefillDecision(
            together >= MAX_COST_RATIO * disaggregated, reason, disaggregated, together
        )

    def colocated_seconds(self, num_tokens: int, decode: WorkerView) -> float:
        """Return the cost in seconds of a prompt on `decode`; 0 if no prefill rate is known."""
        if not self._mean_rate:
            return 0.0
        here = self._prompt_cost(num_tokens, decode)
        return here.wait + here.compute * (1 + decode.num_busy)

    def _prompt_cost(
        self, num_tokens: int, view: WorkerView, router_queue_tokens: float = 0.0
    ) -> _PromptCost:
        speed = (
            view.prefill_rate.tokens_per_second
            if view.prefill_rate.is_calibrated
            else self._mean_rate
        )
        # The workers' backlogs exclude cached tokens; the router's queue includes cached tokens.
        uncached = view.prefill_rate.uncached_fraction
        wait = (view.backlog_tokens + router_queue_tokens * uncached) / speed
        return _PromptCost(wait, num_tokens * uncached / speed)
