"""Answers of both completion APIs, and the fields of requests that change answers.

The tests cover the rows "answer" of `review_rows.txt`, a review of the OpenAI API.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import openai
import pytest

from penstock.protos.worker_codec import num_prompt_tokens, unpack_tokens
from tests.support.openai_client import HELLO
from tests.support.served_router import Served
from tests.support.stub_worker import END_TOKEN
from tests.support.tokenizers import byte_level

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
SENTENCE = "the quick brown fox jumps over the lazy dog 🚀"
PROMPT = "grüße"


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture(autouse=True)
def sentence(served: Served) -> None:
    served.worker.answer = lambda prompt: tokens_of(SENTENCE)


async def chat(client: Any, **fields: Any) -> Any:
    return await client.chat.completions.create(model="stub", messages=HELLO, **fields)


async def complete(client: Any, **fields: Any) -> Any:
    given = {"prompt": PROMPT, "max_tokens": 100, **fields}
    return await client.completions.create(model="stub", **given)


async def chunks_of(stream: Any) -> Sequence[Any]:
    return [chunk async for chunk in stream if chunk.choices]


def text_of(choice: Any) -> str:
    return str(choice.text if hasattr(choice, "text") else choice.message.content)


def logged_tokens(choice: Any) -> list[str]:
    """Return the names of the tokens in the logprobs of a choice."""
    logprobs = choice.logprobs
    return list(
        [entry.token for entry in logprobs.content]
        if hasattr(logprobs, "content")
        else logprobs.tokens
    )


CALLS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "chat": (chat, {"logprobs": True}),
    "completion": (complete, {"logprobs": 0}),
}
"""For each API: the function that calls it, and the fields that request log probabilities."""


async def test_completion_has_the_fields_of_the_reference(client: Any) -> None:
    answer = (await complete(client)).model_dump()
    assert {"id", "object", "created", "model", "choices", "usage"} <= answer.keys()
    assert (answer["object"], answer["model"]) == ("text_completion", "stub")
    assert answer["choices"][0].keys() >= {"index", "text", "logprobs", "finish_reason"}


async def test_fields_without_a_meaning_here_are_left_out(client: Any) -> None:
    answer = await chat(client, service_tier="flex", store=True, metadata={"a": "b"})
    message = answer.choices[0].message
    assert not {"service_tier", "metadata", "moderation"} & answer.model_fields_set
    assert not {"annotations", "audio", "function_call"} & message.model_fields_set
    assert "completion_tokens_details" not in answer.usage.model_fields_set


@pytest.mark.parametrize("api", CALLS)
async def test_end_token_is_counted_and_has_logprobs(client: Any, api: str) -> None:
    call, logprobs = CALLS[api]
    answer = await call(client, **logprobs)
    (choice,) = answer.choices
    names = logged_tokens(choice)
    assert names[-1] == TOKENIZER.id_to_token(END_TOKEN)
    assert answer.usage.completion_tokens == len(names) == len(tokens_of(SENTENCE)) + 1
    assert (text_of(choice), choice.finish_reason) == (SENTENCE, "stop")


@pytest.mark.parametrize("stop", ["fox ju", ["never", "fox ju"]])
@pytest.mark.parametrize("api", CALLS)
async def test_stop_string_ends_the_text_and_its_tokens_have_logprobs(
    client: Any, api: str, stop: object
) -> None:
    call, logprobs = CALLS[api]
    answer = await call(client, stop=stop, **logprobs)
    (choice,) = answer.choices
    assert text_of(choice) == SENTENCE[: SENTENCE.index("fox ju")]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "fox ju")
    logged = "".join(logged_tokens(choice))
    assert SENTENCE.startswith(logged)
    assert "fox ju" in logged
    assert "fox ju" not in "".join(logged_tokens(choice)[:-1])
    assert answer.usage.completion_tokens == len(logged_tokens(choice))


@pytest.mark.parametrize("api", CALLS)
async def test_stop_token_is_the_stop_reason(client: Any, api: str) -> None:
    token = tokens_of(SENTENCE)[3]
    (choice,) = (await CALLS[api][0](client, extra_body={"stop_token_ids": [token]})).choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token)
    assert text_of(choice) == TOKENIZER.decode(tokens_of(SENTENCE)[:3])


async def test_default_of_max_tokens_is_16_or_the_rest_of_the_context(
    client: Any, served: Served
) -> None:
    await client.completions.create(model="stub", prompt=PROMPT)
    await chat(client)
    await chat(client, max_tokens=None, max_completion_tokens=None)
    first, *chats = served.worker.submits
    assert first.params.max_tokens == 16
    assert [each.params.max_tokens for each in chats] == [2048 - num_prompt_tokens(chats[0])] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", CALLS)
async def test_n_is_the_number_of_choices(client: Any, api: str, stream: bool) -> None:
    answer = await CALLS[api][0](client, n=3, stream=stream)
    texts = dict.fromkeys(range(3), "")
    if stream:
        for chunk in await chunks_of(answer):
            (choice,) = chunk.choices
            texts[choice.index] += (
                choice.text if api == "completion" else choice.delta.content or ""
            )
    else:
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        texts = {choice.index: text_of(choice) for choice in answer.choices}
    expected = [TOKENIZER.decode(tokens_of(SENTENCE)[number:]) for number in range(3)]
    assert list(texts.values()) == expected


@pytest.mark.parametrize("count", [0, 1, 20])
async def test_number_of_alternatives_per_token(client: Any, count: int) -> None:
    answer = await chat(client, logprobs=True, top_logprobs=count, max_tokens=4)
    entries = answer.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in entries] == [count] * 4
    answer = await complete(client, logprobs=count, max_tokens=4)
    logprobs = answer.choices[0].logprobs
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert top[token] == -0.25
        assert len(top) == max(count, 1)  # the chosen token is always included


async def test_bytes_of_logprobs_are_those_of_the_text(client: Any) -> None:
    entries = (await chat(client, logprobs=True)).choices[0].logprobs.content
    assert bytes(byte for entry in entries[:-1] for byte in entry.bytes).decode() == SENTENCE


@pytest.mark.parametrize("api", CALLS)
async def test_stream_has_the_text_logprobs_and_reason_of_the_whole_answer(
    client: Any, api: str
) -> None:
    call, logprobs = CALLS[api]
    (whole,) = (await call(client, **logprobs)).choices
    parts = [
        chunk.choices[0] for chunk in await chunks_of(await call(client, **logprobs, stream=True))
    ]
    is_chat = api == "chat"
    text = "".join((part.delta.content or "") if is_chat else part.text for part in parts)
    assert text == text_of(whole) == SENTENCE
    names = [name for part in parts if part.logprobs for name in logged_tokens(part)]
    assert names == logged_tokens(whole)
    assert [part.finish_reason for part in parts if part.finish_reason] == [whole.finish_reason]


@pytest.mark.parametrize(
    "prompt",
    [PROMPT, tokens_of(PROMPT), [PROMPT, "x"], [tokens_of(PROMPT), tokens_of("x")]],
    ids=["text", "tokens", "texts", "lists of tokens"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_repeats_each_prompt(client: Any, prompt: Any, stream: bool) -> None:
    answer = await complete(client, prompt=prompt, echo=True, max_tokens=2, stream=stream)
    is_many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    begins = [PROMPT, "x"] if is_many else [PROMPT]
    texts = dict.fromkeys(range(len(begins)), "")
    for chunk in await chunks_of(answer) if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    two = TOKENIZER.decode(tokens_of(SENTENCE)[:2])
    assert list(texts.values()) == [begin + two for begin in begins]


async def test_echo_without_new_tokens_returns_the_prompt_and_its_logprobs(
    client: Any, served: Served
) -> None:
    answer = await complete(client, echo=True, max_tokens=0, logprobs=1)
    (choice,), prompt = answer.choices, unpack_tokens(served.worker.submits[0].prompt)
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert choice.logprobs.token_logprobs == [None, *(-token / 8 for token in prompt[1:])]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 0)


async def test_best_of_generates_more_choices_than_it_returns(client: Any, served: Served) -> None:
    answer = await complete(client, best_of=3, n=2)
    assert len(answer.choices) == 2
    assert served.worker.submits[0].params.n == 3


async def test_token_ids_are_returned_on_request(client: Any, served: Served) -> None:
    expected = [*tokens_of(SENTENCE), END_TOKEN]
    more = {"extra_body": {"return_token_ids": True}}
    (completion,) = (await complete(client, **more)).choices
    answer = await chat(client, **more)
    first, second = (unpack_tokens(submit.prompt) for submit in served.worker.submits)
    assert (completion.prompt_token_ids, completion.token_ids) == (first, expected)
    assert (answer.prompt_token_ids, answer.choices[0].token_ids) == (second, expected)


async def test_prompt_logprobs_are_returned_on_request(client: Any, served: Served) -> None:
    more = {"extra_body": {"prompt_logprobs": 2}}
    tables = [
        (await complete(client, **more)).choices[0].prompt_logprobs,
        (await chat(client, **more)).prompt_logprobs,
    ]
    for table, submit in zip(tables, served.worker.submits, strict=True):
        first, *rest = table
        assert first is None
        for token, entry in zip(unpack_tokens(submit.prompt)[1:], rest, strict=True):
            assert entry[str(token)]["logprob"] == -token / 8
            assert entry.keys() >= {"7", "8"}


@pytest.mark.parametrize("count", [21, -1])
async def test_more_logprobs_of_a_prompt_are_refused(client: Any, count: int) -> None:
    for call in (chat, complete):
        with pytest.raises(openai.BadRequestError) as refusal:
            await call(client, extra_body={"prompt_logprobs": count})
        assert refusal.value.param == "prompt_logprobs"
