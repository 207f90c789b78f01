"""Routers that subscribe get a worker's cached blocks, over a real channel."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from penstock.common.block_hash import HASH_BYTES, root_hash, short_prefix_hashes
from penstock.protos import worker_pb2 as wire
from penstock.router.routing.prefix_cache.cache_feed import CacheFeed
from penstock.router.routing.prefix_cache.prefix_index import PrefixIndex
from penstock.router.worker_links.codec import decode_cache_events, decode_event
from penstock.workers.config import WorkerConfig
from penstock.workers.scheduling.cache_report import CacheSnapshot
from penstock.workers.service.cache_stream import CHUNK_BLOCKS, encode_snapshot
from penstock.workers.service.grpc_service import RunningWorker, serve_worker
from tests.support.attached_router import AttachedRouter, greedy
from tests.support.tiny import tiny_checkpoint

KEY = bytes(range(32))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture
async def worker(checkpoint: Path) -> AsyncIterator[RunningWorker]:
    config = WorkerConfig("w0", checkpoint, kv_cache_mib=1, max_sequences=4, hash_key=KEY)
    running = await serve_worker(config)
    yield running
    await running.stop()


class Follower:
    """A router's stream, and an index that is updated by the messages of the stream."""

    def __init__(self, attached: AttachedRouter, start: int = 0) -> None:
        self.attached = attached
        self.index = PrefixIndex()
        self._feed = CacheFeed(self.index)
        self._num_read = start  # number of messages that the index has read
        welcome = attached.welcome
        self._feed.worker_up("w0", welcome.incarnation, welcome.num_blocks, 0.0)

    @classmethod
    async def open(cls, worker: RunningWorker, name: str) -> "Follower":
        return cls(await AttachedRouter(worker.address).open(name, cache_events=True))

    async def until_known(self, prompt: list[int], num_blocks: int) -> None:
        """Wait until the index has this many leading blocks of a prompt."""
        await self.attached.until(lambda: self.knows(prompt) == num_blocks)

    def knows(self, prompt: list[int]) -> int:
        """Return the number of the prompt's cached blocks, according to all messages so far."""
        for message in self.attached.received[self._num_read :]:
            self._num_read += 1
            if message.HasField("cache_snapshot"):
                event = decode_event("w0", message)
                assert self._feed.apply_snapshot(event, 0.0) is None  # type: ignore[arg-type]
            elif message.step.HasField("cache"):
                changes = decode_cache_events("w0", message.step.cache)
                assert self._feed.apply_events(changes, 0.0) is None
        return self.index.match(hashes_of(prompt)).get("w0", 0)


def hashes_of(prompt: list[int]) -> list[int]:
    tokens = np.array(prompt, np.int32)
    return list(short_prefix_hashes(root_hash(KEY, b"tenant"), tokens, 16))


async def compute(attached: AttachedRouter, request: int, prompt: list[int]) -> None:
    await attached.submit(request, prompt, greedy(1), salt=b"tenant")
    await attached.answer(request)


async def test_routers_know_what_others_caused_to_be_cached_and_what_was_before(
    worker: RunningWorker,
) -> None:
    first, plain = await Follower.open(worker, "r1"), await AttachedRouter(worker.address).open()
    prompt = [3 + i % 90 for i in range(40)]
    await compute(plain, 1, prompt)
    await first.until_known(prompt, 2)
    late = await Follower.open(worker, "r2")
    await late.until_known(prompt, 2)
    other = [5 + i % 70 for i in range(33)]
    await compute(plain, 2, other)
    for follower in (first, late):
        await follower.until_known(other, 2)
        await follower.attached.close()
    kinds = {message.WhichOneof("body") for message in plain.received}
    assert "cache_snapshot" not in kinds
    assert not any(message.step.HasField("cache") for message in plain.received)
    await plain.close()


async def test_snapshot_is_sent_again_on_request_and_evictions_are_reported(
    worker: RunningWorker,
) -> None:
    follower = await Follower.open(worker, "r1")
    attached = follower.attached
    prompt = [3 + i % 90 for i in range(40)]
    await compute(attached, 1, prompt)
    await follower.until_known(prompt, 2)
    await attached.send(resync_cache=wire.ResyncCache())
    await attached.until(
        lambda: sum(message.HasField("cache_snapshot") for message in attached.received) == 2
    )
    again = [message for message in attached.received if message.HasField("cache_snapshot")][1]
    assert set(again.cache_snapshot.blocks) >= set(hashes_of(prompt))
    fresh = Follower(attached, attached.received.index(again))
    for request in range(2, 2 + attached.welcome.num_blocks // 6):
        await compute(attached, request, [3 + (request + i) % 90 for i in range(200)])
    await fresh.until_known(prompt, 0)
    assert fresh.index.num_blocks("w0") <= attached.welcome.num_blocks
    await attached.close()


@pytest.mark.parametrize(
    ("num_blocks", "sizes"),
    [
        (0, [0]),
        (3, [3]),
        (CHUNK_BLOCKS, [CHUNK_BLOCKS]),
        (CHUNK_BLOCKS + 1, [CHUNK_BLOCKS, 1]),
    ],
)
def test_snapshot_is_cut_into_bounded_messages(num_blocks: int, sizes: list[int]) -> None:
    digests = [number.to_bytes(HASH_BYTES, "little") for number in range(num_blocks)]
    chunks = list(encode_snapshot(CacheSnapshot(7, digests), "i"))
    assert [len(chunk.blocks) for chunk in chunks] == sizes
    assert [chunk.chunk for chunk in chunks] == list(range(len(sizes)))
    assert [chunk.last for chunk in chunks] == [False] * (len(sizes) - 1) + [True]
    assert {(chunk.next, chunk.incarnation) for chunk in chunks} == {(7, "i")}
    assert [digest for chunk in chunks for digest in chunk.blocks] == list(range(num_blocks))
