"""Clients and fake workers around one `Dispatcher`, in virtual time.

Messages of one stream stay in order; a test chooses the order of all other events. Invariants are
checked after every event.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from penstock.router.routing.dispatcher import Dispatcher, DispatcherLimits
from penstock.router.routing.events import (
    AssignWaiting,
    ChoiceStopped,
    ClientDisconnected,
    CloseStream,
    Command,
    DeliverEnd,
    DeliverPrompt,
    Draining,
    Drop,
    EndRequest,
    Event,
    Heartbeat,
    Request,
    RequestArrived,
    Send,
    Status,
    Stepped,
    Submit,
    Tick,
    WorkerInfo,
    WorkerLost,
    WorkerUp,
    Yield,
    Yielded,
)
from penstock.router.routing.placement.routing_strategies import policy_of
from tests.support.columns import NewToken, delivered, tokens_of
from tests.support.fake_worker import FakeWorker, Transfer, reference


def info_of(worker: str, role: str, incarnation: str = "1", **changes: object) -> WorkerInfo:
    fields: dict[str, object] = {
        "worker": worker,
        "incarnation": incarnation,
        "role": role,
        "layout": "L",
        "block_size": 4,
        "num_blocks": 64,
        "max_model_len": 64,
        "max_sequences": 4,
    }
    return WorkerInfo(**(fields | changes))  # type: ignore[arg-type]


@dataclass
class Client:
    """A client with its received tokens, and the lengths at which stop strings cut its answers."""

    request: Request
    cuts: dict[int, int]  # by choice: length at which a stop string cuts the answer
    answers: list[list[int]] = field(default_factory=list)
    ended: EndRequest | None = None
    closed: set[int] = field(default_factory=set)  # choices that have a finish reason
    num_cached: int | None = None

    def expected(self) -> list[list[int]]:
        answers = reference(self.request)
        return [answer[: self.cuts.get(i, len(answer))] for i, answer in enumerate(answers)]

    def deliver(self, token: NewToken) -> None:
        self._expect(token.choice, token.position)
        assert self.num_cached is not None, "a token before the number of cached tokens"
        self.answers[token.choice].append(token.token)
        if token.finish:
            self.closed.add(token.choice)

    def deliver_cached(self, num_tokens: int) -> None:
        assert self.ended is None, "delivered after the end"
        assert self.num_cached is None, "counted twice"
        self.num_cached = num_tokens

    def deliver_end(self, end: DeliverEnd) -> None:
        self._expect(end.choice, end.num_tokens)
        self.closed.add(end.choice)

    def _expect(self, choice: int, position: int) -> None:
        assert self.ended is None, "delivered after the end"
        assert choice not in self.closed, "delivered after its finish"
        assert position == len(self.answers[choice]), "a repeated or missing position"

    def end(self, end: EndRequest) -> None:
        assert self.ended is None, "ended twice"
        self.ended = end

    def check(self) -> None:
        assert self.ended is not None, "never ended"
        expected = self.expected()
        if self.ended.status is Status.OK:
            assert self.answers == expected
        for answer, right in zip(self.answers, reference(self.request), strict=True):
            assert answer == right[: len(answer)]


class World:
    def __init__(
        self, infos: list[WorkerInfo], limits: DispatcherLimits, max_queued: int = 100
    ) -> None:
        self._limits = limits
        self.dispatcher = Dispatcher(policy_of("cost"), limits)
        self.workers: dict[str, FakeWorker] = {}
        self.linked: set[str] = set()  # workers to which the router has an open stream
        self.clients: dict[int, Client] = {}
        self.now = 0.0
        self.num_skipped = 0
        self.num_stuck = 0  # number of workers that were reported as stuck
        self.superseded: set[tuple[int, int]] = set()  # superseded attempts as (request, attempt)
        # First reported number of cached tokens of each request.
        self.first_cached: dict[int, int] = {}
        self.placed: dict[tuple[int, int], str] = {}  # worker of each (request, attempt)
        self.history: list[tuple[Event, float, list[Command]]] = []
        self._num_started = 0
        for info in infos:
            self.workers[info.worker] = FakeWorker(info, max_queued)
            self.handle(WorkerUp(info))

    # -------------------------------------------------------------- the router

    def handle(self, event: Event) -> None:
        self._handle(event)
        while self.dispatcher.has_more_to_assign:
            self._handle(AssignWaiting())

    def _handle(self, event: Event) -> None:
        match event:
            case WorkerUp():
                self.linked.add(event.info.worker)
            case WorkerLost():
                self.linked.discard(event.worker)
        valid = self._valid_tokens(event)
        commands = self.dispatcher.handle(event, self.now)
        self.history.append((event, self.now, list(commands)))
        self.dispatcher.check()
        self._deliver_cached(commands)
        cuts = self._deliver(delivered(commands), valid)
        for command in commands:
            match command:
                case DeliverEnd():
                    self.clients[command.request].deliver_end(command)
                case EndRequest():
                    self.clients[command.request].end(command)
                case CloseStream():
                    self._close_stream(command)
                case Submit() | Yield() | Send() | Drop():
                    assert command.worker in self.linked, "a command for a worker without a stream"
                    self._record_command(command)
                    if command.worker in self.workers:
                        self.workers[command.worker].inbox.append(command)
        for cut in cuts:
            self.handle(cut)

    def _deliver_cached(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, DeliverPrompt) and command.num_cached is not None:
                assert command.num_cached == self.first_cached[command.request]
                self.clients[command.request].deliver_cached(command.num_cached)

    def _valid_tokens(self, event: Event) -> set[tuple[int, int, int]] | None:
        """Return (request, choice, position) of a Stepped event's valid tokens; otherwise, None."""
        match event:
            case Yielded():
                self.superseded.add((event.request, event.attempt))
            case WorkerLost() | WorkerUp():
                lost = event.worker if isinstance(event, WorkerLost) else event.info.worker
                self.superseded |= {name for name, worker in self.placed.items() if worker == lost}
            case Stepped():
                for request, attempt, num_tokens in event.cached:
                    if (request, attempt) not in self.superseded:
                        num_prompt = len(self.clients[request].request.prompt)
                        self.first_cached.setdefault(request, min(num_tokens, num_prompt))
                return {
                    (token.request, token.choice, token.position)
                    for token in tokens_of(event.tokens)
                    if (token.request, token.attempt) not in self.superseded
                }
        return None

    def _record_command(self, command: Submit | Yield | Send | Drop) -> None:
        if isinstance(command, Submit):
            self.placed[(command.request.id, command.attempt)] = command.worker
        elif isinstance(command, Drop) and command.choice is None:
            self.superseded.add((command.request, command.attempt))

    def _deliver(
        self, tokens: list[NewToken], allowed: set[tuple[int, int, int]] | None
    ) -> list[ChoiceStopped]:
        cuts: list[ChoiceStopped] = []
        for token in tokens:
            key = (token.request, token.choice, token.position)
            assert allowed is None or key in allowed, "from a superseded attempt"
            client = self.clients[token.request]
            client.deliver(token)
            answer, length = client.answers[token.choice], client.cuts.get(token.choice)
            if length is not None and len(answer) >= length and not token.finish:
                del answer[length:]
                client.closed.add(token.choice)
                cuts.append(ChoiceStopped(token.request, token.choice, length))
        return cuts

    def _close_stream(self, close: CloseStream) -> None:
        self.linked.discard(close.worker)
        old = self.workers.get(close.worker)
        if old is None:
            return
        if close.stuck:  # the supervisor replaces a stuck worker
            self.num_stuck += 1
            self._num_started += 1
            self.workers[close.worker] = old.restarted(f"born {self._num_started}")
            return
        self.workers[close.worker] = old.restarted(
            old.info.incarnation
        )  # the worker drops all its sequences
        self.workers[close.worker].stuck = old.stuck

    # -------------------------------------------------------------- clients

    def arrive(self, request: Request, cuts: dict[int, int]) -> None:
        lengths = [len(answer) for answer in reference(request)]
        cuts = {i: at for i, at in cuts.items() if i < len(lengths) and at < lengths[i]}
        answers = [list(answer) for answer in request.log]
        answers += [[] for _ in range(request.num_choices - len(answers))]
        cuts = {i: at for i, at in cuts.items() if at > len(answers[i])}
        self.clients[request.id] = Client(request, cuts, answers)
        self.handle(RequestArrived(request))

    def leave(self, request: int) -> None:
        self.handle(ClientDisconnected(request))

    # -------------------------------------------------------------- possible events

    def possible_actions(self) -> list[Callable[[], None]]:
        """Return all actions that are possible now without a fault."""
        actions: list[Callable[[], None]] = []
        for worker in self.workers.values():
            if worker.name not in self.linked:
                continue
            if worker.inbox:
                actions.append(lambda w=worker: self.deliver_command(w))  # type: ignore[misc]
            if worker.outbox:
                actions.append(lambda w=worker: self.deliver_event(w))  # type: ignore[misc]
            if not worker.stuck and (worker.in_phase("queued") or worker.in_phase("running")):
                actions.append(worker.step)
            actions.extend(
                lambda w=worker, t=transfer: self.deliver_blocks(w, t, True)  # type: ignore[misc]
                for transfer in worker.transfers
            )
        return actions

    def deliver_command(self, worker: FakeWorker) -> None:
        send = worker.execute_next()
        if send is None:
            return
        kv = worker.read_lease(send)
        target = self.workers.get(send.endpoint.worker)
        if target is not None and target.info.incarnation == send.endpoint.incarnation:
            target.transfers.append(Transfer(send, kv))
            if kv is not None:
                worker.held[(send.request, send.attempt)].sending += 1

    def deliver_event(self, worker: FakeWorker) -> None:
        self.handle(worker.outbox.popleft())

    def deliver_blocks(self, worker: FakeWorker, transfer: Transfer, whole: bool) -> None:
        worker.transfers.remove(transfer)
        worker.arrive(transfer, whole)
        source = self.workers.get(transfer.send.worker)
        lease = (transfer.send.request, transfer.send.attempt)
        if source is not None and lease in source.held:
            source.held[lease].sending -= 1

    # -------------------------------------------------------------- faults

    def kill(self, name: str) -> None:
        """Kill a worker; the router does not notice yet."""
        del self.workers[name]

    def report_lost(self, name: str) -> None:
        self.handle(WorkerLost(name))

    def start_worker(self, info: WorkerInfo) -> None:
        """Start a new worker, which replaces any older worker of the same name."""
        self._num_started += 1
        worker = FakeWorker(info).restarted(f"born {self._num_started}")
        self.workers[info.worker] = worker
        self.handle(WorkerUp(worker.info))

    def drain(self, name: str) -> None:
        self.workers[name].outbox.append(Draining(name))

    def skip_position(self, name: str) -> None:
        self.num_skipped += self.workers[name].skip_position()

    def make_stuck(self, name: str) -> None:
        """Make a worker stuck: it accepts messages but computes no steps."""
        self.workers[name].stuck = True

    def wait(self, seconds: float, silent: tuple[str, ...] = ()) -> None:
        self.now += seconds
        for worker in self.workers.values():
            if worker.name in self.linked and worker.name not in silent:
                worker.outbox.append(Heartbeat(worker.name))
        self.handle(Tick())

    # -------------------------------------------------------------- end of a test

    def run_until_idle(self, rng: Random) -> None:
        """Run all possible actions, without further faults, until none is left."""
        for worker in self.workers.values():
            if worker.name not in self.linked:
                self.handle(WorkerUp(worker.info))
        idle = 0
        while idle < 200:
            actions = self.possible_actions()
            if actions:
                rng.choice(actions)()
            if not actions or rng.random() < 0.05:
                self.wait(0.5)
            receiving = [w.in_phase("reserved") for w in self.workers.values() if not w.transfers]
            if not actions and any(receiving):
                self._fail_waiting_transfers()
            idle = 0 if self.dispatcher.num_requests else idle + 1
            assert len(self.history) < 100_000, "the world does not become idle"
        while actions := self.possible_actions():
            actions[0]()

    def _fail_waiting_transfers(self) -> None:
        for worker in self.workers.values():
            for name in worker.in_phase("reserved"):
                if not any(t.send.request == name[0] for t in worker.transfers):
                    worker.fail_transfer(name)

    def check_rest(self) -> None:
        """Check that all requests ended, nothing is held, and a replay gives the same commands."""
        for client in self.clients.values():
            client.check()
        for worker in self.workers.values():
            if worker.name in self.linked:
                assert not worker.held, "a worker still holds sequences"
        assert self.dispatcher.counters.num_gaps <= self.num_skipped, "unexplained gap"
        assert self.dispatcher.num_requests == self.dispatcher.num_queued == 0
        assert all(status.num_requests == 0 for status in self.dispatcher.workers())
        again = Dispatcher(policy_of("cost"), self._limits)
        for event, now, commands in self.history:
            assert again.handle(event, now) == commands, "the same events gave other commands"
