"""Responses with `truncation: auto` (openai's client)."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from penstock.protos.worker_codec import num_prompt_tokens
from tests.support.responses_client import ADD, ResponsesModel, serving_responses

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ResponsesModel]:
    async with serving_responses(tmp_path_factory.mktemp("truncated")) as model:
        yield model


def dialog(count: int, size: int = 200) -> list[Any]:
    """Return turns of user and assistant, followed by a question."""
    found: list[Any] = []
    for index in range(count):
        found.append({"role": "user", "content": f"q{index}" + "y" * size})
        found.append({"role": "assistant", "content": f"a{index}"})
    return [*found, {"role": "user", "content": "last?"}]


async def test_oldest_messages_are_left_out(model: ResponsesModel) -> None:
    given = dialog(20)
    body = {"input": given, "instructions": "Be brief.", "max_output_tokens": 100}
    with pytest.raises(openai.BadRequestError) as refusal:
        await model("x", **body)
    assert refusal.value.code == "context_length_exceeded"
    response = await model("x", **body, truncation="auto")
    assert response.truncation == "auto"
    prompt = model.prompt()
    kept = [index for index in range(20) if f"[user]q{index}y" in prompt]
    assert kept == list(range(kept[0], 20))
    assert kept[0] > 0
    assert prompt.startswith(f"[system]Be brief.[user]q{kept[0]}y")
    assert prompt.endswith("[user]last?[assistant]")
    num_tokens = num_prompt_tokens(model.served.worker.submits[-1])
    turn = num_tokens // len(kept)
    assert 2048 - 100 - 2 * turn < num_tokens <= 2048 - 100
    page = await model.client.responses.input_items.list(response.id, limit=100)
    assert len(page.data) == 41


async def test_conversation_that_fits_is_whole(model: ResponsesModel) -> None:
    await model("x", input=dialog(3), truncation="auto")
    assert model.prompt().startswith("[user]q0y")


async def test_stored_conversation_is_truncated(model: ResponsesModel) -> None:
    first = await model("A.", input=dialog(20), truncation="auto")
    await model("B.", input="more?", previous_response_id=first.id, truncation="auto")
    assert model.prompt().endswith("[user]last?[assistant]A.[user]more?[assistant]")
    with pytest.raises(openai.BadRequestError, match="context"):
        await model("B.", input="more?", previous_response_id=first.id)


async def test_calls_of_the_last_turn_are_left_out_with_their_results(
    model: ResponsesModel,
) -> None:
    items: list[Any] = [{"role": "user", "content": "go"}]
    for index in range(20):
        name = f"c{index}"
        items.append({"type": "function_call", "call_id": name, "name": "add", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": name, "output": "y" * 200})
    await model("x", input=items, tools=[ADD], truncation="auto")
    prompt = model.prompt()
    calls = [index for index in range(20) if f"(c{index} add)" in prompt]
    assert calls == list(range(calls[0], 20))
    assert prompt.count("[tool]") == len(calls)
    assert prompt.count("[user]go") == 1


async def test_message_that_cannot_fit_is_refused(model: ResponsesModel) -> None:
    for given in ([*dialog(2), {"role": "user", "content": "y" * 3000}], "y" * 3000):
        with pytest.raises(openai.BadRequestError) as refusal:
            await model("x", input=given, truncation="auto")
        assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "input")
