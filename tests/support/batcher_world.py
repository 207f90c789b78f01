"""Two workers, each a batcher with a hash model, and a router's view of their requests.

A correct answer proves that the right blocks, slots and cached prefixes were read; `check` and
`close` test the remaining invariants.
"""

from penstock.common.sampling_params import SamplingParams
from penstock.workers.scheduling.batcher import SchedulerConfig
from penstock.workers.scheduling.config import check_fits
from penstock.workers.scheduling.sequence import (
    Admitted,
    Finished,
    FinishReason,
    Key,
    LeaseGone,
    NeverFits,
    Reserved,
    SchedulerEvent,
    Yielded,
)
from tests.support.batcher_request import BatcherRequest
from tests.support.batcher_worker import BatcherWorker, BlockTransfer


class BatcherWorld:
    """Two workers and their router, with the actions of a test; asserts all invariants."""

    def __init__(self, limits: SchedulerConfig) -> None:
        self.limits = limits
        self.workers = [BatcherWorker(limits) for _ in "ab"]
        self.requests: list[BatcherRequest] = []
        self.transfers: list[BlockTransfer] = []
        self.num_transferred = 0
        self.num_scored = 0  # number of prompt tokens that got logprobs

    def in_state(self, *states: str) -> list[BatcherRequest]:
        return [request for request in self.requests if request.state in states]

    def leased(self) -> list[BatcherRequest]:
        return [request for request in self.requests if request.lease]

    def movable(self) -> list[BatcherRequest]:
        return [request for request in self.in_state("yielded") if request.lease]

    def stoppable(self) -> list[BatcherRequest]:
        """Return the requests that would continue if one of their choices were stopped."""
        return [
            request
            for request in self.in_state("submitted", "receiving")
            if len(request.open_choices) > 1 and not request.params.use_beam_search
        ]

    def without_transfer(self) -> list[BatcherRequest]:
        """Return the requests that wait for a transfer that has not started."""
        started = {transfer.key for transfer in self.transfers}
        return [request for request in self.in_state("receiving") if request.key not in started]

    # ------------------------------------------------------------ router

    def submit(
        self,
        worker: BatcherWorker,
        prompt: list[int],
        params: SamplingParams,
        *,
        salt: bytes = b"",
        yield_after: int = 0,
        num_choices: int = 1,
    ) -> None:
        number, longest = len(self.requests), self.limits.max_model_len
        request = BatcherRequest.new(number, worker, prompt, params, num_choices, longest)
        request.salt = salt
        self.requests.append(request)
        self._submit_attempt(request, worker, yield_after, source_len=0)

    def fits(self, prompt: list[int], params: SamplingParams) -> bool:
        """Return True if the request fits a worker's limits."""
        new = BatcherRequest.new(0, self.workers[0], prompt, params, 1, self.limits.max_model_len)
        try:
            check_fits(new.to_sequence(0, 0), self.limits)
        except NeverFits:
            return False
        return True

    def resubmit(self, request: BatcherRequest, worker: BatcherWorker, yield_after: int) -> None:
        """Resubmit a yielded request without a source, so that its KV is recomputed."""
        request.attempt += 1
        self._submit_attempt(request, worker, yield_after, source_len=0)

    def move(self, request: BatcherRequest, yield_after: int) -> BatcherWorker:
        """Resubmit a yielded request to the other worker, with its lease as the source."""
        assert request.lease is not None
        source, _, kv_len = request.lease
        request.attempt += 1
        target = self.workers[1 - self.workers.index(source)]
        self._submit_attempt(request, target, yield_after, kv_len)
        return target

    def request_yield(self, request: BatcherRequest) -> None:
        request.worker.batcher.request_yield(request.key)
        self.handle_events(request.worker)

    def drop(self, request: BatcherRequest) -> None:
        worker = request.worker
        if request in self.without_transfer():
            worker.abandoned[request.key] = worker.batcher.reserved_blocks(request.key)
        worker.drop(request.key)
        request.state = "done"

    def stop_choice(self, request: BatcherRequest, choice: int) -> None:
        """End one choice early, as after a stop string."""
        request.ended[choice] = True
        request.worker.batcher.drop_choice(request.key, choice)
        self.handle_events(request.worker)

    def drop_lease(self, request: BatcherRequest) -> None:
        assert request.lease is not None
        request.lease[0].batcher.drop(request.lease[1])
        request.lease = None

    def _submit_attempt(
        self, request: BatcherRequest, worker: BatcherWorker, yield_after: int, source_len: int
    ) -> None:
        request.worker, request.state = worker, "submitted"
        new = request.to_sequence(yield_after, source_len)
        worker.batcher.submit(new)
        worker.beams.open(new)

    # ------------------------------------------------------------ workers

    def plan(self, worker: BatcherWorker) -> None:
        """Plan a step. The events of a step planned ahead stay pending, as in a stepper."""
        is_ahead = worker.plan is not None
        worker.plan_step()
        if not is_ahead:
            self.handle_events(worker)

    def commit(self, worker: BatcherWorker) -> None:
        """Commit the step in flight, and check its results."""
        if worker.plan is None:
            return
        self.handle_events(worker)
        for key, position in worker.scored():
            self._by_key(key).accept_prompt_logprob(position)
            self.num_scored += 1
        output, searches = worker.commit()
        for key, answers in searches.items():
            self._by_key(key).accept_beams(answers)
        for i, key in enumerate(output.keys):
            self._by_key(key).accept_token(
                int(output.choices[i]),
                int(output.indices[i]),
                int(output.tokens[i]),
                FinishReason(int(output.finishes[i])),
            )
        self.handle_events(worker)

    def step(self, worker: BatcherWorker, num_steps: int) -> None:
        for _ in range(num_steps):
            self.plan(worker)
            self.commit(worker)

    def step_ahead(self, worker: BatcherWorker, num_steps: int) -> None:
        """Run steps with overlap: each step is planned before the previous step is committed."""
        for _ in range(num_steps):
            self.plan(worker)
            self.step(worker, 1)

    def fail(self, worker: BatcherWorker, key: Key) -> None:
        """Fail a sequence of the step in flight, as if its logits were not finite."""
        if key not in worker.dropped:
            self._by_key(key).state = "done"
        worker.fail(key)

    # ------------------------------------------------------------ KV transfers

    def start_transfer(self, request: BatcherRequest) -> None:
        """Start the transfer that the request waits for; fail the transfer if the lease is gone."""
        try:
            if request.lease is None:
                raise LeaseGone(request.key)
            transfer = BlockTransfer.start(*request.lease, request.worker, request.key)
            self.transfers.append(transfer)
        except LeaseGone:
            self.fail_transfer(request)

    def fail_transfer(self, request: BatcherRequest) -> None:
        request.state = "submitted"
        request.worker.batcher.transfer_failed(request.key)
        self.handle_events(request.worker)

    def end_transfer(self, transfer: BlockTransfer, complete: bool) -> None:
        self.transfers.remove(transfer)
        transfer.end(complete)
        target, request = transfer.target, self._by_key(transfer.key)
        if transfer.key in target.dropped:
            target.batcher.transfer_drained(transfer.key)
        elif complete:
            self.num_transferred += 1
            request.state = "submitted"
            target.batcher.transfer_done(transfer.key)
            self.handle_events(target)
        else:
            self.fail_transfer(request)

    # ------------------------------------------------------------ invariants

    def check(self) -> None:
        for worker in self.workers:
            worker.check()

    def close(self) -> None:
        """End all transfers; check that all requests end and no blocks stay held."""
        for transfer in list(self.transfers):
            self.end_transfer(transfer, complete=False)
        for worker in self.workers:
            worker.end_abandoned_writes()
            self._run_until_idle(worker)
        assert not self.in_state("submitted", "receiving")
        for worker in self.workers:
            for request in self.requests:
                for attempt in range(request.attempt + 1):
                    worker.batcher.drop((request.number, attempt))
            worker.check_rest()

    def _run_until_idle(self, worker: BatcherWorker) -> None:
        # The first request advances in every step. Each of the other requests may overtake it once.
        longest = self.limits.max_model_len
        limit = 2 + 2 * sum(request.num_tokens_at_most(longest) for request in self.requests)
        for _ in range(limit):
            for request in self.in_state("receiving"):
                if request.worker is worker:
                    self.fail_transfer(request)
            self.commit(worker)
            if worker.plan is None:
                self.plan(worker)
            waiting = any(request.worker is worker for request in self.in_state("receiving"))
            if worker.plan is None and not waiting:
                return
        raise AssertionError(f"a request is still running after {limit} steps")

    # ------------------------------------------------------------ events

    def handle_events(self, worker: BatcherWorker) -> None:
        for event in worker.batcher.events():
            assert event.key not in worker.dropped
            self._handle_event(worker, self._by_key(event.key), event)

    def _handle_event(
        self, worker: BatcherWorker, request: BatcherRequest, event: SchedulerEvent
    ) -> None:
        assert event.key == request.key
        match event:
            case Admitted(key, row, choice):
                assert worker.batcher.table.keys[row] == key
                assert worker.batcher.table.choices[row] == choice
            case Reserved(key, have):
                request.state = "receiving"
                blocks = worker.batcher.reserved_blocks(key)
                worker.model.poison(blocks)
                size = self.limits.block_size
                assert request.lease is None or have + len(blocks) * size >= request.lease[2]
            case Yielded(key, kv_len):
                request.state = "yielded"
                request.lease = (worker, key, kv_len) if kv_len else None
                worker.beams.close(key)
                request.check_yield(kv_len)
            case Finished():
                request.state = "done"
                assert all(request.ended)

    def _by_key(self, key: Key) -> BatcherRequest:
        assert isinstance(key, tuple)
        return self.requests[key[0]]


def move_and_drop(world: BatcherWorld, request: BatcherRequest) -> None:
    """Move a yielded request to a decoding worker, and drop it when a step is planned ahead."""
    assert request.lease is not None
    target = world.workers[1 - world.workers.index(request.lease[0])]
    # Another request, so that the target decodes and can admit `request` in the planned step.
    world.submit(target, [30, 31], SamplingParams(max_tokens=12, min_tokens=12))
    world.step(target, 4)
    target.withdraw()
    world.plan(target)
    world.move(request, yield_after=0)
    world.plan(target)
    world.drop(request)
