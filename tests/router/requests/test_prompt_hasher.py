"""PromptHasher: a router hashes prompts as workers do, long ones in a thread."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from penstock.common.block_hash import short_hashes
from penstock.common.sampling_params import SamplingParams
from penstock.protos.worker_codec import pack_tokens
from penstock.router.errors import Code, ServingError
from penstock.router.requests.encoding_line import EncodingLine
from penstock.router.requests.prompt_hasher import INLINE_BLOCKS, Hashes, PromptHasher
from penstock.router.requests.request import GenerationRequest
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.config import SchedulerConfig
from penstock.workers.scheduling.sequence import NewSequence

KEY = bytes(range(32))


async def run_here(tenant: str, num_chars: int, work: Callable[[], Hashes]) -> Hashes:
    return work()


async def refuse(tenant: str, num_chars: int, work: Callable[[], Hashes]) -> Hashes:
    raise ServingError(Code.OVERLOADED, "too much waits")


def hashes_of_worker(request: GenerationRequest, block_size: int) -> list[int]:
    """Return the short hashes of the blocks that a worker's batcher publishes for this prompt."""
    batcher = Batcher(SchedulerConfig(64, 512, block_size, hash_key=KEY))
    params = SamplingParams(max_tokens=1)
    batcher.submit(NewSequence("k", request.prompt, len(request.prompt), params, salt=request.salt))
    plan = batcher.plan()
    assert plan is not None
    batcher.commit(plan, np.array([5], np.int32))
    return short_hashes(batcher.pool.published.hashes())


async def hashes_of_router(hasher: PromptHasher, request: GenerationRequest) -> Hashes:
    return await hasher.hashes(request, pack_tokens(request.prompt))


@pytest.mark.parametrize("cache_salt", ["", "own"])
@pytest.mark.parametrize("tenant", ["", "someone"])
@pytest.mark.parametrize("num_tokens", [7, 8, 40])
async def test_hashes_equal_those_of_the_worker(
    num_tokens: int, tenant: str, cache_salt: str
) -> None:
    request = GenerationRequest(list(range(num_tokens)), tenant=tenant, cache_salt=cache_salt)
    found = await hashes_of_router(PromptHasher(KEY, lambda: {4, 8}, run_here), request)
    assert {size: list(hashes) for size, hashes in found.items()} == {
        size: hashes_of_worker(request, size) for size in (4, 8)
    }
    salted = GenerationRequest(request.prompt, tenant="another")
    other = await hashes_of_router(PromptHasher(KEY, lambda: {4, 8}, run_here), salted)
    assert not set(other[4]) & set(found[4])


async def test_prompt_without_a_full_block_or_a_worker_has_no_hashes() -> None:
    request = GenerationRequest([1, 2, 3])
    assert await hashes_of_router(PromptHasher(KEY, lambda: {4}, refuse), request) == {}
    assert await hashes_of_router(PromptHasher(KEY, lambda: (), refuse), request) == {}


async def test_long_prompts_are_hashed_in_a_thread_and_short_ones_are_not() -> None:
    line = EncodingLine(1 << 20)
    threads: list[str] = []

    async def run(tenant: str, num_chars: int, work: Callable[[], Hashes]) -> Hashes:
        def recorded() -> Hashes:
            threads.append(threading.current_thread().name)
            return work()

        return await line.run(tenant, num_chars, recorded)

    hasher = PromptHasher(KEY, lambda: {4}, run)
    short, long = [GenerationRequest([1] * (4 * (INLINE_BLOCKS + more))) for more in (0, 1)]
    assert len((await hashes_of_router(hasher, short))[4]) == INLINE_BLOCKS
    assert threads == []
    assert len((await hashes_of_router(hasher, long))[4]) == INLINE_BLOCKS + 1
    assert threads != [threading.current_thread().name]
    line.close()


async def test_request_is_served_without_hashes_if_too_much_work_waits() -> None:
    request = GenerationRequest([1] * 4096)
    assert await hashes_of_router(PromptHasher(KEY, lambda: {4}, refuse), request) == {}
