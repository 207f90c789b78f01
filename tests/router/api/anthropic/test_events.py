"""Pieces of an answer become content blocks, equal for whole and streamed answers."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.router.api.anthropic.events import BlockEvents, blocks_of
from penstock.router.parsers.pieces import ARGUMENTS, CALL, CONTENT, REASONING, Piece

PIECES = [
    Piece(REASONING, "w"),
    Piece(REASONING, 'h"y'),
    Piece(CONTENT, "I\n"),
    Piece(CONTENT, "add 😀."),
    Piece(CALL, "add", 0),
    Piece(ARGUMENTS, '{"a": ', 0),
    Piece(ARGUMENTS, '"grüße"}', 0),
    Piece(CALL, "now", 1, "own id"),
    Piece(CALL, "add", 2),
    Piece(ARGUMENTS, '{"a": [1, 2', 2),
    Piece(CONTENT, "bye"),
]
BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": 'wh"y', "signature": "unsigned"},
    {"type": "text", "text": "I\nadd 😀."},
    {"type": "tool_use", "id": "call 0", "name": "add", "input": {"a": "grüße"}},
    {"type": "tool_use", "id": "own id", "name": "now", "input": {}},
    {"type": "tool_use", "id": "call 2", "name": "add", "input": {"a": [1, 2]}},
    {"type": "text", "text": "bye"},
]


def call_id(piece: Piece) -> str:
    return piece.call_id or f"call {piece.call}"


def assembled(events: BlockEvents, pieces: Sequence[Piece]) -> list[Any]:
    """Return the blocks of the events, with the inputs of calls as text."""
    blocks: list[Any] = []
    open_index = -1
    for event in "".join([*map(events.add, pieces), events.end()]).strip().split("\n\n"):
        data = json.loads(event.split("\ndata: ")[1])
        match data["type"]:
            case "content_block_start":
                assert open_index == -1
                assert data["index"] == len(blocks)
                open_index = data["index"]
                block = data["content_block"]
                blocks.append(block | {"input": ""} if "input" in block else block)
            case "content_block_delta":
                assert data["index"] == open_index
                delta = dict(data["delta"])
                kind = delta.pop("type")
                ((field, text),) = delta.items()
                assert kind == ("input_json_delta" if field == "partial_json" else f"{field}_delta")
                blocks[-1]["input" if field == "partial_json" else field] += text
            case "content_block_stop":
                assert data["index"] == open_index
                open_index = -1
    assert open_index == -1
    return blocks


def test_whole_message_has_one_block_for_each_kind_and_call() -> None:
    assert blocks_of(PIECES, call_id) == BLOCKS


def test_streamed_blocks_are_those_of_the_whole_message() -> None:
    texts = ['{"a": "grüße"}', "", '{"a": [1, 2']
    expected = [
        {**block, "input": texts.pop(0)} if block["type"] == "tool_use" else block
        for block in BLOCKS
    ]
    assert assembled(BlockEvents(call_id), PIECES) == expected


def test_omitted_thinking_has_no_text_but_a_signature() -> None:
    hidden = {**BLOCKS[0], "thinking": ""}
    assert blocks_of(PIECES, call_id, omits_thinking=True) == [hidden, *BLOCKS[1:]]
    assert assembled(BlockEvents(call_id, omits_thinking=True), PIECES)[0] == hidden


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", {}),
        ('{"a": {"b": "c', {"a": {}}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("a=17", {"INVALID_JSON": "a=17"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('{"a": [-Infinity, 1', {"INVALID_JSON": '{"a": [-Infinity, 1'}),
        ('{"a": [{"b": -1e999}]}', {"INVALID_JSON": '{"a": [{"b": -1e999}]}'}),
        ('{"a": "NaN", "b": 1e99}', {"a": "NaN", "b": 1e99}),
        (r'{"a": "\ud83d"}', {"INVALID_JSON": r'{"a": "\ud83d"}'}),
    ],
)
def test_input_is_always_an_object(text: str, expected: Any) -> None:
    (block,) = blocks_of([Piece(CALL, "add"), Piece(ARGUMENTS, text)], call_id)
    assert block["input"] == expected
