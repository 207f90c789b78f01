"""Where ranks meet: the store from afar, and who is not let in."""

import threading
from collections.abc import Iterator
from datetime import timedelta

import grpc
import pytest

from penstock.protos import ranks_pb2 as wire
from penstock.protos import ranks_pb2_grpc
from penstock.workers.parallel.groups import RankLost
from penstock.workers.parallel.mesh import Mesh
from penstock.workers.parallel.parallel_groups import all_reduce_min
from penstock.workers.parallel.rendezvous import (
    MAX_BYTES,
    LocalStore,
    RemoteStore,
    RendezvousServer,
)
from tests.support.ranks import in_threads


@pytest.fixture
def meeting() -> Iterator[RendezvousServer]:
    made = RendezvousServer("127.0.0.1", "secret", 2)
    yield made
    made.close()


@pytest.fixture
def remote(meeting: RendezvousServer) -> Iterator[RemoteStore]:
    store = RemoteStore(meeting.address, "secret")
    yield store
    store.close()


@pytest.mark.slow
def test_what_one_side_says_the_other_hears(meeting: RendezvousServer, remote: RemoteStore) -> None:
    remote.set("a", b"\x00\xff")
    assert meeting.store.get("a") == b"\x00\xff"
    meeting.store.set("b", "words")
    assert remote.get("b") == b"words"
    assert remote.check(["a", "b"])
    assert not remote.check(["a", "c"])


@pytest.mark.slow
def test_it_is_waited_for(meeting: RendezvousServer, remote: RemoteStore) -> None:
    threading.Timer(0.05, lambda: meeting.store.set("late", "here")).start()
    assert remote.get("late") == b"here"
    with pytest.raises(RankLost, match="did not say never"):
        remote.wait(["never"], timedelta(seconds=0.01))


@pytest.mark.parametrize("token", [None, "wrong"])
def test_strangers_get_nothing(meeting: RendezvousServer, token: str | None) -> None:
    stranger = RemoteStore(meeting.address, token)
    with pytest.raises(RankLost, match="wrong or no cluster token"):
        stranger.set("a", b"b")
    with pytest.raises(RankLost, match="wrong or no cluster token"):
        stranger.get("a")
    assert not meeting.store.check(["a"])


def test_a_message_that_is_too_large_is_refused(meeting: RendezvousServer) -> None:
    with grpc.insecure_channel(meeting.address) as channel:
        stub = ranks_pb2_grpc.RendezvousStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as refusal:
            stub.Put(wire.Entry(key="a", value=bytes(MAX_BYTES)))
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not meeting.store.check(["a"])


def test_a_store_that_closes_frees_who_waits() -> None:
    store = LocalStore()
    threading.Timer(0.05, lambda: store.close("rank 3 failed")).start()
    with pytest.raises(RankLost, match="rank 3 failed"):
        store.get("anything")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="not this machine's address"):
        RendezvousServer("192.0.2.1", None, 2)


def test_ranks_agree_on_the_least() -> None:
    values = [30, 10, 20, 40]
    found = in_threads(
        4, lambda rank, store: all_reduce_min(store, "blocks", Mesh(2, 2).coord(rank), values[rank])
    )
    assert found == [10] * 4
