"""Fields that would change the answer are refused, and the error names the right field."""

from typing import Any

import openai
import pytest

from penstock.router.api.openai.unsupported_fields import PERMITTED_VALUES
from tests.support.openai_client import HELLO, message_of
from tests.support.served_router import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


CHANGES_THE_ANSWER = {
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "structural_tag": "{}",
    "stop_regex": "a",
    "custom_logit_processor": "x",
    "json_schema": {"type": "object"},
    "grammar": 'root ::= "a"',
    "logits_processors": ["x"],
    "prompt_token_ids": [5, 6],
    "thinking_token_budget": 10,
    "moderation": {"mode": "block"},
    "verbosity": "low",
    "vllm_xargs": {"a": 1},
    "detokenize": False,
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "web_search_options": {},
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "chat_template": "{{ 7 }}",
    "logprob_token_ids": [5],
    "prompt_embeds": "x",
    "kv_transfer_params": {"remote_host": "x"},
    "lora_path": "x",
    "n_predict": 5,
    "mirostat": 2,
    "dynatemp_range": 0.5,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "suffix": "x",
    "tool_prompt": "x",
    "instructions": "x",
    "max_output_tokens": 5,
    "reasoning": {"effort": "low"},
    "prompt_cache_options": {"mode": "explicit"},
    "add_special_tokens": True,
    "lora_request": {"lora_name": "x"},
    "repetition_detection": {"max_pattern_size": 5},
    "truncation_side": "right",
    "no_stop_trim": True,
    "separate_reasoning": False,
    "stream_reasoning": False,
    "session_params": {"id": "x"},
    "extra_key": "x",
    "custom_params": {"a": 1},
    "max_new_tokens": 5,
    "min_new_tokens": 5,
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 8998,
    "bootstrap_room": 1,
    "data_parallel_rank": 1,
    "return_hidden_states": True,
    "lora": [{"id": 0, "scale": 0.5}],
    "n_probs": 5,
    "reasoning_format": "none",
    "repeat_penalty": 1.1,
    "samplers": ["top_k"],
    "t_max_predict_ms": 100,
    "top_n_sigma": 1.0,
    "adapter_id": "x",
    "do_sample": False,
    "watermark": True,
    "format": "json",
    "options": {"temperature": 0},
    "think": False,
    "enable_thinking": False,
    "thinking": {"type": "disabled"},
    "thinking_budget": 5,
    "guided_decoding_backend": "outlines",
    "guided_whitespace_pattern": " ",
}


@pytest.mark.parametrize(("name", "value"), CHANGES_THE_ANSWER.items())
async def test_field_that_would_change_the_answer_is_refused(
    client: Any, served: Served, name: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{name} is not supported") as refusal:
        await client.chat.completions.create(model="stub", messages=HELLO, extra_body={name: value})
    assert refusal.value.param == name
    assert served.worker.submits == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_completion_tokens", 5), ("top_logprobs", 2), ("reasoning_effort", "low")],
)
async def test_completion_with_a_field_of_chats_is_refused(
    client: Any, served: Served, name: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{name} is a field of /v1/chat") as refusal:
        await client.completions.create(model="stub", prompt="x", extra_body={name: value})
    assert refusal.value.param == name
    assert served.worker.submits == []
    await client.completions.create(model="stub", prompt="x", extra_body={name: None})


async def test_completion_without_alternatives_for_tokens_is_answered(client: Any) -> None:
    answer = await client.completions.create(
        model="stub", prompt="x", extra_body={"top_logprobs": 0}
    )
    assert answer.choices[0].logprobs is None


async def test_every_refused_field_is_tested() -> None:
    known = {"tools", "tool_choice", "documents", "include_reasoning"}  # chats have these fields
    assert PERMITTED_VALUES.keys() - CHANGES_THE_ANSWER.keys() == known


@pytest.mark.parametrize("name", PERMITTED_VALUES)
async def test_value_that_means_the_same_as_none_is_accepted(client: Any, name: str) -> None:
    for value in PERMITTED_VALUES[name]:
        await client.completions.create(
            model="stub", prompt="x", max_tokens=1, extra_body={name: value}
        )


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"min_tokens": 9, "max_completion_tokens": 5}, "min_tokens"),
    ],
)
async def test_refusal_names_the_field_that_the_client_sent(
    client: Any, body: dict[str, Any], name: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(model="stub", messages=HELLO, extra_body=body)
    assert refusal.value.param == name
    assert name in message_of(refusal.value)


@pytest.mark.parametrize(
    ("body", "start"),
    [
        ({"messages": [user([{"type": "text", "text": 5}])]}, "messages.0.content.0.text: "),
        ({"messages": [user([{"text": "x"}])]}, "messages.0.content.0.type: Field required"),
        ({"messages": [user([5])]}, "messages.0.content.0: Input should be an object"),
        ({"messages": [user(5)]}, "messages.0.content: Input should be a valid string"),
        ({"messages": [5]}, "messages.0: Input should be an object"),
        ({"messages": [{"content": 7}]}, "messages.0.role: Field required"),
        ({"messages": HELLO, "stop": [1]}, "stop.0: Input should be a valid string"),
        ({"messages": HELLO, "stop": 1}, "stop: Input should be a valid string"),
        ({"messages": HELLO, "early_stopping": 1}, "early_stopping: "),
        ({"messages": HELLO, "stream_options": 1}, "stream_options: Input should be an object"),
        ({"messages": HELLO, "logit_bias": {"5": "x"}}, "logit_bias.5: "),
    ],
)
async def test_refusal_of_a_nested_value_names_the_form_that_was_meant(
    client: Any, body: dict[str, Any], start: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(model="stub", messages=HELLO, extra_body=body)
    assert message_of(refusal.value).startswith(start)
    assert refusal.value.param == start.partition(":")[0].partition(".")[0]
