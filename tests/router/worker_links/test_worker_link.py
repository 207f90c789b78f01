"""The stream to a worker over real loopback gRPC: greeting, numbering, breaking, coming back."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from penstock.common.sampling_params import SamplingParams
from penstock.protos import worker_pb2 as pb
from penstock.router.routing import events as ev
from penstock.router.worker_links import worker_link
from penstock.router.worker_links.worker_link import RouterIdentity, WorkerLink
from tests.support.served_router import until
from tests.support.stub_worker import StubWorker

REQUEST = ev.Request(1, (5, 6, 7), SamplingParams(max_tokens=97))


@dataclass
class Heard:
    """What a link told."""

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
async def heard() -> Heard:
    return Heard()


def link_to(worker: StubWorker, heard: Heard, token: str | None = "secret") -> WorkerLink:
    identity = RouterIdentity("router-7", "fresh", token)
    return WorkerLink(
        worker.name, worker.address, identity, heard.events.append, heard.welcomes.append
    )


async def test_it_introduces_itself_and_tells_what_it_hears(
    worker: StubWorker, heard: Heard
) -> None:
    link = link_to(worker, heard)
    await until(lambda: heard.events)
    up = heard.events[0]
    assert isinstance(up, ev.WorkerUp)
    assert (up.info.worker, up.info.role, up.info.max_model_len) == ("w0", "mixed", 2048)
    hello = worker.hellos[0]
    assert (hello.protocol, hello.router, hello.incarnation) == (1, "router-7", "fresh")
    worker.go.clear()
    link.send(ev.Submit("w0", REQUEST, 1, ((),), (False,), None, 0))
    await until(lambda: worker.holding)
    assert list(worker.submits[0].prompt) == [5, 6, 7]
    worker.go.set()
    await until(lambda: heard.count(ev.Stepped) >= 3)
    steps = [event for event in heard.events if isinstance(event, ev.Stepped)]
    assert [step.tokens[0].position for step in steps[:3]] == [0, 1, 2]
    link.send(ev.Drop("w0", 1, 1))
    await until(lambda: not worker.holding)
    await link.stop()
    assert heard.kinds()[-1] == "WorkerLost"


@pytest.mark.slow
async def test_it_beats_when_there_is_nothing_to_say(
    worker: StubWorker, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "IDLE_HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(worker_link, "HEARTBEAT_SECONDS", 1e6)
    link = link_to(worker, heard)
    await until(lambda: worker.num_beats >= 2 and heard.count(ev.Heartbeat) >= 2)
    await link.stop()


async def test_it_beats_sooner_to_a_worker_that_has_something(
    worker: StubWorker, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "IDLE_HEARTBEAT_SECONDS", 1e6)
    monkeypatch.setattr(worker_link, "HEARTBEAT_SECONDS", 0.05)
    worker.welcome.load.running = 1
    link = link_to(worker, heard)
    await until(lambda: worker.num_beats >= 2)
    worker.welcome.load.running = 0
    await link.stop()
    link = link_to(worker, heard)
    await until(lambda: heard.count(ev.WorkerUp) == 2)
    before = worker.num_beats
    link.send(ev.Drop("w0", 1, 1))  # who was asked something is not idle, whatever it said
    await until(lambda: worker.num_beats == before + 1)
    await asyncio.sleep(0.3)
    assert worker.num_beats == before + 1
    await link.stop()


async def test_it_comes_back_after_a_break(worker: StubWorker, heard: Heard) -> None:
    link = link_to(worker, heard)
    await until(lambda: heard.kinds() == ["WorkerUp"])
    port = int(worker.address.rsplit(":", 1)[1])
    await worker.stop()
    await until(lambda: heard.kinds() == ["WorkerUp", "WorkerLost"])
    await worker.start(port)
    await until(lambda: heard.kinds() == ["WorkerUp", "WorkerLost", "WorkerUp"])
    await link.stop()


async def test_a_hang_is_a_loss_and_a_new_stream(worker: StubWorker, heard: Heard) -> None:
    link = link_to(worker, heard)
    await until(lambda: heard.kinds() == ["WorkerUp"])
    link.close("it was silent")
    await until(lambda: heard.kinds() == ["WorkerUp", "WorkerLost", "WorkerUp"])
    assert len(worker.hellos) == 2
    await link.stop()


async def test_what_was_for_an_old_stream_is_not_sent_on_the_new(
    worker: StubWorker, heard: Heard
) -> None:
    link = link_to(worker, heard)
    await until(lambda: heard.kinds() == ["WorkerUp"])
    link.close("it was silent")
    link.send(ev.Submit("w0", REQUEST, 1, ((),), (False,), None, 0))
    await until(lambda: heard.kinds() == ["WorkerUp", "WorkerLost", "WorkerUp"])
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
async def test_messages_without_sense_end_the_stream(
    worker: StubWorker, heard: Heard, message: pb.ToRouter
) -> None:
    link = link_to(worker, heard)
    await until(lambda: heard.kinds() == ["WorkerUp"])
    worker.say(message)
    await until(lambda: heard.kinds()[:3] == ["WorkerUp", "WorkerLost", "WorkerUp"])
    await link.stop()


async def test_an_unknown_finish_ends_the_stream(worker: StubWorker, heard: Heard) -> None:
    link = link_to(worker, heard)
    await until(lambda: heard.kinds() == ["WorkerUp"])
    step = pb.Step(request=[1], attempt=[1], choice=[0], position=[0], token=[1])
    step.finish.append(7)  # type: ignore[arg-type]
    worker.say(pb.ToRouter(step=step))
    await until(lambda: heard.kinds()[:2] == ["WorkerUp", "WorkerLost"])
    await link.stop()


async def refused(
    worker: StubWorker, heard: Heard, caplog: pytest.LogCaptureFixture, words: str, token: str = ""
) -> None:
    """The link never comes up, keeps trying, and the log says why."""
    with caplog.at_level("DEBUG", worker_link.__name__):
        link = link_to(worker, heard, token or worker.token)
        await until(lambda: caplog.text.count(words) >= 2, caplog.text)
    assert heard.events == []
    await link.stop()
    assert heard.events == []


async def test_a_wrong_token(
    worker: StubWorker, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    await refused(worker, heard, caplog, "UNAUTHENTICATED", token="guess")


async def test_another_worker_at_the_address(
    worker: StubWorker, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    worker.welcome.worker = "somebody"
    await refused(worker, heard, caplog, "another worker answers there ('somebody')")


async def test_another_version(
    worker: StubWorker, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    worker.welcome.protocol = 99
    await refused(worker, heard, caplog, "another version of the protocol")


async def test_a_worker_that_never_says_welcome(
    worker: StubWorker,
    heard: Heard,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_link, "CONNECT_SECONDS", 0.1)

    async def silent(*stream: object) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(30):
        mute = StubWorker(token="secret")
        monkeypatch.setattr(mute, "Attach", silent)
        async with mute:
            await refused(mute, heard, caplog, "no welcome within")


async def test_a_missing_message_ends_the_stream(
    worker: StubWorker, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "first_number", 3)
    link = link_to(worker, heard)
    await until(lambda: heard.count(ev.WorkerLost) >= 1)
    await link.stop()


async def test_a_worker_that_takes_nothing_is_hung_up_on(
    worker: StubWorker, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "MAX_UNSENT", 10)
    link = link_to(worker, heard)
    await until(lambda: heard.kinds() == ["WorkerUp"])
    for request in range(11):
        link.send(ev.Yield("w0", request, 1))
    await until(lambda: "WorkerLost" in heard.kinds())
    await link.stop()


async def test_a_link_to_nobody_stops_at_once(heard: Heard) -> None:
    link = link_to(StubWorker(), heard)
    await asyncio.sleep(0)
    await link.stop()
    assert heard.events == []
