"""Records of a worker's latest steps, read over gRPC."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from penstock.protos import worker_pb2 as wire
from penstock.protos import worker_pb2_grpc
from penstock.workers.config import WorkerConfig
from penstock.workers.service.grpc_service import RunningWorker, serve_worker
from tests.support.attached_router import AttachedRouter, greedy
from tests.support.tiny import tiny_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(3, 40))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningWorker]:
    checkpoint: Path = tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    running = await serve_worker(WorkerConfig("w0", checkpoint, kv_cache_mib=1, token="secret"))
    yield running
    await running.stop()


async def steps_of(worker: RunningWorker, token: str) -> wire.StepRecords:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        records: wire.StepRecords = await stub.Steps(
            wire.StepsRequest(), metadata=(("authorization", f"Bearer {token}"),)
        )
        return records


async def test_step_records_have_the_work_of_each_step(
    worker: RunningWorker,
) -> None:
    router = await AttachedRouter(worker.address, "secret").open()
    before = len((await steps_of(worker, "secret")).number)
    await router.submit(1, PROMPT, greedy(3))
    await router.answer(1)
    await router.close()
    steps = await steps_of(worker, "secret")
    assert list(steps.sequences[before:]) == [1, 1, 1]
    assert list(steps.tokens[before:]) == [len(PROMPT), 1, 1]
    assert list(steps.positions[before:]) == [37, 38, 39]
    assert list(steps.pairs[before:]) == [37 * 37 / 2, 0, 0]
    assert all(seconds > 0 for seconds in steps.seconds)
    assert list(steps.ended) == sorted(steps.ended)


async def test_prompt_of_another_tenant_takes_the_work_of_a_new_prompt(
    worker: RunningWorker,
) -> None:
    """The time to the first token therefore does not show which prompts other tenants have sent."""
    prompt = PROMPT[::-1]
    router = await AttachedRouter(worker.address, "secret").open()
    work = []
    for request, salt in enumerate((b"a", b"a", b"b", b"a\0own"), 10):
        before = len((await steps_of(worker, "secret")).number)
        await router.submit(request, prompt, greedy(3), salt=salt)
        await router.answer(request)
        steps = await steps_of(worker, "secret")
        columns = (steps.tokens, steps.sequences, steps.positions, steps.pairs)
        work.append([list(column[before:]) for column in columns])
    await router.close()
    first, again, *others = work
    assert again[0][0] < first[0][0] == len(prompt)
    assert others == [first, first]


async def test_step_records_need_the_token(worker: RunningWorker) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await steps_of(worker, "wrong")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
