"""Rank pairs: the mirrored key-value store through which ranks connect, and the communicator."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch

from penstock.workers.kv_transfer import transport
from penstock.workers.kv_transfer.transport import (
    DESTINATION,
    SOURCE,
    MirrorStore,
    Operation,
    PairBroken,
    RankPair,
)

CPU = torch.device("cpu")
CLOSED = "the connection of this pair of ranks is closed"


def mirrored(seconds: float) -> tuple[MirrorStore, MirrorStore]:
    stores: list[MirrorStore] = []
    one = MirrorStore(lambda key, value: stores[1].receive(key, value), seconds)
    other = MirrorStore(lambda key, value: stores[0].receive(key, value), seconds)
    stores += [one, other]
    return one, other


progress = threading.Event()
"""Set when an operation of a pair of `pairs` has ended, or a pair was released."""


def finish(operation: Operation) -> None:
    """Wait for an operation; raise `PairBroken` if it failed."""
    while not operation.ready():
        assert progress.wait(60)
        progress.clear()
    operation.check()


@pytest.fixture
def pairs() -> Iterator[tuple[RankPair, RankPair]]:
    stores = mirrored(1.0)
    source = RankPair(SOURCE, stores[0], CPU, "127.0.0.1", 1.0, progress.set)
    destination = RankPair(DESTINATION, stores[1], CPU, "127.0.0.1", 1.0, progress.set)
    source.connected().result(60)
    destination.connected().result(60)
    yield source, destination
    source.close()
    destination.close()


def broken(work: Callable[[], object]) -> str:
    with pytest.raises(PairBroken) as caught:
        work()
    return str(caught.value)


def test_value_set_on_one_side_is_readable_on_both() -> None:
    one, other = mirrored(1.0)
    one.set("a", b"\x00\xff")
    other.set("b", "text")
    assert (one.get("a"), other.get("a")) == (b"\x00\xff", b"\x00\xff")
    assert one.get("b") == b"text"
    assert one.check(["a", "b"])
    assert not one.check(["a", "c"])


def test_wait_for_a_value_ends_when_it_arrives_at_the_timeout_or_on_close() -> None:
    one, other = mirrored(60.0)
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(one.get("late")))
    waiting.start()
    other.set("late", b"value")
    waiting.join(60)
    assert found == [b"value"]
    with pytest.raises(PairBroken, match="did not publish never"):
        one.wait(["never"], timedelta(seconds=0.01))
    one.close()
    with pytest.raises(PairBroken, match="did not publish never"):
        one.get("never")


def test_messages_arrive_whole_and_in_order(pairs: tuple[RankPair, RankPair]) -> None:
    source, destination = pairs
    sent = [torch.randn(size) for size in (1, 1000, 300_000)]
    received = [torch.empty_like(data) for data in sent]
    started = [destination.receive(data) for data in received]
    started += [source.send(data) for data in sent]
    for operation in started:
        finish(operation)
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))


@pytest.mark.slow
def test_receive_timeout_breaks_the_pair(pairs: tuple[RankPair, RankPair]) -> None:
    source, destination = pairs
    late = destination.receive(torch.zeros(10))
    assert "Timed out" in broken(lambda: finish(late))
    assert broken(lambda: finish(source.send(torch.zeros(10))))


def test_closed_pair_fails_on_both_sides(pairs: tuple[RankPair, RankPair]) -> None:
    source, destination = pairs
    waiting = destination.receive(torch.zeros(1))
    source.close()
    source.close().result(60)
    assert broken(lambda: source.send(torch.zeros(1))) == CLOSED
    assert broken(lambda: finish(waiting))


def test_operations_in_progress_end_before_the_pair_is_released(
    pairs: tuple[RankPair, RankPair],
) -> None:
    waiting = [pairs[1].receive(torch.zeros(1)) for _ in range(2)]
    pairs[1].close().result(60)
    assert all(each.ready() for each in waiting)
    assert all(broken(each.check) for each in waiting)


def test_connecting_without_a_peer_times_out() -> None:
    store = MirrorStore(lambda key, value: None, 0.1)
    pair = RankPair(SOURCE, store, CPU, "127.0.0.1", 0.1)
    assert "did not publish" in broken(lambda: pair.connected().result(60))
    assert broken(lambda: pair.send(torch.zeros(1)))
    pair.close().result(60)


def test_close_ends_the_wait_for_the_peer() -> None:
    pair = RankPair(SOURCE, MirrorStore(lambda key, value: None, 300), CPU, "127.0.0.1", 300)
    pair.close()
    assert broken(lambda: pair.connected().result(60))


class PolledWork:
    """A backend's operation that can be polled, like NCCL's."""

    def __init__(self, error: str = "") -> None:
        self.is_done = False
        self._error = error

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self, timeout: timedelta) -> None:
        assert self.is_done, "the mover thread must not block"
        if self._error:
            raise RuntimeError(self._error)


def polled(work: PolledWork, seconds: float = 60.0, over: bool = False) -> Operation:
    return Operation(work, seconds, True, lambda: over)  # type: ignore[arg-type]


def test_polled_operation_is_ready_when_its_backend_says_so() -> None:
    work = PolledWork()
    operation = polled(work)
    assert not operation.ready()
    work.is_done = True
    assert operation.ready()
    operation.check()


def test_polled_operation_fails_with_its_backend_at_its_timeout_and_when_the_pair_is_over() -> None:
    failed = PolledWork("remote process exited")
    failed.is_done = True
    for operation, reason in (
        (polled(failed), "remote process exited"),
        (
            polled(PolledWork(), seconds=0.0),
            "Timed out after 0 s: the peer did not transfer the message",
        ),
        (polled(PolledWork(), over=True), CLOSED),
    ):
        assert operation.ready()
        assert broken(operation.check) == reason


class FailingCommunicator:
    """Communicator that sends only the first message, and whose `abort` fails."""

    has_sent = False
    num_aborts = 0

    def send(self, *arguments: object) -> PolledWork:
        work = PolledWork()
        work.is_done = not self.has_sent
        self.has_sent = True
        return work

    def abort(self) -> None:
        self.num_aborts += 1
        raise RuntimeError("NCCL error: unhandled cuda error")


def test_pair_is_released_if_its_communicator_cannot_be_aborted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = FailingCommunicator()
    monkeypatch.setattr(transport, "connect", lambda *arguments: group)
    monkeypatch.setattr(transport, "backend_for", lambda device: "nccl")
    pair = RankPair(SOURCE, MirrorStore(lambda key, value: None, 60), CPU, "127.0.0.1", 60)
    pair.connected().result(60)
    operation = pair.send(torch.zeros(1))
    pair.close().result(60)
    assert operation.ready()
    assert broken(operation.check) == CLOSED
    assert group.num_aborts == 2
    assert caplog.messages == ["could not abort the connection of a pair of ranks"] * 2
