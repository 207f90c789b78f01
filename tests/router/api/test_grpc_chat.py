"""Chats with tools over gRPC: tools, calls and results reach the chat template."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc
from penstock.protos.worker_codec import unpack_tokens
from penstock.router.config import RouterConfig
from tests.support.served_router import serving
from tests.support.stub_worker import StubWorker
from tests.support.tokenizers import byte_level, write_folder
from tests.support.tool_chats import ADD, RENDERED, TEMPLATE

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
HISTORY = [
    pb.ChatMessage(role="user", content_list=[pb.ContentPart(text="sum?")], name="ann"),
    pb.ChatMessage(
        role="assistant",
        tool_calls=[pb.ToolCall(id="call_1", name="add", arguments='{"a": 17, "b": 25}')],
        reasoning_content="add them",
    ),
    pb.ChatMessage(role="tool", tool_call_id="call_1", content="42"),
]


class Prompts:
    """Sends a chat to Tokenize and to Generate, and checks that both make the same prompt."""

    def __init__(self, stub: Any, submits: Sequence[Any]) -> None:
        self.stub = stub
        self.submits = submits

    async def __call__(self, **chat: Any) -> str:
        found = pb.Chat(**chat)
        reply = await self.stub.Tokenize(pb.TokenizeRequest(chat=found))
        request = pb.GenerateRequest(chat=found, sampling=pb.Sampling(max_tokens=1))
        _ = [reply async for reply in self.stub.Generate(request)]
        assert unpack_tokens(self.submits[-1].prompt) == list(reply.tokens)
        return str(TOKENIZER.decode(list(reply.tokens), skip_special_tokens=False))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def prompt(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prompts]:
    folder: Path = tmp_path_factory.mktemp("tools") / "model"
    config = RouterConfig(write_folder(folder, TOKENIZER, TEMPLATE), "stub")
    async with (
        serving(config, StubWorker()) as served,
        grpc.aio.insecure_channel(served.router.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        yield Prompts(stub, served.worker.submits)


HI = [pb.ChatMessage(role="user", content="hi")]


async def test_history_with_tool_calls_reaches_the_template(prompt: Prompts) -> None:
    assert await prompt(messages=HISTORY) == RENDERED


async def test_tools_documents_and_variables_reach_the_template(prompt: Prompts) -> None:
    documents = [json.dumps({"text": "x"})]
    found = await prompt(messages=HI, documents=documents, template_kwargs='{"variable": "v"}')
    assert found == '[{"text": "x"}]v[user  ]hi</s>'
    found = await prompt(messages=HI, tools=[json.dumps(ADD)])
    assert found == json.dumps([ADD]) + "[user  ]hi</s>"


async def test_tools_of_a_large_message_reach_the_template(prompt: Prompts) -> None:
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=HI, tools=[json.dumps(ADD)]),
        sampling=pb.Sampling(max_tokens=1),
        request_id="x" * 40_000,  # so long that a helper process checks the message
    )
    _ = [reply async for reply in prompt.stub.Generate(request)]
    tokens = unpack_tokens(prompt.submits[-1].prompt)
    shown = TOKENIZER.decode(tokens, skip_special_tokens=False)
    assert shown == json.dumps([ADD]) + "[user  ]hi</s>"


PIECE = pb.ContentPart(text="y")


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [pb.ChatMessage(**fields)]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": HI, "tools": ["{"]}, "tools is not valid JSON"),
    ({"messages": HI, "tools": ["[1]"]}, "tools must be a JSON object"),
    (
        {"messages": HI, "tools": ['{"type": "x"}']},
        "tools.0.type must be 'function', not 'x'",
    ),
    ({"messages": HI, "tools": ['{"a":' + "[" * 70 + "]" * 70 + "}"]}, "more than 64 levels"),
    ({"messages": HI, "tools": ["{}"] * 513}, "513 tools; at most 512"),
    ({"messages": HI, "documents": ["x"]}, "documents is not valid JSON"),
    ({"messages": HI, "documents": ['{"a": NaN}']}, "documents is not valid JSON"),
    ({"messages": HI, "template_kwargs": "1"}, "template_kwargs must be a JSON object"),
    (
        {"messages": HI, "template_kwargs": '{"tools": 1}'},
        "contains tools, which cannot be set there",
    ),
    (message(role="tool", content="x"), "no tool_call_id"),
    (message(role="user", content="x", reasoning_content="y"), "which only the role 'assistant'"),
    (
        message(role="user", content_list=[pb.ContentPart()]),
        "a content part of a message has no text",
    ),
    (
        message(role="user", content="x", content_list=[pb.ContentPart(text="y")]),
        "both 'content' and 'content_list'",
    ),
    (
        message(role="user", content_list=[PIECE] * 4097),
        "content parts; at most 4096",
    ),
    (message(role="assistant", tool_calls=[pb.ToolCall()] * 4097), "tool calls; at most 4096"),
]


@pytest.mark.parametrize(("chat", "why"), REFUSED)
async def test_wrong_chats_are_refused_by_name(
    prompt: Prompts, chat: dict[str, Any], why: str
) -> None:
    found = pb.Chat(**chat)
    for call in (
        prompt.stub.Tokenize(pb.TokenizeRequest(chat=found)),
        prompt.stub.Generate(pb.GenerateRequest(chat=found)).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert why in str(refusal.value.details())
