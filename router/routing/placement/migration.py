"""Moves requests from one worker to another.

A request moves if its worker drains, is suspect or became a prefill worker. It also moves if it
waits for room while another worker has room (rebalancing). An answer moves away from a prefill
worker if prompts delay it there.

A rebalanced request must not bounce between two workers that are nearly full. Therefore each worker
gets some time to make room, and this time doubles with each move. A request is rebalanced only to a
worker that has no queue.
"""

from penstock.router.routing.events import Command
from penstock.router.routing.placement.disaggregation import DisaggregationPolicy, ignores_roles
from penstock.router.routing.request_state import RequestState
from penstock.router.routing.request_table import RequestTable
from penstock.router.routing.worker_registry import WorkerRegistry
from penstock.router.routing.worker_view import WorkerView

INITIAL_SECONDS = 1.0
"""Time that the first worker gets to make room for a request."""
BACKOFF_FACTOR = 2.0
"""`rebalance_delay` is multiplied by this for each move."""


class RequestMigrator:
    """Moves requests between workers. The routing policy chooses the new workers."""

    def __init__(self, requests: RequestTable, registry: WorkerRegistry) -> None:
        self._requests = requests
        self._registry = registry
        self.num_rebalanced = 0  # number of moves away from workers that had no room
        self.num_returned = 0  # number of moves of answers away from prefill workers

    # -------------------------------------------------------------- evacuating a worker

    def evacuate(self, view: WorkerView, out: list[Command], now: float) -> None:
        """Move requests away from a worker that drains, changes role or is suspect.

        All requests leave a draining worker. Decoding requests leave a new prefill worker if their
        KV blocks can move. A suspect worker keeps the requests that it has started; the others
        move.
        """
        for request in list(view.requests):
            state = self._requests.states[request]
            if state.decode_target == view.name:
                state.decode_target = None
                self._requests.reconcile(state, out, now)
            if state.pending is not None and state.pending.worker == view.name:
                self._withdraw(state, view, out, now)
            elif state.running is not None and state.running.worker == view.name:
                self._migrate(state, view, out, now)

    def _withdraw(
        self, state: RequestState, view: WorkerView, out: list[Command], now: float
    ) -> None:
        """Withdraw a request that is pending on `view`, if another worker can run it.

        Nothing changes while KV blocks are being sent to `view`. If a live migration to `view` is
        withdrawn, the request continues at its source, and a migration to another destination
        begins immediately if there is one.
        """
        assert state.pending is not None
        if state.running is None and state.pending.epoch is not None:
            return
        if state.running is None or view.is_usable:
            other = self._requests.alternative(state, now)
            if other is None or (view.is_usable and other.role == "prefill"):
                return
        state.cancel_pending(out)
        self._requests.reconcile(state, out, now)
        source = None if state.running is None else self._registry.get(state.running.worker)
        if source is not None:
            self._migrate(state, source, out, now)

    def _migrate(
        self, state: RequestState, view: WorkerView, out: list[Command], now: float
    ) -> None:
        """Move a request off its running worker `view`, which drains or became a prefill worker.

        A live migration keeps the pause short. Without a live migration, the request of a draining
        worker yields. The request of a new prefill worker stays where it is.
        """
        running = state.running
        if running is None or running.yielding or state.pending is not None:
            return
        sheds = view.is_shedding and not view.suspect and not running.yields_after_prefill
        other = self._requests.alternative(state, now) if view.draining or sheds else None
        if other is None:
            return
        is_destination = view.draining or other.role != "prefill"
        reason = "the worker drains" if view.draining else "the worker became a prefill worker"
        if state.can_migrate_live and is_destination and other.info.layout == running.info.layout:
            self._requests.listener.moving(state, reason)
            state.start_live_migration(other.info, out)
            self._requests.reconcile(state, out, now)
        elif view.draining:
            self._requests.listener.moving(state, reason)
            state.request_yield(out)

    # -------------------------------------------------------------- rebalancing

    def rebalance(self, out: list[Command], now: float) -> None:
        """Move requests that wait for room on a worker to another worker that has room."""
        if not any(view.is_usable and not view.load.queued for view in self._registry.views()):
            return
        for state in list(self._requests.states.values()):
            pending = state.pending
            if pending is None or state.lease is None or pending.epoch is not None:
                continue
            if now - state.submitted_at < rebalance_delay(state.num_rebalances):
                continue
            view, other = self._registry.get(pending.worker), self._requests.alternative(state, now)
            if view is None or other is None or other is view:
                continue
            if has_capacity_sooner(
                other, view, state.token_log.num_known, state.request.num_sequences
            ):
                state.num_rebalances += 1
                self.num_rebalanced += 1
                self._requests.listener.moving(state, "another worker has room")
                state.cancel_pending(out)
                state.decode_target = other.name
                self._requests.reconcile(state, out, now)

    # -------------------------------------------------------------- answers on prefill workers

    def return_answers(self, out: list[Command], now: float) -> None:
        """Move answers from prefill workers to decode workers where this saves time.

        At most one answer of each worker begins to move at a time, so that the next decision sees
        the effect of this move. If roles do not matter, no answer moves, because prompts slow the
        answer down on every worker.
        """
        views = self._registry.views()
        found = [v for v in views if v.role == "prefill" and v.is_usable and v.num_answers]
        usable = [v for v in views if v.is_usable]
        if not found or ignores_roles(usable):
            return
        costs = DisaggregationPolicy(views, self._registry.transfer_costs)
        for view in found:
            self._return_answer(view, costs, out, now)

    def _return_answer(
        self, view: WorkerView, costs: DisaggregationPolicy, out: list[Command], now: float
    ) -> None:
        for request in view.requests:
            state = self._requests.states[request]
            here = state.running
            if here is None or here.worker != view.name or here.yielding or state.pending:
                continue
            if state.decode_target is not None or not state.can_migrate_live:
                continue
            other = self._requests.alternative(state, now)
            if other is None or other.role == "prefill" or other.info.layout != here.info.layout:
                return
            known, left = state.token_log.num_known, state.token_log.num_remaining
            slo = self._registry.tpot_slo_seconds
            if costs.pays_to_move(known, left, view, other, slo, now):
                self._requests.listener.moving(state, "prompts delay the answer")
                state.start_live_migration(other.info, out)
                self.num_returned += 1
                self._requests.reconcile(state, out, now)
            return


def rebalance_delay(num_rebalances: int) -> float:
    """Return how many seconds a worker gets to make room for a request.

    The time grows with `num_rebalances`, the number of earlier moves of the request.
    """
    return INITIAL_SECONDS * BACKOFF_FACTOR**num_rebalances


def has_capacity_sooner(
    other: WorkerView, pending: WorkerView, num_tokens: int, num_seqs: int
) -> bool:
    """Return whether `other` could now start a request that waits for room on `pending`."""
    blocks = other.resource_usage(num_tokens, num_seqs).num_blocks
    idle = not (other.load.queued or other.new_sequences or other.backlog_tokens)
    free = other.load.free_blocks + other.load.cached_blocks
    free_slots = other.info.max_sequences - other.num_busy
    return bool(pending.load.queued) and idle and free >= blocks and free_slots >= num_seqs
