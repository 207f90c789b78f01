"""Responses that are generated in the background."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from penstock.router.api.responses.formatter import ResponsesFormatter
from penstock.router.requests.response_stream import Delta
from tests.support.openai_client import message_of
from tests.support.responses_client import ResponsesModel, ended, serving_responses, without_ids
from tests.support.served_router import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ResponsesModel]:
    async with serving_responses(tmp_path_factory.mktemp("background")) as model:
        yield model


async def started(model: ResponsesModel, **body: Any) -> Any:
    """Return a background response whose worker is paused."""
    model.answer("It is 42.")
    model.served.worker.stepping.clear()
    return await model.client.responses.create(model="stub", input="hello", background=True, **body)


async def test_background_response_is_retrieved_when_it_has_ended(model: ResponsesModel) -> None:
    response = await started(model)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    assert (await model.client.responses.retrieve(response.id)).status == "queued"
    model.served.worker.stepping.set()
    response = await ended(model, response.id)
    assert (response.status, response.output_text) == ("completed", "It is 42.")
    await model("x", input="more", previous_response_id=response.id)
    assert model.prompt() == "[user]hello[assistant]It is 42.[user]more[assistant]"


async def test_background_response_is_the_same_as_another(model: ResponsesModel) -> None:
    response = await started(model)
    model.served.worker.stepping.set()
    found = without_ids((await ended(model, response.id)).to_dict())
    assert found == {**without_ids((await model("It is 42.")).to_dict()), "background": True}


async def test_running_response_has_input_items_but_cannot_be_continued(
    model: ResponsesModel,
) -> None:
    first = await model("x", input="before")
    response = await started(model, previous_response_id=first.id)
    items = model.client.responses.input_items
    running = (await items.list(response.id, order="asc")).to_dict()
    assert [item["content"][0]["text"] for item in running["data"]] == ["before", "x", "hello"]
    with pytest.raises(openai.BadRequestError, match="is still being generated") as refusal:
        await model.client.responses.create(
            model="stub", input="x", previous_response_id=response.id
        )
    assert refusal.value.param == "previous_response_id"
    assert refusal.value.code != "previous_response_not_found"
    model.served.worker.stepping.set()
    await ended(model, response.id)
    assert (await items.list(response.id, order="asc")).to_dict() == running


async def test_canceled_response_ends_at_the_worker(model: ResponsesModel) -> None:
    response = await started(model)
    frontend = model.served.router.frontend
    assert frontend.num_open_requests == 1
    canceled = await model.client.responses.cancel(response.id)
    assert (canceled.status, canceled.output) == ("cancelled", [])
    assert frontend.num_open_requests == 0
    again = await model.client.responses.cancel(response.id)
    assert again.to_dict() == canceled.to_dict()
    assert (await model.client.responses.retrieve(response.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="canceled"):
        await model("x", previous_response_id=response.id)
    model.served.worker.stepping.set()


async def test_other_responses_cannot_be_canceled(model: ResponsesModel) -> None:
    response = await model("x")
    with pytest.raises(openai.BadRequestError) as refusal:
        await model.client.responses.cancel(response.id)
    assert "background" in message_of(refusal.value)


async def test_deleting_a_running_response_cancels_it(model: ResponsesModel) -> None:
    response = await started(model)
    await model.client.responses.delete(response.id)
    assert model.served.router.frontend.num_open_requests == 0
    with pytest.raises(openai.NotFoundError):
        await model.client.responses.retrieve(response.id)
    model.served.worker.stepping.set()


async def test_failed_background_response_has_the_error(model: ResponsesModel) -> None:
    worker = model.served.worker
    worker.submits.clear()
    response = await started(model)
    await model.fail()
    failed = await ended(model, response.id)
    assert (failed.status, failed.error.code) == ("failed", "server_error")


async def test_background_is_refused_without_store(model: ResponsesModel) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await model.client.responses.create(model="stub", input="x", background=True, store=False)
    assert refusal.value.param == "background"


async def test_background_responses_of_a_tenant_are_bounded(
    model: ResponsesModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.router.api.responses.background.MAX_PER_TENANT", 1)
    response = await started(model)
    with pytest.raises(openai.RateLimitError):
        await started(model)
    await model.client.responses.cancel(response.id)
    model.served.worker.stepping.set()


async def test_bug_makes_the_response_fail(
    model: ResponsesModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ResponsesFormatter, deltas: Sequence[Delta]) -> Iterator[str]:
        yield ""
        raise ZeroDivisionError

    monkeypatch.setattr(ResponsesFormatter, "full_response", broken)
    model.answer("x")
    response = await model.client.responses.create(model="stub", input="x", background=True)
    failed = await ended(model, response.id)
    assert (failed.status, failed.error.code, failed.output) == ("failed", "server_error", [])


async def test_request_id_is_that_of_the_request(model: ResponsesModel) -> None:
    create = model.client.responses.with_raw_response.create
    sent = await create(model="stub", input="x", background=True)
    assert sent.headers["x-request-id"] == sent.parse().id


async def test_router_that_drains_waits_for_the_response(tmp_path: Path) -> None:
    async with serving_responses(tmp_path) as model:
        response = await started(model)
        router = model.served.router
        draining = asyncio.create_task(router.drain(100))
        await until(lambda: router.frontend.is_draining)
        assert (await model.client.responses.retrieve(response.id)).status == "queued"
        model.served.worker.stepping.set()
        await draining
        assert (await model.client.responses.retrieve(response.id)).status == "completed"


async def test_router_that_stops_ends_the_response_as_failed(tmp_path: Path) -> None:
    async with serving_responses(tmp_path) as model:
        response = await started(model)
        frontend = model.served.router.frontend
        await frontend.drain(0.0)
        await frontend.stop()
        failed = await model.client.responses.retrieve(response.id)
        assert failed.status == "failed"
        assert "shutting down" in failed.error.message
        model.served.worker.stepping.set()
