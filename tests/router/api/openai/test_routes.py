"""The OpenAI API, used through the `openai` client."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from penstock.protos import worker_pb2
from penstock.protos.worker_codec import num_prompt_tokens, unpack_tokens
from penstock.router.config import RouterConfig
from tests.support.served_router import Served, serving
from tests.support.stub_worker import StubWorker
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
SENTENCE = "the quick brown fox jumps over the lazy dog, naïve 😀 café"
PROMPT = "grüße"


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def sentence_tokens(prompt: object) -> list[int]:
    return tokens_of(SENTENCE)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def sentence_served(shared_served: Served) -> Served:
    """Return the shared router, with a worker that answers every prompt with `SENTENCE`."""
    shared_served.worker.answer = sentence_tokens
    shared_served.worker.submits.clear()
    return shared_served


@pytest_asyncio.fixture(loop_scope="module")
async def client(sentence_served: Served) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(
        base_url=f"{sentence_served.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_models_are_listed(client: Any) -> None:
    (model,) = (await client.models.list()).data
    assert model.id == "stub"
    card = (await client.models.retrieve("stub")).model_extra
    assert (card["max_model_len"], card["vocab_size"]) == (2048, TOKENIZER.get_vocab_size())
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.models.retrieve("gpt")


async def test_chat_completion(client: Any, sentence_served: Served) -> None:
    answer = await client.chat.completions.create(
        model="stub", messages=[{"role": "user", "content": PROMPT}]
    )
    (choice,) = answer.choices
    assert choice.message.content == SENTENCE
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    num_answer = len(tokens_of(SENTENCE)) + 1  # + 1 for the end token
    num_prompt = num_prompt_tokens(sentence_served.worker.submits[0])
    assert answer.usage.completion_tokens == num_answer
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.total_tokens == num_answer + num_prompt


async def test_streamed_chat_completion(client: Any) -> None:
    stream = await client.chat.completions.create(
        model="stub",
        messages=[{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == SENTENCE
    finishes = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert finishes == [None] * (len(finishes) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tokens_of(SENTENCE)) + 1
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_synchronous_client(sentence_served: Served) -> None:
    def stream_text(url: str) -> str:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="stub", prompt=PROMPT, max_tokens=100, stream=True
            )
            return "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(stream_text, sentence_served.url) == SENTENCE


async def test_max_tokens_has_the_default_of_each_api(client: Any, sentence_served: Served) -> None:
    await client.completions.create(model="stub", prompt=PROMPT)
    await client.chat.completions.create(model="stub", messages=[{"role": "user", "content": "x"}])
    plain, chat = sentence_served.worker.submits
    assert plain.params.max_tokens == 16
    assert chat.params.max_tokens == 2048 - num_prompt_tokens(chat)


async def test_reaching_max_tokens_gives_finish_reason_length(client: Any) -> None:
    answer = await client.completions.create(model="stub", prompt=PROMPT, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_each_prompt_has_the_choice_of_its_index(
    client: Any, sentence_served: Served
) -> None:
    sentence_served.worker.answer = lambda prompt: list(reversed(prompt))
    prompts = [tokens_of("the lazy dog"), tokens_of("café")]
    answer = await client.completions.create(model="stub", prompt=prompts)
    assert [choice.index for choice in answer.choices] == [0, 1]
    expected = [TOKENIZER.decode(list(reversed(prompt))) for prompt in prompts]
    assert [choice.text for choice in answer.choices] == expected

    texts = ["", ""]
    stream = await client.completions.create(model="stub", prompt=prompts, stream=True)
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_text_and_usage(
    client: Any, sentence_served: Served, include: bool, stream: bool
) -> None:
    options = {
        "model": "stub",
        "prompt": PROMPT,
        "max_tokens": 1000,
        "stop": ["fox ju", "never"],
        "extra_body": {"include_stop_str_in_output": include},
    }
    if stream:
        chunks = [
            chunk
            async for chunk in await client.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
        ]
        text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
        last, usage = chunks[-2].choices[0], chunks[-1].usage
    else:
        answer = await client.completions.create(**options)
        text, last, usage = answer.choices[0].text, answer.choices[0], answer.usage
    before = SENTENCE[: SENTENCE.index("fox ju")]
    assert text == before + ("fox ju" if include else "")
    assert last.finish_reason == "stop"
    assert last.model_extra["stop_reason"] == "fox ju"
    taken = tokens_of(SENTENCE)[: usage.completion_tokens]
    assert "fox ju" in TOKENIZER.decode(taken)
    assert "fox ju" not in TOKENIZER.decode(taken[:-1])
    assert sentence_served.router.frontend.num_open_requests == 0


async def test_stop_token_is_given_as_stop_reason(client: Any) -> None:
    token = tokens_of(SENTENCE)[3]
    answer = await client.completions.create(
        model="stub", prompt=PROMPT, extra_body={"stop_token_ids": [token]}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == token
    assert answer.choices[0].text == TOKENIZER.decode(tokens_of(SENTENCE)[:3])


async def test_logprobs_of_completions(client: Any) -> None:
    answer = await client.completions.create(model="stub", prompt=PROMPT, logprobs=2, max_tokens=4)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.25] * 4
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(4)]
    assert logprobs.top_logprobs is not None
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert top[token] == -0.25
        assert len(top) == 2


async def test_logprobs_of_chats(client: Any) -> None:
    answer = await client.chat.completions.create(
        model="stub",
        messages=[{"role": "user", "content": PROMPT}],
        logprobs=True,
        top_logprobs=3,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    text_bytes = b"".join(bytes(entry.bytes or []) for entry in content[:-1])
    assert text_bytes.decode() == SENTENCE
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert content[0].top_logprobs[0].logprob == content[0].logprob == -0.25


async def test_streamed_logprobs_equal_unstreamed_ones(client: Any) -> None:
    options = {"model": "stub", "prompt": PROMPT, "logprobs": 1, "max_tokens": 30}
    whole = (await client.completions.create(**options)).choices[0].logprobs
    tokens, offsets = [], []
    async for chunk in await client.completions.create(**options, stream=True):
        tokens += chunk.choices[0].logprobs.tokens
        offsets += chunk.choices[0].logprobs.text_offset
    assert (tokens, offsets) == (whole.tokens, whole.text_offset)


async def test_returned_token_ids_have_the_form_of_vllm(
    client: Any, sentence_served: Served
) -> None:
    more = {"return_token_ids": True}
    expected = [*tokens_of(SENTENCE), 2]
    chat = {"model": "stub", "messages": [{"role": "user", "content": PROMPT}]}
    plain = {"model": "stub", "prompt": PROMPT, "max_tokens": 100}

    answer = await client.completions.create(**plain, extra_body=more)
    prompt = unpack_tokens(sentence_served.worker.submits[-1].prompt)
    assert answer.choices[0].model_extra["token_ids"] == expected
    assert answer.choices[0].model_extra["prompt_token_ids"] == prompt

    chunks = [
        c async for c in await client.completions.create(**plain, stream=True, extra_body=more)
    ]
    extras = [chunk.choices[0].model_extra for chunk in chunks]
    assert [token for extra in extras for token in extra["token_ids"]] == expected
    assert extras[0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in extra for extra in extras[1:])

    whole = await client.chat.completions.create(**chat, extra_body=more)
    prompt = unpack_tokens(sentence_served.worker.submits[-1].prompt)
    assert whole.choices[0].model_extra["token_ids"] == expected
    assert whole.model_extra["prompt_token_ids"] == prompt

    stream = await client.chat.completions.create(**chat, stream=True, extra_body=more)
    events = [chunk async for chunk in stream]
    assert events[0].model_extra["prompt_token_ids"] == prompt
    taken = [t for e in events for t in e.choices[0].model_extra.get("token_ids", [])]
    assert taken == expected


async def test_every_parameter_reaches_the_worker(client: Any, sentence_served: Served) -> None:
    await client.completions.create(
        model="stub",
        prompt=PROMPT,
        max_tokens=9,
        temperature=0.5,
        top_p=0.75,
        presence_penalty=0.25,
        frequency_penalty=-0.25,
        seed=-5,
        logit_bias={"7": 1.5},
        extra_body={
            "top_k": 4,
            "min_p": 0.125,
            "repetition_penalty": 1.25,
            "min_tokens": 3,
            "ignore_eos": True,
            "stop_token_ids": [300],
            "typical_p": 0.25,
            "bad_words": ["dog"],
            "allowed_token_ids": [5, 300, 5],
        },
    )
    params = sentence_served.worker.submits[0].params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.75, 4)
    assert (params.min_p, params.repetition_penalty) == (0.125, 1.25)
    assert (params.presence_penalty, params.frequency_penalty) == (0.25, -0.25)
    assert (params.max_tokens, params.min_tokens) == (9, 3)
    assert params.seed == 2**64 - 5
    assert params.ignore_eos
    assert list(params.stop_tokens) == [300]
    assert dict(params.logit_bias) == {7: 1.5}
    assert params.typical_p == 0.25
    assert list(params.bad_words[0].tokens) == tokens_of("dog")
    assert list(params.allowed_tokens) == [5, 300, 5]
    assert not params.HasField("logprobs")


async def test_omitted_parameters_have_defaults(client: Any, sentence_served: Served) -> None:
    for _ in range(2):
        await client.completions.create(model="stub", prompt=PROMPT)
    first, second = (submit.params for submit in sentence_served.worker.submits)
    assert (first.temperature, first.top_p, first.repetition_penalty) == (1, 1, 1)
    assert first.seed != second.seed
    assert (first.typical_p, len(first.bad_words), len(first.allowed_tokens)) == (1, 0, 0)


async def test_special_tokens_are_shown_on_request(client: Any, sentence_served: Served) -> None:
    sentence_served.worker.answer = lambda prompt: [*tokens_of("a"), 1, *tokens_of("b")]
    plain = await client.completions.create(model="stub", prompt=PROMPT)
    shown = await client.completions.create(
        model="stub", prompt=PROMPT, extra_body={"skip_special_tokens": False}
    )
    assert (plain.choices[0].text, shown.choices[0].text) == ("ab", "a<s>b")


async def test_request_goes_through_prefill_and_decode_pools(config: RouterConfig) -> None:
    peers: dict[str, StubWorker] = {}
    prefill = StubWorker("p0", "prefill", sentence_tokens, peers)
    decode = StubWorker("d0", "decode", sentence_tokens, peers)
    async with (
        serving(config, prefill, decode) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client,
    ):
        answer = await client.completions.create(model="stub", prompt=PROMPT, max_tokens=100)
    assert answer.choices[0].text == SENTENCE
    assert prefill.submits[0].yield_after == 1
    assert decode.submits[0].source.worker == "p0"


async def test_several_choices_of_several_prompts(client: Any, sentence_served: Served) -> None:
    answer = await client.completions.create(
        model="stub", prompt=[PROMPT, "x"], n=3, max_tokens=100, logprobs=0
    )
    tokens = tokens_of(SENTENCE)
    expected = [TOKENIZER.decode(tokens[choice:]) for choice in range(3)] * 2
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text.strip() for choice in answer.choices] == [text.strip() for text in expected]
    assert answer.usage.completion_tokens == 2 * (3 * len(tokens) + 3 - 1 - 2)
    assert [submit.params.n for submit in sentence_served.worker.submits] == [3, 3]


async def test_choices_are_streamed_concurrently(client: Any) -> None:
    stream = await client.chat.completions.create(
        model="stub", messages=[{"role": "user", "content": PROMPT}], n=2, stream=True
    )
    texts, finishes, roles = {0: "", 1: ""}, {}, []
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.delta.role:
            roles.append(choice.index)
        if choice.finish_reason:
            finishes[choice.index] = choice.finish_reason
    assert texts[0] == SENTENCE
    assert SENTENCE.endswith(texts[1])
    assert len(texts[1]) < len(texts[0])
    assert (finishes, sorted(roles)) == ({0: "stop", 1: "stop"}, [0, 1])


async def test_a_stop_string_ends_its_own_choice(client: Any, sentence_served: Served) -> None:
    answer = await client.completions.create(
        model="stub", prompt=PROMPT, n=2, max_tokens=100, stop=["the quick"]
    )
    first, second = answer.choices
    assert (first.text, first.finish_reason) == ("", "stop")
    assert second.text.endswith(SENTENCE[10:])


async def test_best_of_returns_the_likeliest_choice(client: Any, sentence_served: Served) -> None:
    def likelier_later(token: int) -> tuple[float, list[tuple[int, float]]]:
        return (-2.0 if token == tokens_of(SENTENCE)[0] else -1.0), []

    original, sentence_served.worker.logprobs = sentence_served.worker.logprobs, likelier_later
    try:
        answer = await client.completions.create(
            model="stub", prompt=PROMPT, max_tokens=100, extra_body={"best_of": 2}
        )
    finally:
        sentence_served.worker.logprobs = original
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert SENTENCE.endswith(choice.text)
    assert choice.text != SENTENCE
    assert sentence_served.worker.submits[0].params.n == 2


async def test_beam_search(client: Any, sentence_served: Served) -> None:
    """The router returns the beams in the worker's order, without ranking them again."""
    more = {"use_beam_search": True, "best_of": 5, "length_penalty": 0.7, "early_stopping": "never"}
    answer = await client.completions.create(
        model="stub", prompt=PROMPT, max_tokens=100, temperature=0, n=3, extra_body=more
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    ends = [SENTENCE.endswith(choice.text) for choice in answer.choices]
    assert (answer.choices[0].text, ends) == (SENTENCE, [True] * 3)
    params = sentence_served.worker.submits[0].params
    assert (params.n, params.beams.width, params.beams.length_penalty) == (3, 5, 0.7)
    assert params.beams.early_stopping == worker_pb2.EARLY_STOPPING_NEVER
    assert not params.HasField("logprobs")


async def test_beam_search_has_a_default_max_tokens(client: Any, sentence_served: Served) -> None:
    chat = {"model": "stub", "messages": [{"role": "user", "content": "x"}], "n": 64}
    await client.chat.completions.create(**chat, extra_body={"use_beam_search": True})
    assert sentence_served.worker.submits[0].params.max_tokens == 8192 // 64


async def test_echo_puts_the_prompt_before_the_answer(client: Any, sentence_served: Served) -> None:
    answer = await client.completions.create(
        model="stub", prompt=PROMPT, max_tokens=3, echo=True, logprobs=1, n=2
    )
    prompt = unpack_tokens(sentence_served.worker.submits[0].prompt)
    for choice in answer.choices:
        assert choice.text.startswith(PROMPT)
        assert len(choice.text) > len(PROMPT)
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(prompt) + 3
        assert logprobs.token_logprobs[: len(prompt)] == [None, *(-t / 8 for t in prompt[1:])]
        assert logprobs.top_logprobs[0] is None
        assert len(logprobs.top_logprobs[1]) == 2  # the token of the prompt and the likeliest token
        assert logprobs.text_offset[0] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_new_tokens_returns_only_the_prompt(
    client: Any, sentence_served: Served, stream: bool
) -> None:
    answer = await client.completions.create(
        model="stub", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0, stream=stream
    )
    chunks = [chunk async for chunk in answer] if stream else [answer]
    (choice,) = chunks[0].choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert len(choice.logprobs.tokens) == num_prompt_tokens(sentence_served.worker.submits[0])


async def test_prompt_logprobs_have_the_form_of_vllm(client: Any, sentence_served: Served) -> None:
    more = {"prompt_logprobs": 2}
    plain = await client.completions.create(model="stub", prompt=PROMPT, extra_body=more)
    hello = [{"role": "user", "content": PROMPT}]
    chat = await client.chat.completions.create(model="stub", messages=hello, extra_body=more)
    tables = [plain.choices[0].model_extra["prompt_logprobs"], chat.model_extra["prompt_logprobs"]]
    for table, submit in zip(tables, sentence_served.worker.submits, strict=True):
        assert len(table) == num_prompt_tokens(submit)
        assert table[0] is None
        token = unpack_tokens(submit.prompt)[1]
        own = {"logprob": -token / 8, "rank": 3, "decoded_token": TOKENIZER.decode([token])}
        assert {name: entry["rank"] for name, entry in table[1].items()} == {
            str(token): 3,
            "7": 1,
            "8": 2,
        }
        assert table[1][str(token)]["logprob"] == own["logprob"]
