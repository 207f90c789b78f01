"""Live migration: running requests move with their KV blocks when workers drain or change roles.

A real router and real workers, each a separate process. Every answer must be complete and equal to
the answer without migration.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from penstock.cli.checkpoint import SHIPPED
from penstock.common.sampling_params import SamplingParams
from penstock.router.config import RouterConfig
from penstock.router.requests.request import GenerationRequest
from penstock.router.server import RunningRouter, serve_router
from tests.support.served_router import until
from tests.support.worker_process import WorkerProcess, worker_process

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = SHIPPED.parent / "demo-small"
ROLES = {"p0": "prefill", "d0": "decode", "d1": "decode"}
NUM_TOKENS = 500
MIN_TOKENS = 20  # number of tokens that each stream must get before a test acts
NUM_PROMPTS, PROMPT_LENGTH = 6, 200
BYTES_PER_TOKEN = 2 * 2 * 2 * 32 * 4  # 2 layers x keys and values x 2 heads x 32 features x 4 bytes


def prompts(kind: int) -> list[list[int]]:
    """Return prompts that share no cached prefix with prompts of another `kind`."""
    numbers = range(10 * kind, 10 * kind + NUM_PROMPTS)
    return [[5 + (7 * i + 31 * number) % 900 for i in range(PROMPT_LENGTH)] for number in numbers]


@dataclass
class Stream:
    """A client that collects the tokens of one answer."""

    tokens: list[int] = field(default_factory=list)

    async def read(self, router: RunningRouter, prompt: Sequence[int]) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        answers = await router.frontend.submit([GenerationRequest(prompt, sampling)])
        try:
            async for delta in answers:
                assert delta.position == len(self.tokens), "a position is repeated or missing"
                self.tokens += delta.tokens
        finally:
            answers.close()
        return self.tokens


@dataclass
class Cluster:
    router: RunningRouter
    workers: dict[str, WorkerProcess]

    async def answers(self, inputs: Sequence[Sequence[int]]) -> list[list[int]]:
        """Run all prompts at the same time and return their answers."""
        return list(await asyncio.gather(*(Stream().read(self.router, each) for each in inputs)))

    def running_by_worker(self) -> dict[str, int]:
        """Return the number of running sequences by worker."""
        snapshot = self.router.frontend.take_snapshot()
        workers = snapshot.workers
        return {each.worker: each.numbers.load.running for each in workers if each.numbers}

    def computed(self, worker: str) -> int:
        """Return the number of prompt positions that a worker has computed."""
        numbers = {one.worker: one.numbers for one in self.router.frontend.take_snapshot().workers}[
            worker
        ]
        return 0 if numbers is None else numbers.load.prompt_tokens_computed


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        started = [
            stack.enter_async_context(
                worker_process(name, MODEL, role=role, kv_cache_mib=64, threads=1)
            )
            for name, role in ROLES.items()
        ]
        workers = dict(zip(ROLES, await asyncio.gather(*started), strict=True))
        router = await serve_router(RouterConfig(MODEL, "demo-small", http_port=0, grpc_port=0))
        stack.push_async_callback(router.stop)
        await router.set_workers({name: worker.address for name, worker in workers.items()})
        await until(lambda: len(router.frontend.workers()) == len(workers), "no stream")
        yield Cluster(router, workers)


async def start_streams(
    cluster: Cluster, inputs: Sequence[Sequence[int]]
) -> tuple[list[Stream], "asyncio.Future[list[list[int]]]"]:
    """Start one stream per prompt and wait until each has `MIN_TOKENS` tokens."""
    streams = [Stream() for _ in inputs]
    reading = asyncio.gather(
        *(
            stream.read(cluster.router, prompt)
            for stream, prompt in zip(streams, inputs, strict=True)
        )
    )
    async with asyncio.timeout(120):
        while not all(len(stream.tokens) >= MIN_TOKENS for stream in streams):
            await asyncio.sleep(0.005)
    return streams, reading


async def test_streams_are_complete_while_roles_change(cluster: Cluster) -> None:
    frontend = cluster.router.frontend
    before, inputs, others = frontend.take_snapshot(), prompts(1), prompts(2)
    streams, reading = await start_streams(cluster, inputs)
    assert cluster.running_by_worker()["d0"]
    await frontend.assign("d0", "prefill", "ops")
    await frontend.assign("p0", "mixed", "ops")
    async with asyncio.timeout(120):
        while cluster.running_by_worker()["d0"]:
            await asyncio.sleep(0.005)
    assert not any(len(stream.tokens) == NUM_TOKENS for stream in streams), (
        "the move must not wait for answers to end"
    )
    # The router places these requests by the workers' new roles.
    _, second = await start_streams(cluster, others)
    await frontend.assign("d1", "prefill", "ops")
    await frontend.assign("d0", "decode", "ops")
    await frontend.assign("p0", "prefill", "ops")
    found = [*await reading, *await second]
    await frontend.assign("d1", "decode", "ops")
    after = frontend.take_snapshot()
    assert {one.worker: one.role for one in after.workers} == ROLES
    assert after.kv_transfers - before.kv_transfers > NUM_PROMPTS
    assert after.kv_transfers_failed == after.failovers == 0
    assert {reason for reason, count in after.finished.items() if count} == {"length"}
    assert found == await cluster.answers([*inputs, *others])


async def test_drain_moves_blocks_before_answers_end(cluster: Cluster) -> None:
    frontend, inputs, staying = cluster.router.frontend, prompts(3), ("p0", "d1")
    streams, reading = await start_streams(cluster, inputs)
    before, computed = frontend.take_snapshot(), sum(map(cluster.computed, staying))
    moving = cluster.running_by_worker()["d0"]
    assert moving
    await cluster.workers["d0"].drained()
    assert not any(len(stream.tokens) == NUM_TOKENS for stream in streams), (
        "the move must not wait for answers to end"
    )
    after = frontend.take_snapshot()
    assert after.kv_transfers - before.kv_transfers >= moving
    assert after.kv_transfers_failed == after.failovers == 0
    moved = after.kv_transfer_bytes - before.kv_transfer_bytes
    assert moved >= moving * PROMPT_LENGTH * BYTES_PER_TOKEN, "KV blocks of whole prompts must move"
    recomputed = sum(map(cluster.computed, staying)) - computed
    assert recomputed < moving * PROMPT_LENGTH / 4, "prompts must not be recomputed"
    found = await reading
    assert found == await cluster.answers(inputs)
