"""`usage.prompt_tokens_details.cached_tokens`, with a real worker and its prefix cache."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from penstock.protos import inference_pb2 as grpc_pb
from penstock.protos import inference_pb2_grpc
from penstock.router.config import RouterConfig
from penstock.router.server import serve_router
from penstock.workers.config import WorkerConfig
from penstock.workers.service.grpc_service import serve_worker
from tests.support import anthropic_client
from tests.support.checkpoints import make_checkpoint
from tests.support.openai_client import connect
from tests.support.served_router import Served, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 16
TEXT = "the water runs down the pipe to the wheel and the wheel turns in the stream. " * 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "llama3")
    worker = await serve_worker(WorkerConfig("w", folder, kv_cache_mib=2, block_size=BLOCK))
    router = await serve_router(RouterConfig(folder, "stub", http_port=0, grpc_port=0))
    await router.set_workers({"w": worker.address})
    await until(lambda: router.frontend.workers())
    yield Served(router, ())
    await router.stop()
    await worker.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def client(module_served: Served) -> AsyncIterator[Any]:
    async with connect(module_served) as client:
        yield client


def cached(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)


def reusable(usage: Any) -> int:
    """Return the number of tokens of a repeated prompt that can be cached: all but the last."""
    return int(usage.prompt_tokens - 1)


async def complete(client: Any, prompt: Any, salt: str, **more: Any) -> Any:
    answer = await client.completions.create(
        model="stub", prompt=prompt, max_tokens=2, extra_body={"cache_salt": salt}, **more
    )
    return answer.usage


async def test_repeated_prompt_is_cached_up_to_its_last_token(client: Any) -> None:
    assert cached(await complete(client, TEXT, "repeated")) == 0
    usage = await complete(client, TEXT, "repeated")
    assert cached(usage) == reusable(usage) > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_prompt_under_another_salt_is_not_cached(client: Any) -> None:
    await complete(client, TEXT, "a salt")
    assert cached(await complete(client, TEXT, "another salt")) == 0


async def test_choices_share_the_prompt_which_counts_once(client: Any) -> None:
    assert cached(await complete(client, TEXT, "choices", n=3)) == 0
    usage = await complete(client, TEXT, "choices", n=3)
    assert cached(usage) == reusable(usage)


async def test_cached_tokens_of_all_prompts_are_added(client: Any) -> None:
    alone = await complete(client, TEXT, "prompts")
    usage = await complete(client, [TEXT, "x", TEXT], "prompts")
    assert cached(usage) == 2 * reusable(alone)


@pytest.mark.parametrize("is_continuous", [False, True])
async def test_streams_have_the_same_number(client: Any, is_continuous: bool) -> None:
    call = {"model": "stub", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 3}
    call["extra_body"] = {"cache_salt": f"streams {is_continuous}"}
    assert cached((await client.chat.completions.create(**call)).usage) == 0
    options = {"include_usage": True, "continuous_usage_stats": is_continuous}
    stream = await client.chat.completions.create(**call, stream=True, stream_options=options)
    usages = [chunk.usage async for chunk in stream if chunk.usage is not None]
    assert {cached(usage) for usage in usages} == {reusable(usages[-1])}
    assert (len(usages) > 1) == is_continuous


async def test_grpc_reports_the_same_number(client: Any, module_served: Served) -> None:
    usage = await complete(client, TEXT, "grpc")
    async with grpc.aio.insecure_channel(module_served.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        sampling = grpc_pb.Sampling(max_tokens=2)
        request = grpc_pb.GenerateRequest(text=TEXT, cache_salt="grpc", sampling=sampling)
        replies = [reply async for reply in stub.Generate(request)]
    assert replies[-1].usage.cached_prompt_tokens == reusable(usage) > 0


async def test_messages_count_cached_tokens_apart_from_input_tokens(module_served: Served) -> None:
    call = {"model": "stub", "messages": [{"role": "user", "content": f"messages {TEXT}"}]}
    async with anthropic_client.connect(module_served) as client:
        empty = (await client.messages.create(**call, max_tokens=0)).usage
        assert empty.cache_read_input_tokens == 0
        whole = (await client.messages.create(**call, max_tokens=3)).usage
        async with client.messages.stream(**call, max_tokens=3) as stream:
            streamed = (await stream.get_final_message()).usage
        counted = await client.messages.count_tokens(**call)
    for usage in (whole, streamed):
        num_cached = usage.cache_read_input_tokens
        assert num_cached == counted.input_tokens - 1
        assert usage.input_tokens + num_cached == counted.input_tokens


async def test_continued_response_has_its_conversation_cached(client: Any) -> None:
    create = client.responses.create
    body = {"model": "stub", "input": TEXT, "max_output_tokens": 4}
    first = await create(**body, extra_body={"cache_salt": "response"})
    assert first.usage.input_tokens_details.cached_tokens == 0
    more = {**body, "input": "more", "extra_body": {"cache_salt": "response"}}
    stream = await create(**more, previous_response_id=first.id, stream=True)
    *_, last = [event async for event in stream]
    details = last.response.usage.input_tokens_details
    shared = (first.usage.input_tokens - 1) // BLOCK * BLOCK
    # The last full block of the first prompt may differ in the second prompt.
    assert details.cached_tokens >= shared - BLOCK > 0
    assert last.response.usage.input_tokens > first.usage.input_tokens
