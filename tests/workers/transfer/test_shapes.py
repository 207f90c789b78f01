"""Hand-overs between workers of any shapes, whose ranks are threads of this process."""

import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from penstock.workers.follower import Follower
from penstock.workers.parallel.blocks import BlockLine, SpreadStaging, connect_blocks, move
from penstock.workers.parallel.mesh import Mesh
from penstock.workers.parallel.meeting import LocalStore
from penstock.workers.parallel.plans import MoveBlocks, decode
from penstock.workers.service import RunningWorker, serve_worker
from penstock.workers.transfer import source as source_side
from penstock.workers.transfer.shards import Rectangle, Shard
from penstock.workers.transfer.staging import KvStaging
from tests.support.attached import Attached
from tests.support.handover import HandOvers
from tests.support.ranks import in_threads, make_model, rank_config

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [3 + (7 * i) % 150 for i in range(60)]
NUM_TOKENS = 6
SHAPES = {"one": (1, 1, 1), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "tp2-pp2": (2, 2, 1)}


async def serve(name: str, model: Path) -> RunningWorker:
    """Of the shape of that name."""
    store = LocalStore()
    config = replace(rank_config(model, SHAPES[name]), name=name)

    def follow(rank: int) -> None:
        Follower(replace(config, rank=rank), store, lambda done, total: None).run()

    for rank in range(1, config.place.mesh.num_ranks):
        threading.Thread(target=follow, args=(rank,), daemon=True).start()
    return await serve_worker(config, store=store)


Workers = dict[str, RunningWorker]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["llama", "deepseek"])
async def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Workers]:
    model = make_model(tmp_path_factory.mktemp(request.param), request.param)
    found = {name: await serve(name, model) for name in SHAPES}
    yield found
    for worker in found.values():
        await worker.stop()


async def test_layouts_are_the_model_s_whatever_the_shape(workers: Workers) -> None:
    attached = [await Attached(worker.address).open("looks") for worker in workers.values()]
    assert len({each.welcome.layout for each in attached}) == 1
    for each in attached:
        await each.close()


@pytest.mark.parametrize("pair", permutations(SHAPES, 2), ids="-to-".join)
async def test_any_shape_hands_over_to_any_other(
    workers: Workers, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_side, "MESSAGE_BYTES", 3000)  # several messages, layers apart
    prefill, decode = (workers[name].address for name in pair)
    pools = await HandOvers.open(prefill, decode, f"router {pair}")
    for length in (3, 17, 60):
        expected = await pools.mixed(PROMPT[:length], NUM_TOKENS)
        computed = pools.decode.load.prompt_tokens_computed
        moving = await pools.prefilled(PROMPT[:length], NUM_TOKENS)
        assert await moving.whole() == expected
        assert pools.decode.load.prompt_tokens_computed == computed, "it came, and was not computed"
    await pools.close()


LAYERS, BLOCKS, SIZE, DIM = 5, 9, 2, 3


@pytest.mark.parametrize(("tp", "pp", "heads"), [(2, 2, 4), (4, 1, 2), (3, 1, 1)])
async def test_rank_0_stands_for_all(tp: int, pp: int, heads: int) -> None:
    """Every part of the blocks can be had and set, wherever it lies."""
    mesh = Mesh(tp, pp)
    whole = torch.randn(LAYERS, 2, BLOCKS, heads, SIZE, DIM)
    written = torch.randn_like(whole)
    blocks = np.array([7, 2, 5], np.int32)
    parts = [
        Rectangle(0, LAYERS, 0, heads),
        Rectangle(1, 4, 0, heads),
        Rectangle(2, 3, heads - 1, heads),
    ]
    rectangles = []
    for rank in range(mesh.num_ranks):
        place = mesh.place(rank)
        layers, first = place.layers(LAYERS), heads * place.column // tp
        own = Rectangle(layers.start, layers.stop, first, first + max(1, heads // tp))
        rectangles.append(own)

    def cut(tensor: torch.Tensor, part: Rectangle) -> torch.Tensor:
        heads_of = slice(part.first_head, part.last_head)
        return tensor[part.first_layer : part.last_layer, :, :, heads_of].clone()

    def lead(line: BlockLine, own: KvStaging, told: list[list[bytes]]) -> None:
        def tell(message: bytes) -> None:
            for each in told[1:]:
                each.append(message)

        staging = SpreadStaging(own, rectangles, line, tell)
        for part in parts:
            shard = Shard(part, 0, len(blocks) * SIZE)
            found = staging.gather(blocks, shard)
            expected = cut(whole, part)[:, :, blocks]
            assert torch.equal(own.viewed(found, blocks, part), expected)
        everything = Shard(parts[0], 0, len(blocks) * SIZE)
        data = written[:, :, blocks].contiguous().view(-1).view(torch.uint8)
        staging.scatter(blocks, everything, data)
        for each in told[1:]:
            each.append(b"")

    told: list[list[bytes]] = [[] for _ in range(mesh.num_ranks)]

    def work(rank: int, store: LocalStore) -> torch.Tensor:
        cache = cut(whole, rectangles[rank])
        own = KvStaging(cache, rectangles[rank])
        line = connect_blocks(store, mesh.place(rank), "127.0.0.1", 20.0)
        if rank == 0:
            lead(line, own, told)
            return cache
        at = 0
        while True:
            while len(told[rank]) <= at:
                threading.Event().wait(0.001)
            if not told[rank][at]:
                return cache
            order = decode(told[rank][at])
            assert isinstance(order, MoveBlocks)
            if order.rank == rank:
                move(order, own, line)
            at += 1

    caches = in_threads(mesh.num_ranks, work)
    after = whole.clone()
    after[:, :, blocks] = written[:, :, blocks]
    for rank, cache in enumerate(caches):
        assert torch.equal(cache, cut(after, rectangles[rank]))
