"""Pings in Anthropic's streams while the next token is late, read by the official client."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from penstock.protos import worker_pb2 as pb
from penstock.router.api.generation import response
from penstock.router.config import RouterConfig
from tests.compat.test_messages import TEMPLATE, TOKENIZER, Model, tokens_of
from tests.support.anthropic_client import HELLO, connect
from tests.support.served_router import serving, until
from tests.support.stub_worker import StubWorker
from tests.support.tokenizers import write_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    folder: Path = tmp_path_factory.mktemp("pings") / "model"
    config = RouterConfig(write_folder(folder, TOKENIZER, TEMPLATE), "stub")
    async with serving(config, StubWorker()) as served, connect(served) as client:
        yield Model(served, client)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response, "KEEP_ALIVE_SECONDS", 0.01)


async def begun(model: Model) -> Any:
    """Return a stream that has begun but has no tokens, because the worker is paused."""
    worker = model.served.worker
    worker.answer = lambda prompt: tokens_of("It is 42.")
    worker.submits.clear()
    worker.stepping.clear()
    return await model.client.messages.create(
        model="stub", messages=HELLO, max_tokens=100, stream=True
    )


async def test_stream_begins_with_pings_while_the_prompt_is_computed(model: Model) -> None:
    stream = await begun(model)
    names: list[str] = []
    async for event in stream._iter_events():  # The client's public stream hides pings.
        names.append(event.event)
        if len(names) == 4:
            assert names == ["message_start", "ping", "ping", "ping"]
            model.served.worker.stepping.set()
    rest = [name for name in names[4:] if name != "ping"]
    assert rest[:2] == ["content_block_start", "content_block_delta"]
    assert rest[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "message_start" not in rest


async def test_pings_fill_a_pause_between_two_tokens(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = model.served.worker
    # Make steps slow, so that the client reads some tokens before the answer ends.
    monkeypatch.setattr(worker, "step_seconds", 0.02)
    worker.answer = lambda prompt: tokens_of("It is 42. " * 20)
    worker.stepping.set()
    stream = await model.client.messages.create(
        model="stub", messages=HELLO, max_tokens=90, stream=True
    )
    names: list[str] = []
    async for event in stream._iter_events():
        names.append(event.event)
        if names.count("content_block_delta") == 1:
            worker.stepping.clear()
        if names[-3:] == ["ping"] * 3:
            monkeypatch.setattr(worker, "step_seconds", 0.0)
            worker.stepping.set()
    last = len(names) - names[::-1].index("content_block_delta") - 1
    first = names.index("content_block_delta")
    assert names[first:last].count("ping") >= 3
    assert names[-2:] == ["message_delta", "message_stop"]
    assert names.count("message_start") == 1


@pytest.mark.parametrize("stops", [[], ["never"]])
async def test_pings_are_sent_while_tokens_cause_no_event(
    model: Model, monkeypatch: pytest.MonkeyPatch, stops: list[str]
) -> None:
    monkeypatch.setattr(response, "KEEP_ALIVE_SECONDS", 0.1)
    worker = model.served.worker
    monkeypatch.setattr(worker, "step_seconds", 0.02)
    worker.answer = lambda prompt: tokens_of(f"<think>{'abc ' * 15}</think>x")
    worker.stepping.set()
    stream = await model.client.messages.create(
        model="stub",
        messages=HELLO,
        max_tokens=500,
        stream=True,
        thinking={"type": "adaptive", "display": "omitted"},
        stop_sequences=stops,
    )
    names = [event.event async for event in stream._iter_events()]
    # A ping follows the first `content_block_start`; the reasoning takes 12 intervals.
    assert names.count("ping") > 4


async def test_client_assembles_the_same_message(model: Model) -> None:
    model.served.worker.stepping.clear()
    call = {"model": "stub", "messages": HELLO, "max_tokens": 100}
    model.served.worker.answer = lambda prompt: tokens_of("It is 42.")
    # The stream starts before the first token.
    async with model.client.messages.stream(**call) as stream:
        model.served.worker.stepping.set()
        message = await stream.get_final_message()
    whole = await model("It is 42.")
    assert message.content[0].text == whole.content[0].text
    assert (message.usage, message.stop_reason) == (whole.usage, whole.stop_reason)


async def test_error_before_the_first_token_is_an_event(model: Model) -> None:
    stream = await begun(model)
    worker = model.served.worker
    (submit,) = worker.submits
    step = pb.Step()
    step.ended.add(request=submit.request, attempt=submit.attempt, reason="out of memory")
    worker.send(pb.ToRouter(step=step))
    worker.runs.clear()
    with pytest.raises(anthropic.APIStatusError, match="out of memory"):
        async for _ in stream:
            pass
    worker.stepping.set()


async def test_request_ends_when_the_client_leaves_before_the_first_token(model: Model) -> None:
    stream = await begun(model)
    frontend = model.served.router.frontend
    assert frontend.num_open_requests == 1
    await stream.response.aclose()
    await until(lambda: not frontend.num_open_requests)
    model.served.worker.stepping.set()


async def test_whole_message_waits_without_pings(model: Model) -> None:
    worker = model.served.worker
    worker.submits.clear()
    worker.stepping.clear()
    waiting = asyncio.create_task(model("It is 42."))
    await until(lambda: worker.submits)
    worker.stepping.set()
    assert (await waiting).content[0].text == "It is 42."
