"""Detokenize calls whose texts are many times as long as their lists of tokens."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio
from tokenizers import AddedToken

from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc
from penstock.router.config import RequestBounds, RouterConfig
from tests.support.served_router import Served, serving
from tests.support.stub_worker import StubWorker
from tests.support.tokenizers import byte_level, id_of, write_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 100_000
LONG = " " * 128
"""A token of 128 spaces, as Llama 3 has."""

MOST_TOKENS = RequestBounds().max_detokenize_tokens
MOST_BYTES = RequestBounds().max_body_bytes


@pytest.fixture(scope="module")
def long_token() -> int:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(LONG)])
    return id_of(tokenizer, LONG)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(LONG)])
    folder = write_folder(tmp_path_factory.mktemp("m") / "model", tokenizer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    worker = StubWorker()
    worker.welcome.max_model_len = CONTEXT
    async with serving(RouterConfig(folder, "stub"), worker) as served:
        yield served


async def test_text_of_64_mib_is_decoded_while_it_is_sent(served: Served, long_token: int) -> None:
    content = json.dumps({"tokens": [long_token] * MOST_TOKENS}, separators=(",", ":"))
    headers = {"content-type": "application/json"}
    size = 0
    async with (
        httpx.AsyncClient(base_url=served.url, timeout=200) as http,
        http.stream("POST", "/detokenize", content=content, headers=headers) as response,
    ):
        assert response.status_code == 200
        async for piece in response.aiter_raw():
            size += len(piece)
    assert size == len('{"prompt":""}') + MOST_TOKENS * len(LONG)


@pytest.mark.parametrize("num_tokens", [MOST_BYTES // len(LONG), MOST_TOKENS, MOST_TOKENS + 1])
async def test_text_of_a_grpc_reply_is_bounded(
    served: Served, long_token: int, num_tokens: int
) -> None:
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(served.router.grpc_address, options) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Detokenize(pb.DetokenizeRequest(tokens=[long_token] * num_tokens))
        if num_tokens * len(LONG) == MOST_BYTES:
            assert (await call).text == " " * MOST_BYTES
            return
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.value.details() == (
        f"tokens has {num_tokens} tokens; at most {MOST_TOKENS} are allowed"
        if num_tokens > MOST_TOKENS
        else f"the text of the tokens has more than {MOST_BYTES} bytes, the maximum: send fewer "
        "tokens"
    )
