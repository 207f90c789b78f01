"""A router follows the cached blocks of its workers, over real streams."""

import logging
from pathlib import Path

import pytest

from penstock.protos import worker_pb2 as pb
from penstock.router.config import RouterConfig
from penstock.router.routing import events as ev
from penstock.router.routing.dispatcher import Dispatcher
from tests.support.served_router import Served, client_of, serving, until
from tests.support.stub_worker import StubWorker

KEY = bytes(range(32))
BODY = {"prompt": "a prompt of more than sixteen bytes", "max_tokens": 1}


def indexed(served: Served) -> int:
    return served.router.frontend.workers()[0].num_indexed_blocks


def snapshot(worker: StubWorker, blocks: list[int], next_number: int) -> pb.ToRouter:
    incarnation = worker.welcome.incarnation
    return pb.ToRouter(
        cache_snapshot=pb.CacheSnapshot(
            incarnation=incarnation, next=next_number, last=True, blocks=blocks
        )
    )


def stored(worker: StubWorker, first: int, parent: int, blocks: list[int]) -> pb.ToRouter:
    change = pb.CacheChange(stored=blocks, parents=[parent], lengths=[len(blocks)])
    cache = pb.CacheEvents(incarnation=worker.welcome.incarnation, first=first, changes=[change])
    return pb.ToRouter(step=pb.Step(cache=cache))


async def test_gap_leads_to_a_request_for_a_snapshot_and_one_log_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = StubWorker()
    async with serving(RouterConfig(folder, "stub"), worker) as served:
        assert worker.hellos[0].cache_events
        worker.send(snapshot(worker, [1, 2], 5))
        worker.send(stored(worker, 5, 2, [3, 4]))
        await until(lambda: indexed(served) == 4)
        async with client_of(served) as client:
            status = (await client.get("/status")).json()
        assert [each["indexed_blocks"] for each in status["workers"]] == [4]
        with caplog.at_level(logging.WARNING):
            worker.send(stored(worker, 8, 0, [9]))
            worker.send(stored(worker, 9, 0, [10]))
            await until(lambda: worker.num_resyncs)
        assert indexed(served) == 0
        (line,) = [each.getMessage() for each in caplog.records if "cached" in each.getMessage()]
        assert line.startswith("worker w0: expected cache change 6, received 8;")
        worker.send(snapshot(worker, [1, 2, 9], 10))
        await until(lambda: indexed(served) == 3)
        assert worker.num_resyncs == 1


async def test_lost_worker_has_no_blocks(folder: Path) -> None:
    worker = StubWorker()
    async with serving(RouterConfig(folder, "stub"), worker) as served:
        worker.send(snapshot(worker, [1, 2], 5))
        await until(lambda: indexed(served) == 2)
        await worker.stop()
        await until(lambda: not served.router.frontend.workers())
        await worker.start(int(worker.address.rpartition(":")[2]))
        await until(lambda: served.router.frontend.workers())
        assert indexed(served) == 0


async def test_requests_carry_the_hashes_of_their_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[ev.Request] = []
    handle = Dispatcher.handle

    def record(self: Dispatcher, event: ev.Event, now: float) -> list[ev.Command]:
        if isinstance(event, ev.RequestArrived):
            arrived.append(event.request)
        return handle(self, event, now)

    monkeypatch.setattr(Dispatcher, "handle", record)
    small, large = StubWorker("w0"), StubWorker("w1")
    small.welcome.block_size = 4
    config = RouterConfig(folder, "stub", hash_key=KEY)
    async with serving(config, small, large) as served, client_of(served) as client:
        for body in (BODY, BODY, BODY | {"cache_salt": "own"}):
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    first, second, salted = arrived
    num_tokens = len(first.prompt)
    lengths = {size: len(hashes) for size, hashes in first.prompt_hashes.items()}
    assert lengths == {4: num_tokens // 4, 16: num_tokens // 16}
    assert second.prompt_hashes == first.prompt_hashes
    assert not set(salted.prompt_hashes[16]) & set(first.prompt_hashes[16])
