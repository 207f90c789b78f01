"""The destination's side alone: strangers, and sources that do not keep to the protocol."""

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
from penstock.workers.kv_transfer.peer_channel import Peer
from penstock.workers.kv_transfer.rank_endpoints import RankEndpoints
from penstock.workers.kv_transfer.rank_mover import Movers, RankMover
from penstock.workers.kv_transfer.receive_state import ExpectedTransfer, TransferResult
from penstock.workers.kv_transfer.receiver import KvReceiver
from penstock.workers.kv_transfer.sender import KvSender, OutgoingTransfer
from penstock.workers.kv_transfer.shards import LayerHeadRange
from penstock.workers.kv_transfer.staging import KvStaging, WorkerIdentity
from penstock.workers.kv_transfer.transport import PairBroken

pytestmark = pytest.mark.asyncio(loop_scope="module")

IDENTITY = WorkerIdentity("d", "inc", "layout float32", "127.0.0.1", "secret")
NUM_BLOCKS, BLOCK_SIZE = 12, 4


def make_staging(seed: int) -> KvStaging:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn((3, 2, NUM_BLOCKS, 2, BLOCK_SIZE, 5), generator=generator)
    return KvStaging(kv, LayerHeadRange(0, 3, 0, 2))


def make_ends(staging: KvStaging) -> RankEndpoints:
    return RankEndpoints(Movers(RankMover(staging, "127.0.0.1", 20.0)))


@dataclass
class Side:
    """A destination that serves, what it was told, and its memory."""

    destination: KvReceiver
    staging: KvStaging
    address: str
    verdicts: list[TransferResult] = field(default_factory=list)

    def expect(self, stop: int, blocks: list[int], start: int = 0) -> int:
        numbers = np.array(blocks, np.int32)
        expected = ExpectedTransfer("r", 7, 2, ("s", "i"), start, stop, numbers)
        return self.destination.open(expected, self.verdicts.append)

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
        "protocol": 2,
        "worker": "s",
        "incarnation": "i",
        "layout": "layout float32",
        "block_size": BLOCK_SIZE,
        "ranks": [wire.Holding(last_layer=3, last_head=2)],
        **other,
    }
    return wire.FromSource(introduction=wire.Introduction(**given))


class Stranger:
    """A source that says whatever a test wants, and has no communicator."""

    def __init__(self, side: Side, secret: str = "secret") -> None:
        self._channel = grpc.aio.insecure_channel(side.address)
        stub = transfer_pb2_grpc.TransferStub(self._channel)  # type: ignore[no-untyped-call]
        self.call = stub.Pair(metadata=(("authorization", f"Bearer {secret}"),))

    async def introduced(self) -> "Stranger":
        await self.call.write(introduction())
        assert (await self.call.read()).accepted.backend == "gloo"
        return self

    async def heard(self, kind: str) -> Any:
        while True:
            message = await self.call.read()
            assert message is not grpc.aio.EOF
            if message.HasField(kind):
                return getattr(message, kind)

    async def refused(self) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call.read()
        await self.close()
        return caught.value

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


def header(epoch: int, **other: Any) -> wire.FromSource:
    """All three layers and both heads of positions [0, 8)."""
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


@pytest.mark.parametrize("secret", ["", "wrong", "secret2"])
async def test_a_stranger_is_unauthenticated(side: Side, secret: str) -> None:
    error = await Stranger(side, secret).refused()
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (introduction(protocol=9), "protocol 9, not 2"),
        (introduction(layout="other"), "layouts differ"),
        (introduction(layout="layout bfloat16"), "KV cache is of bfloat16, ours of float32"),
        (introduction(block_size=0), "are to be said"),
        (introduction(ranks=[]), "are to be said"),
        (introduction(ranks=[wire.Holding(last_layer=3, last_head=1)]), "do not hold the same"),
        (introduction(worker=""), "must be an introduction"),
        (wire.FromSource(end=wire.End(epoch=1)), "must be an introduction"),
    ],
)
async def test_who_does_not_fit_is_told_why(
    side: Side, first: wire.FromSource, reason: str
) -> None:
    stranger = Stranger(side)
    await stranger.call.write(first)
    error = await stranger.refused()
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason in error.details()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"router": "x"}, "another request"),
        ({"request": 8}, "another request"),
        ({"attempt": 1}, "another request"),
        ({"stop": 12}, "outside"),
        ({"last_layer": 4}, "outside"),
        ({"first_head": 2, "last_head": 3}, "outside"),
        ({"bytes": 1 << 40}, "bytes, not"),
        ({"start": 3}, "begin and end"),
        ({"source_rank": 1}, "a pair that there is not"),
        ({"destination_rank": 1}, "a pair that there is not"),
    ],
)
async def test_a_header_without_sense_ends_its_transfer_only(
    side: Side, other: dict[str, Any], reason: str
) -> None:
    before = side.staging._kv.clone()
    stranger = await Stranger(side).introduced()
    bad, good = side.expect(8, [1, 2]), side.expect(8, [3, 4])
    await stranger.call.write(header(bad, **other))
    outcome = await stranger.heard("outcome")
    assert (outcome.epoch, outcome.received) == (bad, False)
    assert reason in outcome.reason
    assert (await stranger.heard("credit")).discard
    assert [verdict.epoch for verdict in side.verdicts] == [bad]
    await stranger.call.write(header(good))
    assert not (await stranger.heard("credit")).discard
    # Its pair is never completed: what was to come ends with it.
    await stranger.close()
    await eventually(side, 2)
    assert "broke" in side.verdicts[1].reason
    assert torch.equal(side.staging._kv, before)


async def test_an_epoch_that_is_unknown_or_closed_is_thrown_away(side: Side) -> None:
    stranger = await Stranger(side).introduced()
    epoch = side.expect(8, [1, 2])
    side.destination.close(epoch)
    side.destination.close(epoch)
    for wrong in (epoch, 999):
        await stranger.call.write(header(wrong))
        credit = await stranger.heard("credit")
        assert (credit.epoch, credit.discard) == (wrong, True)
    assert [verdict.reason for verdict in side.verdicts] == ["dropped"]
    await stranger.close()


async def test_another_worker_cannot_touch_a_transfer(side: Side) -> None:
    stranger = Stranger(side)
    await stranger.call.write(introduction(worker="somebody else"))
    epoch = side.expect(8, [1, 2])
    await stranger.call.write(header(epoch))
    assert (await stranger.heard("credit")).discard
    await stranger.call.write(wire.FromSource(end=wire.End(epoch=epoch, aborted=True)))
    await stranger.call.write(header(epoch))
    assert (await stranger.heard("credit")).discard
    assert not side.verdicts
    await stranger.close()


@pytest.mark.parametrize("aborted", [True, False])
async def test_an_end_before_everything_was_announced_ends_it(side: Side, aborted: bool) -> None:
    stranger = await Stranger(side).introduced()
    epoch = side.expect(8, [1, 2])
    await stranger.call.write(wire.FromSource(end=wire.End(epoch=epoch, aborted=aborted)))
    assert (await stranger.heard("outcome")).epoch == epoch
    assert ("gave up" if aborted else "ended before") in side.verdicts[0].reason
    await stranger.close()


@pytest.mark.parametrize(
    ("again", "reason"), [({"index": 1}, "repeats"), ({"start": 4}, "the same number")]
)
async def test_a_message_that_comes_twice_ends_its_transfer(
    side: Side, again: dict[str, Any], reason: str
) -> None:
    before = side.staging._kv.clone()
    stranger = await Stranger(side).introduced()
    epoch = side.expect(8, [1, 2])
    half = 3 * 2 * 2 * BLOCK_SIZE * 5 * 4
    first = {"stop": 4, "bytes": half}
    await stranger.call.write(header(epoch, **first))
    assert not (await stranger.heard("credit")).discard
    second = {**first, **again} if "index" in again else {**first, "stop": 8, **again}
    await stranger.call.write(header(epoch, **second))
    await stranger.call.write(header(epoch, **first, index=7))
    assert reason in (await stranger.heard("outcome")).reason
    assert (await stranger.heard("credit")).discard
    assert (await stranger.heard("credit")).discard
    await eventually(side, 1)
    assert torch.equal(side.staging._kv, before)
    await stranger.close()


async def test_ranks_that_do_not_know_how_to_meet_end_the_pair(side: Side) -> None:
    stranger = await Stranger(side).introduced()
    epoch = side.expect(8, [1, 2])
    await stranger.call.write(wire.FromSource(value=wire.StoreValue(key="k", value=bytes(1 << 16))))
    await eventually(side, 1)
    assert side.verdicts[0].epoch == epoch
    assert "do not know how to meet" in side.verdicts[0].reason
    await stranger.close()


async def test_bytes_that_are_no_message_end_the_pair_only(side: Side) -> None:
    async with grpc.aio.insecure_channel(side.address) as channel:
        method = channel.stream_stream("/penstock.transfer.v1.Transfer/Pair")
        call = method(metadata=(("authorization", "Bearer secret"),))
        await call.write(b"\xff\xff garbage")
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    await (await Stranger(side).introduced()).close()


async def eventually(side: Side, num_verdicts: int) -> None:
    async with asyncio.timeout(60):
        while len(side.verdicts) < num_verdicts:
            await asyncio.sleep(0.005)


# ------------------------------------------------------------------ with a source that is one


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
    monkeypatch.setattr("penstock.workers.kv_transfer.sender.MESSAGE_BYTES", 500)
    sender, theirs = source
    before = side.staging._kv.clone()
    epoch = side.expect(15, [9, 4, 7], start=4)
    read: list[int] = []
    # Positions [4, 15) of the source are in its blocks 3, 0 and 8.
    await sender.send(side.peer(), outgoing(epoch, 15, [3, 0, 8], 4), lambda: read.append(1))
    await eventually(side, 1)
    assert side.verdicts[0] == TransferResult(epoch, sender.bytes_sent)
    assert side.destination.bytes_received == sender.bytes_sent == 3 * 3 * 2 * 2 * 4 * 5 * 4
    assert read == [1]
    before[:, :, [9, 4, 7]] = theirs._kv[:, :, [3, 0, 8]]
    assert torch.equal(side.staging._kv, before)


async def test_a_pair_is_kept_for_the_next_transfer(
    side: Side, source: tuple[KvSender, KvStaging]
) -> None:
    sender, _ = source
    epochs = [side.expect(8, [2 * i, 2 * i + 1]) for i in range(5)]
    for epoch in epochs:
        await sender.send(side.peer(), outgoing(epoch, 8, [5, 6]), lambda: None)
    await eventually(side, 5)
    assert [verdict.reason for verdict in side.verdicts] == [""] * 5
    assert next(side.destination._generations) == 2


async def test_a_transfer_that_is_not_wanted_any_more_stops(
    side: Side, source: tuple[KvSender, KvStaging]
) -> None:
    sender, _ = source
    read: list[int] = []
    await sender.send(side.peer(), outgoing(12345, 8, [5, 6]), lambda: read.append(1))
    assert (read, sender.bytes_sent) == ([1], 0)


async def test_what_cannot_be_reached_is_said_and_the_blocks_let_go(
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
