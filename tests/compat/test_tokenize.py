"""/tokenize and /detokenize, in vLLM's format."""

from typing import Any

import openai
import pytest

from penstock.protos.worker_codec import unpack_tokens
from tests.support.openai_client import HELLO
from tests.support.served_router import Served
from tests.support.tokenizers import byte_level

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
TEXT = "the quick 日本 </s>"


async def post(client: Any, name: str, **body: object) -> Any:
    """Call a route that is not below /v1."""
    root = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    return await root.post(name, cast_to=object, body={"model": "stub", **body})


async def test_tokenize_counts_and_returns_the_tokens_of_a_text(client: Any) -> None:
    expected = TOKENIZER.encode(TEXT).ids
    assert await post(client, "/tokenize", prompt=TEXT) == {
        "count": len(expected),
        "max_model_len": 2048,
        "tokens": expected,
        "token_strs": None,
    }
    bare = await post(client, "/tokenize", prompt=TEXT, add_special_tokens=False)
    assert bare["tokens"] == TOKENIZER.encode(TEXT, add_special_tokens=False).ids
    assert len(bare["tokens"]) == len(expected) - 1


async def test_tokenize_returns_the_strings_of_the_tokens_on_request(client: Any) -> None:
    found = await post(client, "/tokenize", prompt=TEXT, return_token_strs=True)
    assert found["token_strs"] == TOKENIZER.encode(TEXT).tokens


async def test_tokenize_of_a_chat_equals_the_prompt_that_a_worker_gets(
    client: Any, served: Served
) -> None:
    for more in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        found = await post(client, "/tokenize", messages=HELLO, **more)
        await client.chat.completions.create(
            model="stub", messages=HELLO, max_tokens=1, extra_body=more
        )
        assert found["tokens"] == unpack_tokens(served.worker.submits[-1].prompt)
        assert found["count"] == len(found["tokens"])


async def test_detokenize_returns_the_text_with_special_tokens(client: Any) -> None:
    tokens = TOKENIZER.encode(TEXT).ids
    assert await post(client, "/detokenize", tokens=tokens) == {"prompt": f"<s>{TEXT}"}
    assert await post(client, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": [5] * (64 * 2048 + 1)}, "tokens"),
    ],
)
async def test_invalid_body_is_refused_by_name(
    client: Any, name: str, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await post(client, name, **body)
    assert refusal.value.param == param


@pytest.mark.parametrize("name", ["/tokenize", "/detokenize"])
async def test_unknown_model_is_not_found(client: Any, name: str) -> None:
    with pytest.raises(openai.NotFoundError):
        await post(client, name, model="gpt-9", prompt="x", tokens=[5])
