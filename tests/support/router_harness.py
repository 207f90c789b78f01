"""A dispatcher with a clock, to which a test sends events one by one."""

from collections.abc import Sequence

from penstock.common.sampling_params import SamplingParams
from penstock.router.routing.dispatcher import Dispatcher, DispatcherLimits
from penstock.router.routing.events import (
    AssignWaiting,
    Command,
    EndRequest,
    Event,
    Finish,
    Heartbeat,
    Request,
    RequestArrived,
    Status,
    Stepped,
    Submit,
    Tick,
    WorkerInfo,
    WorkerUp,
)
from penstock.router.routing.placement.routing_strategies import policy_of
from penstock.router.routing.prefix_cache.cache_events import CacheSnapshot
from penstock.router.routing.transfer_peers import TransferEndpoint
from tests.support.columns import NewToken, columns_of
from tests.support.router_world import info_of

P, D, E = info_of("p", "prefill"), info_of("d", "decode"), info_of("e", "decode")
M, N = info_of("m", "mixed"), info_of("n", "mixed")
AT = TransferEndpoint("d", "1", "address", "secret")


class Router:
    """A dispatcher with a clock; its invariants are checked after every event."""

    def __init__(self, *infos: WorkerInfo, limits: DispatcherLimits | None = None) -> None:
        self.dispatcher = Dispatcher(policy_of("cost"), limits)
        self.now = 1000.0
        for info in infos:
            self(WorkerUp(info))

    def __call__(self, event: Event) -> list[Command]:
        commands = self.dispatcher.handle(event, self.now)
        self.dispatcher.check()
        while event != AssignWaiting() and self.dispatcher.has_more_to_assign:
            commands += self(AssignWaiting())
        if isinstance(event, WorkerUp):  # the worker has cached no blocks
            info = event.info
            commands += self(CacheSnapshot(info.worker, info.incarnation, 0, 0, True, ()))
        return commands

    def arrive(self, number: int = 1, num_prompt: int = 3, **fields: object) -> list[Command]:
        request = Request(number, [7] * num_prompt, SamplingParams(), **fields)  # type: ignore[arg-type]
        return self(RequestArrived(request))

    def step(
        self,
        worker: str,
        attempt: int,
        position: int,
        finish: Finish = Finish.NONE,
        number: int = 1,
    ) -> list[Command]:
        token = NewToken(number, attempt, 0, position, 50 + position, finish)
        return self(Stepped(worker, columns_of([token])))

    def wait(self, seconds: float, *alive: str) -> list[Command]:
        """Advance time in small ticks; only the workers in `alive` send heartbeats."""
        commands: list[Command] = []
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for worker in alive:
                commands += self(Heartbeat(worker))
            commands += self(Tick())
        return commands

    def state(self, worker: str) -> str:
        return next(w.state for w in self.dispatcher.workers() if w.worker == worker)


def submits(commands: Sequence[Command]) -> list[tuple[str, int, int]]:
    return [(c.worker, c.request.id, c.attempt) for c in commands if isinstance(c, Submit)]


def ends(commands: Sequence[Command]) -> list[tuple[int, Status]]:
    return [(c.request, c.status) for c in commands if isinstance(c, EndRequest)]
