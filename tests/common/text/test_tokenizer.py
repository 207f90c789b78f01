import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel

from penstock.common.text.chat_source import ChatTemplateError
from penstock.common.text.token_bytes import UnsupportedTokenizer
from penstock.common.text.tokenizer import ModelTokenizer
from tests.support.chats import encode_chat
from tests.support.tokenizers import TEMPLATE, byte_fallback, byte_level, metaspace, write_folder

BOS, EOS = 1, 2
HELLO = [{"role": "user", "content": "the dog"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), byte_level())


def test_bos_is_added_unless_special_tokens_are_disabled(folder: Path) -> None:
    text = ModelTokenizer(folder)
    tokens = text.encode("the dog")
    assert tokens[0] == BOS
    assert text.encode("the dog", add_special_tokens=False) == tokens[1:]


def test_chat_prompt_has_exactly_one_bos(folder: Path) -> None:
    tokens = encode_chat(ModelTokenizer(folder), HELLO)
    assert tokens.count(BOS) == 1
    assert tokens.count(EOS) == 1


def with_config(folder: Path, tokenizer: Tokenizer, **changes: object) -> ModelTokenizer:
    path = write_folder(folder, tokenizer) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return ModelTokenizer(folder)


LLAMA = {"add_bos_token": True, "tokenizer_class": "LlamaTokenizerFast"}


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
def test_bos_is_added_if_only_the_tokenizer_config_requires_it(
    make: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    tokenizer = make()
    tokenizer.post_processor = ByteLevel(trim_offsets=False)  # as in DeepSeek V3
    plain = with_config(tmp_path / "plain", tokenizer)
    text = with_config(tmp_path / "bos", tokenizer, **LLAMA)
    tokens = plain.encode("the dog</s>")
    assert text.encode("the dog</s>") == [BOS, *tokens]
    assert text.encode("the dog</s>", add_special_tokens=False) == tokens
    assert text.encode_without_control("</s>")[0] == BOS
    assert encode_chat(text, HELLO) == encode_chat(plain, HELLO)
    assert text.encode_bad_words(["the"]) == plain.encode_bad_words(["the"])


@pytest.mark.parametrize(
    "changes",
    [
        LLAMA | {"add_bos_token": False},
        LLAMA | {"tokenizer_class": "Qwen2Tokenizer"},
        LLAMA | {"bos_token": None},
        LLAMA | {"bos_token": "<unknown>"},
        {"add_bos_token": True},
    ],
)
def test_bos_is_not_added_in_other_cases(tmp_path: Path, changes: dict[str, object]) -> None:
    text = with_config(tmp_path, byte_fallback(), **changes)
    assert text.encode("the dog") == text.encode("the dog", add_special_tokens=False)


def test_bos_is_not_added_twice(tmp_path: Path) -> None:
    assert with_config(tmp_path, byte_level(), **LLAMA).encode("the dog").count(BOS) == 1


def bad_words_of_vllm(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Return the token sequences that vLLM bans for these bad words."""
    banned: list[list[int]] = []
    for word in words:
        bare, spaced = (
            tokenizer.encode(lead + word.lstrip(), add_special_tokens=False).ids
            for lead in ("", " ")
        )
        banned.append(bare)
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            banned.append(spaced)
    return banned


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
def test_bad_words_are_encoded_with_and_without_a_leading_space(
    make: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    text = ModelTokenizer(write_folder(tmp_path, make()))
    words = ["the", " dog", "the end of", "q", "日本", "\tx", "zq"]
    expected = bad_words_of_vllm(text.tokenizer, words)
    assert text.encode_bad_words(words) == expected
    assert text.encode_bad_words(words * 400) == expected * 400


def test_bad_word_in_mid_sentence_has_its_own_encoding(folder: Path) -> None:
    text = ModelTokenizer(folder)
    token_id = text.tokenizer.token_to_id
    assert text.encode_bad_words(["the"]) == [[token_id("the")], [token_id("Ġthe")]]
    assert text.encode_bad_words([]) == []


def test_chat_template_file_overrides_the_tokenizer_config(folder: Path, tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level(), template="old")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    expected = encode_chat(ModelTokenizer(folder), HELLO)
    assert encode_chat(ModelTokenizer(tmp_path), HELLO) == expected


def test_given_chat_template_replaces_those_of_the_model(folder: Path, tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level(), template="old")
    (tmp_path / "chat_template.jinja").write_text("old")
    expected = encode_chat(ModelTokenizer(folder), HELLO)
    assert encode_chat(ModelTokenizer(tmp_path, TEMPLATE), HELLO) == expected


def test_template_named_default_is_chosen_among_several(folder: Path, tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level())
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": TEMPLATE},
    ]
    path.write_text(json.dumps(config))
    expected = encode_chat(ModelTokenizer(folder), HELLO)
    assert encode_chat(ModelTokenizer(tmp_path), HELLO) == expected


def test_folder_without_a_template_has_no_chat_template(tmp_path: Path) -> None:
    assert ModelTokenizer(write_folder(tmp_path, metaspace(), None)).chat_template is None


def test_error_raised_by_the_template_is_reported(folder: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no developers here"):
        encode_chat(ModelTokenizer(folder), [{"role": "developer", "content": "x"}])


def test_unusable_model_folder_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTokenizer, match=r"tokenizer\.json is missing"):
        ModelTokenizer(tmp_path)
    write_folder(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UnsupportedTokenizer, match="cannot be parsed as JSON"):
        ModelTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(UnsupportedTokenizer, match="cannot be read"):
        ModelTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"[" * 100_000, "cannot be parsed as JSON"),
        (b"\xff", "cannot be parsed as JSON"),
    ],
)
def test_broken_tokenizer_config_is_refused(tmp_path: Path, config: bytes, message: str) -> None:
    write_folder(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(UnsupportedTokenizer, match=message):
        ModelTokenizer(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": [5, {"name": "other", "template": "x"}]},
        {"chat_template": {"name": "default"}},
        {"chat_template": "x", "bos_token": {"text": "<s>"}, "eos_token": 5},
    ],
)
def test_odd_values_in_tokenizer_config_are_ignored(tmp_path: Path, config: object) -> None:
    write_folder(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ModelTokenizer(tmp_path)
