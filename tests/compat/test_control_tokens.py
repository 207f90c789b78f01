"""Control tokens in prompts of completions, with and without `no_special_in_completions`."""

from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from penstock.protos import inference_pb2 as grpc_pb
from penstock.protos import inference_pb2_grpc
from penstock.protos.worker_codec import unpack_tokens
from penstock.router.config import RouterConfig
from tests.support.openai_client import serving_with_client
from tests.support.served_router import Served
from tests.support.tokenizers import byte_level, id_of

pytestmark = pytest.mark.asyncio

TOKENIZER = byte_level()
PROMPT = "a</s>b"
END = id_of(TOKENIZER, "</s>")


async def prompts(served: Served, client: Any) -> list[list[int]]:
    """Send the prompt over HTTP and gRPC; return the tokens that workers and /tokenize show."""
    await client.completions.create(model="stub", prompt=PROMPT, max_tokens=1)
    await client.completions.create(
        model="stub", prompt=PROMPT, max_tokens=1, extra_body={"add_special_tokens": False}
    )
    root = client.with_options(base_url=served.url)
    shown = await root.post("/tokenize", cast_to=object, body={"prompt": PROMPT})
    async with grpc.aio.insecure_channel(served.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        request = grpc_pb.GenerateRequest(text=PROMPT)
        request.sampling.max_tokens = 1
        async for _ in stub.Generate(request):
            pass
        counted = await stub.Tokenize(grpc_pb.TokenizeRequest(text=PROMPT))
    sent = [unpack_tokens(submit.prompt) for submit in served.worker.submits]
    return [*sent, shown["tokens"], list(counted.tokens)]


async def test_completions_keep_control_tokens_by_default(config: RouterConfig) -> None:
    async with serving_with_client(config) as (served, client):
        expected = TOKENIZER.encode(PROMPT).ids
        bare = TOKENIZER.encode(PROMPT, add_special_tokens=False).ids
        assert END in bare
        assert await prompts(served, client) == [expected, bare, expected, expected, expected]


async def test_no_special_in_completions_reads_control_tokens_as_text(config: RouterConfig) -> None:
    plain = replace(config, no_special_in_completions=True)
    async with serving_with_client(plain) as (served, client):
        found = await prompts(served, client)
        assert all(END not in tokens for tokens in found)
        assert {TOKENIZER.decode(tokens) for tokens in found} == {PROMPT}
        begin = id_of(TOKENIZER, "<s>")
        assert [tokens[0] == begin for tokens in found] == [True, False, True, True, True]
        ids = [5, END, 6]
        await client.completions.create(model="stub", prompt=ids, max_tokens=1)
        assert unpack_tokens(served.worker.submits[-1].prompt) == ids
