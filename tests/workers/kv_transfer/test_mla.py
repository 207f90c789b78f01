"""KV transfers of an MLA model: compressed cache rows are sent and used for decoding."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.workers.config import WorkerConfig
from penstock.workers.kv_transfer import sender as source_side
from penstock.workers.service.grpc_service import serve_worker
from tests.support.checkpoints import make_checkpoint
from tests.support.disaggregated_pair import DisaggregatedPair

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [3 + (7 * i) % 300 for i in range(100)]
BLOCK_BYTES = 16 * 3 * (20 + 6) * 4
"""Tokens x layers x features of a cache row x bytes of float32."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pools(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DisaggregatedPair]:
    folder: Path = tmp_path_factory.mktemp("latent")
    make_checkpoint(folder, "deepseek-v3")
    prefill, decode = [
        await serve_worker(WorkerConfig(role, folder, role=role, kv_cache_mib=1))
        for role in ("prefill", "decode")
    ]
    pools = await DisaggregatedPair.open(prefill.address, decode.address)
    yield pools
    await pools.close()
    await prefill.stop()
    await decode.stop()


async def test_kv_cache_holds_compressed_rows_instead_of_heads(pools: DisaggregatedPair) -> None:
    assert pools.decode.welcome.num_blocks == (1 << 20) // BLOCK_BYTES


@pytest.mark.parametrize("message_bytes", [1, 1 << 20])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 70])
async def test_transferred_request_gives_the_answer_of_a_mixed_worker(
    pools: DisaggregatedPair, monkeypatch: pytest.MonkeyPatch, length: int, message_bytes: int
) -> None:
    monkeypatch.setattr(source_side, "max_data_bytes", lambda backend: message_bytes)
    expected = await pools.answer_without_transfer(PROMPT[:length], 12)
    computed = pools.decode.load.prompt_tokens_computed
    moving = await pools.prefill_and_yield(PROMPT[:length], 12)
    assert await moving.finish() == expected
    assert pools.decode.load.prompt_tokens_computed == computed
    received = await pools.decode.message("received", moving.request)
    assert received.bytes == -(-length // 16) * BLOCK_BYTES
