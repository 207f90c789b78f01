"""Invalid HTTP requests get a one-line error and the right status, and have no effect."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.openai_errors import check_form
from tests.support.served_router import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(shared_served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shared_served.url, timeout=30) as client:
        yield client


WRONG_BEAMS: list[tuple[dict[str, object], str]] = [
    ({"n": 1}, "n"),
    ({"n": None}, "n"),
    ({"n": 1, "best_of": 1}, "best_of"),
    ({"n": 10**9}, "n"),
    ({"best_of": 10**9}, "best_of"),
    ({"temperature": 0.7}, "temperature"),
    ({"top_p": 0.9}, "top_p"),
    ({"top_k": 5}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"typical_p": 0.9}, "typical_p"),
    ({"seed": 5}, "seed"),
    ({"stop": "x"}, "stop"),
    ({"stream": True}, "use_beam_search"),
    ({"length_penalty": 5.5}, "length_penalty"),
    ({"length_penalty": "long"}, "length_penalty"),
    ({"early_stopping": "always"}, "early_stopping"),
    ({"early_stopping": 1}, "early_stopping"),
    ({"n": 9, "max_tokens": 1000}, "max_tokens"),
    ({"use_beam_search": "yes"}, "use_beam_search"),
]


def schema_format(schema: object, **rest: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **rest}}


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": schema_format("{}")}, "response_format"),
    ({"response_format": schema_format({}, strict="yes")}, "response_format"),
    ({"response_format": schema_format({"not": {}})}, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": [3]}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
    ({"guided_json": {"type": "text"}}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_grammar": "start: missing"}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_regex": "a", "use_beam_search": True, "n": 2, "temperature": 0}, "use_beam_search"),
]

PARAMETERS = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -7}, "max_tokens"),
    ({"max_tokens": 4000}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": 10**9}, "n"),
    ({"best_of": 65}, "best_of"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"best_of": 10**9}, "best_of"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 4, "stream": True}, "best_of"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"seed": 2**70}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": "y" * 257}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [400_000]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"7": 101}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"typical_p": 0}, "typical_p"),
    ({"typical_p": 1.1}, "typical_p"),
    ({"typical_p": "very"}, "typical_p"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words"),
    ({"bad_words": ["zqj" * 40]}, "bad_words"),  # a bad word of far more than 32 tokens
    ({"bad_words": ["fine", " "]}, "bad_words"),
    ({"bad_words": "damn"}, "bad_words"),
    ({"bad_words": [[5]]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [400_000]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [1] * 400_000}, "allowed_token_ids"),
    ({"allowed_token_ids": {"5": 1}}, "allowed_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    *FORMS,
    ({"kv_transfer_params": {"remote_host": "x"}}, "kv_transfer_params"),
    ({"priority": "high"}, "priority"),
    ({"model": 7}, "model"),
    *(({"use_beam_search": True, "n": 2} | wrong, param) for wrong, param in WRONG_BEAMS),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("wrong", "param"), PARAMETERS)
async def test_invalid_parameter_is_refused_by_name(
    http: httpx.AsyncClient, shared_served: Served, path: str, wrong: dict[str, Any], param: str
) -> None:
    shared_served.worker.submits.clear()
    valid = {"prompt": "hi"} if path == COMPLETIONS else {"messages": HI}
    response = await http.post(path, json={**valid, **wrong})
    assert response.status_code == 400
    error = check_form(response)
    assert error["param"] == param
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"
    assert shared_served.worker.submits == []


ONLY_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": ""}, "empty"),
    ({"prompt": []}, "empty"),
    ({"prompt": [[]]}, "empty"),
    ({"prompt": ["ok", ""]}, "empty"),
    ({"prompt": 5}, "a list of token ids"),
    ({"prompt": [1, "x"]}, "a list of token ids"),
    ({"prompt": [True, 2]}, "a list of token ids"),
    ({"prompt": {"text": "x"}}, "a list of token ids"),
    ({"prompt": [-1]}, "outside the vocabulary"),
    ({"prompt": [10**20]}, "outside the vocabulary"),
    ({"prompt": [9999]}, "outside the vocabulary"),
    ({"prompt": [5] * 2048}, "maximum context length is 2048"),
    ({"prompt": "word " * 3000}, "maximum context length is 2048"),
    ({"prompt": ["x"] * 1025}, "1 to 1024 prompts"),
    ({"prompt": "x", "echo": "yes"}, "echo"),
    ({"prompt": "x", "echo": True, "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "suffix": "y"}, "suffix is not supported"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": -1}, "logprobs"),
    ({"prompt": "x", "use_beam_search": True}, "needs n from 2 to 64, not 1"),
    ({"prompt": "x", "use_beam_search": True, "n": 2, "seed": 1}, "leave out seed"),
    ({"prompt": "x", "use_beam_search": True, "n": 2, "top_k": 3}, "leave top_k at 0 or -1"),
    (
        {"prompt": "x", "use_beam_search": True, "n": 9, "max_tokens": 911},
        "8192 tokens in all: set max_tokens to at most 910",
    ),
]
ONLY_CHAT = [
    ({}, "messages"),
    ({"messages": []}, "'messages' is empty"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "role must be one of"),
    ({"messages": [{"role": "user"}]}, "no content"),
    ({"messages": [{"role": "user", "content": 5}]}, "content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "'image_url' are not supported",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls.0"),
    ({"messages": [{"role": "developer", "content": "x"}]}, "no developers here"),
    ({"messages": HI, "tools": [{"type": "function"}]}, "tools.0.function must be an object"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice needs tools"),
    ({"messages": HI, "chat_template": "{{ 7 }}"}, "chat_template is not supported"),
    ({"messages": HI, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
    ({"messages": HI, "top_logprobs": 2}, "needs logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"messages": HI, "logprobs": 3}, "logprobs"),
    ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens must be"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "maximum context length is 2048"),
]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [(COMPLETIONS, *row) for row in ONLY_COMPLETIONS] + [(CHAT, *row) for row in ONLY_CHAT],
)
async def test_invalid_body_is_refused(
    http: httpx.AsyncClient, shared_served: Served, path: str, body: dict[str, Any], words: str
) -> None:
    shared_served.worker.submits.clear()
    response = await http.post(path, json=body)
    assert response.status_code == 400
    assert words in check_form(response)["message"]
    assert shared_served.worker.submits == []


RAW = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b'{"prompt": "x",}', "not valid JSON"),
    (b'{"prompt": "\\ud800"}', "not valid JSON"),
    (b'\xff\xfe{"prompt"', "not valid JSON"),
    (b"[" * 100_000, "JSON"),
    (b"null", "the body"),
    (b"[]", "the body"),
    (b'"prompt"', "the body"),
    (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (b'{"prompt": "x", "temperature": Infinity}', "temperature"),
    (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
    (b'{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias"),
    (b'{"prompt": "x", "use_beam_search": true, "n": 2, "length_penalty": NaN}', "length_penalty"),
    (b'{"prompt": "x", "seed": ' + b"9" * 4000 + b"}", "seed"),
    (b'{"prompt": [' + b"9" * 5000 + b"]}", ""),
]


@pytest.mark.parametrize(("body", "words"), RAW)
async def test_malformed_body_is_refused(http: httpx.AsyncClient, body: bytes, words: str) -> None:
    response = await http.post(COMPLETIONS, content=body, headers=JSON)
    assert response.status_code == 400
    assert words in check_form(response)["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_unknown_model_is_not_found(http: httpx.AsyncClient, path: str) -> None:
    body = {"model": "../../etc", "prompt": "x", "messages": HI}
    response = await http.post(path, json=body)
    assert response.status_code == 404
    assert "this server serves 'stub'" in check_form(response)["message"]


async def test_unknown_fields_are_ignored(http: httpx.AsyncClient) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 1,
        "user": "me",
        "metadata": {"a": 1},
        "echo": False,
        "n": 1,
        "response_format": {"type": "text"},
        "tools": [],
    }
    assert (await http.post(COMPLETIONS, json=body)).status_code == 200


INTEGERS = (
    *("max_tokens", "min_tokens", "n", "best_of", "seed", "top_k", "logprobs", "prompt_logprobs"),
    *("truncate_prompt_tokens", "priority", "thinking_token_budget", "stop_token_ids"),
    *("logit_bias", "allowed_token_ids", "echo", "prompt", "temperature", "use_beam_search"),
)
LARGEST = "9" * 4300  # a longer integer is refused when the JSON is parsed


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("name", INTEGERS)
async def test_huge_integer_is_refused_without_its_digits(
    http: httpx.AsyncClient, name: str, sign: str
) -> None:
    value = f"{sign}{LARGEST}"
    if name in ("stop_token_ids", "allowed_token_ids", "prompt"):
        value = f"[{value}]"
    if name == "logit_bias":
        value = f'{{"{value}": 1}}'
    rest = {"prompt": "hi", "n": 2, "max_tokens": 2}
    fields = "".join(f', "{key}": {value_!r}' for key, value_ in rest.items() if key != name)
    body = f'{{"{name}": {value}{fields}}}'.replace("'", '"')
    reply = await http.post(COMPLETIONS, content=body, headers=JSON)
    assert reply.status_code == 400, reply.text[:300]
    assert len(reply.text) < 1000


async def test_huge_integer_of_a_chat_is_refused_without_its_digits(
    http: httpx.AsyncClient,
) -> None:
    for name in ("max_completion_tokens", "max_tokens", "top_logprobs", "n", "seed"):
        body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "{name}": {LARGEST}}}'
        reply = await http.post(CHAT, content=body, headers=JSON)
        assert reply.status_code == 400, (name, reply.text[:300])
        assert len(reply.text) < 1000, name
