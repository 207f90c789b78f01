"""Whether a prompt is computed apart, on a prefill worker, or where its answer is generated.

Both ways are priced in seconds that clients wait, all of them together:

    apart     what waits for the prefill worker + computing the prompt there + the KV transfer
    together  what waits at the decode worker + computing the prompt there, once for the request
              and once for each sequence that stands still meanwhile

Pure: what the fleet says of itself in, a decision with its reason out. While something is not
measured yet, prompts are computed apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.worker_registry import WorkerView

MAX_COST_RATIO = 0.9
"""Together must cost less than this share of apart: what is estimated is no exact price."""


class Reason(Enum):
    """What weighed most."""

    UNMEASURED = "unmeasured"  # apart: a speed or the price of KV transfers is not known
    INTERFERENCE = "harm"  # apart: running sequences would stand still
    DECODE_QUEUE = "decode queue"  # apart: other prompts wait where the answer would be generated
    NO_GAIN = "even"  # apart: together would save too little
    PREFILL_QUEUE = "prefill queue"  # together: too much waits at the prefill workers
    TRANSFER = "transfer"  # together: the KV transfer costs more than it spares
    PROMPT = "prompt"  # together: it is cheaper to compute there, where more of it is cached


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    """Where a prompt is computed, why, and what either way was thought to cost, in seconds."""

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
"""Where and why, without the prices: all that there are."""


@dataclass(frozen=True, slots=True)
class _PromptCost:
    """A prompt on a worker, in seconds."""

    wait: float
    compute: float


class DisaggregationPolicy:
    """Prices prompts on these workers.

    Args:
        workers: all that may be looked at; one that has computed no prompts of late is taken to be
            as fast as those that have.
        handover: what KV transfers took.
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
        return self._mean_rate > 0 and self._transfer_costs.is_calibrated

    def decide(
        self,
        num_tokens: int,
        prefill: WorkerView,
        decode: WorkerView,
        router_queue_tokens: float = 0.0,
    ) -> PrefillDecision:
        """Whether `prefill` computes so many tokens for `decode`, or `decode` does it itself;
        `line` are the tokens that wait at the router for `prefill`."""
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
        """What computing them on `decode` costs everybody; 0 while nothing is measured."""
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
        # What waits there is told without what is cached; what waits here is not known to be.
        uncached = view.prefill_rate.uncached_fraction
        wait = (view.backlog_tokens + router_queue_tokens * uncached) / speed
        return _PromptCost(wait, num_tokens * uncached / speed)
