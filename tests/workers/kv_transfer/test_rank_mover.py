"""From rank to rank: each carries its own part, and what goes wrong on one is wrong for all."""

import asyncio
import threading
from collections import Counter

import numpy as np
import pytest
import torch

from penstock.protos import ranks_pb2 as wire
from penstock.workers.kv_transfer import sender as source_side
from penstock.workers.kv_transfer.rank_mover import RankMover, WriteGate, make_piece
from penstock.workers.kv_transfer.shards import LayerHeadRange, Shard, routes
from penstock.workers.kv_transfer.staging import KvStaging
from penstock.workers.kv_transfer.transport import PairBroken, RankPair
from penstock.workers.parallel.mesh import Mesh
from tests.support.rank_blocks import SECONDS, Blocks, Held, Sides, eventually, moved, sides

pytestmark = pytest.mark.asyncio

ONE, TP2, TP4, PP2, BOTH = Mesh(), Mesh(2), Mesh(4), Mesh(1, 2), Mesh(2, 2)
LENGTH = 21


def blocks(size: int, seed: int) -> list[int]:
    """Scattered ones that have room for the sequence."""
    chosen = np.random.default_rng(seed).permutation(96 // size)[: -(-LENGTH // size)]
    return [int(each) for each in chosen]


def by_pair(source: Blocks, destination: Blocks, unit: int) -> Counter[tuple[int, int]]:
    """Bytes that each pair of ranks is to carry."""
    num_sides = source.before.shape[1]
    position = num_sides * 3 * 4 * -(-LENGTH // unit) * unit
    found = routes(source.rectangles, destination.rectangles)
    return Counter(
        {(each.source, each.destination): each.overlap.area * position for each in found}
    )


@pytest.mark.parametrize(
    ("theirs", "ours", "sizes", "heads", "unit"),
    [
        (TP2, ONE, (4, 4), 4, 4),
        (ONE, TP2, (4, 8), 4, 4),
        (PP2, TP2, (8, 4), 4, 4),
        (BOTH, PP2, (4, 6), 4, 2),
        (TP2, TP4, (16, 32), 2, 16),  # each KV head of the destination twice
        (TP4, TP2, (32, 16), 1, 16),
        (TP2, BOTH, (4, 8), 0, 4),  # latent rows, which every rank has
    ],
)
async def test_every_rank_carries_its_own_part(
    monkeypatch: pytest.MonkeyPatch,
    theirs: Mesh,
    ours: Mesh,
    sizes: tuple[int, int],
    heads: int,
    unit: int,
) -> None:
    monkeypatch.setattr(source_side, "MESSAGE_BYTES", 500)
    source, target = Blocks(1, theirs, sizes[0], heads), Blocks(2, ours, sizes[1], heads)
    async with sides(source, target) as both:
        sent, taken = blocks(sizes[0], 3), blocks(sizes[1], 4)
        epoch = both.expect(LENGTH, taken)
        await both.send(epoch, LENGTH, sent)
        verdict = await both.verdict()
        assert verdict.reason == ""
        expected = by_pair(source, target, unit)
        assert both.source.bytes_by_pair == both.destination.bytes_by_pair == expected
        assert verdict.num_bytes == expected.total()
        carried = {pair: num for pair, num in expected.items() if pair != (0, 0)}
        assert carried, "rank 0 does not carry what is others'"
        end = -(-LENGTH // unit) * unit
        assert target.hold(moved(target, source, taken, sent, end))
        assert both.read == [epoch]


# ------------------------------------------------------------------ what can go wrong


async def failed(both: Sides, source: Blocks, target: Blocks) -> str:
    """Why a transfer from two ranks to two did not come."""
    epoch = both.expect(LENGTH, blocks(4, 4))
    await both.send(epoch, LENGTH, blocks(4, 3))
    return (await both.verdict()).reason


async def test_a_bit_flipped_on_one_rank_s_way_fails_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = Blocks(1, TP2, 4), Blocks(2, TP2, 4)
    send = RankPair.send
    flipped: list[int] = []

    def flip(pair: RankPair, data: torch.Tensor) -> None:
        if data.dtype == torch.uint8 and not flipped and len(data) == len(theirs):
            flipped.append(1)
            data[len(data) // 2] ^= 4
        send(pair, data)

    theirs = source.stagings[1].gather(
        np.array(blocks(4, 3), np.int32), Shard(source.rectangles[1], 0, LENGTH)
    )
    monkeypatch.setattr(RankPair, "send", flip)
    async with sides(source, target) as both:
        assert "checksum" in await failed(both, source, target)
        assert flipped
        # The pairs stand: what comes next is whole.
        epoch = both.expect(LENGTH, blocks(4, 5))
        await both.send(epoch, LENGTH, blocks(4, 3))
        assert (await both.verdict(2)).reason == ""


async def test_a_rank_that_cannot_send_fails_it_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_late_bytes_do_not_touch_blocks_that_are_others_now() -> None:
    source, target = Blocks(1, TP2, 4), Blocks(2, TP2, 4)
    reading = Held(source.stagings[1], "gather")
    async with sides(source, target) as both:
        epoch = both.expect(LENGTH, blocks(4, 4))
        sending = asyncio.create_task(both.send(epoch, LENGTH, blocks(4, 3)))
        await reading.reached()
        both.destination.close(epoch)
        # Nothing is being written, though the bytes are still to come: the blocks are given away.
        assert (await both.verdict()).reason == "dropped"
        for cache in target.caches:
            cache.fill_(7.0)
        assert both.read == [], "a rank of the source still reads"
        reading.open()
        await sending
        assert both.read == [epoch]
        again = both.expect(LENGTH, blocks(4, 5))  # after it, on the same pairs
        await both.send(again, LENGTH, blocks(4, 3))
        assert (await both.verdict(2)).reason == ""
        kept = [each for each in blocks(4, 4) if each not in blocks(4, 5)]
        assert kept
        assert all((cache[:, :, kept] == 7.0).all() for cache in target.caches)


async def test_the_source_lets_go_when_no_rank_reads_even_if_the_pairs_broke() -> None:
    source, target = Blocks(1, TP2, 4), Blocks(2, TP2, 4)
    reading = Held(source.stagings[1], "gather")
    async with sides(source, target) as both:
        epoch = both.expect(LENGTH, blocks(4, 4))
        sending = asyncio.create_task(both.send(epoch, LENGTH, blocks(4, 3)))
        await reading.reached()
        both.destination.stop()
        assert "broke" in (await both.verdict()).reason
        link = both.source._channels["d"]
        await eventually(lambda: link.broken)
        await asyncio.sleep(0.05)
        assert both.read == []
        reading.open()
        with pytest.raises(PairBroken):
            await sending
        assert both.read == [epoch]


async def test_an_abort_while_ranks_send_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_side, "MESSAGE_BYTES", 200)
    source, target = Blocks(1, TP2, 4), Blocks(2, TP2, 4)
    reading = Held(source.stagings[1], "gather")
    async with sides(source, target) as both:
        epoch = both.expect(LENGTH, blocks(4, 4))
        outgoing = source_side.OutgoingTransfer(
            "r", 7, 2, epoch, 0, LENGTH, np.array(blocks(4, 3), np.int32)
        )
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


# ------------------------------------------------------------------ one rank alone


class Two:
    """A rank that sends and one that takes, whose orders are the test's."""

    def __init__(self) -> None:
        whole = LayerHeadRange(0, 2, 0, 1)
        self.caches = [torch.randn(2, 2, 6, 1, 4, 3) for _ in range(2)]
        self.before = self.caches[1].clone()
        self.movers = [
            RankMover(KvStaging(cache, whole), "127.0.0.1", SECONDS) for cache in self.caches
        ]
        self.heard: list[list[wire.Report]] = [[], []]
        self._open = threading.Event()
        for side, mover in enumerate(self.movers):
            mover.listen(lambda report, side=side: self._hear(side, report))  # type: ignore[misc]
            mover.execute(wire.Move(end=1, open=wire.Open(receives=side == 1)))
        self._open.set()

    def _hear(self, side: int, report: wire.Report) -> None:
        self.heard[side].append(report)
        if report.HasField("value"):
            assert self._open.wait(60), "an end hears nothing before it is there"
            self.movers[1 - side].execute(wire.Move(end=1, value=report.value))

    def piece(self, epoch: int, index: int, numbers: list[int]) -> wire.Piece:
        shard = Shard(LayerHeadRange(0, 2, 0, 1), 0, 4 * len(numbers))
        return make_piece(epoch, index, np.array(numbers, np.int32), shard, 4)

    async def report(self, side: int, kind: str, num: int = 1) -> list[wire.Report]:
        def found() -> list[wire.Report]:
            return [each for each in self.heard[side] if each.WhichOneof("body") == kind]

        await eventually(lambda: len(found()) >= num)
        return found()

    def stop(self) -> None:
        for mover in self.movers:
            mover.stop()


async def test_a_message_that_is_not_due_is_written_nowhere() -> None:
    two = Two()
    two.movers[0].execute(wire.Move(end=1, send=two.piece(5, 0, [1, 2])))
    two.movers[1].execute(wire.Move(end=1, receive=two.piece(5, 1, [3, 4])))
    (report,) = await two.report(1, "moved")
    assert report.moved.broken == "a message came that was not due"
    assert (report.moved.epoch, report.moved.index) == (5, 1)
    assert torch.equal(two.caches[1], two.before)
    two.stop()


async def test_what_is_settled_is_read_and_thrown_away() -> None:
    two = Two()
    two.movers[1].execute(wire.Move(end=1, receive=two.piece(5, 0, [3, 4])))
    two.movers[1].execute(wire.Move(settle=5))
    (report,) = await two.report(1, "settled")
    assert report.settled == 5
    two.movers[0].execute(wire.Move(end=1, send=two.piece(5, 0, [1, 2])))
    (report,) = await two.report(1, "moved")
    assert not report.moved.broken
    assert torch.equal(two.caches[1], two.before)
    two.movers[0].execute(wire.Move(end=1, send=two.piece(6, 0, [1, 2])))
    two.movers[1].execute(wire.Move(end=1, receive=two.piece(6, 0, [3, 4])))
    await two.report(1, "moved", 2)
    two.before[:, :, [3, 4]] = two.caches[0][:, :, [1, 2]]
    assert torch.equal(two.caches[1], two.before)
    two.stop()


async def test_every_order_is_answered_once_whatever_becomes_of_the_end() -> None:
    two = Two()
    await two.report(0, "met")
    await two.report(1, "met")
    for index in range(3):
        two.movers[1].execute(wire.Move(end=1, receive=two.piece(5, index, [1])))
    two.movers[1].execute(wire.Move(end=1, close=wire.Close()))
    two.movers[1].execute(wire.Move(end=1, receive=two.piece(5, 3, [1])))
    await two.report(1, "closed")
    reports = await two.report(1, "moved", 4)
    assert sorted(each.moved.index for each in reports) == [0, 1, 2, 3]
    assert all(each.moved.broken for each in reports)
    last = [each for each in two.heard[1] if each.moved.index != 3]
    assert last[-1].WhichOneof("body") == "closed"
    two.stop()


async def test_a_gate_says_when_the_last_writer_has_left() -> None:
    gate = WriteGate()
    said: list[int] = []
    assert gate.enter()
    assert gate.enter()
    gate.leave()
    gate.close(lambda: said.append(1))
    assert not gate.enter()
    assert said == []
    gate.leave()
    assert said == [1]


# ------------------------------------------------------------------ few pairs


async def test_only_idle_pairs_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_side, "MAX_PEERS", 1)
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
        assert list(one.source._channels) == ["d"], "it is busy, and is not evicted"
        reading.open()
        await busy
        await waiting
        assert (await one.verdict()).reason == (await two.verdict()).reason == ""
        assert list(one.source._channels) == ["e"]


async def test_a_destination_has_room_for_few_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.kv_transfer.receiver.MAX_PEERS", 0)
    async with sides(Blocks(1, ONE, 4), Blocks(2, ONE, 4)) as both:
        epoch = both.expect(LENGTH, blocks(4, 4))
        with pytest.raises(PairBroken, match="RESOURCE_EXHAUSTED"):
            await both.send(epoch, LENGTH, blocks(4, 3))
        both.destination.close(epoch)
