"""Drives the state machine of a request event by event, and builds one in any state."""

from collections.abc import Callable

from penstock.common.sampling_params import SamplingParams
from penstock.router.routing import request_state
from penstock.router.routing.events import (
    Command,
    Drop,
    Finish,
    Ready,
    Request,
    Source,
    Submit,
)
from penstock.router.routing.request_state import Phase, RequestState, phase_of
from penstock.router.routing.transfer_peers import TransferEndpoint
from tests.support.router_world import info_of

W, V, X = info_of("w", "prefill"), info_of("v", "decode"), info_of("x", "decode")
AT = TransferEndpoint("v", "1", "address", "secret")
PROMPT = [5, 6, 7]


class RequestHistory:
    """The state machine of a request; `commands` holds the commands of the last event."""

    def __init__(self, **request: object) -> None:
        fields: dict[str, object] = {
            "id": 1,
            "prompt": PROMPT,
            "params": SamplingParams(),
        } | request
        self.state = RequestState(Request(**fields))  # type: ignore[arg-type]
        self.commands: list[Command] = []

    def apply(self, act: Callable[[list[Command]], object]) -> object:
        self.commands = []
        result = act(self.commands)
        if self.state.status is None:
            request_state.check(self.state)
        return result

    def place(self, info: object = W, yield_after: int = 0) -> "RequestHistory":
        self.apply(lambda out: self.state.assign(info, yield_after, out))  # type: ignore[arg-type]
        return self

    def token(
        self,
        worker: str,
        attempt: int,
        position: int,
        finish: Finish = Finish.NONE,
        choice: int = 0,
    ) -> object:
        token = 100 + position
        return self.apply(
            lambda out: self.state.append(worker, attempt, choice, position, token, finish, out)
        )

    def yielded(self, worker: str = "w", attempt: int = 1, kv_len: int = 3) -> "RequestHistory":
        self.apply(lambda out: self.state.yielded(worker, attempt, kv_len, out))
        return self

    def ready(self, worker: str = "v", attempt: int = 2, epoch: int = 9) -> "RequestHistory":
        event = Ready(worker, 1, attempt, epoch, 2, AT)
        self.apply(lambda out: self.state.ready(event, out))
        return self

    @property
    def phase(self) -> Phase:
        return phase_of(self.state)


def running() -> RequestHistory:
    history = RequestHistory().place(W, 1)
    history.token("w", 1, 0)
    return history


def yielded() -> RequestHistory:
    return running().yielded()


def waiting() -> RequestHistory:
    return yielded().place(V)


def transferring() -> RequestHistory:
    return waiting().ready()


def migrating() -> RequestHistory:
    """Return a request that migrates live from the draining worker w to v."""
    history = running()
    history.apply(lambda out: history.state.start_live_migration(V, out))
    return history


STATES: dict[Phase, Callable[[], RequestHistory]] = {
    Phase.QUEUED: RequestHistory,
    Phase.RUNNING: running,
    Phase.YIELDED: yielded,
    Phase.WAITING: waiting,
    Phase.TRANSFERRING: transferring,
}
HELD: dict[Phase, list[Command]] = {
    Phase.QUEUED: [],
    Phase.RUNNING: [Drop("w", 1, 1)],
    Phase.YIELDED: [Drop("w", 1, 1)],
    Phase.WAITING: [Drop("v", 1, 2), Drop("w", 1, 1)],
    Phase.TRANSFERRING: [Drop("v", 1, 2), Drop("w", 1, 1)],
}
LEASE = Source("w", "1", 1, 3, "L")


def submit(worker: str, attempt: int, log: tuple[int, ...], source: Source | None) -> Submit:
    request = Request(1, PROMPT, SamplingParams())
    return Submit(worker, request, attempt, (log,), (False,), source, 0)
