"""Calls that would cost too much are refused before work is done, over HTTP and gRPC."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc
from tests.support.openai_errors import check_form
from tests.support.served_router import Served
from tests.support.stub_worker import counting

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 2048
ECHOED = {"prompt": [[52] * 2046] * 4, "n": 64, "echo": True, "logprobs": 20, "max_tokens": 0}


@pytest.fixture
def unused(shared_served: Served) -> Served:
    """Return the shared router, whose worker has recorded no requests."""
    shared_served.worker.submits.clear()
    shared_served.worker.answer = counting
    return shared_served


@pytest_asyncio.fixture(loop_scope="module")
async def http(unused: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=unused.url, timeout=60) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def stub(unused: Served) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(unused.router.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


MESSAGE = {"role": "user", "content": "x"}
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "many echoed prompts": (COMPLETIONS, ECHOED, "n", f"costs {4 * 64 * 2047 * 21}; at most"),
    "long answers": (
        COMPLETIONS,
        {"prompt": [5], "n": 64, "max_tokens": 2000, "logprobs": 20},
        "n",
        f"costs {64 * 2000 * 21}; at most 1000000",
    ),
    "prompt logprobs": (
        COMPLETIONS,
        {"prompt": [[5] * 2000] * 64, "prompt_logprobs": 20},
        "prompt_logprobs",
        "costs",
    ),
    "lists of many prompts": (
        COMPLETIONS,
        {"prompt": [[5]] * 1024, "max_tokens": 1, "allowed_token_ids": [5] * 400}
        | {"logit_bias": {str(i): 1 for i in range(400)}, "stop_token_ids": [5] * 256},
        "allowed_token_ids",
        f"have {1024 * 1056} entries; at most 1048576 are allowed",
    ),
    "many prompts": (COMPLETIONS, {"prompt": ["a"] * 300_000}, "prompt", "not 300000"),
    "long list of token ids": (COMPLETIONS, {"prompt": [5] * 1_000_000}, "prompt", "1000000"),
    "long text": (COMPLETIONS, {"prompt": " " * 1_000_000}, "prompt", "1000000 characters"),
    "long text that is truncated": (
        COMPLETIONS,
        {"prompt": " " * 4_000_000, "truncate_prompt_tokens": 5},
        "prompt",
        "4000000 characters",
    ),
    "logit_bias": (
        COMPLETIONS,
        {"prompt": "x", "logit_bias": {str(i): 1 for i in range(200_000)}},
        "logit_bias",
        "has 200000 entries; at most 1024 are allowed",
    ),
    "messages": (CHAT, {"messages": [MESSAGE] * 100_000}, "messages", "at most 4096"),
    "tokenized messages": (
        "/tokenize",
        {"messages": [MESSAGE] * 100_000},
        "messages",
        "at most 4096",
    ),
    "content parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5000}]},
        "messages",
        "has 5000 content parts; at most 4096 are allowed",
    ),
    "chat text": (
        CHAT,
        {"messages": [{"role": "user", "content": "x" * 1_000_000}]},
        "messages",
        "1000000 characters",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_costly_http_request_is_refused_with_its_size_and_the_bound(
    http: httpx.AsyncClient, unused: Served, case: str
) -> None:
    path, body, param, words = REFUSED[case]
    response = await http.post(path, json=body)
    assert response.status_code == 400
    error = check_form(response)
    assert error["param"] == param
    assert words in error["message"]
    assert unused.worker.submits == []


async def test_as_many_prompts_as_allowed_are_answered(http: httpx.AsyncClient) -> None:
    body = {"prompt": [[5, 6]] * 1024, "max_tokens": 1}
    response = await http.post(COMPLETIONS, json=body)
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 1024


async def test_absent_max_tokens_is_limited_to_what_a_call_may_cost(
    http: httpx.AsyncClient, unused: Served
) -> None:
    body = {"messages": [MESSAGE], "n": 32, "logprobs": True, "top_logprobs": 20}
    unused.worker.answer = lambda prompt: [7]
    assert (await http.post(CHAT, json=body)).status_code == 200
    (submit,) = unused.worker.submits
    assert submit.params.max_tokens == 1_000_000 // (32 * 21)


async def refusal(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return refused.value.details() or ""


async def first_reply(stub: Any, **request: Any) -> Any:
    async for reply in stub.Generate(pb.GenerateRequest(**request)):
        return reply


async def test_costly_grpc_request_is_refused_with_its_cost_and_the_bound(
    stub: Any, unused: Served
) -> None:
    sampling = pb.Sampling(n=64, max_tokens=2000, logprobs=20)
    message = await refusal(first_reply(stub, text="hi", sampling=sampling))
    assert f"the call costs {64 * 2000 * 21}; at most 1000000 is allowed" in message
    assert unused.worker.submits == []


REFUSED_BY_GRPC: list[tuple[dict[str, Any], str]] = [
    ({"tokens": pb.Tokens(ids=[5] * 1_000_000)}, "prompt has 1000000 tokens"),
    ({"text": " " * 1_000_000}, "prompt has 1000000 characters"),
    (
        {"chat": {"messages": [MESSAGE] * 4097}},
        "messages has 4097 messages; at most 4096 are allowed",
    ),
    (
        {"text": "x", "sampling": pb.Sampling(logit_bias=dict.fromkeys(range(100_000), 1.0))},
        "has 100000 entries; at most 1024 are allowed",
    ),
    (
        {"text": "x", "sampling": pb.Sampling(allowed_tokens=[5] * 1_000_000)},
        "allowed_token_ids has 1000000 tokens; at most 401",
    ),
    ({"text": "x", "stop": ["a"] * 100_000}, "stop has 100000 strings; at most 16 are allowed"),
    (
        {"text": "x", "resume_from": [pb.ResumeState(tokens=[5] * 1_000_000)]},
        f"resume_from has 1000000 tokens; at most {CONTEXT}",
    ),
    (
        {"text": "x", "resume_from": [pb.ResumeState(choice=i) for i in range(10_000)]},
        "resume_from has 10000 choices; at most 64 are allowed",
    ),
]


@pytest.mark.parametrize(("request_", "words"), REFUSED_BY_GRPC)
async def test_oversized_list_in_a_grpc_request_is_refused(
    stub: Any, unused: Served, request_: dict[str, Any], words: str
) -> None:
    assert words in await refusal(first_reply(stub, **request_))
    assert unused.worker.submits == []


async def test_longest_answers_are_resumed_with_all_stop_strings(stub: Any, unused: Served) -> None:
    known = [7 + i % 390 for i in range(2040)]
    states = [pb.ResumeState(choice=choice, tokens=known) for choice in range(64)]
    sampling = pb.Sampling(n=64, max_tokens=2044, seed=1)
    stops = [f"{i:02}never" for i in range(16)]
    call = stub.Generate(
        pb.GenerateRequest(text="x", sampling=sampling, stop=stops, resume_from=states)
    )
    num_tokens = sum([len(reply.tokens) async for reply in call])
    assert num_tokens == 64 * 4


async def test_tokenize_and_detokenize_are_bounded(stub: Any) -> None:
    text = pb.TokenizeRequest(text=" " * 1_000_000)
    assert "text has 1000000 characters" in await refusal(stub.Tokenize(text))
    chat = pb.TokenizeRequest(chat={"messages": [MESSAGE] * 4097})
    assert "at most 4096" in await refusal(stub.Tokenize(chat))
    most = 64 * CONTEXT
    tokens = pb.DetokenizeRequest(tokens=[7] * (most + 1))
    assert f"at most {most}" in await refusal(stub.Detokenize(tokens))
    assert (await stub.Detokenize(pb.DetokenizeRequest(tokens=[7] * most))).text
