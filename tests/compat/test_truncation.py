"""`truncate_prompt_tokens`: only the last tokens of a prompt are used."""

from typing import Any

import openai
import pytest

from penstock.protos.worker_codec import unpack_tokens
from tests.support.served_router import Served
from tests.support.tokenizers import byte_level

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
LONG = "word " * 3000


async def sent(served: Served, client: Any, keep: int, prompt: object, **more: object) -> list[int]:
    """Return the prompt that the worker gets."""
    await client.completions.create(
        model="stub", prompt=prompt, extra_body={"truncate_prompt_tokens": keep}, **more
    )
    return unpack_tokens(served.worker.submits[-1].prompt)


async def test_last_tokens_are_kept(client: Any, served: Served) -> None:
    tokens = TOKENIZER.encode(LONG).ids
    assert await sent(served, client, 7, LONG) == tokens[-7:]
    assert await sent(served, client, 7, tokens) == tokens[-7:]
    assert await sent(served, client, 7, [5, 6]) == [5, 6]


async def test_minus_one_keeps_what_fits_beside_the_answer(client: Any, served: Served) -> None:
    assert len(await sent(served, client, -1, LONG, max_tokens=48)) == 2000
    assert len(await sent(served, client, -1, LONG)) == 2048 - 16


async def test_chat_is_truncated_after_the_template(client: Any, served: Served) -> None:
    messages = [{"role": "user", "content": LONG}]
    answer = await client.chat.completions.create(
        model="stub", messages=messages, max_tokens=1, extra_body={"truncate_prompt_tokens": 12}
    )
    assert answer.usage.prompt_tokens == 12
    end = TOKENIZER.encode("[assistant]", add_special_tokens=False).ids
    assert unpack_tokens(served.worker.submits[-1].prompt)[-len(end) :] == end


async def test_echo_shows_the_truncated_prompt(client: Any, served: Served) -> None:
    answer = await client.completions.create(
        model="stub",
        prompt=LONG,
        max_tokens=0,
        echo=True,
        extra_body={"truncate_prompt_tokens": 5},
    )
    assert answer.choices[0].text == TOKENIZER.decode(
        unpack_tokens(served.worker.submits[-1].prompt)
    )


@pytest.mark.parametrize("keep", [0, -2, 2048, 10**30, "5"])
async def test_other_numbers_are_refused(client: Any, keep: object) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.completions.create(
            model="stub", prompt="x", extra_body={"truncate_prompt_tokens": keep}
        )
    assert refusal.value.param == "truncate_prompt_tokens"
