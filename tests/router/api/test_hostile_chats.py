"""Costly chat templates and large bodies are processed in helper processes, with limits."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from penstock.common.sampling_params import SamplingParams
from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc
from penstock.router.api.generation.parsed_body import INLINE_BYTES
from penstock.router.api.openai.schema import BaseRequest
from penstock.router.config import HelperLimits, RequestBounds, RouterConfig
from penstock.router.requests.generation_defaults import GenerationDefaults
from tests.support.callback_times import CallbackTimes
from tests.support.openai_errors import check_form
from tests.support.served_router import Served, serving
from tests.support.stub_worker import StubWorker, counting
from tests.support.tokenizers import byte_level, write_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
CONTEXT = 100_000
FULL = 4 << 20
TEMPLATE = (
    "{% set text = messages[-1].content %}"
    "{% if spin or 'spin' in text %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% if j < 0 %}{{ j }}{% endif %}{% endfor %}{% endfor %}{% endif %}"
    "{% if size %}{{ ('a' * size) | length }}{% endif %}"
    "{% if short %}x{% else %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]
SPIN = {"messages": HELLO, "chat_template_kwargs": {"spin": True}}
SECONDS = 3.0
"""CPU time limit of a job. On a slow machine, filling 256 MiB takes longer than the default."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def hostile(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder: Path = write_folder(tmp_path_factory.mktemp("m") / "model", byte_level(), TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    worker = StubWorker()
    worker.answer = counting
    worker.welcome.max_model_len = CONTEXT
    limits = HelperLimits(cpu_seconds=SECONDS)
    async with serving(RouterConfig(folder, "stub", helpers=limits), worker) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def http(hostile: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=hostile.url, timeout=100) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def stub(hostile: Served) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(hostile.router.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    content = json.dumps(body, separators=(",", ":"))
    return await http.post(path, content=content, headers={"content-type": "application/json"})


def message_of(answer: httpx.Response, param: str | None) -> str:
    """Return the message of a refusal, which names `param`."""
    assert answer.status_code == 400, answer.text
    check_form(answer)
    assert answer.json()["error"]["param"] == param
    return str(answer.json()["error"]["message"])


async def test_template_that_never_ends_is_refused_and_other_requests_continue(
    http: httpx.AsyncClient,
) -> None:
    spinning = asyncio.create_task(post(http, CHAT, SPIN))
    await asyncio.sleep(0)
    assert (await http.get("/health")).status_code == 200
    assert (await post(http, COMPLETIONS, {"prompt": "x", "max_tokens": 1})).status_code == 200
    message = message_of(await spinning, "messages")
    assert message.startswith(
        f"the model's chat template needs more than {SECONDS:g} s of processor time"
    )
    answer = await post(http, CHAT, {"messages": HELLO, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


async def test_template_that_allocates_gigabytes_is_refused(http: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "chat_template_kwargs": {"size": 8 << 30}}
    message = message_of(await post(http, CHAT, body), "messages")
    assert message.startswith("the model's chat template needs more than 256 MiB of memory")
    assert (await post(http, TOKENIZE, {"messages": HELLO})).status_code == 200


async def test_grpc_chat_has_the_same_limits(stub: Any) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="spin")])
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the model's chat template needs more than" in str(refusal.value.details())
    chat.messages[0].content = "hello"
    assert (await stub.Tokenize(pb.TokenizeRequest(chat=chat))).tokens


async def test_most_messages_of_a_chat_are_rendered_and_one_more_is_refused(
    http: httpx.AsyncClient, hostile: Served
) -> None:
    most = RequestBounds().max_messages
    text = "the quick brown fox "
    messages = [{"role": "user", "content": text}] * most
    answer = await post(http, TOKENIZE, {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens"] == byte_level().encode(text * most, add_special_tokens=False).ids
    refused = await post(http, TOKENIZE, {"messages": [*messages, messages[0]]})
    assert "4097 messages; at most 4096 are allowed" in message_of(refused, "messages")


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
async def test_chat_template_kwargs_are_bounded_by_name(http: httpx.AsyncClient, path: str) -> None:
    most = RequestBounds().max_template_kwargs
    text = "x" * (most - len('{"y":""}'))
    body = {"messages": HELLO, "chat_template_kwargs": {"y": text}}
    answer = await post(http, path, body)
    assert answer.status_code == 200, answer.text
    for length in (most + 1, 50 * most):
        body["chat_template_kwargs"] = {"y": text + "x" * (length - most)}
        message = message_of(await post(http, path, body), "chat_template_kwargs")
        assert message == (
            f"chat_template_kwargs has {length} bytes as JSON; at most {most} are allowed"
        )


@pytest.mark.parametrize(("depth", "status"), [(100, 200), (5_000, 400), (100_000, 400)])
async def test_deep_chat_template_kwargs_are_rendered_or_refused(
    http: httpx.AsyncClient, depth: int, status: int
) -> None:
    content = json.dumps({"messages": HELLO, "max_tokens": 1})[:-1]
    content += ',"chat_template_kwargs":{"y":' + "[" * depth + "]" * depth + "}}"
    answer = await http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    if status == 400:
        message_of(answer, None)


@pytest.mark.parametrize("value", [[], {"": 0}, 7, "\n"])
async def test_largest_bodies_are_parsed(http: httpx.AsyncClient, value: object) -> None:
    size = len(json.dumps(value, separators=(",", ":"))) + 1
    body = {"prompt": "x", "max_tokens": 1, "other": [value] * ((FULL - 100) // size)}
    answer = await post(http, COMPLETIONS, body)
    assert answer.status_code == 200, answer.text


async def test_body_that_needs_too_much_memory_is_refused(http: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "max_tokens": 1, "other": [[[[]]]] * ((FULL - 100) // 7)}
    message = message_of(await post(http, COMPLETIONS, body), None)
    assert message == "the body needs more than 256 MiB of memory: send a smaller request"
    assert (await post(http, COMPLETIONS, {"prompt": "x", "max_tokens": 1})).status_code == 200


RESPONSES = "/v1/responses"
LONG_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": HELLO, "model": "\n" * 1_000_000}, "model"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": "x" * 300_000, "stop": ["x"]}, "cache_salt"),
    (RESPONSES, {"input": "x", "prompt_cache_key": "x" * 300_000}, "prompt_cache_key"),
    (RESPONSES, {"input": "x", "user": "x" * 200_000, "safety_identifier": "y" * 150_000}, "user"),
    (RESPONSES, {"input": "x", "metadata": {"a": "x" * 300_000}}, "metadata"),
]


@pytest.mark.parametrize(("path", "body", "field"), LONG_FIELDS, ids=lambda value: str(value)[:40])
async def test_long_field_that_the_router_would_parse_is_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    assert message_of(await post(http, path, body), field).startswith(field)


BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ["a b", "c"], "max_tokens": 2, "echo": True, "stop": "x"}),
    (COMPLETIONS, {"prompt": [[5, 6], [7]], "max_tokens": 2, "logit_bias": {"5": 1}, "seed": 4}),
    (COMPLETIONS, {"prompt": [5, 2**70]}),
    (COMPLETIONS, {"prompt": [5, -1]}),
    (COMPLETIONS, {"prompt": [5, True]}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": None}),
    (COMPLETIONS, {"prompt": [[]]}),
    (COMPLETIONS, {"prompt": {"a": 1}}),
    (COMPLETIONS, {"prompt": "x", "stop": [1, "x"]}),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "truncate_prompt_tokens": 1}),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [5] * 5000}),
    (COMPLETIONS, {"prompt": "x", "regex": "a+"}),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True, "more": [1]}}),
    (CHAT, {"messages": HELLO, "max_tokens": 2, "temperature": 0, "stop": ["x"]}),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "so"}], "echo": True}),
    (CHAT, {"messages": HELLO, "max_tokens": 1, "bad_words": ["the"], "top_logprobs": 2}),
    (CHAT, {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"x": [1.5, None, "é"]}}),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": 1}}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user"}]}),
    (CHAT, {"messages": [{"role": "bogus", "content": "x"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    (CHAT, {"messages": HELLO, "model": "nobody"}),
    (CHAT, {}),
    (CHAT, {"messages": HELLO, "response_format": {"type": "text"}}),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}),
    (CHAT, {"messages": HELLO, "guided_choice": ["a", "b"], "structured_outputs": {"regex": "x"}}),
    (CHAT, {"messages": HELLO, "guided_choice": []}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "guided_grammar": "start: 'é'"}),
    (COMPLETIONS, {"prompt": "x", "guided_regex": "(?=a)"}),
    (COMPLETIONS, {"prompt": "x", "guided_regex": "a" * 140_000}),
    (TOKENIZE, {"prompt": "the 日本 </s>", "return_token_strs": True}),
    (TOKENIZE, {"messages": HELLO, "add_generation_prompt": False}),
    (TOKENIZE, {"prompt": 5}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/detokenize", {"tokens": []}),
    ("/detokenize", {"tokens": [99999]}),
    ("/detokenize", {"tokens": ["x"]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda value: str(value)[:60])
async def test_large_body_gets_the_same_answer_as_a_small_one(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    body = {"max_tokens": 2, **body} if path == CHAT else body
    small = await post(http, path, body)
    large = await post(http, path, {**body, "other": "x" * INLINE_BYTES})
    assert large.status_code == small.status_code, large.text
    own = ("id", "created")
    contents = [{**answer.json(), **dict.fromkeys(own)} for answer in (small, large)]
    assert contents[0] == contents[1]


async def test_large_answer_of_tokenize_is_made_in_slices(
    http: httpx.AsyncClient, callback_times: CallbackTimes
) -> None:
    text = "the quick 日本 " * 30_000
    answer = await post(http, TOKENIZE, {"prompt": text, "return_token_strs": True})
    expected = byte_level().encode(text)
    assert answer.json() == {
        "count": len(expected.ids),
        "max_model_len": CONTEXT,
        "tokens": expected.ids,
        "token_strs": expected.tokens,
    }
    # If a single callback made the whole answer, the callback would take about 0.04 s.
    assert callback_times.longest < 0.03
    tokens = {"tokens": expected.ids}
    answer = await post(http, "/detokenize", tokens)
    assert answer.json() == {"prompt": f"<s>{text}"}
    assert callback_times.longest < 0.03


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=str)
async def test_long_echo_of_a_chat_is_made_in_slices(
    http: httpx.AsyncClient, callback_times: CallbackTimes, fields: dict[str, Any]
) -> None:
    text = "\n" * 2_000_000
    body = {"messages": [*HELLO, {"role": "assistant", "content": text}], "echo": True, **fields}
    short = {"chat_template_kwargs": {"short": True}, "max_tokens": 1}
    answer = await post(http, CHAT, body | short)
    assert answer.status_code == 200, answer.text
    assert answer.text.count("\\n") == len(text)
    # If a single callback made the whole answer, the callback would take about 0.03 s.
    assert callback_times.longest < 0.015


async def test_sampling_parameters_are_computed_once_for_a_call(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = BaseRequest.sampling_params

    def counted(self: BaseRequest, defaults: GenerationDefaults) -> SamplingParams:
        calls.append(type(self).__name__)
        return original(self, defaults)

    monkeypatch.setattr(BaseRequest, "sampling_params", counted)
    body = {"max_tokens": 1, "bad_words": ["dog"]}
    for path, content in ((COMPLETIONS, {"prompt": ["a", "b"]}), (CHAT, {"messages": HELLO})):
        assert (await post(http, path, {**body, **content})).status_code == 200
    assert calls == ["CompletionRequest", "ChatCompletionRequest"]


LARGE_MESSAGES: dict[str, tuple[bytes, str]] = {
    "empty messages": (b"\x0a\x00" * ((FULL - 100) // 2), "at most 4096 are allowed"),
    "malformed": (b"\xff" * 100_000, "not a valid penstock.v1.TokenizeRequest"),
    "long text": (pb.TokenizeRequest(text="x " * 1_000_000).SerializeToString(), ""),
}


@pytest.mark.parametrize("name", LARGE_MESSAGES)
async def test_large_grpc_message_is_checked_before_it_is_parsed(
    hostile: Served, name: str
) -> None:
    content, words = LARGE_MESSAGES[name]
    if name == "empty messages":  # many empty messages in the field `chat` of a TokenizeRequest
        number = pb.TokenizeRequest.DESCRIPTOR.fields_by_name["chat"].number
        content = pb.TokenizeRequest(chat=pb.Chat()).SerializeToString()[:-1]
        assert content == bytes([number << 3 | 2])
        chat = LARGE_MESSAGES[name][0]
        content += _varint(len(chat)) + chat
    async with grpc.aio.insecure_channel(hostile.router.grpc_address) as channel:
        call = channel.unary_unary("/penstock.v1.Inference/Tokenize")
        if not words:
            assert len(pb.TokenizeReply.FromString(await call(content)).tokens) > CONTEXT
            return
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(content)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in str(refusal.value.details())


TEXT = "x" * 500
LARGE_CHATS: dict[str, list[pb.ChatMessage]] = {
    "messages": [pb.ChatMessage(role="user", content=TEXT)] * 4096,
    "parts": [pb.ChatMessage(role="user", content_list=[pb.ContentPart(text=TEXT)] * 4096)],
    "calls": [
        pb.ChatMessage(
            role="assistant", tool_calls=[pb.ToolCall(id="1", name="f", arguments=TEXT)] * 4096
        )
    ],
}


@pytest.mark.parametrize("name", LARGE_CHATS)
async def test_large_grpc_chat_is_converted_in_slices(
    stub: Any, callback_times: CallbackTimes, name: str
) -> None:
    chat = pb.Chat(messages=LARGE_CHATS[name], template_kwargs='{"short": true}')
    assert len((await stub.Tokenize(pb.TokenizeRequest(chat=chat))).tokens) == 1
    # If a single callback converted all messages, the callback would take about 0.02 s.
    assert callback_times.longest < 0.012


async def test_small_grpc_message_is_checked_after_a_large_one(stub: Any) -> None:
    await stub.Detokenize(pb.DetokenizeRequest(tokens=[52] * 2 * INLINE_BYTES))
    with pytest.raises(grpc.aio.AioRpcError, match="outside the vocabulary"):
        await stub.Detokenize(pb.DetokenizeRequest(tokens=[99999]))


async def test_large_message_of_another_kind_is_refused(hostile: Served) -> None:
    content = pb.GetModelRequest(name="x" * 100_000).SerializeToString()
    async with grpc.aio.insecure_channel(hostile.router.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await channel.unary_unary("/penstock.v1.Inference/GetModel")(content)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the message penstock.v1.GetModelRequest has" in str(refusal.value.details())


async def test_generate_request_without_unknown_fields_is_the_same(stub: Any) -> None:
    text = "the quick brown fox " * 4000
    request = pb.GenerateRequest(text=text, sampling=pb.Sampling(max_tokens=2, seed=3))
    found = [reply async for reply in stub.Generate(request)]
    assert sum(len(reply.tokens) for reply in found) == 2


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
