"""Conversations of stored responses: their texts and numbers of characters."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.router.api.generation.parsed_body import parse_body
from penstock.router.api.responses.kept import KeptContent
from penstock.router.api.responses.stored import StoredItems, joined_chat, own_items
from penstock.router.config import RequestBounds
from penstock.router.requests.chat import Chat
from penstock.router.requests.request import ModelLimits

BOUNDS = RequestBounds()
MODEL = ModelLimits("stub", 2048, 1024)
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOL_CHARS = sum(map(len, ("function", "add", "Adds numbers.", "object", "integer")))


def parsed(**fields: Any) -> tuple[Chat, KeptContent]:
    body = {"model": "stub", **fields}
    found = parse_body("response", json.dumps(body).encode(), BOUNDS, MODEL)
    return found.messages, KeptContent.read(found.kept)


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize(
    ("fields", "num_chars"),
    [
        ({}, 0),
        ({"instructions": "be kind"}, 7),
        ({"tools": [TOOL]}, TOOL_CHARS),
        ({"tools": [TOOL], "tool_choice": "none"}, 0),
        ({"tools": [TOOL], "instructions": "be kind"}, TOOL_CHARS + 7),
    ],
)
def test_each_text_of_a_conversation_is_counted_once(
    fields: dict[str, Any], num_chars: int, store: bool
) -> None:
    history: Sequence[StoredItems] = ()
    for turn in range(1, 4):
        chat, content = parsed(input="hello", store=store, **fields)
        assert own_items(chat, content).num_chars == 5
        whole = joined_chat(chat, content, history, BOUNDS)
        assert whole.num_chars == num_chars + 5 * turn
        history = (*history, own_items(chat, content))
