"""Requests that do not fit into the model's context."""

from typing import Any

import openai
import pytest

from tests.support.openai_client import HELLO, message_of
from tests.support.served_router import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


def check(refusal: openai.BadRequestError, param: str) -> None:
    assert (refusal.code, refusal.param) == ("context_length_exceeded", param)
    message = message_of(refusal)
    assert "this model's maximum context length is 2048" in message


@pytest.mark.parametrize("words", [3000, 200_000], ids=["tokenized", "not tokenized"])
async def test_too_long_prompt_has_the_words_that_clients_look_for(
    client: Any, served: Served, words: int
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.completions.create(model="stub", prompt="word " * words)
    check(refusal.value, "prompt")
    messages = [{"role": "user", "content": "word " * words}]
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(model="stub", messages=messages, stream=True)
    check(refusal.value, "messages")
    assert served.worker.submits == []


async def test_too_large_max_tokens_has_the_words_that_clients_look_for(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.completions.create(model="stub", prompt="x", max_tokens=2048)
    check(refusal.value, "max_tokens")
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(
            model="stub", messages=HELLO, max_completion_tokens=2048
        )
    check(refusal.value, "max_completion_tokens")


async def test_other_refusals_have_no_such_code(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.completions.create(model="stub", prompt="x", temperature=7)
    assert refusal.value.code == "400"
