"""KV transfers between workers of different meshes and block sizes, with ranks as threads."""

import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.workers.kv_transfer import sender as source_side
from penstock.workers.parallel.rendezvous import LocalStore
from penstock.workers.rank.follower import Follower
from penstock.workers.service.grpc_service import RunningWorker, serve_worker
from tests.support.disaggregated_pair import DisaggregatedPair
from tests.support.ranks import make_model, rank_config

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [3 + (7 * i) % 150 for i in range(60)]
NUM_TOKENS = 6
# Meshes by name, as (tp, pp, ep).
MESHES = {"one": (1, 1, 1), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "tp2-pp2": (2, 2, 1)}
PAIRS = list(permutations(MESHES, 2))
# In these pairs, each mesh is a source once and a destination once.
RING = [("one", "tp2"), ("tp2", "pp2"), ("pp2", "tp2-pp2"), ("tp2-pp2", "one")]
# For each model family and KV cache format, pairs of meshes between which KV is transferred.
KINDS = {
    ("llama", "auto"): PAIRS,
    ("deepseek", "auto"): RING,
    ("falcon-rw", "auto"): RING,
    ("llama", "bfloat16"): RING,
    ("llama", "fp8"): RING,
    ("llama", "int8"): RING,
}
BLOCK_SIZES = {"one": 4, "tp2": 8, "pp2": 4, "tp2-pp2": 6}
TRANSFER_SECONDS = 240.0  # limit in seconds; long, because machines may be busy


async def serve(name: str, model: Path, kv_cache_dtype: str) -> RunningWorker:
    """Start a worker with the mesh and block size of `name`."""
    store = LocalStore()
    sizes = {"block_size": BLOCK_SIZES[name], "kv_cache_dtype": kv_cache_dtype}
    config = rank_config(model, MESHES[name], **sizes)
    config = replace(config, name=name, transfer_seconds=TRANSFER_SECONDS)

    def follow(rank: int) -> None:
        Follower(replace(config, rank=rank), store, lambda done, total: None).run()

    for rank in range(1, config.coord.mesh.num_ranks):
        threading.Thread(target=follow, args=(rank,), daemon=True).start()
    return await serve_worker(config, store=store)


Workers = dict[str, RunningWorker]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Workers]:
    family, kv_cache_dtype = request.param
    model = make_model(tmp_path_factory.mktemp(family), family)
    found = {name: await serve(name, model, kv_cache_dtype) for name in MESHES}
    yield found
    for worker in found.values():
        await worker.stop()


@pytest.mark.parametrize(
    ("workers", "pair"),
    [
        pytest.param(kind, pair, id=f"{'-'.join(kind)}-{'-to-'.join(pair)}")
        for kind, pairs in KINDS.items()
        for pair in pairs
    ],
    indirect=["workers"],
)
async def test_transfer_from_any_mesh_to_any_other(
    workers: Workers, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        source_side, "max_data_bytes", lambda backend: 3000
    )  # so small that a transfer has several messages
    prefill, decode = (workers[name].address for name in pair)
    pools = await DisaggregatedPair.open(prefill, decode, f"router {pair}")
    # Workers report equal layouts, although their meshes differ.
    assert pools.prefill.welcome.layout == pools.decode.welcome.layout != ""
    for length in (3, 17, 60):
        expected = await pools.answer_without_transfer(PROMPT[:length], NUM_TOKENS)
        computed = pools.decode.load.prompt_tokens_computed
        moving = await pools.prefill_and_yield(PROMPT[:length], NUM_TOKENS)
        assert await moving.finish() == expected
        assert pools.decode.load.prompt_tokens_computed == computed, (
            "the KV must be received, not recomputed"
        )
    await pools.close()
