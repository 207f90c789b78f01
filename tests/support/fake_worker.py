"""A small model of a correct worker (see `docs/lifecycle.md`), for tests of the router.

The fake worker queues, runs, yields, reserves and rejects submissions, keeps leases, and receives
KV transfers. Each block is represented by the tokens whose KV it would hold, so that a transfer of
wrong blocks is detected.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.events import (
    Command,
    Drop,
    Event,
    Failed,
    Finish,
    Ready,
    Received,
    Rejected,
    Request,
    Send,
    Stepped,
    Submit,
    TokenColumns,
    WorkerInfo,
    Yield,
    Yielded,
)
from penstock.router.routing.transfer_peers import TransferEndpoint
from tests.support.columns import NewToken, columns_of

STOP_ONE_IN = 13
"""Average number of tokens per stop token."""


def next_token(prompt: Sequence[int], answer: Sequence[int], choice: int) -> tuple[int, bool]:
    """Return the next token of the reference model, and whether this token ends the answer."""
    token = zlib.crc32(repr((tuple(prompt), tuple(answer), choice)).encode()) % 9973
    return token, token % STOP_ONE_IN == 0


def reference(request: Request) -> list[list[int]]:
    """Return the answers that a worker would give without faults, one list per choice."""
    answers = []
    for choice in range(request.num_choices):
        answer = list(request.log[choice]) if choice < len(request.log) else []
        stop = len(answer) >= request.max_tokens
        while not stop:
            token, stop = next_token(request.prompt, answer, choice)
            answer.append(token)
            stop = stop or len(answer) >= request.max_tokens
        answers.append(answer)
    return answers


@dataclass
class HeldSubmission:
    """A submission; its `phase` is "queued", "running", "reserved" or "leased"."""

    submit: Submit
    answers: list[list[int]]
    open: list[bool]
    phase: str = "queued"
    num_new: int = 0
    yield_requested: bool = False
    epoch: int = 0
    kv: tuple[int, ...] = ()  # tokens whose KV the leased blocks hold
    sending: int = 0  # number of transfers that read the leased blocks
    # Generated tokens; a beam search sends all of them at its end.
    found: list[NewToken] = field(default_factory=list)

    def tokens(self) -> tuple[int, ...]:
        return (*self.submit.request.prompt, *self.answers[0])

    def limit(self) -> int:
        """Return the number of new tokens before the submission yields, or 0 if it never yields."""
        request = self.submit.request
        return 0 if request.num_beams and len(request.prompt) == 1 else self.submit.yield_after

    def num_kept(self) -> int:
        """Return the number of positions in a lease; the last token has no KV yet."""
        if self.submit.request.num_beams:
            return len(self.submit.request.prompt) - 1
        # A lease keeps only KV that all choices share, and several choices have different tokens.
        return len(self.tokens()) - 1 if len(self.answers) == 1 else 0


@dataclass
class Transfer:
    """A KV transfer in progress."""

    send: Send
    kv: tuple[int, ...] | None  # tokens whose KV is sent; None if the lease no longer existed


Name = tuple[int, int]  # (request, attempt)


class FakeWorker:
    """A simulated worker with an inbox of commands and an outbox of events."""

    def __init__(self, info: WorkerInfo, max_queued: int = 100) -> None:
        self.info = info
        self.held: dict[Name, HeldSubmission] = {}
        self.inbox: deque[Command] = deque()
        self.outbox: deque[Event] = deque()
        self.transfers: list[Transfer] = []  # KV transfers that this worker receives
        self._max_queued = max_queued
        self._last_epoch = 0
        self.stuck = False  # True if the worker accepts messages but computes no steps
        self.num_steps = 0
        self.num_computed = 0  # number of prompt positions that were computed here

    @property
    def name(self) -> str:
        return self.info.worker

    def in_phase(self, phase: str) -> list[Name]:
        return [name for name, held in self.held.items() if held.phase == phase]

    def load(self) -> WorkerLoad:
        size = self.info.block_size
        taken = sum(
            -(-len(answer) // size) + -(-len(held.submit.request.prompt) // size)
            for held in self.held.values()
            if held.phase != "queued"
            for answer in held.answers
        )
        free = max(self.info.num_blocks - taken, 0)
        queued, running = len(self.in_phase("queued")), len(self.in_phase("running"))
        return WorkerLoad(
            queued=queued, running=running, free_blocks=free, num_steps=self.num_steps
        )

    # -------------------------------------------------------------- commands

    def execute_next(self) -> Send | None:
        """Execute the next command. A Send is returned, and the caller simulates its transfer."""
        command = self.inbox.popleft()
        match command:
            case Submit():
                self._submit(command)
            case Yield():
                self._request_yield((command.request, command.attempt))
            case Drop():
                self._drop(command)
            case Send():
                return command
            case _:
                raise AssertionError(f"not for a worker: {command}")
        return None

    def _submit(self, submit: Submit) -> None:
        request = submit.request
        name = (request.id, submit.attempt)
        assert name not in self.held, "one attempt submitted twice"
        tokens = len(request.prompt) + max(map(len, submit.log))
        if tokens >= self.info.max_model_len:
            self.outbox.append(Rejected(self.name, *name, "too long", is_permanent=True))
        elif len(self.in_phase("queued")) >= self._max_queued:
            self.outbox.append(Rejected(self.name, *name, "full"))
        else:
            answers = [list(answer) for answer in submit.log]
            assert len(answers) == request.num_choices
            assert not (request.num_beams and any(answers)), "a search begins at its prompt"
            self.held[name] = HeldSubmission(
                submit, answers, [not ended for ended in submit.finished]
            )

    def _request_yield(self, name: Name) -> None:
        held = self.held.get(name)
        if held is None or held.phase == "leased":
            return
        if held.phase == "running":
            held.yield_requested = True
        else:
            self._yield(name, 0)

    def _drop(self, drop: Drop) -> None:
        name = (drop.request, drop.attempt)
        if drop.choice is None:
            self.held.pop(name, None)
        elif name in self.held:
            held = self.held[name]
            held.open[drop.choice] = False
            if not any(held.open):
                del self.held[name]

    # -------------------------------------------------------------- steps

    def step(self) -> None:
        """Admit queued submissions, sample a token per running choice, then yield where due."""
        cached = self._admit()
        self.num_steps += 1
        tokens: list[NewToken] = []
        running = self.in_phase("running")
        for name in running:
            tokens.extend(self._advance(name))
        self.outbox.append(Stepped(self.name, columns_of(tokens), self.load(), cached=cached))
        for name in running:
            held = self.held.get(name)
            if held and (held.yield_requested or 0 < held.limit() <= held.num_new):
                self._yield(name, held.num_kept())

    def _admit(self) -> list[tuple[int, int, int]]:
        """Admit queued submissions; return (request, attempt, cached tokens) of each.

        The fake worker has no prefix cache. It reports the attempt as the number of cached tokens,
        so that tests can distinguish these numbers.
        """
        cached: list[tuple[int, int, int]] = []
        for name in self.in_phase("queued"):
            if (
                len(self.in_phase("running")) + len(self.in_phase("reserved"))
                >= self.info.max_sequences
            ):
                break
            held = self.held[name]
            cached.append((*name, name[1]))
            if held.submit.source is None:
                held.phase = "running"
                self.num_computed += len(held.submit.request.prompt)
                continue
            held.phase = "reserved"
            self._last_epoch += 1
            held.epoch = self._last_epoch
            at = TransferEndpoint(self.name, self.info.incarnation, "address", "secret")
            self.outbox.append(Ready(self.name, *name, held.epoch, 0, at))
        return cached

    def _advance(self, name: Name) -> list[NewToken]:
        held = self.held[name]
        tokens = []
        for choice, answer in enumerate(held.answers):
            if not held.open[choice]:
                continue
            token, stop = next_token(held.submit.request.prompt, answer, choice)
            full = len(answer) + 1 >= held.submit.request.max_tokens
            finish = Finish.STOP if stop else Finish.LENGTH if full else Finish.NONE
            tokens.append(NewToken(*name, choice, len(answer), token, finish))
            answer.append(token)
            held.open[choice] = not finish
        held.num_new += 1
        held.found.extend(tokens)
        if not any(held.open):
            del self.held[name]  # a finished submission does not yield
        if not held.submit.request.num_beams:
            return tokens
        return [] if any(held.open) else sorted(held.found, key=lambda token: token[2:4])

    def _yield(self, name: Name, kv_len: int) -> None:
        held = self.held[name]
        if kv_len:
            held.phase, held.kv = "leased", held.tokens()[:kv_len]
        else:
            del self.held[name]
        self.outbox.append(Yielded(self.name, *name, kv_len))

    def fail(self, name: Name, reason: str) -> None:
        """Fail a submission, as if its logits were not finite."""
        del self.held[name]
        self.outbox.append(Stepped(self.name, TokenColumns(), None, [(*name, reason)]))

    def skip_position(self) -> bool:
        """Skip the first position of a queued Step (a fault); return False if none has tokens."""
        for number, event in enumerate(self.outbox):
            if isinstance(event, Stepped) and event.tokens:
                first, *rest = event.tokens.positions
                wrong = replace(event.tokens, positions=[first + 1, *rest])
                self.outbox[number] = replace(event, tokens=wrong)
                return True
        return False

    # -------------------------------------------------------------- blocks

    def reclaim(self, name: Name) -> None:
        """Reclaim a lease, as under memory pressure, unless a transfer is reading it."""
        if not self.held[name].sending:
            del self.held[name]

    def read_lease(self, send: Send) -> tuple[int, ...] | None:
        held = self.held.get((send.request, send.attempt))
        if held is None or held.phase != "leased":
            epoch = send.epoch
            gone = Failed(self.name, send.request, send.attempt, epoch, "the lease is gone")
            self.outbox.append(gone)
            return None
        return held.kv

    def arrive(self, transfer: Transfer, whole: bool) -> None:
        """End a transfer at this worker. If `whole` is False, the data is incomplete."""
        send = transfer.send
        name = (send.request, send.to_attempt)
        held = self.held.get(name)
        same = send.endpoint.incarnation == self.info.incarnation
        if not same or held is None or held.phase != "reserved" or held.epoch != send.epoch:
            return  # data of a closed or unknown epoch is discarded
        if transfer.kv is None or not whole:
            self.fail_transfer(name)
            return
        source = held.submit.source
        assert source is not None
        assert len(transfer.kv) == source.kv_len, "other blocks than were offered"
        assert transfer.kv == held.tokens()[: source.kv_len], "blocks of other tokens"
        held.phase = "running"
        self.outbox.append(Received(self.name, *name, send.epoch))

    def fail_transfer(self, name: Name) -> None:
        """Fail a transfer that has timed out. The worker then computes the prompt itself."""
        held = self.held[name]
        held.phase = "running"
        self.num_computed += len(held.submit.request.prompt)
        self.outbox.append(Failed(self.name, *name, held.epoch, "waited too long"))

    def restarted(self, incarnation: str) -> "FakeWorker":
        """Return a restarted, empty worker with another incarnation."""
        info = replace(self.info, incarnation=incarnation)
        return FakeWorker(info, self._max_queued)
