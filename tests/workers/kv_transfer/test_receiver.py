"""The KV receiver refuses sources that violate the protocol."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch

from penstock.protos import transfer_pb2 as wire
from penstock.protos import transfer_pb2_grpc
from penstock.workers.kv_transfer import receiver
from penstock.workers.kv_transfer.protocol.messages import Peer
from penstock.workers.kv_transfer.protocol.receive import ExpectedTransfer, TransferResult
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.kv_transfer.rank_endpoints import RankEndpoints
from penstock.workers.kv_transfer.rank_mover import Movers, RankMover
from penstock.workers.kv_transfer.receiver import KvReceiver
from penstock.workers.kv_transfer.sender import KvSender
from penstock.workers.kv_transfer.shards import LayerHeadRange
from penstock.workers.kv_transfer.staging import PROTOCOL, KvStaging, WorkerIdentity
from penstock.workers.kv_transfer.transport import PairBroken
from tests.support.raw_calls import write_and_read
from tests.support.raw_http2 import (
    HEADERS,
    PREFACE,
    headers,
    message,
    raw_http2,
    settings,
    window_update,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

IDENTITY = WorkerIdentity("d", "inc", "layout float32", "127.0.0.1", "secret")
NUM_BLOCKS, BLOCK_SIZE = 12, 4
PAIR = "/penstock.transfer.v1.Transfer/Pair"


def make_staging(seed: int) -> KvStaging:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn((3, 2, NUM_BLOCKS, 2, BLOCK_SIZE, 5), generator=generator)
    return KvStaging(kv, LayerHeadRange(0, 3, 0, 2))


def make_ends(staging: KvStaging) -> RankEndpoints:
    return RankEndpoints(Movers(RankMover(staging, "127.0.0.1", 20.0)))


@dataclass
class Side:
    """A served `KvReceiver`, its KV cache and the results that it reported."""

    destination: KvReceiver
    staging: KvStaging
    address: str
    results: list[TransferResult] = field(default_factory=list)

    def expect(self, stop: int, blocks: list[int], start: int = 0) -> int:
        numbers = np.array(blocks, np.int32)
        expected = ExpectedTransfer("r", 7, 2, ("s", "i"), start, stop, numbers)
        return self.destination.open(expected, self.results.append)

    def peer(self, **other: str) -> Peer:
        return replace(Peer("d", "inc", self.address, "secret"), **other)


@pytest_asyncio.fixture(loop_scope="module")
async def side() -> AsyncIterator[Side]:
    staging = make_staging(1)
    destination = KvReceiver(IDENTITY, make_ends(staging), 20.0)
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    transfer_pb2_grpc.add_TransferServicer_to_server(destination, server)  # type: ignore[no-untyped-call]
    await server.start()
    yield Side(destination, staging, f"127.0.0.1:{port}")
    destination.stop()
    await server.stop(0)


def introduction(**other: Any) -> wire.FromSource:
    given = {
        "protocol": PROTOCOL,
        "worker": "s",
        "incarnation": "i",
        "layout": "layout float32",
        "block_size": BLOCK_SIZE,
        "ranks": [wire.Holding(last_layer=3, last_head=2)],
        **other,
    }
    return wire.FromSource(introduction=wire.Introduction(**given))


class FakeSource:
    """A source that sends messages chosen by the test. It has no communicator for KV data."""

    def __init__(self, side: Side) -> None:
        self._channel = grpc.aio.insecure_channel(side.address)
        stub = transfer_pb2_grpc.TransferStub(self._channel)  # type: ignore[no-untyped-call]
        self.call = stub.Pair()

    async def introduced(self) -> "FakeSource":
        await self.call.write(introduction())
        assert (await self.call.read()).accepted.backend == "gloo"
        return self

    async def receive(self, kind: str) -> Any:
        while True:
            message = await self.call.read()
            assert message is not grpc.aio.EOF
            if message.HasField(kind):
                return getattr(message, kind)

    async def refusal(self) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call.read()
        await self.close()
        return caught.value

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


def header(epoch: int, **other: Any) -> wire.FromSource:
    """Return a header for all three layers and both heads of positions [0, 8)."""
    given = {
        "router": "r",
        "request": 7,
        "attempt": 2,
        "epoch": epoch,
        "start": 0,
        "stop": 8,
        "last_layer": 3,
        "last_head": 2,
        "bytes": 2 * 3 * 2 * 2 * BLOCK_SIZE * 5 * 4,
        **other,
    }
    return wire.FromSource(header=wire.Header(**given))


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (introduction(protocol=9), "protocol 9 and this worker 4"),
        (introduction(layout="other"), "layouts differ"),
        (
            introduction(layout="layout bfloat16"),
            "formats of the KV caches differ (bfloat16 and float32)",
        ),
        (introduction(block_size=0), "block size of 0: expected"),
        (introduction(ranks=[]), "the peer has 0 ranks"),
        (
            introduction(ranks=[wire.Holding(last_layer=3, last_head=1)]),
            "both must have the same",
        ),
        (introduction(worker=""), "must be an Introduction"),
        (wire.FromSource(end=wire.End(epoch=1)), "must be an Introduction"),
    ],
)
async def test_incompatible_source_is_refused_with_the_reason(
    side: Side, first: wire.FromSource, reason: str
) -> None:
    fake = FakeSource(side)
    await fake.call.write(first)
    error = await fake.refusal()
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason in error.details()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"router": "x"}, "another request"),
        ({"request": 8}, "another request"),
        ({"attempt": 1}, "another request"),
        ({"stop": 12}, "this rank receives only"),
        ({"last_layer": 4}, "this rank receives only"),
        ({"first_head": 2, "last_head": 3}, "this rank receives only"),
        ({"bytes": 1 << 40}, "bytes, but its positions"),
        ({"start": 3}, "expected multiples of the block size"),
        ({"source_rank": 1}, "the unknown rank pair"),
        ({"destination_rank": 1}, "the unknown rank pair"),
    ],
)
async def test_invalid_header_fails_only_its_own_transfer(
    side: Side, other: dict[str, Any], reason: str
) -> None:
    before = side.staging._kv.clone()
    fake = await FakeSource(side).introduced()
    bad, good = side.expect(8, [1, 2]), side.expect(8, [3, 4])
    await fake.call.write(header(bad, **other))
    outcome = await fake.receive("outcome")
    assert (outcome.epoch, outcome.received) == (bad, False)
    assert reason in outcome.reason
    assert (await fake.receive("credit")).discard
    assert [result.epoch for result in side.results] == [bad]
    await fake.call.write(header(good))
    assert not (await fake.receive("credit")).discard
    # The rank pair never connects, so closing the stream must fail the pending transfer.
    await fake.close()
    await eventually(side, 2)
    assert "broke" in side.results[1].reason
    assert torch.equal(side.staging._kv, before)


async def test_messages_of_an_unknown_or_closed_epoch_are_discarded(side: Side) -> None:
    fake = await FakeSource(side).introduced()
    epoch = side.expect(8, [1, 2])
    side.destination.close(epoch)
    side.destination.close(epoch)
    for wrong in (epoch, 999):
        await fake.call.write(header(wrong))
        credit = await fake.receive("credit")
        assert (credit.epoch, credit.discard) == (wrong, True)
    assert [result.reason for result in side.results] == ["dropped"]
    await fake.close()


async def test_messages_from_another_worker_do_not_affect_a_transfer(side: Side) -> None:
    fake = FakeSource(side)
    await fake.call.write(introduction(worker="somebody else"))
    epoch = side.expect(8, [1, 2])
    await fake.call.write(header(epoch))
    assert (await fake.receive("credit")).discard
    await fake.call.write(wire.FromSource(end=wire.End(epoch=epoch, aborted=True)))
    await fake.call.write(header(epoch))
    assert (await fake.receive("credit")).discard
    assert not side.results
    await fake.close()


@pytest.mark.parametrize("aborted", [True, False])
async def test_end_before_all_messages_fails_the_transfer(side: Side, aborted: bool) -> None:
    fake = await FakeSource(side).introduced()
    epoch = side.expect(8, [1, 2])
    await fake.call.write(wire.FromSource(end=wire.End(epoch=epoch, aborted=aborted)))
    assert (await fake.receive("outcome")).epoch == epoch
    assert ("gave up" if aborted else "ended before") in side.results[0].reason
    await fake.close()


@pytest.mark.parametrize(
    ("again", "reason"), [({"index": 1}, "repeats"), ({"start": 4}, "have the index")]
)
async def test_repeated_message_fails_its_transfer(
    side: Side, again: dict[str, Any], reason: str
) -> None:
    before = side.staging._kv.clone()
    fake = await FakeSource(side).introduced()
    epoch = side.expect(8, [1, 2])
    half = 3 * 2 * 2 * BLOCK_SIZE * 5 * 4
    first = {"stop": 4, "bytes": half}
    await fake.call.write(header(epoch, **first))
    assert not (await fake.receive("credit")).discard
    second = {**first, **again} if "index" in again else {**first, "stop": 8, **again}
    await fake.call.write(header(epoch, **second))
    await fake.call.write(header(epoch, **first, index=7))
    assert reason in (await fake.receive("outcome")).reason
    assert (await fake.receive("credit")).discard
    assert (await fake.receive("credit")).discard
    await eventually(side, 1)
    assert torch.equal(side.staging._kv, before)
    await fake.close()


async def test_store_value_for_an_unknown_pair_fails_the_stream(side: Side) -> None:
    fake = await FakeSource(side).introduced()
    epoch = side.expect(8, [1, 2])
    await fake.call.write(wire.FromSource(value=wire.StoreValue(key="k", value=bytes(1 << 16))))
    await eventually(side, 1)
    assert side.results[0].epoch == epoch
    assert "a store value that is too large or of an unknown rank pair" in side.results[0].reason
    await fake.close()


async def test_malformed_bytes_fail_only_their_own_stream(side: Side) -> None:
    async with grpc.aio.insecure_channel(side.address) as channel:
        method = channel.stream_stream(PAIR)
        call = method()
        with pytest.raises(grpc.aio.AioRpcError):
            await write_and_read(call, b"\xff\xff garbage")
    await (await FakeSource(side).introduced()).close()


async def test_source_that_does_not_read_is_ended(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "MAX_MESSAGES_WAITING", 4)
    start = (PREFACE, settings(initial_window_size=0), headers(1, PAIR))
    async with raw_http2(side.address, *start) as slow:
        slow.send(message(1, introduction().SerializeToString()))
        await slow.frame(HEADERS, 1)
        epoch = side.expect(8, [1, 2])
        unknown = [header(epoch + 1000 + number) for number in range(10)]
        slow.send(*(message(1, each.SerializeToString()) for each in unknown))
        await eventually(side, 1)
        assert "does not read" in side.results[0].reason
        slow.send(window_update(1, 1 << 20))
        assert await slow.status(1) == grpc.StatusCode.OK.value[0]


async def eventually(side: Side, num_results: int) -> None:
    async with asyncio.timeout(60):
        while len(side.results) < num_results:
            await asyncio.sleep(0.005)


# ------------------------------------------------------------------ with a real sender


@pytest_asyncio.fixture(loop_scope="module")
async def source() -> AsyncIterator[tuple[KvSender, KvStaging]]:
    staging = make_staging(2)
    source = KvSender(replace(IDENTITY, worker="s", incarnation="i"), make_ends(staging), 20.0)
    yield source, staging
    source.stop()


def outgoing(epoch: int, stop: int, blocks: list[int], start: int = 0) -> OutgoingTransfer:
    return OutgoingTransfer("r", 7, 2, epoch, start, stop, np.array(blocks, np.int32))


async def test_only_the_reserved_blocks_are_written(
    side: Side, source: tuple[KvSender, KvStaging], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.kv_transfer.sender.max_data_bytes", lambda backend: 500)
    sender, source_staging = source
    before = side.staging._kv.clone()
    epoch = side.expect(15, [9, 4, 7], start=4)
    read: list[int] = []
    # The source holds positions [4, 15) in its blocks 3, 0 and 8.
    await sender.send(side.peer(), outgoing(epoch, 15, [3, 0, 8], 4), lambda: read.append(1))
    await eventually(side, 1)
    assert side.results[0] == TransferResult(epoch, sender.bytes_sent)
    assert side.destination.bytes_received == sender.bytes_sent == 3 * 3 * 2 * 2 * 4 * 5 * 4
    assert read == [1]
    before[:, :, [9, 4, 7]] = source_staging._kv[:, :, [3, 0, 8]]
    assert torch.equal(side.staging._kv, before)


async def test_pair_is_reused_for_the_next_transfer(
    side: Side, source: tuple[KvSender, KvStaging]
) -> None:
    sender, _ = source
    epochs = [side.expect(8, [2 * i, 2 * i + 1]) for i in range(5)]
    for epoch in epochs:
        await sender.send(side.peer(), outgoing(epoch, 8, [5, 6]), lambda: None)
    await eventually(side, 5)
    assert [result.reason for result in side.results] == [""] * 5
    assert next(side.destination._protocol._generations) == 2


async def test_transfer_of_an_unknown_epoch_sends_nothing_and_releases_its_blocks(
    side: Side, source: tuple[KvSender, KvStaging]
) -> None:
    sender, _ = source
    read: list[int] = []
    await sender.send(side.peer(), outgoing(12345, 8, [5, 6]), lambda: read.append(1))
    assert (read, sender.bytes_sent) == ([1], 0)


async def test_unreachable_peer_raises_and_releases_the_blocks(
    source: tuple[KvSender, KvStaging],
) -> None:
    sender, _ = source
    read: list[int] = []
    nowhere = Peer("nowhere", "x", "127.0.0.1:1", "secret")
    with pytest.raises(PairBroken, match="UNAVAILABLE"):
        await sender.send(nowhere, outgoing(1, 8, [5, 6]), lambda: read.append(1))
    assert read == [1]
    with pytest.raises(PairBroken):
        await sender.refuse(nowhere, 1)
