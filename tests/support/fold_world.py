"""Two workers, each a batcher with a hash model, and a router's view of their requests.

A correct answer proves that the right blocks, slots and cached prefixes were read; `check` and
`close` test the remaining invariants.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.simulator.model.hash_model import HashModel, copy_blocks, reference_answer
from penstock.loadtests.simulator.model.hash_model_beams import HashModelBeams, reference_beams
from penstock.workers.scheduling.batcher import Batcher, SchedulerConfig
from penstock.workers.scheduling.config import check_fits
from penstock.workers.scheduling.kv_pool import State
from penstock.workers.scheduling.sequence import (
    Admitted,
    Finished,
    FinishReason,
    Ints,
    Key,
    LeaseGone,
    NeverFits,
    NewSequence,
    Reserved,
    SchedulerEvent,
    Sibling,
    StepPlan,
    Yielded,
)


@dataclass(eq=False)
class FoldWorker:
    """A worker: a batcher with its hash models and its planned steps."""

    batcher: Batcher
    model: HashModel
    beams: HashModelBeams
    plan: StepPlan | None = None  # step in flight; its slots are read and written at commit
    next: StepPlan | None = None  # step planned after `plan`
    abandoned: dict[Key, Ints] = field(default_factory=dict)  # blocks still being written
    dropped: set[Key] = field(default_factory=set)


@dataclass(eq=False)
class Asked:
    """A request as seen by its router; lists have one entry per choice."""

    number: int
    prompt: list[int]
    params: SamplingParams
    salt: bytes
    priority: int
    answers: list[tuple[list[int], FinishReason]]  # reference answers
    at: FoldWorker
    logs: list[list[int]]
    ended: list[bool]
    known: int = 1  # prompt positions below this have logprobs
    attempt: int = 0
    state: str = "submitted"  # submitted, receiving, yielded or done
    lease: tuple[FoldWorker, Key, int] | None = None  # worker, key, kv_len

    @property
    def key(self) -> tuple[int, int]:
        return self.number, self.attempt

    @property
    def open(self) -> list[int]:
        """The choices that have not ended."""
        return [choice for choice, ended in enumerate(self.ended) if not ended]


@dataclass(eq=False)
class Transfer:
    """A KV transfer in progress."""

    source: FoldWorker
    lease: Key
    blocks: Ints
    read: list[int]  # contents of `blocks` at the start
    to: FoldWorker
    key: Key
    into: Ints


class FoldWorld:
    """Two workers and their router, with the actions of a test; asserts all invariants."""

    def __init__(self, limits: SchedulerConfig) -> None:
        self.limits = limits
        self.workers = [
            FoldWorker(
                Batcher(limits),
                HashModel(limits.num_blocks, limits.block_size),
                HashModelBeams(limits.max_model_len),
            )
            for _ in "ab"
        ]
        self.asked: list[Asked] = []
        self.transfers: list[Transfer] = []
        self.num_arrived = 0
        self.num_scored = 0  # prompt tokens that got logprobs
        self.num_copies = 0  # copy-on-write block copies
        self.num_forks = 0  # rows whose first token comes from another row's logits
        self.num_moved = 0  # beams that continued from another beam's tokens
        self.num_ahead = 0  # steps planned while another was in flight

    def those(self, *states: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.state in states]

    def movable(self) -> list[Asked]:
        return [asked for asked in self.those("yielded") if asked.lease]

    def cuttable(self) -> list[Asked]:
        """Return the requests that would continue if one of their choices were cut."""
        those = self.those("submitted", "receiving")
        return [
            asked for asked in those if len(asked.open) > 1 and not asked.params.use_beam_search
        ]

    def unsent(self) -> list[Asked]:
        sent = {transfer.key for transfer in self.transfers}
        return [asked for asked in self.those("receiving") if asked.key not in sent]

    # ------------------------------------------------------------ router

    def ask(
        self,
        at: FoldWorker,
        prompt: list[int],
        params: SamplingParams,
        *,
        salt: bytes = b"",
        priority: int = 0,
        yield_after: int = 0,
        num_choices: int = 1,
    ) -> None:
        most = self.limits.max_model_len
        if params.use_beam_search:
            answers = reference_beams(prompt, params, most)
        else:
            answers = [reference_answer(prompt, params, most, at) for at in range(num_choices)]
        number, logs = len(self.asked), [list[int]() for _ in answers]
        ended = [False] * len(answers)
        self.asked.append(Asked(number, prompt, params, salt, priority, answers, at, logs, ended))
        self._submit(self.asked[-1], at, yield_after, source_len=0)

    def fits(self, prompt: list[int], params: SamplingParams) -> bool:
        """Return True if the request fits a worker's limits."""
        try:
            check_fits(_sequence((0, 0), prompt, params), self.limits)
        except NeverFits:
            return False
        return True

    def submit_again(self, asked: Asked, at: FoldWorker, yield_after: int) -> None:
        """Resubmit a yielded request without a source, so that its KV is recomputed."""
        asked.attempt += 1
        self._submit(asked, at, yield_after, source_len=0)

    def move(self, asked: Asked, yield_after: int) -> FoldWorker:
        """Resubmit a yielded request to the other worker, with its lease as the source."""
        assert asked.lease is not None
        source, _, kv_len = asked.lease
        asked.attempt += 1
        to = self.workers[1 - self.workers.index(source)]
        self._submit(asked, to, yield_after, kv_len)
        return to

    def ask_to_yield(self, asked: Asked) -> None:
        asked.at.batcher.request_yield(asked.key)
        self._hear(asked.at)

    def drop(self, asked: Asked) -> None:
        worker = asked.at
        if asked in self.unsent():
            worker.abandoned[asked.key] = worker.batcher.reserved_blocks(asked.key)
        worker.batcher.drop(asked.key)
        worker.beams.close(asked.key)
        worker.dropped.add(asked.key)
        asked.state = "done"

    def cut(self, asked: Asked, choice: int) -> None:
        """End one choice early, as after a stop string."""
        asked.ended[choice] = True
        asked.at.batcher.drop_choice(asked.key, choice)
        self._hear(asked.at)

    def drop_lease(self, asked: Asked) -> None:
        assert asked.lease is not None
        asked.lease[0].batcher.drop(asked.lease[1])
        asked.lease = None

    # ------------------------------------------------------------ workers

    def plan(self, worker: FoldWorker) -> None:
        """Plan a step. If a step is in flight, plan the next one, unless it is planned already."""
        if worker.next is not None:
            return
        batcher = worker.batcher
        worker.model.poison(np.flatnonzero(batcher.pool.state == State.FREE).astype(np.int32))
        plan = batcher.plan(0.0)
        if worker.plan is None:
            worker.plan = plan
        else:
            worker.next = plan
            self.num_ahead += plan is not None
        self._hear(worker)
        if plan is not None:
            assert 1 <= len(plan.tokens) <= self.limits.max_batched_tokens
            assert len(set(plan.slots.tolist())) == len(plan.slots)

    def withdraw(self, worker: FoldWorker) -> None:
        if worker.next is not None:
            worker.batcher.withdraw(worker.next)
            worker.next = None

    def commit(self, worker: FoldWorker) -> None:
        """Run the hash model on the step in flight, and commit the step."""
        if worker.plan is None:
            return
        plan, table = worker.plan, worker.batcher.table
        drawn, parents, over = worker.beams.draw(plan, table, worker.model.hash(plan))
        self._score(worker, plan)
        if worker.next is not None:
            assert parents is None
            worker.next.fill(drawn)
        if parents is not None:
            self.num_moved += int((parents != plan.sampling_rows).sum())
        for key in over:
            self._end_search(worker, key)
        output = worker.batcher.commit(plan, drawn, parents)
        self.num_copies += len(worker.plan.copies)
        self.num_forks += len(worker.plan.forks)
        worker.plan, worker.next = worker.next, None
        assert not worker.dropped & set(output.keys)
        for i, key in enumerate(output.keys):
            asked, choice = self._by_key(key), int(output.choices[i])
            answer, ending = asked.answers[choice]
            index, finish = int(output.indices[i]), FinishReason(int(output.finishes[i]))
            assert asked.params.prompt_logprobs is None or asked.known >= len(asked.prompt)
            assert not asked.ended[choice], "a choice that is over"
            assert index == len(asked.logs[choice]), "each index once, in order"
            assert int(output.tokens[i]) == answer[index]
            asked.ended[choice] = index == len(answer) - 1
            assert finish == (ending if asked.ended[choice] else FinishReason.NONE)
            asked.logs[choice].append(int(output.tokens[i]))
        self._hear(worker)

    def _end_search(self, worker: FoldWorker, key: Key) -> None:
        asked = self._by_key(key)
        worker.batcher.finish(key)
        assert worker.beams.close(key) == asked.answers
        assert not any(asked.ended)
        asked.logs = [tokens for tokens, _ in asked.answers]
        asked.ended = [True] * len(asked.answers)

    def _score(self, worker: FoldWorker, plan: StepPlan) -> None:
        """Check that prompt logprobs are computed once per position, in order."""
        owners = np.searchsorted(plan.query_starts, plan.scored, side="right") - 1
        keys = worker.batcher.table.keys[plan.rows[owners]]
        for key, position in zip(keys, plan.positions[plan.scored].tolist(), strict=True):
            if key not in worker.dropped:
                asked = self._by_key(key)
                assert asked.params.prompt_logprobs is not None
                assert position + 1 == asked.known < len(asked.prompt)
                asked.known += 1
                self.num_scored += 1

    def step(self, worker: FoldWorker, num_steps: int) -> None:
        for _ in range(num_steps):
            self.plan(worker)
            self.commit(worker)

    def step_ahead(self, worker: FoldWorker, num_steps: int) -> None:
        """Run steps with overlap: each step is planned before the previous step is committed."""
        for _ in range(num_steps):
            self.plan(worker)
            self.plan(worker)
            self.commit(worker)

    def fail(self, worker: FoldWorker, key: Key) -> None:
        """Fail a sequence of the step in flight, as after non-finite logits."""
        worker.batcher.fail(key)
        worker.beams.close(key)
        if key not in worker.dropped:
            worker.dropped.add(key)
            self._by_key(key).state = "done"

    def send(self, asked: Asked) -> None:
        """Start the transfer that the request waits for; fail the transfer if the lease is gone."""
        to, size = asked.at, self.limits.block_size
        into = to.batcher.reserved_blocks(asked.key)
        try:
            if asked.lease is None:
                raise LeaseGone(asked.key)
            source, lease, kv_len = asked.lease
            blocks = source.batcher.pin(lease, (-(-kv_len // size) - len(into)) * size)
        except LeaseGone:
            self.miss(asked)
            return
        read = self._content(source, blocks)
        self.transfers.append(Transfer(source, lease, blocks, read, to, asked.key, into))

    def miss(self, asked: Asked) -> None:
        asked.state = "submitted"
        asked.at.batcher.transfer_failed(asked.key)
        self._hear(asked.at)

    def end_transfer(self, transfer: Transfer, complete: bool) -> None:
        self.transfers.remove(transfer)
        to, asked = transfer.to, self._by_key(transfer.key)
        assert self._content(transfer.source, transfer.blocks) == transfer.read
        if complete:
            copy_blocks(transfer.source.model, transfer.blocks, to.model, transfer.into)
        else:
            to.model.poison(transfer.into)
        transfer.source.batcher.unpin(transfer.lease)
        if transfer.key in to.dropped:
            to.batcher.transfer_drained(transfer.key)
        elif complete:
            self.num_arrived += 1
            asked.state = "submitted"
            to.batcher.transfer_done(transfer.key)
            self._hear(to)
        else:
            self.miss(asked)

    def settle(self, worker: FoldWorker) -> None:
        for key, blocks in worker.abandoned.items():
            worker.model.poison(blocks)  # still being written until now, so not reused
            worker.batcher.transfer_drained(key)
        worker.abandoned = {}

    # ------------------------------------------------------------ invariants

    def check(self) -> None:
        for worker in self.workers:
            worker.batcher.check()
            load = worker.batcher.load()
            for plan in filter(None, (worker.plan, worker.next)):
                written = plan.slots // self.limits.block_size
                assert (worker.batcher.pool.state[written] == State.USED).all()
                assert not worker.batcher.pool.is_findable(written).any()
            held = load.leased_blocks + load.reserved_blocks + load.used_blocks
            assert load.free_blocks + load.cached_blocks + held == self.limits.num_blocks

    def close(self) -> None:
        """End all transfers; check that all requests end and no blocks stay held."""
        for transfer in list(self.transfers):
            self.end_transfer(transfer, complete=False)
        for worker in self.workers:
            self.settle(worker)
            self._run_out(worker)
        assert not self.those("submitted", "receiving")
        for worker in self.workers:
            for asked in self.asked:
                for attempt in range(asked.attempt + 1):
                    worker.batcher.drop((asked.number, attempt))
            worker.batcher.check()
            load = worker.batcher.load()
            assert load.free_blocks + load.cached_blocks == self.limits.num_blocks

    def _run_out(self, worker: FoldWorker) -> None:
        # The first request advances in every step; every other request may overtake it once.
        longest = self.limits.max_model_len
        most = 2 + 2 * sum(
            len(asked.prompt)
            + 1
            + (
                asked.params.answer_limit(0, longest)
                if asked.params.use_beam_search
                else len(answer)
            )
            for asked in self.asked
            for answer, _ in asked.answers
        )
        for _ in range(most):
            for asked in self.those("receiving"):
                if asked.at is worker:
                    self.miss(asked)
            self.commit(worker)
            if worker.plan is None:
                self.plan(worker)
            waiting = any(asked.at is worker for asked in self.those("receiving"))
            if worker.plan is None and not waiting:
                return
        raise AssertionError(f"a request is still running after {most} steps")

    # ------------------------------------------------------------ events

    def _submit(self, asked: Asked, at: FoldWorker, yield_after: int, source_len: int) -> None:
        asked.at, asked.state = at, "submitted"
        if asked.params.prompt_logprobs is not None and asked.known < len(asked.prompt):
            source_len = 0  # recompute the whole prompt for its logprobs
        logs = {choice: asked.logs[choice] for choice in asked.open}
        new = _sequence(asked.key, asked.prompt, asked.params, logs)
        new = replace(
            new,
            yield_after=yield_after,
            priority=asked.priority,
            salt=asked.salt,
            source_len=source_len,
            prompt_known=asked.known,
        )
        at.batcher.submit(new)
        at.beams.open(new)

    def _hear(self, worker: FoldWorker) -> None:
        for event in worker.batcher.events():
            assert event.key not in worker.dropped
            self._obey(worker, self._by_key(event.key), event)

    def _obey(self, worker: FoldWorker, asked: Asked, event: SchedulerEvent) -> None:
        assert event.key == asked.key
        match event:
            case Admitted(key, row, choice):
                assert worker.batcher.table.keys[row] == key
                assert worker.batcher.table.choices[row] == choice
            case Reserved(key, have):
                asked.state = "receiving"
                blocks = worker.batcher.reserved_blocks(key)
                worker.model.poison(blocks)
                size = self.limits.block_size
                assert asked.lease is None or have + len(blocks) * size >= asked.lease[2]
            case Yielded(key, kv_len):
                asked.state = "yielded"
                asked.lease = (worker, key, kv_len) if kv_len else None
                worker.beams.close(key)
                lengths = [len(asked.logs[choice]) for choice in asked.open]
                assert kv_len < len(asked.prompt) + max(lengths)
                assert len(lengths) == 1 or kv_len <= len(asked.prompt)
                assert not asked.params.use_beam_search or kv_len < len(asked.prompt)
            case Finished():
                asked.state = "done"
                assert all(asked.ended)

    def _by_key(self, key: Key) -> Asked:
        assert isinstance(key, tuple)
        return self.asked[key[0]]

    def _content(self, worker: FoldWorker, blocks: Ints) -> list[int]:
        return [worker.model.kv[slot] for slot in worker.model.slots_of(blocks)]


def _sequence(
    key: Key, prompt: list[int], params: SamplingParams, logs: dict[int, list[int]] | None = None
) -> NewSequence:
    """Return the sequence to submit; `logs` holds each choice's tokens (unused in beam search)."""
    if params.use_beam_search:
        logs = {choice: [] for choice in range(params.num_sequences)}
    first, *others = [Sibling(choice, prompt + log) for choice, log in (logs or {0: []}).items()]
    return NewSequence(
        key=key,
        tokens=first.tokens,
        choice=first.choice,
        siblings=tuple(others),
        num_prompt=len(prompt),
        params=params,
    )
