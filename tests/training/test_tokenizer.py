"""The tokenizer: texts round-trip, a digit is one token, and names always get the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from training import chat
from training.tasks import Message, Tool, ToolCall
from training.train import MODELS

SHIPPED = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    ids = SHIPPED.encode(text).ids
    assert SHIPPED.decode(ids, skip_special_tokens=False) == text


@given(st.integers(min_value=0))
def test_every_digit_is_one_token(number: int) -> None:
    assert SHIPPED.encode(str(number)).tokens == list(str(number))


@pytest.mark.parametrize("prefix", ["", " ", '"', "<|user|>"])
def test_a_name_has_the_same_tokens_after_any_text(prefix: str) -> None:
    name = SHIPPED.encode("Zubalor").ids
    assert SHIPPED.encode(prefix + "Zubalor").ids[-len(name) :] == name


def test_special_tokens_come_first() -> None:
    assert [SHIPPED.token_to_id(token) for token in chat.SPECIAL_TOKENS] == list(range(6))


def test_no_special_tokens_are_added() -> None:
    assert SHIPPED.encode("7").tokens == ["7"]


def test_both_models_have_the_same_tokenizer() -> None:
    files = [MODELS / name / "tokenizer.json" for name in ("demo", "demo-small")]
    assert files[0].read_bytes() == files[1].read_bytes()


CALCULATOR: Tool = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
BARE: Tool = {"type": "function", "function": {"name": "get_time"}}
UNTYPED: Tool = {
    "type": "function",
    "function": {"name": "find", "parameters": {"properties": {"a": {}, "b": {"type": "number"}}}},
}
CALL = ToolCall("calculator", {"expression": '12 * "é"'}, "408 <|end|>")
SYSTEM: Message = {"role": "system", "content": "Answer briefly."}
CHAT: list[Message] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "What is 1 + 1?"},
    *CALL.messages(),
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [(), (CALCULATOR,), (BARE, UNTYPED, CALCULATOR)])
@pytest.mark.parametrize("messages", [CHAT, [SYSTEM, *CHAT], [SYSTEM]])
def test_the_chat_template_matches_the_training_format(
    messages: list[Message], tools: tuple[Tool, ...], add_generation_prompt: bool
) -> None:
    apply: Callable[..., str] = AutoTokenizer.from_pretrained(MODELS / "demo").apply_chat_template
    text = apply(messages, list(tools), tokenize=False, add_generation_prompt=add_generation_prompt)
    assert text == chat.render(messages, tools, add_generation_prompt=add_generation_prompt)


def test_the_small_models_template_matches_the_training_format() -> None:
    messages = [SYSTEM, *CHAT[:3]]
    apply: Callable[..., str] = AutoTokenizer.from_pretrained(
        MODELS / "demo-small"
    ).apply_chat_template
    text = apply(messages, tokenize=False, add_generation_prompt=True)
    assert text == chat.render(messages, add_generation_prompt=True)


def test_a_call_written_by_the_model_equals_the_call_in_the_history() -> None:
    [call, _] = CALL.messages()
    assert chat.render([call]) == f"{chat.BEGIN}{chat.ASSISTANT}{CALL.text()}{chat.END}"


def test_tools_are_listed_with_parameters_and_description() -> None:
    text = chat.render([SYSTEM], (CALCULATOR, BARE, UNTYPED))
    assert text == (
        "<|begin|><|system|>Answer briefly.\nTools:\n"
        "calculator(expression: string): Evaluates an arithmetic expression.\n"
        "get_time()\n"
        "find(a, b: number)<|end|>"
    )
