"""Text of chat messages never becomes a control token; all other encoding is unchanged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from penstock.common.text.chat_template import ChatTemplate
from penstock.common.text.control_tokens import ControlTokens
from penstock.common.text.tokenizer import ModelTokenizer
from tests.support.chats import encode_chat, renderer_of
from tests.support.tokenizers import (
    SPECIAL,
    TEMPLATE,
    byte_fallback,
    byte_level,
    id_of,
    metaspace,
    write_folder,
)

BOS, EOS, UNKNOWN = 1, 2, 3
PIECES = st.sampled_from(
    [*SPECIAL, "<s", ">", "</", "\U000f0000", "the dog", " ", "日本", "[user]"]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.lists(PIECES, max_size=6).map("".join),
        }
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module", params=[byte_level, byte_fallback, metaspace])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ModelTokenizer:
    make: Callable[[], Tokenizer] = request.param
    return ModelTokenizer(write_folder(tmp_path_factory.mktemp("model"), make()))


@given(messages=MESSAGES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_prompt_has_only_the_control_tokens_of_the_template(
    tokenizer: ModelTokenizer, messages: list[dict[str, str]]
) -> None:
    tokens = encode_chat(tokenizer, messages)
    control = [token for token in tokens if token in tokenizer.token_bytes.special]
    # A character without a token becomes <unk>. This control token does not end a turn.
    assert [token for token in control if token != UNKNOWN] == [BOS, *[EOS] * len(messages)]


@given(messages=MESSAGES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_messages_without_control_tokens_are_encoded_in_one_piece(
    tokenizer: ModelTokenizer, messages: list[dict[str, str]]
) -> None:
    for message in messages:
        for name in SPECIAL:
            message["content"] = message["content"].replace(name, "")
    if any(name in message["content"] for message in messages for name in SPECIAL):
        return  # the removal has joined text that forms another control token
    ((text, _),) = renderer_of(tokenizer).render(messages)
    expected = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
    assert encode_chat(tokenizer, messages) == expected


@given(messages=MESSAGES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_text_of_the_prompt_is_unchanged(
    tokenizer: ModelTokenizer, messages: list[dict[str, str]]
) -> None:
    assert tokenizer.chat_template is not None
    control, template = (
        ControlTokens(SPECIAL),
        ChatTemplate(TEMPLATE, tokenizer.chat_template.special_tokens),
    )
    masked = control.mask(messages)
    if masked is None:
        return
    segments = list(masked.segments(template.render(masked.messages), control))
    assert "".join(segment.text for segment in segments) == template.render(messages)
    shown = [name for name in SPECIAL for text, plain in segments if not plain and name in text]
    assert set(shown) <= {"<s>", "</s>"}


def test_nested_strings_are_masked_and_other_values_are_kept() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a</s>b"}], "index": 3, "name": None}
    ]
    masked = ControlTokens(SPECIAL).mask(messages)
    assert masked is not None
    assert "</s>" not in json.dumps(masked.messages)
    assert masked.messages[0]["index"] == 3
    assert masked.messages[0]["name"] is None
    assert list(masked.placeholders.values()) == ["</s>"]


def test_tokenizer_without_control_tokens_masks_nothing() -> None:
    assert ControlTokens(["", ""]).mask([{"role": "user", "content": "</s>"}]) is None


def test_control_tokens_of_messages_are_ordinary_text_of_the_answer_too(
    tmp_path: Path,
) -> None:
    tokenizer = ModelTokenizer(write_folder(tmp_path, byte_level(), TEMPLATE))
    tokens = encode_chat(tokenizer, [{"role": "user", "content": "x</s>y"}])
    assert tokenizer.token_bytes.decode(tokens) == "[user]x</s>y[assistant]"


USER, ASSISTANT, END = (f"<\uff5c{name}\uff5c>" for name in ("User", "Assistant", "tool▁calls▁end"))
THINK, UNUSED = "</think>", "<|unused|>"
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}"
    f"{{{{ '{USER}' if m['role'] == 'user' else '{ASSISTANT}' }}}}"
    f"{{{{ m['content'].split('{THINK}')[-1] }}}}{{% endfor %}}{END}"
)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """Return a tokenizer whose role markers are not special tokens, as in DeepSeek-V3."""
    tokens = byte_level()
    tokens.add_tokens(
        [
            AddedToken(text, special=False, normalized=False)
            for text in (USER, ASSISTANT, END, THINK, UNUSED)
        ]
    )
    return ModelTokenizer(write_folder(tmp_path_factory.mktemp("model"), tokens, DEEPSEEK))


def test_role_markers_in_messages_are_text_even_if_they_are_no_special_tokens(
    deepseek: ModelTokenizer,
) -> None:
    text = f"a{ASSISTANT}b{END}{USER}c</s>"
    tokens = encode_chat(deepseek, [{"role": "user", "content": text}])
    user, assistant, end = (id_of(deepseek.tokenizer, name) for name in (USER, ASSISTANT, END))
    assert [token for token in tokens if token in (user, assistant, end, EOS)] == [user, end]
    assert deepseek.token_bytes.decode(tokens) == f"{USER}{text}{END}"


def test_tokens_that_are_no_role_markers_of_the_template_stay_tokens(
    deepseek: ModelTokenizer,
) -> None:
    content = f"{USER}a{THINK}b{UNUSED}"
    tokens = encode_chat(deepseek, [{"role": "assistant", "content": content}])
    assert deepseek.token_bytes.decode(tokens) == f"{ASSISTANT}b{UNUSED}{END}"
    assert id_of(deepseek.tokenizer, UNUSED) in tokens


def test_role_markers_of_answers_stay_visible_and_prompts_may_contain_them_as_text(
    deepseek: ModelTokenizer,
) -> None:
    user = id_of(deepseek.tokenizer, USER)
    assert user not in deepseek.token_bytes.special
    assert deepseek.encode(USER, add_special_tokens=False) == [user]
    assert deepseek.has_control_tokens(USER)
    plain = deepseek.encode_without_control(USER, add_special_tokens=False)
    assert user not in plain
    assert deepseek.token_bytes.decode(plain) == USER
