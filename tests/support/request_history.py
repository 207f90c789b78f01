"""Drives a request's state machine event by event, and builds a state machine in each state."""

from collections.abc import Callable

from penstock.common.sampling_params import SamplingParams
from penstock.router.routing import request_state
from penstock.router.routing.events import (
    Command,
    Drop,
    Finish,
    NewToken,
    Ready,
    Request,
    Source,
    Submit,
    TransferEndpoint,
)
from penstock.router.routing.request_state import Phase, RequestState, phase_of
from tests.support.router_world import info_of

W, V, X = info_of("w", "prefill"), info_of("v", "decode"), info_of("x", "decode")
AT = TransferEndpoint("v", "1", "address", "secret")
PROMPT = [5, 6, 7]


class RequestHistory:
    """A request's state machine; `out` holds the commands of the last event."""

    def __init__(self, **request: object) -> None:
        fields: dict[str, object] = {
            "id": 1,
            "prompt": PROMPT,
            "params": SamplingParams(),
        } | request
        self.life = RequestState(Request(**fields))  # type: ignore[arg-type]
        self.out: list[Command] = []

    def does(self, act: Callable[[list[Command]], object]) -> object:
        self.out = []
        result = act(self.out)
        if self.life.status is None:
            request_state.check(self.life)
        return result

    def place(self, info: object = W, yield_after: int = 0) -> "RequestHistory":
        self.does(lambda out: self.life.assign(info, yield_after, out))  # type: ignore[arg-type]
        return self

    def token(
        self,
        worker: str,
        attempt: int,
        position: int,
        finish: Finish = Finish.NONE,
        choice: int = 0,
    ) -> object:
        token = NewToken(1, attempt, choice, position, 100 + position, finish)
        return self.does(lambda out: self.life.append(worker, token, out))

    def yielded(self, worker: str = "w", attempt: int = 1, kv_len: int = 3) -> "RequestHistory":
        self.does(lambda out: self.life.yielded(worker, attempt, kv_len, out))
        return self

    def ready(self, worker: str = "v", attempt: int = 2, epoch: int = 9) -> "RequestHistory":
        event = Ready(worker, 1, attempt, epoch, 2, AT)
        self.does(lambda out: self.life.ready(event, out))
        return self

    @property
    def phase(self) -> Phase:
        return phase_of(self.life)


def running() -> RequestHistory:
    story = RequestHistory().place(W, 1)
    story.token("w", 1, 0)
    return story


def yielded() -> RequestHistory:
    return running().yielded()


def waiting() -> RequestHistory:
    return yielded().place(V)


def moving() -> RequestHistory:
    return waiting().ready()


def asked() -> RequestHistory:
    """Return a request of draining worker w whose live migration to v has started."""
    story = running()
    story.does(lambda out: story.life.start_live_migration(V, out))
    return story


STATES: dict[Phase, Callable[[], RequestHistory]] = {
    Phase.QUEUED: RequestHistory,
    Phase.RUNNING: running,
    Phase.YIELDED: yielded,
    Phase.WAITING: waiting,
    Phase.TRANSFERRING: moving,
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
