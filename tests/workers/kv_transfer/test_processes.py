"""KV transfers between worker processes, and failures when either process is killed."""

from pathlib import Path

import pytest

from tests.support.attached_router import AttachedRouter
from tests.support.disaggregated_pair import DisaggregatedPair
from tests.support.tiny import tiny_checkpoint
from tests.support.worker_process import worker_process

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [3 + (7 * i) % 150 for i in range(100)]
NUM_TOKENS = 12
BYTES_PER_BLOCK = 16 * 3 * 2 * 2 * 8 * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


async def test_transferred_requests_give_the_answers_of_a_mixed_worker(checkpoint: Path) -> None:
    async with (
        worker_process("prefill", checkpoint, role="prefill") as prefill,
        worker_process("decode", checkpoint, role="decode") as decode,
    ):
        pools = await DisaggregatedPair.open(prefill.address, decode.address)
        for length in (1, 15, 16, 17, 31, 33, 100):
            expected = await pools.answer_without_transfer(PROMPT[:length], NUM_TOKENS)
            computed = pools.decode.load.prompt_tokens_computed
            moving = await pools.prefill_and_yield(PROMPT[:length], NUM_TOKENS)
            assert await moving.finish() == expected
            assert pools.decode.load.prompt_tokens_computed == computed
            received = await pools.decode.message("received", moving.request)
            assert received.bytes == -(-length // 16) * BYTES_PER_BLOCK
        await pools.close()


async def test_transfer_between_different_meshes_and_block_sizes(checkpoint: Path) -> None:
    async with (
        worker_process("one", checkpoint) as one,
        worker_process("tp2", checkpoint, tp=2, block_size=32) as tp2,
        worker_process("pp2", checkpoint, pp=2) as pp2,
    ):
        for prefill, decode in ((tp2, one), (one, tp2), (pp2, tp2)):
            pools = await DisaggregatedPair.open(prefill.address, decode.address)
            expected = await pools.answer_without_transfer(PROMPT[:37], 6)
            computed = pools.decode.load.prompt_tokens_computed
            moving = await pools.prefill_and_yield(PROMPT[:37], 6)
            assert await moving.finish() == expected
            assert pools.decode.load.prompt_tokens_computed == computed
            received = await pools.decode.message("received", moving.request)
            assert received.bytes == 3 * BYTES_PER_BLOCK
            await pools.close()


async def test_request_is_recomputed_if_its_source_is_killed_while_sending(
    checkpoint: Path,
) -> None:
    async with (
        worker_process("prefill", checkpoint, slow_gather=0.02) as prefill,
        worker_process("decode", checkpoint, transfer_seconds=60.0) as decode,
    ):
        pools = await DisaggregatedPair.open(prefill.address, decode.address)
        expected = await pools.answer_without_transfer(PROMPT, NUM_TOKENS)
        earlier = await pools.prefill_and_yield(PROMPT[:40], NUM_TOKENS)
        await earlier.finish()
        moving = await pools.prefill_and_yield(PROMPT, NUM_TOKENS)
        await moving.submit()
        received = pools.decode.load.bytes_received
        await moving.send()
        # Wait until some of the 21 messages have been received, but not all of them. A worker
        # reports its load with each step, so short requests run meanwhile to cause steps.
        while pools.decode.load.bytes_received == received:
            await pools.answer_without_transfer(PROMPT[:2], 2)
        await prefill.kill()
        assert await moving.answer() == expected
        assert "broke" in (await pools.decode.message("failed", moving.request)).reason
        await pools.decode.drop(moving.request, 2)
        load = await pools.decode.until(lambda: not pools.decode.load.running and pools.decode.load)
        assert load.free_blocks + load.cached_blocks == pools.decode.welcome.num_blocks
        await pools.close()


async def test_lease_outlives_a_destination_killed_while_receiving(checkpoint: Path) -> None:
    async with (
        worker_process("prefill", checkpoint, slow_gather=0.02) as prefill,
        worker_process("decode", checkpoint) as decode,
        worker_process("second", checkpoint) as second,
    ):
        pools = await DisaggregatedPair.open(prefill.address, decode.address)
        expected = await pools.answer_without_transfer(PROMPT, NUM_TOKENS)
        moving = await pools.prefill_and_yield(PROMPT, NUM_TOKENS)
        await moving.submit()
        await moving.send()
        received = pools.decode.load.bytes_received
        while pools.decode.load.bytes_received == received:
            await pools.answer_without_transfer(PROMPT[:2], 2)
        await decode.kill()
        await pools.prefill.message("failed", moving.request)
        # The lease still exists, so another worker can receive the sequence.
        pools.decode = await AttachedRouter(second.address).open()
        await moving.submit()
        await moving.send()
        assert await moving.answer() == expected
        assert await pools.decode.message("received", moving.request)
        await moving.drop()
        load = pools.prefill.load
        await pools.prefill.until(lambda: not pools.prefill.load.leased_blocks)
        load = pools.prefill.load
        assert load.free_blocks + load.cached_blocks == pools.prefill.welcome.num_blocks
        await pools.close()
