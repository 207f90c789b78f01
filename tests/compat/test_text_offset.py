"""`logprobs.text_offset` of completions: the offset of each token in the text."""

from typing import Any

import pytest

from tests.support.served_router import Served
from tests.support.tokenizers import byte_level

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
TEXT = "🚀🚀🚀 fox"


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("stream", [False, True])
async def test_text_offset_counts_a_split_character_once(
    client: Any, served: Served, stream: bool
) -> None:
    prompt = tokens_of(TEXT)
    assert len(prompt) > len(TEXT) - 3  # the text has rocket emojis, each of several tokens
    served.worker.answer = lambda prompt: tokens_of(TEXT)
    answer = await client.completions.create(
        model="stub", prompt=prompt, max_tokens=50, logprobs=0, echo=True, stream=stream
    )
    chunks = [chunk async for chunk in answer] if stream else [answer]
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "".join(part.text for part in parts)
    offsets = [offset for part in parts for offset in part.logprobs.text_offset]
    tokens = [*prompt, *tokens_of(TEXT)]
    assert text == TEXT * 2
    for number, (token, offset) in enumerate(zip(tokens, offsets, strict=False)):
        before = TOKENIZER.decode(tokens[:number]).rstrip("\ufffd")
        assert offset == len(before)
        assert text[offset:].startswith(TOKENIZER.decode([token]).rstrip("\ufffd"))
