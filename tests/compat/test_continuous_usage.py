"""`stream_options.continuous_usage_stats`: the usage so far in every chunk."""

from typing import Any

import openai
import pytest

from tests.support.openai_client import HELLO

pytestmark = pytest.mark.asyncio(loop_scope="module")


def check(usages: list[Any], at_first: int) -> None:
    num_prompt = usages[0].prompt_tokens
    assert num_prompt > 0
    counts = [usage.completion_tokens for usage in usages]
    assert counts[0] == at_first
    assert counts == sorted(counts)
    assert counts[-1] == 9
    for usage in usages:
        assert usage.prompt_tokens == num_prompt
        assert usage.total_tokens == num_prompt + usage.completion_tokens


@pytest.mark.parametrize("at_end", [False, True])
async def test_every_chunk_of_a_completion_has_the_usage(client: Any, at_end: bool) -> None:
    stream = await client.completions.create(
        model="stub",
        prompt="x",
        max_tokens=9,
        stream=True,
        stream_options={"continuous_usage_stats": True, "include_usage": at_end},
    )
    chunks = [chunk async for chunk in stream]
    usages = [chunk.usage for chunk in chunks]
    check(usages, usages[0].completion_tokens)
    assert usages[0].completion_tokens > 0
    assert (chunks[-1].choices == []) == at_end


async def test_every_chunk_of_a_chat_has_the_usage(client: Any) -> None:
    stream = await client.chat.completions.create(
        model="stub",
        messages=HELLO,
        max_tokens=9,
        stream=True,
        stream_options={"continuous_usage_stats": True, "include_usage": True},
    )
    check([chunk.usage async for chunk in stream], 0)


async def test_other_types_are_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.completions.create(
            model="stub",
            prompt="x",
            stream=True,
            stream_options={"continuous_usage_stats": "yes"},
        )
    assert refusal.value.param == "stream_options"
