"""Shorter conversations for `truncation: auto`."""

import json
import random
from typing import Any

import pytest

from penstock.router.api.responses.truncation import (
    first_that_fits,
    message_starts,
    shorter_chats,
)
from penstock.router.errors import Code, ServingError, invalid
from penstock.router.requests.chat import Chat
from penstock.router.requests.json_text import dumps

TRICKY = 'x,{"role":"user"},\\"{"role":"'
SYSTEM = {"role": "system", "content": TRICKY}


def user(text: str = TRICKY) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def call(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": '{"role":"x"}'}
    calls = [{"id": name, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "content": TRICKY, "tool_call_id": name}


def chat(messages: list[dict[str, Any]]) -> Chat:
    return Chat(dumps(messages).encode(), 10**6)


def shorter(messages: list[dict[str, Any]], instructions: Any = None) -> list[list[Any]]:
    """Return the messages of the shorter chats without the instructions."""
    head = [instructions] if instructions else []
    size = len(dumps(instructions).encode()) if instructions else 0
    found = []
    for chats in shorter_chats(chat([*head, *messages]), size):
        lists = [json.loads(each.messages) for each in chats]
        assert all(each[: len(head)] == head for each in lists)
        assert all(each.num_chars == len(each.messages) for each in chats)
        found.append([each[len(head) :] for each in lists])
    return found


def test_starts_are_those_of_the_messages_alone() -> None:
    messages = [SYSTEM, user(), call("f"), result("f"), {"role": "assistant", "content": ""}]
    text = dumps(messages).encode()
    starts = message_starts(text)
    assert [start.role for start in starts] == [each["role"] for each in messages]
    decoder = json.JSONDecoder()
    for start, message in zip(starts, messages, strict=True):
        assert decoder.raw_decode(text.decode(), start.offset)[0] == message
    assert message_starts(b"[]") == []


@pytest.mark.parametrize("instructions", [None, SYSTEM])
def test_whole_turns_are_left_out_first_and_then_calls_of_the_last_turn(instructions: Any) -> None:
    first = [user("a"), {"role": "assistant", "content": "b"}]
    second = [user("c"), call("f"), result("f"), call("g"), result("g"), result("h")]
    assert shorter([*first, *second], instructions) == [
        [second],
        [second[1:], second[3:]],
    ]
    third = [user("d")]
    assert shorter([*first, *second, *third], instructions) == [[[*second, *third], third]]
    assert shorter([user("a")], instructions) == []


async def test_longest_conversation_that_fits_is_found() -> None:
    drawn = random.Random(3)
    for _ in range(50):
        messages = [user("x" * drawn.randrange(50)) for _ in range(drawn.randrange(1, 30))]
        whole = chat(messages)
        lists = shorter_chats(whole, 0)
        most = drawn.randrange(40, len(whole.messages) + 10)
        encoded: list[Chat] = []

        async def length_of(each: Chat, encoded: list[Chat] = encoded) -> int:
            encoded.append(each)
            if len(each.messages) > 600:
                raise invalid("too long", "messages")
            return len(each.messages)

        found = await first_that_fits(lists, length_of, min(most, 600))
        fitting = [
            each for chats in lists for each in chats if len(each.messages) <= min(most, 600)
        ]
        assert found == (fitting[0] if fitting else None)
        assert len(encoded) <= 7


async def test_overloaded_router_is_reported() -> None:
    async def length_of(each: Chat) -> int:
        raise ServingError(Code.OVERLOADED, "call again later")

    with pytest.raises(ServingError, match="again later"):
        await first_that_fits(shorter_chats(chat([user(), user()]), 0), length_of, 10)
