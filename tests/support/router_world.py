"""Clients and fake workers around one `Dispatcher`, in virtual time.

Messages of one stream stay in order; a test chooses the order of all other events. Invariants are
checked after every event.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from penstock.router.routing.dispatcher import Dispatcher, DispatcherLimits
from penstock.router.routing.events import (
    ChoiceStopped,
    ClientDisconnected,
    CloseStream,
    Command,
    Deliver,
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
from penstock.router.routing.placement.policy import LeastLoaded
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
    """One client: the tokens that it has received, and where its stop strings cut its answers."""

    request: Request
    cuts: dict[int, int]  # choice -> length at which a stop string cuts the answer
    answers: list[list[int]] = field(default_factory=list)
    ended: EndRequest | None = None
    closed: set[int] = field(default_factory=set)  # choices with a finish reason

    def expected(self) -> list[list[int]]:
        answers = reference(self.request)
        return [answer[: self.cuts.get(i, len(answer))] for i, answer in enumerate(answers)]

    def deliver(self, deliver: Deliver) -> None:
        assert self.ended is None, "delivered after the end"
        assert deliver.choice not in self.closed, "delivered after its finish"
        answer = self.answers[deliver.choice]
        assert deliver.position == len(answer), "a repeated or missing position"
        answer.extend(deliver.tokens)
        if deliver.finish:
            self.closed.add(deliver.choice)

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
        self.dispatcher = Dispatcher(LeastLoaded(), limits)
        self.workers: dict[str, FakeWorker] = {}
        self.linked: set[str] = set()  # workers to which the router has an open stream
        self.clients: dict[int, Client] = {}
        self.now = 0.0
        self.num_garbled = 0
        self.num_stuck = 0  # workers reported as stuck
        self.over: set[tuple[int, int]] = set()  # (request, attempt) of superseded attempts
        self.placed: dict[tuple[int, int], str] = {}  # (request, attempt) -> worker
        self.history: list[tuple[Event, float, list[Command]]] = []
        self._num_births = 0
        for info in infos:
            self.workers[info.worker] = FakeWorker(info, max_queued)
            self.tell(WorkerUp(info))

    # -------------------------------------------------------------- the router

    def tell(self, event: Event) -> None:
        match event:
            case WorkerUp():
                self.linked.add(event.info.worker)
            case WorkerLost():
                self.linked.discard(event.worker)
        taken = self._what_may_be_taken(event)
        commands = self.dispatcher.handle(event, self.now)
        self.history.append((event, self.now, list(commands)))
        self.dispatcher.check()
        cuts: list[ChoiceStopped] = []
        for command in commands:
            match command:
                case Deliver():
                    key = (command.request, command.choice, command.position)
                    assert taken is None or key in taken, "from a superseded attempt"
                    cuts.extend(self._deliver(command))
                case EndRequest():
                    self.clients[command.request].end(command)
                case CloseStream():
                    self._hang(command)
                case Submit() | Yield() | Send() | Drop():
                    assert command.worker in self.linked, "a command for a worker without a stream"
                    self._follow(command)
                    if command.worker in self.workers:
                        self.workers[command.worker].inbox.append(command)
        for cut in cuts:
            self.tell(cut)

    def _what_may_be_taken(self, event: Event) -> set[tuple[int, int, int]] | None:
        """Return (request, choice, position) of the valid tokens of a Stepped event, else None."""
        match event:
            case Yielded():
                self.over.add((event.request, event.attempt))
            case WorkerLost() | WorkerUp():
                lost = event.worker if isinstance(event, WorkerLost) else event.info.worker
                self.over |= {name for name, worker in self.placed.items() if worker == lost}
            case Stepped():
                return {
                    (token.request, token.choice, token.position)
                    for token in event.tokens
                    if (token.request, token.attempt) not in self.over
                }
        return None

    def _follow(self, command: Submit | Yield | Send | Drop) -> None:
        if isinstance(command, Submit):
            self.placed[(command.request.id, command.attempt)] = command.worker
        elif isinstance(command, Drop) and command.choice is None:
            self.over.add((command.request, command.attempt))

    def _deliver(self, deliver: Deliver) -> list[ChoiceStopped]:
        client = self.clients[deliver.request]
        client.deliver(deliver)
        answer, length = client.answers[deliver.choice], client.cuts.get(deliver.choice)
        if length is None or len(answer) < length or deliver.finish:
            return []
        del answer[length:]
        client.closed.add(deliver.choice)
        return [ChoiceStopped(deliver.request, deliver.choice, length)]

    def _hang(self, hang: CloseStream) -> None:
        self.linked.discard(hang.worker)
        old = self.workers.get(hang.worker)
        if old is None:
            return
        if hang.stuck:  # the supervisor replaces a stuck worker
            self.num_stuck += 1
            self._num_births += 1
            self.workers[hang.worker] = old.reborn(f"born {self._num_births}")
            return
        self.workers[hang.worker] = old.reborn(old.info.incarnation)  # all sequences are dropped
        self.workers[hang.worker].stuck = old.stuck

    # -------------------------------------------------------------- clients

    def arrive(self, request: Request, cuts: dict[int, int]) -> None:
        lengths = [len(answer) for answer in reference(request)]
        cuts = {i: at for i, at in cuts.items() if i < len(lengths) and at < lengths[i]}
        answers = [list(answer) for answer in request.log]
        answers += [[] for _ in range(request.num_choices - len(answers))]
        cuts = {i: at for i, at in cuts.items() if at > len(answers[i])}
        self.clients[request.id] = Client(request, cuts, answers)
        self.tell(RequestArrived(request))

    def leave(self, request: int) -> None:
        self.tell(ClientDisconnected(request))

    # -------------------------------------------------------------- possible events

    def moves(self) -> list[Callable[[], None]]:
        """Return all actions that are possible now without a fault."""
        moves: list[Callable[[], None]] = []
        for worker in self.workers.values():
            if worker.name not in self.linked:
                continue
            if worker.inbox:
                moves.append(lambda w=worker: self.carry_command(w))  # type: ignore[misc]
            if worker.outbox:
                moves.append(lambda w=worker: self.carry_event(w))  # type: ignore[misc]
            if not worker.stuck and (worker.of("queued") or worker.of("running")):
                moves.append(worker.step)
            moves.extend(
                lambda w=worker, t=transfer: self.carry_blocks(w, t, True)  # type: ignore[misc]
                for transfer in worker.transfers
            )
        return moves

    def carry_command(self, worker: FakeWorker) -> None:
        send = worker.obey()
        if send is None:
            return
        kv = worker.read_lease(send)
        target = self.workers.get(send.endpoint.worker)
        if target is not None and target.info.incarnation == send.endpoint.incarnation:
            target.transfers.append(Transfer(send, kv))
            if kv is not None:
                worker.held[(send.request, send.attempt)].sending += 1

    def carry_event(self, worker: FakeWorker) -> None:
        self.tell(worker.outbox.popleft())

    def carry_blocks(self, worker: FakeWorker, transfer: Transfer, whole: bool) -> None:
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

    def notice(self, name: str) -> None:
        self.tell(WorkerLost(name))

    def birth(self, info: WorkerInfo) -> None:
        """Start a new worker, which replaces any older worker of the same name."""
        self._num_births += 1
        worker = FakeWorker(info).reborn(f"born {self._num_births}")
        self.workers[info.worker] = worker
        self.tell(WorkerUp(worker.info))

    def drain(self, name: str) -> None:
        self.workers[name].outbox.append(Draining(name))

    def garble(self, name: str) -> None:
        self.num_garbled += self.workers[name].garble()

    def stick(self, name: str) -> None:
        """Make a worker stuck: it accepts messages but computes no steps."""
        self.workers[name].stuck = True

    def wait(self, seconds: float, silent: tuple[str, ...] = ()) -> None:
        self.now += seconds
        for worker in self.workers.values():
            if worker.name in self.linked and worker.name not in silent:
                worker.outbox.append(Heartbeat(worker.name))
        self.tell(Tick())

    # -------------------------------------------------------------- end of a test

    def settle(self, rng: Random) -> None:
        """Run all possible actions, without further faults, until none is left."""
        for worker in self.workers.values():
            if worker.name not in self.linked:
                self.tell(WorkerUp(worker.info))
        idle = 0
        while idle < 200:
            moves = self.moves()
            if moves:
                rng.choice(moves)()
            if not moves or rng.random() < 0.05:
                self.wait(0.5)
            receiving = [w.of("reserved") for w in self.workers.values() if not w.transfers]
            if not moves and any(receiving):
                self._wait_out()
            idle = 0 if self.dispatcher.num_requests else idle + 1
            assert len(self.history) < 100_000, "the world does not become idle"
        while moves := self.moves():
            moves[0]()

    def _wait_out(self) -> None:
        for worker in self.workers.values():
            for name in worker.of("reserved"):
                if not any(t.send.request == name[0] for t in worker.transfers):
                    worker.miss(name)

    def check_rest(self) -> None:
        """Check that all requests ended, nothing is held, and a replay gives the same commands."""
        for client in self.clients.values():
            client.check()
        for worker in self.workers.values():
            if worker.name in self.linked:
                assert not worker.held, "a worker still holds sequences"
        assert self.dispatcher.counters.num_gaps <= self.num_garbled, "unexplained gap"
        assert self.dispatcher.num_requests == self.dispatcher.num_queued == 0
        assert all(status.num_requests == 0 for status in self.dispatcher.workers())
        again = Dispatcher(LeastLoaded(), self._limits)
        for event, now, commands in self.history:
            assert again.handle(event, now) == commands, "the same events gave other commands"
