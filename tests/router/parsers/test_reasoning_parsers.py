"""Parsers of reasoning, and of harmony's channels: golden answers, split in every way."""

import pytest

from penstock.router.parsers.answer_parser import AnswerParsers, ParsingOptions
from penstock.router.parsers.harmony import HarmonyParser
from penstock.router.parsers.parser_names import HARMONY_REASONING, REASONING_TAGS
from penstock.router.parsers.pieces import CONTENT, OutputParser, Piece
from penstock.router.parsers.think import Tags, ThinkParser
from tests.support.parsed import Answer, check_splits
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
CASES: list[tuple[bool, str, Answer]] = [
    (False, "", Answer("")),
    (False, " Hello\n", Answer(" Hello\n")),
    (False, "<think>\nwhy\n so\n</think>\n\nHello 😀 \n", Answer("Hello 😀 \n", (), "why\n so")),
    (False, " <think></think>x", Answer("x")),
    (False, "<think> \n </think>", Answer("")),
    (False, "<think>why </thin", Answer("", (), "why </thin")),
    (False, "<thin", Answer("<thin")),
    (False, "x <think>y</think>", Answer("x <think>y</think>")),
    (False, "why</think>x", Answer("why</think>x")),
    (True, "\nwhy\n</think>\n\nHello", Answer("Hello", (), "why")),
    (True, "<think>why</think>Hello</think>", Answer("Hello</think>", (), "why")),
    (True, "why", Answer("", (), "why")),
    (True, "<th", Answer("", (), "<th")),
    (True, "</think>x", Answer("x")),
]


@pytest.mark.parametrize(("is_open", "text", "expected"), CASES)
def test_reasoning_is_the_same_in_every_split(is_open: bool, text: str, expected: Answer) -> None:
    tags = Tags("<think>", "</think>")
    assert check_splits(lambda: ThinkParser(tags, is_open), text, TOKENIZER) == expected


@pytest.mark.parametrize("name", [name for name, tags in REASONING_TAGS.items() if tags])
def test_each_family_has_its_tags(name: str) -> None:
    tags = REASONING_TAGS[name]
    assert tags is not None
    text = f"{tags.start}\nwhy{tags.end}\nHello"
    found = check_splits(lambda: ThinkParser(tags, tags.are_open("")), text, TOKENIZER)
    assert found == Answer("Hello", (), "why")


@pytest.mark.parametrize(
    ("name", "prompt_end", "is_open"),
    [
        ("qwen3", "assistant\n", False),
        ("qwen3", "assistant\n<think>\n", True),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "assistant", True),
        ("deepseek_r1", "assistant<think>\n", True),
        ("deepseek_r1", "assistant</think>\n", False),
    ],
)
def test_prompt_shows_whether_reasoning_has_begun(
    name: str, prompt_end: str, is_open: bool
) -> None:
    tags = REASONING_TAGS[name]
    assert tags is not None
    assert tags.are_open(prompt_end) == is_open


def test_only_a_start_tag_begins_the_reasoning_of_a_continued_message() -> None:
    tags = REASONING_TAGS["deepseek_r1"]
    assert tags is not None
    assert not tags.are_open("assistant: The answer is", continues_message=True)
    assert tags.are_open("assistant<think>\n", continues_message=True)


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
SUM = '{"a": 17, "b": "<x>😀"}'
HARMONY: list[tuple[str, Answer]] = [
    ("", Answer("")),
    (f"{FINAL}Hello 😀\n", Answer("Hello 😀\n")),
    (
        f"{ANALYSIS}why <so>\n<|end|><|start|>assistant{FINAL}Hello<|return|>",
        Answer("Hello", (), "why <so>\n"),
    ),
    (
        f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>"
        f"<|start|>assistant<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{SUM}<|call|>",
        Answer("I add.", [("add", SUM)], "a\nb"),
    ),
    (
        f" to=functions.add<|channel|>commentary json<|message|>{SUM}<|call|>"
        f"<|start|>assistant to=functions.now<|channel|>commentary<|message|><|call|>",
        Answer("", [("add", SUM), ("now", "{}")]),
    ),
    ("<|channel|>commentary to=functions.f<|message|>", Answer("", [("f", "{}")])),
    ("<|channel|>commentary to=browser.search<|message|>x", Answer("", (), "x")),
    (f"{FINAL}a<|end|><|start|>assistant{FINAL}b", Answer("a\nb")),
    ("no channel", Answer("no channel")),
    ("<|channel|>anal", Answer("")),
    (f"{ANALYSIS}why<|en", Answer("", (), "why<|en")),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY)
def test_channels_are_the_same_in_every_split(text: str, expected: Answer) -> None:
    assert check_splits(HarmonyParser, text, TOKENIZER) == expected


def test_continued_message_is_content_until_the_next_header() -> None:
    parsers = AnswerParsers(tools="openai", reasoning=HARMONY_REASONING)
    prompt = f"<|start|>assistant{FINAL}The answer is"
    more = "<|end|><|start|>assistant"
    cases = (
        ("", Answer("")),
        (" 42.", Answer(" 42.")),
        (f" 42.{more}{FINAL}More.", Answer(" 42.\nMore.")),
        (f" 42.{more}{ANALYSIS}why", Answer(" 42.", (), "why")),
        (
            f" 42.{more} to=functions.add<|channel|>commentary<|message|>{SUM}<|call|>",
            Answer(" 42.", [("add", SUM)]),
        ),
    )

    def make() -> OutputParser:
        parser = parsers.new(prompt, ParsingOptions(reads_calls=True))
        assert parser is not None
        return parser

    for text, expected in cases:
        assert check_splits(make, text, TOKENIZER) == expected
    # The text is streamed.
    assert make().feed(" 42") == [Piece(CONTENT, " 42")]
