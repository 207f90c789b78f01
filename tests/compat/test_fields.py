"""Each field of OpenAI's reference: the values that are accepted, refused, and sent to a worker."""

from typing import Any

import openai
import pytest

from penstock.protos import worker_pb2
from tests.support.openai_client import HELLO
from tests.support.served_router import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHARED_ACCEPTED: list[tuple[str, object]] = [
    ("model", ""),
    ("model", None),
    ("frequency_penalty", -2),
    ("frequency_penalty", None),
    ("presence_penalty", 2.0),
    ("logit_bias", {"5": -100}),
    ("logit_bias", {"5": 100}),
    ("logit_bias", None),
    ("max_tokens", 1),
    ("max_tokens", None),
    ("n", 64),
    ("n", None),
    ("seed", -(2**63)),
    ("seed", 2**64 - 1),
    ("seed", None),
    ("stop", "x"),
    ("stop", ["x" * 256] * 16),
    ("stop", []),
    ("stop", None),
    ("stream", False),
    ("stream", None),
    ("stream_options", None),
    ("temperature", 0),
    ("temperature", 2),
    ("temperature", None),
    ("top_p", 1e-6),
    ("top_p", 1),
    ("top_p", None),
    ("user", "me"),
    ("an_unknown_field", {"a": [1]}),
]
SHARED_REFUSED: list[tuple[str, object]] = [
    ("model", 7),
    ("frequency_penalty", 2.5),
    ("frequency_penalty", "1"),
    ("frequency_penalty", True),
    ("presence_penalty", -2.5),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"999999": 1}),
    ("logit_bias", {"5": 101}),
    ("max_tokens", 0),
    ("max_tokens", 2.0),
    ("max_tokens", 5000),
    ("n", 0),
    ("n", 65),
    ("seed", "5"),
    ("seed", 1.0),
    ("seed", 2**64),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop", "x" * 257),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),  # this field is refused without `stream`
    ("temperature", 2.1),
    ("temperature", "1"),
    ("top_p", 0),
    ("top_p", 1.5),
]
CHAT_ACCEPTED: list[tuple[str, object]] = [
    ("audio", None),
    ("function_call", "none"),
    ("function_call", "auto"),
    ("function_call", None),
    ("functions", []),
    ("functions", None),
    ("logprobs", True),
    ("logprobs", None),
    ("top_logprobs", 0),
    ("top_logprobs", None),
    ("max_completion_tokens", 1),
    ("max_completion_tokens", None),
    ("metadata", {"a": "b"}),
    ("store", True),
    ("safety_identifier", "x"),
    ("modalities", ["text"]),
    ("modalities", None),
    ("moderation", None),
    ("parallel_tool_calls", True),
    ("prediction", {"type": "content", "content": "x"}),
    ("prompt_cache_key", "x"),
    ("prompt_cache_options", {"mode": "implicit"}),
    ("prompt_cache_retention", "24h"),
    ("reasoning_effort", None),
    ("response_format", {"type": "text"}),
    ("response_format", None),
    ("service_tier", "auto"),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("tool_choice", None),
    ("tools", []),
    ("tools", None),
    ("verbosity", "medium"),
    ("verbosity", None),
    ("web_search_options", None),
]
CHAT_REFUSED: list[tuple[str, object]] = [
    ("audio", {"voice": "alloy"}),
    ("function_call", {"name": "f"}),
    ("functions", [{"name": "f"}]),
    ("logprobs", 3),
    ("top_logprobs", 2),  # this field is refused without `logprobs: true`
    ("max_completion_tokens", 0),
    ("max_completion_tokens", 3.0),
    ("messages", []),
    ("messages", None),
    ("messages", "hello"),
    ("messages", [{"role": "tool", "content": "x"}]),
    ("messages", [{"role": "function", "content": "x", "name": "f"}]),
    ("messages", [{"role": "robot", "content": "x"}]),
    ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
    ("modalities", []),
    ("moderation", {"mode": "block"}),
    ("prompt_cache_options", {"mode": "explicit"}),
    ("reasoning_effort", "bogus"),
    ("response_format", {"type": "json_schema"}),
    ("tool_choice", "required"),
    ("tools", [{"type": "function"}]),
    # The chat template of these tests does not read tools.
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("documents", [{"text": "x"}]),  # the template does not read documents
    ("verbosity", "high"),
    ("web_search_options", {}),
]
COMPLETION_ACCEPTED: list[tuple[str, object]] = [
    ("prompt", ["x", "y"]),
    ("prompt", [5, 6]),
    ("prompt", [[5, 6], [7]]),
    ("prompt", ["x", [5, 6]]),
    ("best_of", 3),
    ("best_of", None),
    ("echo", True),
    ("echo", None),
    ("logprobs", 0),
    ("logprobs", 20),
    ("logprobs", None),
    ("suffix", ""),
    ("suffix", None),
]
COMPLETION_REFUSED: list[tuple[str, object]] = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", None),
    ("prompt", [99999]),
    ("prompt", 5),
    ("best_of", 65),
    ("echo", "yes"),
    ("logprobs", 21),
    ("logprobs", -1),
    ("suffix", "x"),
]


def named(rows: list[tuple[str, object]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r:.40}") for name, value in rows]


async def chat(client: Any, fields: dict[str, object]) -> Any:
    body = {"model": "stub", "messages": HELLO, "max_completion_tokens": 2, **fields}
    return await client.chat.completions.create(messages=(), model="", extra_body=body)


async def complete(client: Any, fields: dict[str, object]) -> Any:
    body = {"model": "stub", "prompt": "hello", "max_tokens": 2, **fields}
    return await client.completions.create(prompt="", model="", extra_body=body)


@pytest.mark.parametrize(("name", "value"), named(SHARED_ACCEPTED + CHAT_ACCEPTED))
async def test_chat_accepts_the_field(client: Any, name: str, value: object) -> None:
    answer = await chat(client, {name: value})
    assert answer.choices[0].message.content is not None


@pytest.mark.parametrize(("name", "value"), named(SHARED_ACCEPTED + COMPLETION_ACCEPTED))
async def test_completions_accept_the_field(client: Any, name: str, value: object) -> None:
    answer = await complete(client, {name: value})
    assert answer.choices[0].text is not None


@pytest.mark.parametrize(("name", "value"), named(SHARED_REFUSED + CHAT_REFUSED))
async def test_chat_refuses_the_value_by_the_fields_name(
    client: Any, served: Served, name: str, value: object
) -> None:
    fields = {name: value}
    if name == "max_tokens":
        fields["max_completion_tokens"] = None
    with pytest.raises(openai.BadRequestError) as refusal:
        await chat(client, fields)
    assert refusal.value.param == name
    assert served.worker.submits == []


@pytest.mark.parametrize(("name", "value"), named(SHARED_REFUSED + COMPLETION_REFUSED))
async def test_completions_refuse_the_value_by_the_fields_name(
    client: Any, served: Served, name: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await complete(client, {name: value})
    assert refusal.value.param == name
    assert served.worker.submits == []


SENT: list[tuple[str, object, Any]] = [
    ("frequency_penalty", 0.5, lambda params: params.frequency_penalty == 0.5),
    ("presence_penalty", -0.5, lambda params: params.presence_penalty == -0.5),
    ("logit_bias", {"5": 2}, lambda params: dict(params.logit_bias) == {5: 2}),
    ("max_tokens", 7, lambda params: params.max_tokens == 7),
    ("n", 3, lambda params: params.n == 3),
    ("seed", 7, lambda params: params.seed == 7),
    ("temperature", 0.5, lambda params: params.temperature == 0.5),
    ("top_p", 0.5, lambda params: params.top_p == 0.5),
]


@pytest.mark.parametrize(
    ("name", "value", "holds"), [pytest.param(*row, id=row[0]) for row in SENT]
)
async def test_field_reaches_the_worker(
    client: Any, served: Served, name: str, value: object, holds: Any
) -> None:
    await chat(client, {"max_completion_tokens": None, name: value})
    await complete(client, {name: value})
    params: list[worker_pb2.SamplingParams] = [each.params for each in served.worker.submits]
    assert list(map(holds, params)) == [True, True]


async def test_max_completion_tokens_goes_before_max_tokens(client: Any, served: Served) -> None:
    await chat(client, {"max_completion_tokens": 3, "max_tokens": 9})
    assert served.worker.submits[0].params.max_tokens == 3


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
async def test_role_is_accepted(client: Any, role: str) -> None:
    messages = [{"role": role, "content": "x", "name": "n"}]
    assert (await chat(client, {"messages": messages})).choices


ROUTES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/completions": {"prompt": "hello", "max_tokens": 1},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_model_may_be_left_out(client: Any, path: str) -> None:
    answer = await client.post(path, body=ROUTES[path], cast_to=object)
    assert answer["model"] == "stub"


@pytest.mark.parametrize(("path", "name"), [(path, next(iter(ROUTES[path]))) for path in ROUTES])
async def test_messages_and_prompt_are_needed(client: Any, path: str, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.post(path, body={"model": "stub"}, cast_to=object)
    assert refusal.value.param == name


@pytest.mark.parametrize("path", ROUTES)
async def test_options_of_streams(client: Any, served: Served, path: str) -> None:
    api = client.chat.completions if "messages" in ROUTES[path] else client.completions
    call = {"model": "stub", "stream": True, **ROUTES[path]}
    for options in ({}, {"include_obfuscation": False}, {"an_unknown_member": 1}):
        stream = await api.create(**call, stream_options=options)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"
    served.worker.submits.clear()
    for refused in ({"include_obfuscation": True}, {"include_usage": "yes"}):
        with pytest.raises(openai.BadRequestError) as refusal:
            await api.create(**call, stream_options=refused)
        assert refusal.value.param == "stream_options"
    assert served.worker.submits == []


async def test_best_of_above_n_cannot_be_streamed(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be streamed") as refusal:
        await client.completions.create(model="stub", prompt="x", best_of=2, stream=True)
    assert refusal.value.param == "best_of"


async def test_number_of_prompts_is_bounded(client: Any) -> None:
    prompts = {"prompt": ["x"] * 65, "max_tokens": 1}
    assert len((await complete(client, prompts)).choices) == 65
    with pytest.raises(openai.BadRequestError, match="1 to 1024 prompts") as refusal:
        await complete(client, {"prompt": ["x"] * 1025})
    assert refusal.value.param == "prompt"


async def test_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        await chat(client, {"model": "gpt-9"})
    assert refusal.value.param == "model"


async def test_answer_has_the_fields_of_the_reference(client: Any) -> None:
    answer = (await chat(client, {})).model_dump()
    assert {"id", "object", "created", "model", "choices", "usage"} <= answer.keys()
    (choice,) = answer["choices"]
    assert {"index", "message", "logprobs", "finish_reason"} <= choice.keys()
    assert {"role", "content", "refusal"} <= choice["message"].keys()
    assert answer["object"] == "chat.completion"


async def test_streamed_usage_comes_last(client: Any) -> None:
    stream = await client.chat.completions.create(
        model="stub", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens > 0) == ([], True)
