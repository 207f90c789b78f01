"""The fields of a large body, which the router parses after a helper process has checked them."""

import json
from typing import Any

import pytest

from penstock.router.api.generation.parsed_body import (
    IDS_PER_FRAGMENT,
    INLINE_BYTES,
    MAX_FIELDS_CHARS,
    job_items,
    parse_job,
    read_parsed,
)
from penstock.router.config import RequestBounds
from penstock.router.errors import ServingError
from penstock.router.parsers.tools.tool_parameters import ToolParameters
from penstock.router.requests.request import ModelLimits

BOUNDS = RequestBounds()
MODEL = ModelLimits("stub", 2048, 300_000)


def parsed(**fields: Any) -> list[bytes]:
    data = json.dumps({"prompt": "x" * 2 * MAX_FIELDS_CHARS, **fields}).encode()
    return parse_job(BOUNDS, job_items("completion", data, MODEL))


async def test_prompt_and_allowed_tokens_may_be_longer_than_other_fields() -> None:
    tokens = list(range(MODEL.vocab_size))
    found = await read_parsed(parsed(allowed_token_ids=tokens, cache_salt="salt"))
    assert (found.body.allowed_token_ids, found.body.cache_salt) == (tokens, "salt")
    assert found.prompts == ["x" * 2 * MAX_FIELDS_CHARS]
    assert "allowed_token_ids" in found.body.model_fields_set


def test_allowed_tokens_are_split_into_pieces_that_are_parsed_fast() -> None:
    """Parsing 128,000 ids at once and checking them holds the event loop for 15 ms."""
    _, fields, _, *pieces = parsed(allowed_token_ids=list(range(MODEL.vocab_size)))
    assert len(fields) < 1000
    *tokens, prompt = pieces
    assert [len(json.loads(each)) for each in tokens[:-1]] == [IDS_PER_FRAGMENT] * (len(tokens) - 1)
    assert len(json.loads(prompt)) == 2 * MAX_FIELDS_CHARS


async def test_empty_list_of_allowed_tokens_stays_empty() -> None:
    assert (await read_parsed(parsed(allowed_token_ids=[]))).body.allowed_token_ids == []


def test_longest_of_fields_that_are_too_long_together_is_named() -> None:
    half = MAX_FIELDS_CHARS // 2
    parsed(cache_salt="x" * (half - 10), model="x" * (half - 10))
    with pytest.raises(ServingError) as refusal:
        parsed(cache_salt="x" * (half - 10), model="x" * (half + 10))
    assert refusal.value.param == "model"
    assert refusal.value.message == (
        f"model has {half + 12} characters as JSON; all fields but messages, prompts, tools and "
        f"documents may have at most {MAX_FIELDS_CHARS} in all"
    )


async def test_tools_of_a_large_body_reach_the_parsers() -> None:
    found = await read_parsed(parsed_chat(900))
    assert ToolParameters(found.messages.functions).types_of("f", "p5") == {"string"}


def test_function_whose_parameters_have_too_many_values_is_refused() -> None:
    with pytest.raises(ServingError, match="'f' have 10005 JSON values; at most 10000") as refusal:
        parsed_chat(5001)
    assert refusal.value.param == "tools"


def parsed_chat(num_parameters: int) -> list[bytes]:
    properties = {f"p{number}": {"type": "string"} for number in range(num_parameters)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    body = {
        "messages": [{"role": "user", "content": "x" * INLINE_BYTES}],
        "tools": [{"type": "function", "function": function}],
    }
    return parse_job(BOUNDS, job_items("chat", json.dumps(body).encode(), MODEL))
