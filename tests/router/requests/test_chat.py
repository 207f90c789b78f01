"""Chats of gRPC calls become the JSON that helper processes read."""

import json
from typing import Any

import pytest

from penstock.router.requests.chat import chat_of, num_chars_of
from penstock.router.requests.json_text import CHARS_PER_FRAGMENT

CALL = {"id": "é", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": 'é "\n' * CHARS_PER_FRAGMENT}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "é"}]}],
    [{"role": "user", "content": []}, {"role": "user", "content": ""}],
    [{"role": "assistant", "content": None, "tool_calls": [CALL, CALL], "reasoning_content": "r"}],
    [{"role": "tool", "content": "3", "name": "add", "tool_call_id": "é"}],
]


@pytest.mark.parametrize("messages", MESSAGES, ids=range(len(MESSAGES)))
async def test_json_of_a_chat_has_its_messages_and_its_characters_are_counted(
    messages: list[dict[str, Any]],
) -> None:
    chat = await chat_of(messages, tools=b"[{}]")
    assert json.loads(chat.messages) == messages
    assert chat.num_chars == sum(map(num_chars_of, messages)) + len("[{}]")
