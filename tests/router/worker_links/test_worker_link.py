"""The stream to a worker over loopback gRPC: handshake, numbering, failures, reconnection."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from penstock.common.sampling_params import SamplingParams
from penstock.protos import worker_pb2 as pb
from penstock.protos.worker_codec import PROTOCOL, unpack_tokens
from penstock.router.routing import events as ev
from penstock.router.worker_links import worker_link
from penstock.router.worker_links.worker_link import RouterIdentity, WorkerLink
from tests.support.served_router import until
from tests.support.stub_worker import StubWorker

REQUEST = ev.Request(1, (5, 6, 7), SamplingParams(max_tokens=97))


@dataclass
class Received:
    """Events and welcomes that a link has delivered."""

    events: list[ev.Event] = field(default_factory=list)
    welcomes: list[pb.Welcome] = field(default_factory=list)

    def kinds(self) -> list[str]:
        return [
            type(event).__name__ for event in self.events if not isinstance(event, ev.Heartbeat)
        ]

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[StubWorker]:
    async with StubWorker(token="secret") as worker:
        yield worker


@pytest_asyncio.fixture
async def received() -> Received:
    return Received()


def link_to(worker: StubWorker, received: Received, token: str | None = "secret") -> WorkerLink:
    identity = RouterIdentity("router-7", "fresh", token)
    return WorkerLink(
        worker.name, worker.address, identity, received.events.append, received.welcomes.append
    )


async def link_to_stopped(worker: StubWorker, received: Received) -> tuple[WorkerLink, int]:
    """Return a link that has lost its worker, and the port at which the worker may start again."""
    link = link_to(worker, received)
    await until(lambda: received.kinds() == ["WorkerUp"])
    port = int(worker.address.rsplit(":", 1)[1])
    await worker.stop()
    await until(lambda: received.kinds() == ["WorkerUp", "WorkerLost"])
    return link, port


async def test_link_sends_hello_and_delivers_events(worker: StubWorker, received: Received) -> None:
    link = link_to(worker, received)
    await until(lambda: received.events)
    up = received.events[0]
    assert isinstance(up, ev.WorkerUp)
    assert (up.info.worker, up.info.role, up.info.max_model_len) == ("w0", "mixed", 2048)
    hello = worker.hellos[0]
    assert (hello.protocol, hello.router, hello.incarnation) == (PROTOCOL, "router-7", "fresh")
    worker.stepping.clear()
    link.send(ev.Submit("w0", REQUEST, 1, ((),), (False,), None, 0))
    await until(lambda: worker.runs)
    assert unpack_tokens(worker.submits[0].prompt) == [5, 6, 7]
    worker.stepping.set()
    await until(lambda: received.count(ev.Stepped) >= 3)
    steps = [event for event in received.events if isinstance(event, ev.Stepped)]
    assert [step.tokens.positions[0] for step in steps[:3]] == [0, 1, 2]
    link.send(ev.Drop("w0", 1, 1))
    await until(lambda: not worker.runs)
    await link.stop()
    assert received.kinds()[-1] == "WorkerLost"


async def test_cancelled_link_ends_and_reports_the_worker_as_lost(
    worker: StubWorker, received: Received
) -> None:
    """The end of an event loop cancels all tasks, and waits for them."""
    link = link_to(worker, received)
    await until(lambda: received.events)
    link._task.cancel()
    await until(link._task.done)
    assert link._task.cancelled()
    assert received.kinds() == ["WorkerUp", "WorkerLost"]


async def test_large_step_is_posted_in_slices_between_which_others_run(
    worker: StubWorker, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "MAX_EVENT_TOKENS", 4)
    link = link_to(worker, received)
    await until(lambda: received.count(ev.WorkerUp))
    seen: set[int] = set()  # numbers of delivered Stepped events that another task has seen

    async def watch() -> None:
        while received.count(ev.Stepped) < 3:
            seen.add(received.count(ev.Stepped))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    step = pb.Step(load=pb.Load(running=1))
    for column in (step.request, step.attempt, step.choice, step.position, step.token):
        column.extend([0] * 10)
    step.finish.extend([pb.FINISH_NONE] * 10)
    worker.send(pb.ToRouter(step=step))
    await watching
    steps = [event for event in received.events if isinstance(event, ev.Stepped)]
    assert [len(each.tokens) for each in steps] == [4, 4, 2]
    assert seen == {0, 1, 2}
    await link.stop()


@pytest.mark.slow
async def test_idle_link_sends_heartbeats(
    worker: StubWorker, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "IDLE_HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(worker_link, "HEARTBEAT_SECONDS", 1e6)
    link = link_to(worker, received)
    await until(lambda: worker.num_heartbeats >= 2 and received.count(ev.Heartbeat) >= 2)
    await link.stop()


async def test_heartbeats_are_more_frequent_to_a_busy_worker(
    worker: StubWorker, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "IDLE_HEARTBEAT_SECONDS", 1e6)
    monkeypatch.setattr(worker_link, "HEARTBEAT_SECONDS", 0.05)
    worker.welcome.load.running = 1
    link = link_to(worker, received)
    await until(lambda: worker.num_heartbeats >= 2)
    worker.welcome.load.running = 0
    await link.stop()
    link = link_to(worker, received)
    await until(lambda: received.count(ev.WorkerUp) == 2)
    before = worker.num_heartbeats
    # After a command, the link treats the worker as busy, even if it reports to be idle.
    link.send(ev.Drop("w0", 1, 1))
    await until(lambda: worker.num_heartbeats == before + 1)
    await asyncio.sleep(0.3)
    assert worker.num_heartbeats == before + 1
    await link.stop()


async def test_link_reconnects_after_the_worker_restarts(
    worker: StubWorker, received: Received
) -> None:
    link, port = await link_to_stopped(worker, received)
    await worker.start(port)
    await until(lambda: received.kinds() == ["WorkerUp", "WorkerLost", "WorkerUp"])
    await link.stop()


async def test_closed_stream_is_reported_as_a_loss_and_reopened(
    worker: StubWorker, received: Received
) -> None:
    link = link_to(worker, received)
    await until(lambda: received.kinds() == ["WorkerUp"])
    link.close("it was silent")
    await until(lambda: received.kinds() == ["WorkerUp", "WorkerLost", "WorkerUp"])
    assert len(worker.hellos) == 2
    await link.stop()


async def test_close_during_a_backoff_does_not_affect_the_next_stream(
    worker: StubWorker, received: Received
) -> None:
    link, port = await link_to_stopped(worker, received)
    link.close("its process has exited")
    await worker.start(port)
    await until(lambda: received.kinds() == ["WorkerUp", "WorkerLost", "WorkerUp"])
    link.send(ev.Drop("w0", 9, 9))
    await until(lambda: worker.drops)
    link.close("it was silent")
    await until(lambda: received.kinds()[2:] == ["WorkerUp", "WorkerLost", "WorkerUp"])
    await link.stop()


async def test_command_for_an_old_stream_is_not_sent_on_a_new_one(
    worker: StubWorker, received: Received
) -> None:
    link = link_to(worker, received)
    await until(lambda: received.kinds() == ["WorkerUp"])
    link.close("it was silent")
    link.send(ev.Submit("w0", REQUEST, 1, ((),), (False,), None, 0))
    await until(lambda: received.kinds() == ["WorkerUp", "WorkerLost", "WorkerUp"])
    link.send(ev.Drop("w0", 9, 9))
    await until(lambda: worker.drops)
    assert worker.submits == []
    await link.stop()


@pytest.mark.parametrize(
    "message",
    [
        pb.ToRouter(step=pb.Step(request=[1, 2], attempt=[1])),
        pb.ToRouter(step=pb.Step(request=[1], attempt=[1], choice=[0], position=[0], token=[1])),
        pb.ToRouter(welcome=pb.Welcome()),
        pb.ToRouter(),
    ],
    ids=["ragged columns", "a column short", "a second welcome", "nothing"],
)
async def test_invalid_message_ends_the_stream(
    worker: StubWorker, received: Received, message: pb.ToRouter
) -> None:
    link = link_to(worker, received)
    await until(lambda: received.kinds() == ["WorkerUp"])
    worker.send(message)
    await until(lambda: received.kinds()[:3] == ["WorkerUp", "WorkerLost", "WorkerUp"])
    await link.stop()


async def test_unknown_finish_reason_ends_the_stream(
    worker: StubWorker, received: Received
) -> None:
    link = link_to(worker, received)
    await until(lambda: received.kinds() == ["WorkerUp"])
    step = pb.Step(request=[1], attempt=[1], choice=[0], position=[0], token=[1])
    step.finish.append(7)  # type: ignore[arg-type]
    worker.send(pb.ToRouter(step=step))
    await until(lambda: received.kinds()[:2] == ["WorkerUp", "WorkerLost"])
    await link.stop()


async def check_refused(
    worker: StubWorker,
    received: Received,
    caplog: pytest.LogCaptureFixture,
    words: str,
    token: str = "",
) -> None:
    """Check that the link delivers no event, keeps retrying, and warns of `words` once."""
    with caplog.at_level("DEBUG", worker_link.__name__):
        link = link_to(worker, received, token or worker.token)
        await until(lambda: caplog.text.count(words) >= 3, caplog.text)
    levels = [each.levelname for each in caplog.records if words in each.getMessage()]
    assert levels[0] == "WARNING"
    assert set(levels[1:]) == {"DEBUG"}
    assert received.events == []
    await link.stop()
    assert received.events == []


async def test_wrong_token_is_refused(
    worker: StubWorker, received: Received, caplog: pytest.LogCaptureFixture
) -> None:
    await check_refused(worker, received, caplog, "UNAUTHENTICATED", token="guess")


async def test_worker_of_another_name_is_refused(
    worker: StubWorker, received: Received, caplog: pytest.LogCaptureFixture
) -> None:
    worker.welcome.worker = "somebody"
    await check_refused(worker, received, caplog, "another worker, 'somebody', answers at this")


async def test_another_protocol_version_is_refused(
    worker: StubWorker, received: Received, caplog: pytest.LogCaptureFixture
) -> None:
    worker.welcome.protocol = 99
    await check_refused(worker, received, caplog, "of the protocol, and this router uses version")


async def test_worker_with_impossible_sizes_is_refused(
    worker: StubWorker, received: Received, caplog: pytest.LogCaptureFixture
) -> None:
    worker.welcome.block_size = 0
    await check_refused(worker, received, caplog, "the worker reports block_size = 0")
    assert received.welcomes == []


async def test_worker_that_sends_no_welcome_is_refused(
    worker: StubWorker,
    received: Received,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_link, "CONNECT_SECONDS", 0.1)

    async def silent(*stream: object) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(30):
        silent_worker = StubWorker(token="secret")
        monkeypatch.setattr(silent_worker, "Attach", silent)
        async with silent_worker:
            await check_refused(silent_worker, received, caplog, "no Welcome message within")


async def test_gap_in_message_numbers_ends_the_stream(
    worker: StubWorker, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "first_number", 3)
    link = link_to(worker, received)
    await until(lambda: received.count(ev.WorkerLost) >= 1)
    await link.stop()


async def test_stream_to_a_worker_that_does_not_read_is_closed(
    worker: StubWorker, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "MAX_UNSENT", 10)
    link = link_to(worker, received)
    await until(lambda: received.kinds() == ["WorkerUp"])
    for request in range(11):
        link.send(ev.Yield("w0", request, 1))
    await until(lambda: "WorkerLost" in received.kinds())
    await link.stop()


async def test_link_without_a_worker_stops_at_once(received: Received) -> None:
    link = link_to(StubWorker(), received)
    await asyncio.sleep(0)
    await link.stop()
    assert received.events == []
