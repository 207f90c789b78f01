"""Rendezvous of ranks: the key-value store, its gRPC access and authentication."""

import queue
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import cast

import grpc
import pytest

from penstock.protos import ranks_pb2 as wire
from penstock.protos import ranks_pb2_grpc
from penstock.protos.serving import connection_guard
from penstock.workers.parallel import rendezvous
from penstock.workers.parallel.collectives import RankLost
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
def server() -> Iterator[RendezvousServer]:
    started = RendezvousServer("127.0.0.1", "secret", 2)
    yield started
    started.close()


@pytest.fixture
def remote(server: RendezvousServer) -> Iterator[RemoteStore]:
    store = RemoteStore(server.address, "secret")
    yield store
    store.close()


@pytest.mark.slow
def test_value_set_on_one_side_is_readable_on_the_other(
    server: RendezvousServer, remote: RemoteStore
) -> None:
    remote.set("a", b"\x00\xff")
    assert server.store.get("a") == b"\x00\xff"
    server.store.set("b", "words")
    assert remote.get("b") == b"words"
    assert remote.check(["a", "b"])
    assert not remote.check(["a", "c"])


@pytest.mark.slow
def test_get_waits_for_the_value(server: RendezvousServer, remote: RemoteStore) -> None:
    threading.Timer(0.05, lambda: server.store.set("late", "here")).start()
    assert remote.get("late") == b"here"
    with pytest.raises(RankLost, match="did not set never"):
        remote.wait(["never"], timedelta(seconds=0.01))


def test_address_with_all_its_connections_does_not_keep_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = replace(rendezvous._LIMITS, max_connections=8, max_connections_per_address=3)
    monkeypatch.setattr(rendezvous, "_LIMITS", limits)
    monkeypatch.setattr(connection_guard, "LOOK_SECONDS", 0.01)
    server = RendezvousServer("127.0.0.1", "secret", 2)
    host, _, port = server.address.rpartition(":")
    with ExitStack() as stack:
        stack.callback(server.close)
        selector = stack.enter_context(selectors.DefaultSelector())
        for _ in range(8):
            stranger = socket.create_connection((host, int(port)), 60, ("127.0.0.2", 0))
            stack.callback(stranger.close)
            selector.register(stranger, selectors.EVENT_READ)
        closed: set[int] = set()
        while len(closed) < 5:
            for key, _ in selector.select(60):
                stranger = cast(socket.socket, key.fileobj)
                with suppress(ConnectionError):
                    if stranger.recv(1 << 16):  # the SETTINGS frame of HTTP/2
                        continue
                closed.add(key.fd)
                selector.unregister(stranger)
        channel = stack.enter_context(grpc.insecure_channel(server.address))
        ranks_pb2_grpc.RendezvousStub(channel).Put(  # type: ignore[no-untyped-call]
            wire.Entry(key="a", value=b"1"),
            metadata=(("authorization", "Bearer secret"),),
            wait_for_ready=True,
            timeout=60,
        )
        assert server.store.get("a") == b"1"


@pytest.mark.parametrize("token", [None, "wrong"])
def test_wrong_or_missing_token_is_refused(server: RendezvousServer, token: str | None) -> None:
    client = RemoteStore(server.address, token)
    with pytest.raises(RankLost, match="wrong or missing cluster token"):
        client.set("a", b"b")
    with pytest.raises(RankLost, match="wrong or missing cluster token"):
        client.get("a")
    assert not server.store.check(["a"])


@pytest.mark.parametrize("method", ["Get", "Put"])
def test_silent_callers_without_the_token_do_not_occupy_the_threads(
    server: RendezvousServer, remote: RemoteStore, method: str
) -> None:
    silent = queue.SimpleQueue[bytes | None]()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_unary(f"/penstock.ranks.v1.Rendezvous/{method}")
        started = [call.future(iter(silent.get, None), timeout=60) for _ in range(20)]
        assert {each.code() for each in started} == {grpc.StatusCode.UNAUTHENTICATED}
        for _ in started:
            silent.put(None)  # this ends the thread of the silent client
    remote.set("a", b"b")
    assert remote.get("a") == b"b"


def test_oversized_message_is_refused(server: RendezvousServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = ranks_pb2_grpc.RendezvousStub(channel)  # type: ignore[no-untyped-call]
        metadata = (("authorization", "Bearer secret"),)
        with pytest.raises(grpc.RpcError) as refusal:
            stub.Put(wire.Entry(key="a", value=bytes(MAX_BYTES)), metadata=metadata)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not server.store.check(["a"])


def test_closing_the_store_ends_a_waiting_get() -> None:
    store = LocalStore()
    threading.Timer(0.05, lambda: store.close("rank 3 failed")).start()
    with pytest.raises(RankLost, match="rank 3 failed"):
        store.get("anything")


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="not an address of this"):
        RendezvousServer("192.0.2.1", None, 2)


def test_all_reduce_min_gives_every_rank_the_minimum() -> None:
    values = [30, 10, 20, 40]
    found = in_threads(
        4, lambda rank, store: all_reduce_min(store, "blocks", Mesh(2, 2).coord(rank), values[rank])
    )
    assert found == [10] * 4
