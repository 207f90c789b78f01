"""The thinking budget of a call, from every API to the worker."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import openai
import pytest
import pytest_asyncio
from tokenizers import AddedToken

from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc
from penstock.router.config import RouterConfig
from tests.support import anthropic_client, openai_client
from tests.support.openai_client import HELLO
from tests.support.served_router import Served, serving
from tests.support.stub_worker import StubWorker
from tests.support.tokenizers import TEMPLATE, byte_level, id_of, write_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
WITHOUT_MARKS = byte_level()
TOKENIZER.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
OPEN, CLOSE = id_of(TOKENIZER, "<think>"), id_of(TOKENIZER, "</think>")
REASONS = TEMPLATE + "{% if thinking is defined %}<think>\n{% endif %}"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder: Path = tmp_path_factory.mktemp("budget") / "model"
    config = RouterConfig(write_folder(folder, TOKENIZER, REASONS), "stub")
    async with serving(config, StubWorker()) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(served: Served) -> AsyncIterator[Any]:
    async with openai_client.connect(served) as client:
        yield client


def budget_of(served: Served) -> tuple[int, int, list[int]] | None:
    """Return the budget of the newest request to the worker."""
    params = served.worker.submits[-1].params
    if not params.HasField("thinking_budget"):
        return None
    budget = params.thinking_budget
    return budget.num_tokens, budget.end, list(budget.start)


async def chat(client: Any, **fields: Any) -> Any:
    return await client.chat.completions.create(model="stub", messages=HELLO, extra_body=fields)


async def generate(served: Served, **request: Any) -> None:
    async with grpc.aio.insecure_channel(served.router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        async for _ in stub.Generate(pb.GenerateRequest(**request)):
            pass


async def test_chat(served: Served, client: Any) -> None:
    await chat(client)
    assert budget_of(served) is None
    await chat(client, thinking_token_budget=0)
    assert budget_of(served) == (0, CLOSE, [OPEN])
    await chat(client, thinking_token_budget=7, chat_template_kwargs={"thinking": True})
    # No start tag is needed, because the prompt already begins the reasoning.
    assert budget_of(served) == (7, CLOSE, [])


async def test_messages(served: Served) -> None:
    async with anthropic_client.connect(served) as client:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        call = {"model": "stub", "messages": HELLO, "max_tokens": 1500}
        await client.messages.create(**call, thinking=thinking)
        assert budget_of(served) == (1024, CLOSE, [])
        await client.messages.create(**call)
        assert budget_of(served) is None


async def test_responses(served: Served, client: Any) -> None:
    async def respond(**fields: Any) -> None:
        await client.responses.create(model="stub", input="hi", extra_body=fields)

    await respond()
    assert budget_of(served) is None
    await respond(thinking_token_budget=4)
    assert budget_of(served) == (4, CLOSE, [OPEN])
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget") as caught:
        await respond(thinking_token_budget=-1)
    assert caught.value.param == "thinking_token_budget"


async def test_grpc(served: Served) -> None:
    sampling = pb.Sampling(thinking_token_budget=3)
    await generate(served, text="hi", sampling=sampling)
    assert budget_of(served) == (3, CLOSE, [OPEN])
    await generate(served, tokens=pb.Tokens(ids=[5, OPEN]), sampling=sampling)
    assert budget_of(served) == (3, CLOSE, [])
    with pytest.raises(grpc.aio.AioRpcError, match="from 0 to 2147483647"):
        await generate(served, text="hi", sampling=pb.Sampling(thinking_token_budget=2**32 - 1))


async def test_invalid_budgets_are_refused_by_name(client: Any) -> None:
    for value in (-1, 1.5, "x", 2**31):
        with pytest.raises(openai.BadRequestError, match="thinking_token_budget") as caught:
            await chat(client, thinking_token_budget=value)
        assert caught.value.param == "thinking_token_budget"
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget is not supported"):
        await client.completions.create(
            model="stub", prompt="x", extra_body={"thinking_token_budget": 5}
        )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (REASONS, "no single token ends the reasoning of this model"),
        (f"{TEMPLATE}{{# <|channel|> #}}", "no single token ends the reasoning of this model"),
        (TEMPLATE, "this model does not reason"),
    ],
)
async def test_models_without_a_token_that_ends_reasoning(
    tmp_path: Path, template: str, reason: str
) -> None:
    tokenizer = WITHOUT_MARKS if template == REASONS else TOKENIZER
    config = RouterConfig(write_folder(tmp_path / "model", tokenizer, template), "stub")
    async with serving(config, StubWorker()) as served:
        async with openai_client.connect(served) as client:
            with pytest.raises(openai.BadRequestError, match=f"{reason}: leave out thinking_token"):
                await chat(client, thinking_token_budget=5)
            assert not served.worker.submits
        if template == REASONS:  # For /v1/messages, a template that reads the budget is enough.
            async with anthropic_client.connect(served) as client:
                await client.messages.create(
                    model="stub",
                    messages=HELLO,
                    max_tokens=1500,
                    thinking={"type": "enabled", "budget_tokens": 1024},
                )
            assert budget_of(served) is None
