"""Shorter conversations for `truncation: auto` of the Responses API."""

import asyncio
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
from penstock.router.requests import slices
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


async def shorter(messages: list[dict[str, Any]], instructions: Any = None) -> list[list[Any]]:
    """Return the messages of each shorter chat, without the instructions."""
    head = [instructions] if instructions else []
    size = len(dumps(instructions).encode()) if instructions else 0
    found = []
    for chats in await shorter_chats(chat([*head, *messages]), size):
        made = [chats.at(index) for index in range(len(chats.offsets))]
        lists = [json.loads(each.messages) for each in made]
        assert all(each[: len(head)] == head for each in lists)
        assert all(each.num_chars == len(each.messages) for each in made)
        found.append([each[len(head) :] for each in lists])
    return found


async def test_starts_are_those_of_the_messages_alone() -> None:
    messages = [SYSTEM, user(), call("f"), result("f"), {"role": "assistant", "content": ""}]
    text = dumps(messages).encode()
    starts = await message_starts(text)
    assert [start.role for start in starts] == [each["role"] for each in messages]
    decoder = json.JSONDecoder()
    for start, message in zip(starts, messages, strict=True):
        assert decoder.raw_decode(text.decode(), start.offset)[0] == message
    assert await message_starts(b"[]") == []


@pytest.mark.parametrize("instructions", [None, SYSTEM])
async def test_whole_turns_are_left_out_first_and_then_calls_of_the_last_turn(
    instructions: Any,
) -> None:
    first = [user("a"), {"role": "assistant", "content": "b"}]
    second = [user("c"), call("f"), result("f"), call("g"), result("g"), result("h")]
    assert await shorter([*first, *second], instructions) == [
        [second],
        [[second[0], *second[3:]]],
    ]
    third = [user("d")]
    assert await shorter([*first, *second, *third], instructions) == [[[*second, *third], third]]
    assert await shorter([user("a")], instructions) == []


ANSWER = {"role": "assistant", "content": TRICKY}
RULE = {"role": "developer", "content": TRICKY}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        # Case: an answer between a call and its result.
        ([user(), call("f"), ANSWER, result("f"), ANSWER], [[[0, 4]]]),
        ([user(), call("f"), call("g"), result("f"), ANSWER, result("g"), ANSWER], [[[0, 6]]]),
        # Case: a message of the user between a call and its result.
        ([user(), ANSWER, user(), call("f"), user("b"), result("f")], [[[2, 3, 4, 5]]]),
        # Case: other messages directly after the question belong to it.
        ([user(), RULE, ANSWER, call("f"), result("f")], [[[0, 1, 3, 4]]]),
        # Case: a conversation without a question.
        ([call("f"), result("f"), call("f"), result("f"), ANSWER], [[[2, 3, 4], [4]]]),
    ],
)
async def test_results_stay_with_their_calls_and_the_question_stays(
    messages: list[dict[str, Any]], expected: list[list[list[int]]]
) -> None:
    assert await shorter(messages) == [
        [[messages[index] for index in each] for each in chats] for chats in expected
    ]


async def test_other_callbacks_run_while_many_messages_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    whole = chat([user("a")] * 2000)
    reading = asyncio.ensure_future(shorter_chats(whole, 0))
    turns = 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 2 * 2000 // 256
    (chats,) = reading.result()
    assert len(chats.offsets) == 1999
    # Chats are kept as offsets, not as copies.
    assert [type(offset) for offset in chats.offsets[:1]] == [int]


async def test_longest_conversation_that_fits_is_found() -> None:
    drawn = random.Random(3)
    for _ in range(50):
        messages = [user("x" * drawn.randrange(50)) for _ in range(drawn.randrange(1, 30))]
        whole = chat(messages)
        lists = await shorter_chats(whole, 0)
        most = drawn.randrange(40, len(whole.messages) + 10)
        encoded: list[Chat] = []

        async def length_of(each: Chat, encoded: list[Chat] = encoded) -> int:
            encoded.append(each)
            if len(each.messages) > 600:
                raise invalid("too long", "messages")
            return len(each.messages)

        found = await first_that_fits(lists, length_of, min(most, 600))
        fitting = [
            each
            for chats in lists
            for each in map(chats.at, range(len(chats.offsets)))
            if len(each.messages) <= min(most, 600)
        ]
        assert found == (fitting[0] if fitting else None)
        assert len(encoded) <= 7


async def test_overloaded_router_is_reported() -> None:
    async def length_of(each: Chat) -> int:
        raise ServingError(Code.OVERLOADED, "call again later")

    with pytest.raises(ServingError, match="again later"):
        await first_that_fits(await shorter_chats(chat([user(), user()]), 0), length_of, 10)
