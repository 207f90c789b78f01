"""KV transfers between ranks: each pair moves its shard, and a failed pair fails the transfer."""

import asyncio
import threading
from collections import Counter

import numpy as np
import pytest
import torch

from penstock.protos import ranks_pb2 as wire
from penstock.workers.kv_transfer import sender as source_side
from penstock.workers.kv_transfer.codec import encode_piece
from penstock.workers.kv_transfer.protocol import peer_table
from penstock.workers.kv_transfer.protocol.messages import Peer, Piece
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.kv_transfer.rank_mover import RankMover
from penstock.workers.kv_transfer.shards import LayerHeadRange, Shard, routes
from penstock.workers.kv_transfer.staging import KvStaging
from penstock.workers.kv_transfer.transport import Operation, PairBroken, RankPair
from penstock.workers.kv_transfer.verification import message_bytes
from penstock.workers.parallel.mesh import Mesh
from tests.support.rank_blocks import SECONDS, Blocks, Held, Sides, eventually, moved, sides

pytestmark = pytest.mark.asyncio

ONE, TP2, TP4, PP2, BOTH = Mesh(), Mesh(2), Mesh(4), Mesh(1, 2), Mesh(2, 2)
LENGTH = 21


def blocks(size: int, seed: int) -> list[int]:
    """Return scattered block numbers, enough for a sequence of `LENGTH` tokens."""
    chosen = np.random.default_rng(seed).permutation(96 // size)[: -(-LENGTH // size)]
    return [int(each) for each in chosen]


def expected_bytes_by_pair(
    source: Blocks, destination: Blocks, unit: int
) -> Counter[tuple[int, int]]:
    """Return the number of bytes that each (source, destination) pair of ranks must transfer."""
    num_sides = source.before.shape[1]
    position = num_sides * 3 * 4 * -(-LENGTH // unit) * unit
    found = routes(source.rectangles, destination.rectangles)
    return Counter(
        {(each.source, each.destination): each.overlap.area * position for each in found}
    )


@pytest.mark.parametrize(
    ("source_mesh", "target_mesh", "sizes", "heads", "unit"),
    [
        (TP2, ONE, (4, 4), 4, 4),
        (ONE, TP2, (4, 8), 4, 4),
        (PP2, TP2, (8, 4), 4, 4),
        (BOTH, PP2, (4, 6), 4, 2),
        (TP2, TP4, (16, 32), 2, 16),  # 2 KV heads for 4 destination ranks: two ranks hold each head
        (TP4, TP2, (32, 16), 1, 16),
        (TP2, BOTH, (4, 8), 0, 4),  # MLA: every rank has all cache rows
    ],
)
async def test_every_rank_pair_transfers_its_own_shard(
    monkeypatch: pytest.MonkeyPatch,
    source_mesh: Mesh,
    target_mesh: Mesh,
    sizes: tuple[int, int],
    heads: int,
    unit: int,
) -> None:
    monkeypatch.setattr(source_side, "max_data_bytes", lambda backend: 500)
    source, target = (
        Blocks(1, source_mesh, sizes[0], heads),
        Blocks(2, target_mesh, sizes[1], heads),
    )
    async with sides(source, target) as both:
        source_blocks, target_blocks = blocks(sizes[0], 3), blocks(sizes[1], 4)
        epoch = both.expect(LENGTH, target_blocks)
        await both.send(epoch, LENGTH, source_blocks)
        result = await both.verdict()
        assert result.reason == ""
        expected = expected_bytes_by_pair(source, target, unit)
        assert both.source.bytes_by_pair == both.destination.bytes_by_pair == expected
        assert result.num_bytes == expected.total()
        other_pairs = {pair: num for pair, num in expected.items() if pair != (0, 0)}
        assert other_pairs, "ranks other than 0 must transfer their own shards"
        end = -(-LENGTH // unit) * unit
        assert target.hold(moved(target, source, target_blocks, source_blocks, end))
        assert both.read == [epoch]


# ------------------------------------------------------------------ failures


async def failure_reason(both: Sides, source: Blocks, target: Blocks) -> str:
    """Run a transfer between two workers of two ranks, and return the reason of its failure."""
    epoch = both.expect(LENGTH, blocks(4, 4))
    await both.send(epoch, LENGTH, blocks(4, 3))
    return (await both.verdict()).reason


async def test_bit_flip_on_one_rank_pair_fails_the_whole_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = Blocks(1, TP2, 4), Blocks(2, TP2, 4)
    send = RankPair.send
    flipped: list[int] = []

    def flip(pair: RankPair, data: torch.Tensor) -> Operation:
        if not flipped and len(data) == message_bytes(len(second_shard)):
            flipped.append(1)
            data[len(data) // 2] ^= 4
        return send(pair, data)

    second_shard = source.stagings[1].gather(
        np.array(blocks(4, 3), np.int32), Shard(source.rectangles[1], 0, LENGTH)
    )
    monkeypatch.setattr(RankPair, "send", flip)
    async with sides(source, target) as both:
        assert "checksum" in await failure_reason(both, source, target)
        assert flipped
        # The pairs are still connected, so the next transfer succeeds.
        epoch = both.expect(LENGTH, blocks(4, 5))
        await both.send(epoch, LENGTH, blocks(4, 3))
        assert (await both.verdict(2)).reason == ""


async def test_rank_that_cannot_send_fails_the_transfer_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = Blocks(1, TP2, 4), Blocks(2, PP2, 8)

    def fail(*args: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(source.stagings[1], "gather", fail)
    async with sides(source, target) as both:
        epoch = both.expect(LENGTH, blocks(8, 4))
        with pytest.raises(PairBroken, match="out of memory"):
            await both.send(epoch, LENGTH, blocks(4, 3))
        assert "the pair with s broke" in (await both.verdict()).reason
        assert both.read == [epoch]


async def test_blocks_stay_reserved_while_any_rank_writes() -> None:
    source, target = Blocks(1, TP2, 4), Blocks(2, TP2, 4)
    writing = Held(target.stagings[1], "scatter")
    async with sides(source, target) as both:
        epoch = both.expect(LENGTH, blocks(4, 4))
        sending = asyncio.create_task(both.send(epoch, LENGTH, blocks(4, 3)))
        await writing.reached()
        both.destination.close(epoch)
        await asyncio.sleep(0.1)
        assert both.verdicts == []
        writing.open()
        assert (await both.verdict()).reason == "dropped"
        await sending


async def test_late_bytes_are_not_written_to_reassigned_blocks() -> None:
    source, target = Blocks(1, TP2, 4), Blocks(2, TP2, 4)
    reading = Held(source.stagings[1], "gather")
    async with sides(source, target) as both:
        epoch = both.expect(LENGTH, blocks(4, 4))
        sending = asyncio.create_task(both.send(epoch, LENGTH, blocks(4, 3)))
        await reading.reached()
        both.destination.close(epoch)
        # No rank is writing, so the destination releases the blocks before all bytes have arrived.
        assert (await both.verdict()).reason == "dropped"
        for cache in target.caches:
            cache.fill_(7.0)
        assert both.read == [], "a source rank is still reading"
        reading.open()
        await sending
        assert both.read == [epoch]
        again = both.expect(LENGTH, blocks(4, 5))  # the next transfer uses the same pairs
        await both.send(again, LENGTH, blocks(4, 3))
        assert (await both.verdict(2)).reason == ""
        kept = [each for each in blocks(4, 4) if each not in blocks(4, 5)]
        assert kept
        assert all((cache[:, :, kept] == 7.0).all() for cache in target.caches)


async def test_source_releases_blocks_after_the_last_read_even_if_the_pairs_broke() -> None:
    source, target = Blocks(1, TP2, 4), Blocks(2, TP2, 4)
    reading = Held(source.stagings[1], "gather")
    async with sides(source, target) as both:
        epoch = both.expect(LENGTH, blocks(4, 4))
        sending = asyncio.create_task(both.send(epoch, LENGTH, blocks(4, 3)))
        await reading.reached()
        both.destination.stop()
        assert "broke" in (await both.verdict()).reason
        (link,) = both.source.channels()
        await eventually(lambda: link.broken)
        await asyncio.sleep(0.05)
        assert both.read == []
        reading.open()
        with pytest.raises(PairBroken):
            await sending
        assert both.read == [epoch]


async def test_nothing_is_written_after_an_abort_while_ranks_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_side, "max_data_bytes", lambda backend: 200)
    source, target = Blocks(1, TP2, 4), Blocks(2, TP2, 4)
    reading = Held(source.stagings[1], "gather")
    async with sides(source, target) as both:
        epoch = both.expect(LENGTH, blocks(4, 4))
        outgoing = OutgoingTransfer("r", 7, 2, epoch, 0, LENGTH, np.array(blocks(4, 3), np.int32))
        sending = asyncio.create_task(
            both.source.send(both.peer, outgoing, lambda: both.read.append(epoch))
        )
        await reading.reached()
        outgoing.aborted = True
        reading.open()
        await sending
        assert (await both.verdict()).reason == "the source gave up"
        assert both.read == [epoch]
        for cache in target.caches:
            cache.fill_(7.0)
        await asyncio.sleep(0.1)
        assert all((cache == 7.0).all() for cache in target.caches)


# ------------------------------------------------------------------ a single pair of ranks


class MoverPair:
    """A connected sending and receiving `RankMover`, which run the moves of a test."""

    def __init__(self) -> None:
        whole = LayerHeadRange(0, 2, 0, 1)
        self.caches = [torch.randn(2, 2, 6, 1, 4, 3) for _ in range(2)]
        self.before = self.caches[1].clone()
        self.movers = [
            RankMover(KvStaging(cache, whole), "127.0.0.1", SECONDS) for cache in self.caches
        ]
        self.reports: list[list[wire.Report]] = [[], []]
        self._open = threading.Event()
        for side, mover in enumerate(self.movers):
            mover.listen(lambda report, side=side: self._record(side, report))  # type: ignore[misc]
            mover.execute(wire.Move(end=1, open=wire.Open(receives=side == 1)))
        self._open.set()

    def _record(self, side: int, report: wire.Report) -> None:
        self.reports[side].append(report)
        if report.HasField("value"):
            assert self._open.wait(60), "both pairs must open before values are forwarded"
            self.movers[1 - side].execute(wire.Move(end=1, value=report.value))

    def piece(self, epoch: int, index: int, numbers: list[int]) -> wire.Piece:
        shard = Shard(LayerHeadRange(0, 2, 0, 1), 0, 4 * len(numbers))
        return encode_piece(Piece(epoch, index, shard, np.array(numbers, np.int32), 4))

    async def report(self, side: int, kind: str, num: int = 1) -> list[wire.Report]:
        def found() -> list[wire.Report]:
            return [each for each in self.reports[side] if each.WhichOneof("body") == kind]

        await eventually(lambda: len(found()) >= num)
        return found()

    def stop(self) -> None:
        for mover in self.movers:
            mover.stop()


async def test_message_out_of_order_is_not_written() -> None:
    pair = MoverPair()
    pair.movers[0].execute(wire.Move(end=1, send=pair.piece(5, 0, [1, 2])))
    pair.movers[1].execute(wire.Move(end=1, receive=pair.piece(5, 1, [3, 4])))
    (report,) = await pair.report(1, "moved")
    assert report.moved.broken.startswith("a message came out of order: expected message")
    assert (report.moved.epoch, report.moved.index) == (5, 1)
    assert torch.equal(pair.caches[1], pair.before)
    pair.stop()


async def test_data_of_a_settled_epoch_is_received_and_discarded() -> None:
    pair = MoverPair()
    pair.movers[1].execute(wire.Move(end=1, receive=pair.piece(5, 0, [3, 4])))
    pair.movers[1].execute(wire.Move(settle=5))
    (report,) = await pair.report(1, "settled")
    assert report.settled == 5
    pair.movers[0].execute(wire.Move(end=1, send=pair.piece(5, 0, [1, 2])))
    (report,) = await pair.report(1, "moved")
    assert not report.moved.broken
    assert torch.equal(pair.caches[1], pair.before)
    pair.movers[0].execute(wire.Move(end=1, send=pair.piece(6, 0, [1, 2])))
    pair.movers[1].execute(wire.Move(end=1, receive=pair.piece(6, 0, [3, 4])))
    await pair.report(1, "moved", 2)
    pair.before[:, :, [3, 4]] = pair.caches[0][:, :, [1, 2]]
    assert torch.equal(pair.caches[1], pair.before)
    pair.stop()


async def test_every_move_is_reported_once_even_after_its_pair_closes() -> None:
    pair = MoverPair()
    await pair.report(0, "met")
    await pair.report(1, "met")
    for index in range(3):
        pair.movers[1].execute(wire.Move(end=1, receive=pair.piece(5, index, [1])))
    pair.movers[1].execute(wire.Move(end=1, close=wire.Close()))
    pair.movers[1].execute(wire.Move(end=1, receive=pair.piece(5, 3, [1])))
    await pair.report(1, "closed")
    reports = await pair.report(1, "moved", 4)
    assert sorted(each.moved.index for each in reports) == [0, 1, 2, 3]
    assert all(each.moved.broken for each in reports)
    last = [each for each in pair.reports[1] if each.moved.index != 3]
    assert last[-1].WhichOneof("body") == "closed"
    pair.stop()


async def test_late_order_for_a_drained_epoch_writes_nothing() -> None:
    pair = MoverPair()
    pair.movers[1].execute(wire.Move(settle=5))
    await pair.report(1, "settled")
    pair.movers[1].execute(wire.Move(end=1, receive=pair.piece(5, 0, [3, 4])))
    pair.movers[0].execute(wire.Move(end=1, send=pair.piece(5, 0, [1, 2])))
    (report,) = await pair.report(1, "moved")
    assert not report.moved.broken
    assert torch.equal(pair.caches[1], pair.before)
    pair.stop()


# ------------------------------------------------------------------ limits on peers


async def test_only_idle_channels_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_table, "MAX_PEERS", 1)
    source, others = Blocks(1, ONE, 4), [Blocks(seed, ONE, 4) for seed in (2, 3, 4)]
    reading = Held(source.stagings[0], "gather")
    async with sides(source, others[0]) as one, sides(others[1], others[2], "e") as two:
        two.source = one.source
        epoch = one.expect(LENGTH, blocks(4, 4))
        busy = asyncio.create_task(one.send(epoch, LENGTH, blocks(4, 3)))
        await reading.reached()
        other = two.expect(LENGTH, blocks(4, 4))
        waiting = asyncio.create_task(two.send(other, LENGTH, blocks(4, 3)))
        await asyncio.sleep(0.1)
        assert [each.peer.worker for each in one.source.channels()] == ["d"], (
            "a busy channel must not be evicted"
        )
        reading.open()
        await busy
        await waiting
        assert (await one.verdict()).reason == (await two.verdict()).reason == ""
        assert [each.peer.worker for each in one.source.channels()] == ["e"]


async def test_destination_refuses_sources_beyond_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.workers.kv_transfer.protocol.receive.MAX_PEERS", 0)
    async with sides(Blocks(1, ONE, 4), Blocks(2, ONE, 4)) as both:
        epoch = both.expect(LENGTH, blocks(4, 4))
        with pytest.raises(PairBroken, match="RESOURCE_EXHAUSTED"):
            await both.send(epoch, LENGTH, blocks(4, 3))
        both.destination.close(epoch)


# ------------------------------------------------------------------ early connections


async def test_transfer_uses_the_channel_that_was_made_early() -> None:
    source, target = Blocks(1, TP2, 4), Blocks(2, ONE, 4)
    async with sides(source, target) as both:
        both.source.set_peers("router", [both.peer])
        await eventually(lambda: [each.connected for each in both.source.channels()] == [True])
        (early,) = both.source.channels()
        epoch = both.expect(LENGTH, blocks(4, 4))
        await both.send(epoch, LENGTH, blocks(4, 3))
        assert (await both.verdict()).reason == ""
        assert both.source.channels() == [early]


async def test_transfer_waits_for_a_channel_in_the_making(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = Blocks(1, ONE, 4), Blocks(2, ONE, 4)
    may_connect, connect = threading.Event(), RankPair._connect

    def held(self: RankPair, host: str) -> None:
        assert may_connect.wait(60)
        connect(self, host)

    monkeypatch.setattr(RankPair, "_connect", held)
    async with sides(source, target) as both:
        both.source.set_peers("router", [both.peer])
        await eventually(lambda: source.movers.own._endpoints)
        (early,) = both.source.channels()
        epoch = both.expect(LENGTH, blocks(4, 4))
        sending = asyncio.create_task(both.send(epoch, LENGTH, blocks(4, 3)))
        await eventually(lambda: not early.idle)
        assert not early.connected
        may_connect.set()
        await sending
        assert (await both.verdict()).reason == ""
        assert both.source.channels() == [early]


async def test_peer_that_does_not_answer_is_logged_and_does_not_disturb_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, target = Blocks(1, ONE, 4), Blocks(2, ONE, 4)
    async with sides(source, target) as both:
        absent = Peer("gone", "inc", "127.0.0.1:1", "secret")
        both.source.set_peers("router", [absent, both.peer])
        await eventually(lambda: "no connection for KV transfers to worker gone" in caplog.text)
        await eventually(lambda: [each.connected for each in both.source.channels()] == [True])
        epoch = both.expect(LENGTH, blocks(4, 4))
        await both.send(epoch, LENGTH, blocks(4, 3))
        assert (await both.verdict()).reason == ""
        assert caplog.text.count("no connection for KV transfers") == 1, "attempts are spaced"


async def test_loss_of_a_peer_frees_its_channel_and_both_ends_of_its_pairs() -> None:
    source, target = Blocks(1, ONE, 4), Blocks(2, ONE, 4)
    async with sides(source, target) as both:
        both.source.set_peers("router", [both.peer])
        await eventually(lambda: [each.connected for each in both.source.channels()] == [True])
        both.source.set_peers("router", [])  # now no router lists the peer
        await eventually(lambda: not both.source.channels())
        for worker in (source, target):
            await eventually(lambda mover=worker.movers.own: not mover._endpoints)  # type: ignore[misc]
