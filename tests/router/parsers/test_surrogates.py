"""Escape sequences of surrogates in the tool calls of models."""

import pytest

from penstock.router.parsers.answer_parser import AnswerParsers, ParsingOptions
from penstock.router.parsers.parser_names import TOOL_PARSERS
from penstock.router.parsers.surrogates import without_surrogates
from tests.support.parsed import Answer, check_splits
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
HERMES = "<tool_call>{}</tool_call>"


def answer(name: str, text: str) -> Answer:
    parsers = AnswerParsers(tools=name)

    def make() -> object:
        return parsers.new("", ParsingOptions(reads_calls=True))

    return check_splits(make, text, TOKENIZER)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("aä😀", "aä😀"),
        ("\ud83d\ude00", "😀"),
        ("\ud83d", "\ufffd"),
        ("a\ud83db", "a\ufffdb"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ud83d\ude00\ude00", "\ufffd😀\ufffd"),
    ],
)
def test_pairs_become_characters_and_others_are_replaced(text: str, expected: str) -> None:
    assert without_surrogates(text) == expected


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("pythonic", r"[say(text='\ud83d\ude00')]", ("say", '{"text": "😀"}')),
        ("pythonic", r"[say(text='a\ud83d', n=1)]", ("say", '{"text": "a\ufffd", "n": 1}')),
        (
            "pythonic",
            r"[say(text={'\ud83d': '\ude00'})]",
            ("say", '{"text": {"\ufffd": "\ufffd"}}'),
        ),
        ("hermes", HERMES.format(r'{"name": "\ud83d", "arguments": {}}'), ("\ufffd", "{}")),
        ("hermes", HERMES.format(r'{"name": "\ud83d\ude00", "arguments": {}}'), ("😀", "{}")),
        (
            "hermes",
            HERMES.format(r'{"name": "say", "arguments": "{\"text\": \"\ud83d\"}"}'),
            ("say", '{"text": "\ufffd"}'),
        ),
        (
            "hermes",  # the client reads the escape sequence
            HERMES.format(r'{"name": "say", "arguments": {"text": "\ud83d"}}'),
            ("say", r'{"text": "\ud83d"}'),
        ),
    ],
)
def test_calls_contain_no_surrogates(name: str, text: str, call: tuple[str, str]) -> None:
    assert answer(name, text) == Answer("", [call])


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize("value", [r"'\ud83d'", r'"\ud83d"', r"['\ud83d\ude00']", r"\ud83d"])
def test_no_parser_writes_surrogates(name: str, value: str) -> None:
    texts = (
        HERMES.format(f'{{"name": {value}, "arguments": {value}}}'),
        f'{{"name": {value}, "parameters": {{"a": {value}}}}}',
        f"[TOOL_CALLS]{value}{{{value}: {value}}}",
        f"[TOOL_CALLS][{{{value}: 1, 'name': {value}}}]",
        f"[add(a={value}, b={{{value}: 1}})]",
        f"<tool_call><function=a{value}><parameter=b{value}>{value}</parameter></function></tool_call>",
        f"<tool_call>add<arg_key>{value}</arg_key><arg_value>{value}</arg_value></tool_call>",
        f'<|tool_call>call:add{{{value}:{value},b:<|"|>{value}<|"|>}}<tool_call|>',
    )
    for text in texts:
        parser = AnswerParsers(tools=name).new("", ParsingOptions(reads_calls=True))
        assert parser is not None
        for piece in (*parser.feed(text), *parser.finish()):
            piece.text.encode()
