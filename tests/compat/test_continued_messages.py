"""Answers that continue the last message, in both APIs that have them, by the official clients."""

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from penstock.router.config import RouterConfig
from tests.compat.test_messages import TEMPLATE, TOKENIZER, tokens_of
from tests.support import anthropic_client, openai_client
from tests.support.served_router import serving
from tests.support.stub_worker import StubWorker
from tests.support.tokenizers import write_folder

pytestmark = pytest.mark.asyncio

BEGUN: list[Any] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "The answer is"},
]


async def test_continued_text_is_content_of_a_model_that_always_reasons(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", TOKENIZER, TEMPLATE)
    config = RouterConfig(folder, "stub", reasoning_parser="deepseek_r1")
    async with (
        serving(config, StubWorker()) as served,
        anthropic_client.connect(served) as messages,
        openai_client.connect(served) as chats,
    ):
        served.worker.answer = lambda prompt: tokens_of(" 42.")
        message = await messages.messages.create(model="stub", messages=BEGUN, max_tokens=50)
        assert [(each.type, each.text) for each in message.content] == [("text", " 42.")]
        chat = await chats.chat.completions.create(
            model="stub", messages=BEGUN, extra_body={"continue_final_message": True}
        )
        assert chat.choices[0].message.content == " 42."
        assert "reasoning_content" not in chat.choices[0].message.to_dict()


async def test_message_with_calls_cannot_be_continued(tmp_path: Path) -> None:
    config = RouterConfig(write_folder(tmp_path / "model", TOKENIZER, TEMPLATE), "stub")
    use = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}
    blocks = {"role": "assistant", "content": [use, {"type": "text", "text": "So"}]}
    called = {
        "role": "assistant",
        "content": "So",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        ],
    }
    async with (
        serving(config, StubWorker()) as served,
        anthropic_client.connect(served) as messages,
        openai_client.connect(served) as chats,
    ):
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.1\.content\.0: .*tool_use"):
            await messages.messages.create(model="stub", messages=[BEGUN[0], blocks], max_tokens=50)
        with pytest.raises(openai.BadRequestError, match="has tool_calls") as refusal:
            await chats.chat.completions.create(
                model="stub",
                messages=[BEGUN[0], called],
                extra_body={"continue_final_message": True},
            )
        assert refusal.value.param == "messages"
        assert not served.worker.submits
