"""Stored responses: only their tenant can continue, retrieve, list, delete and cancel them."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from penstock.router.api.responses.store import ResponseStore, StoreLimits
from tests.support.api_keys import user_keys
from tests.support.responses_client import (
    ADD,
    CALL,
    FULL,
    ResponsesModel,
    ended,
    serving_responses,
    tokens_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

both = pytest.mark.parametrize("stream", [False, True])
UNKNOWN = "resp_unknown"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ResponsesModel]:
    async with serving_responses(tmp_path_factory.mktemp("stored")) as model:
        yield model


@both
async def test_previous_response_is_continued(model: ResponsesModel, stream: bool) -> None:
    first = await model("A.", stream, input="a?", instructions="one")
    second = await model("B.", stream, input="b?", previous_response_id=first.id)
    assert model.prompt() == "[user]a?[assistant]A.[user]b?[assistant]"
    assert second.previous_response_id == first.id
    await model("C.", stream, input="c?", previous_response_id=second.id, instructions="two")
    assert model.prompt() == (
        "[system]two[user]a?[assistant]A.[user]b?[assistant]B.[user]c?[assistant]"
    )


@both
async def test_result_of_a_call_continues_the_response(model: ResponsesModel, stream: bool) -> None:
    first = await model(f"<think>why</think>{CALL}", stream, tools=[ADD])
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    await model("It is 42.", stream, input=[result], previous_response_id=first.id)
    assert model.prompt() == (
        f"[user]hello[assistant]<think>why</think>({call.call_id} add a=17 b=25)[tool]42[assistant]"
    )


@both
async def test_call_that_was_cut_off_is_not_passed_to_the_model(
    model: ResponsesModel, stream: bool
) -> None:
    for text, answer in (("I add.", "I add."), ("", "")):
        begun = f"{text}{CALL[: CALL.index('25}')]}"
        first = await model(begun, stream, tools=[ADD], max_output_tokens=len(tokens_of(begun)))
        assert (first.status, first.output[-1].type) == ("incomplete", "function_call")
        await model("x", stream, input="more", previous_response_id=first.id)
        assert model.prompt() == f"[user]hello[assistant]{answer}[user]more[assistant]"


async def test_refusal_of_the_template_names_a_call_that_was_cut_off(
    model: ResponsesModel,
) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1'}
    with pytest.raises(openai.BadRequestError, match="the arguments of a call of 'add' are not"):
        await model("x", input=[{"role": "user", "content": "x"}, call])


async def test_large_body_continues_a_response(model: ResponsesModel) -> None:
    first = await model("A.", input="a?", instructions="old")
    metadata = {str(index): "x" * 500 for index in range(16)}
    # This description is so long that the body is parsed in a helper process.
    tools = [{**ADD, "description": "y" * 40000}]
    body = {"metadata": metadata, "tools": tools, "tool_choice": "none", "instructions": "new"}
    second = await model("B.", input="b?", previous_response_id=first.id, **body)
    assert model.prompt() == "[system]new[user]a?[assistant]A.[user]b?[assistant]"
    assert second.tools[0].description == "y" * 40000
    await model("C.", input="c?", previous_response_id=second.id)
    assert model.prompt() == "[user]a?[assistant]A.[user]b?[assistant]B.[user]c?[assistant]"


@both
async def test_retrieved_response_is_the_one_that_was_sent(
    model: ResponsesModel, stream: bool
) -> None:
    sent = await model(FULL, stream, tools=[ADD])
    found = await model.client.responses.retrieve(sent.id)
    assert found.to_dict() == sent.to_dict()


async def test_input_items_are_listed_in_pages(model: ResponsesModel) -> None:
    first = await model("A.", input="a?")
    items = [{"role": "user", "content": "b?"}, {"role": "user", "content": "c?"}]
    second = await model("B.", input=items, previous_response_id=first.id)
    listed = model.client.responses.input_items.list

    def texts(page: Any) -> list[str]:
        return [item.content[0].text for item in page.data]

    page = await listed(second.id, order="asc")
    assert texts(page) == ["a?", "A.", "b?", "c?"]
    assert page.data[1].id == first.output[0].id
    assert (page.first_id, page.last_id) == (page.data[0].id, page.data[-1].id)
    assert not page.has_more
    pages = [texts(page) async for page in (await listed(second.id, limit=3)).iter_pages()]
    assert pages == [["c?", "b?", "A."], ["a?"]]


async def test_deleted_response_is_gone(model: ResponsesModel) -> None:
    response = await model("x")
    await model.client.responses.delete(response.id)
    for call in (model.client.responses.retrieve, model.client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await call(response.id)


async def test_unknown_ids_are_not_found(model: ResponsesModel) -> None:
    responses = model.client.responses
    for call in (
        responses.retrieve,
        responses.delete,
        responses.cancel,
        responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            await call(UNKNOWN)
    with pytest.raises(openai.NotFoundError) as refusal:
        await model("x", previous_response_id=UNKNOWN)
    assert refusal.value.code == "previous_response_not_found"
    assert refusal.value.param == "previous_response_id"


@both
async def test_response_with_store_false_is_not_stored(model: ResponsesModel, stream: bool) -> None:
    response = await model("x", stream, store=False)
    with pytest.raises(openai.NotFoundError):
        await model.client.responses.retrieve(response.id)


async def test_response_shows_whether_it_is_stored(model: ResponsesModel) -> None:
    assert (await model("x")).store is True
    assert (await model("x", store=False)).store is False


async def test_item_that_is_sent_twice_is_refused(model: ResponsesModel) -> None:
    first = await model("A.", input="a?")
    again = [item.to_dict() for item in first.output]
    twice = [{"role": "user", "content": "b?", "id": "msg_1"}] * 2
    for body in ({"input": again, "previous_response_id": first.id}, {"input": twice}):
        with pytest.raises(openai.BadRequestError, match="two items have the id 'msg_") as refusal:
            await model("B.", **body)
        assert refusal.value.param == "input"
    await model("B.", input=twice, store=False)


async def test_too_large_response_is_sent_but_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = ResponseStore(StoreLimits(tenant_bytes=10_000))
    monkeypatch.setattr("penstock.router.api.responses.routes.ResponseStore", lambda: small)
    async with serving_responses(tmp_path) as model:
        assert (await model("y" * 1000)).store is True
        large = await model("y" * 2000)
        assert (large.store, large.output_text) == (False, "y" * 2000)
        assert f"{large.id} is not stored" in caplog.text
        with pytest.raises(openai.NotFoundError):
            await model.client.responses.retrieve(large.id)
        name = (await model.client.responses.create(model="stub", input="x", background=True)).id
        failed = await ended(model, name)
        assert failed.status == "failed"
        assert "can be stored" in failed.error.message
        with pytest.raises(openai.BadRequestError, match="can be stored") as refusal:
            await model("x", input="y" * 1900)
        assert refusal.value.param == "store"
        assert (await model("x", input="y" * 1900, store=False)).store is False


async def test_another_tenant_does_not_see_a_response(tmp_path: Any) -> None:
    async with serving_responses(tmp_path, api_keys=user_keys("first-key", "second-key")) as model:
        mine = model.client.with_options(api_key="first-key").responses
        other = model.client.with_options(api_key="second-key").responses
        model.answer("x")
        response = await mine.create(model="stub", input="hi")
        calls: list[Callable[[str], Any]] = [
            *(other.retrieve, other.delete, other.cancel, other.input_items.list),
            lambda name: other.create(model="stub", input="hi", previous_response_id=name),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                await call(response.id)
        assert (await mine.retrieve(response.id)).output_text == "x"

        model.served.worker.stepping.clear()
        running = await mine.create(model="stub", input="hi", background=True)
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                await call(running.id)
        assert (await mine.retrieve(running.id)).status == "queued"
        assert (await mine.cancel(running.id)).status == "cancelled"
        model.served.worker.stepping.set()
