"""`cache_salt`: requests share cached KV only under the same salt."""

from typing import Any

import grpc.aio
import openai
import pytest

from penstock.protos import inference_pb2 as grpc_pb
from penstock.protos import inference_pb2_grpc
from tests.support.openai_client import HELLO
from tests.support.served_router import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_cache_salt_separates_prefix_caches(client: Any, served: Served) -> None:
    for more in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}):
        await client.chat.completions.create(
            model="stub", messages=HELLO, max_tokens=1, extra_body=more
        )
    await client.completions.create(
        model="stub", prompt="x", max_tokens=1, extra_body={"cache_salt": "a"}
    )
    none, a, b, *same = (submit.salt for submit in served.worker.submits)
    assert len({none, a, b}) == 3
    assert same == [a, a]
    assert a == none + b"\0a"


async def test_grpc_requests_share_the_cache_of_http_requests(client: Any, served: Served) -> None:
    await client.completions.create(
        model="stub", prompt="x", max_tokens=1, extra_body={"cache_salt": "ä"}
    )
    async with grpc.aio.insecure_channel(served.router.grpc_address) as channel:
        request = grpc_pb.GenerateRequest(text="x", cache_salt="ä")
        request.sampling.max_tokens = 1
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        async for _ in stub.Generate(request):
            pass
    first, second = (submit.salt for submit in served.worker.submits)
    assert first == second


@pytest.mark.parametrize("salt", ["", 7, "x" * 300])
async def test_invalid_cache_salt_is_refused(client: Any, salt: object) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.completions.create(model="stub", prompt="x", extra_body={"cache_salt": salt})
    assert refusal.value.param == "cache_salt"
