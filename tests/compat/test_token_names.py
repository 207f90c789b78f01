"""`return_tokens_as_token_ids`: logprobs name tokens by their ids."""

from typing import Any

import pytest

from tests.support.openai_client import HELLO
from tests.support.served_router import Served
from tests.support.tokenizers import byte_level

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
ANSWER = TOKENIZER.encode("a 🚀", add_special_tokens=False).ids
BY_ID = {"return_tokens_as_token_ids": True}


@pytest.fixture(autouse=True)
def rocket(served: Served) -> None:
    served.worker.answer = lambda prompt: ANSWER


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_name_tokens_by_id(client: Any, stream: bool) -> None:
    options = {"model": "stub", "prompt": "x", "logprobs": 2, "stream": stream}
    found = []
    for more in (BY_ID, {}):
        answer = await client.completions.create(**options, extra_body=more)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        found.append([chunk.choices[0].logprobs for chunk in chunks])
    by_id, by_text = found
    tokens = [token for part in by_id for token in part.tokens]
    assert tokens == [f"token_id:{token}" for token in (*ANSWER, 2)]
    for part in by_id:
        for token, top in zip(part.tokens, part.top_logprobs, strict=True):
            assert top[token] == -0.25
            assert len(top) == 2
    offsets = [[offset for part in parts for offset in part.text_offset] for parts in found]
    assert offsets[0] == offsets[1]
    assert any("\ufffd" in token for part in by_text for token in part.tokens)


async def test_chats_name_tokens_by_id_and_keep_the_bytes(client: Any) -> None:
    answer = await client.chat.completions.create(
        model="stub", messages=HELLO, logprobs=True, top_logprobs=1, extra_body=BY_ID
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == [f"token_id:{token}" for token in (*ANSWER, 2)]
    assert [entry.top_logprobs[0].token for entry in content] == [each.token for each in content]
    assert bytes(byte for entry in content[:-1] for byte in entry.bytes).decode() == "a 🚀"
