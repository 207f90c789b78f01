"""Question families about tools: exact calls, answers that repeat results, no needless calls."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from random import Random

import pytest

from training.tasks import FAMILIES, Example, ToolCall
from training.tasks.arithmetic import is_held_out
from training.tasks.offers import CALCULATOR, EXPRESSION, KEY, LOOKUP, has, offer
from training.tasks.smalltalk import UNKNOWN
from training.tasks.tools import ROUNDS, is_call, training_conversation

WEIGHTS = {family.name: family.weight for family in FAMILIES.values()}
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value_of(node: ast.expr) -> float:
    """Return the value of an arithmetic expression."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left, sign, right):
            return OPERATORS[type(sign)](value_of(left), value_of(right))
    raise ValueError(ast.dump(node))


def calls_of(name: str) -> list[ToolCall]:
    """Return the calls of random rounds."""
    rng = Random(0)
    rounds = [ROUNDS[name](rng, ()) for _ in range(400)]
    calls = [each.answer.call for each in rounds if each.answer.call]
    assert [call.text() for call in calls] == [each.call.answer for each in rounds]
    return calls


def test_results_of_the_calculator_are_right() -> None:
    for call in calls_of(CALCULATOR):
        expression = ast.parse(call.arguments[EXPRESSION], mode="eval").body
        assert float(call.result) == pytest.approx(value_of(expression), rel=1e-9, abs=1e-6)
        assert "e" not in call.result.lower()


def test_numbers_of_the_expression_are_those_of_the_question() -> None:
    rng = Random(1)
    for _ in range(300):
        example = ROUNDS[CALCULATOR](rng, ()).answer
        assert example.call
        numbers = [part.strip("()") for part in example.call.arguments[EXPRESSION].split()]
        assert all(number in example.prompt for number in numbers[::2])
        assert example.answer == f"{example.call.arguments[EXPRESSION]} = {example.call.result}"


def test_key_of_the_look_up_is_copied_from_the_question() -> None:
    rng = Random(2)
    missing = 0
    for _ in range(300):
        example = ROUNDS[LOOKUP](rng, ()).answer
        assert example.call
        key = example.call.arguments[KEY]
        assert key in example.prompt
        if "There is no entry" in example.answer:
            missing += 1
        else:
            assert example.answer == f'The entry of "{key}" is {example.call.result}.'
    assert 5 < missing < 60


def test_keys_and_numbers_hardly_repeat() -> None:
    for name in ROUNDS:
        calls = calls_of(name)
        assert len({call.text() for call in calls}) > 0.9 * len(calls)


@pytest.mark.parametrize("name", [CALCULATOR, LOOKUP, "tool_result", "no_tool"])
def test_examples_call_only_tools_that_are_offered(name: str) -> None:
    for example in FAMILIES[name].held_out(60):
        called = [
            each for each in ROUNDS if example.answer.startswith(f'<tool_call>{{"name": "{each}')
        ]
        assert called == ([name] if name in ROUNDS else [])
        for each in [*called, *([example.call.name] if example.call else [])]:
            assert has(example.tools, each)


def test_without_a_fitting_tool_the_answer_is_direct_or_unknown() -> None:
    examples = FAMILIES["no_tool"].held_out(200)
    kinds = {example.split: example for example in examples}
    assert {CALCULATOR, LOOKUP, "story", "copy"} <= set(kinds)
    for example in examples:
        if example.split in ROUNDS:
            assert not has(example.tools, example.split)
            assert example.answer == UNKNOWN
        elif example.split in ("addition", "multiplication"):
            assert not has(example.tools, CALCULATOR)


def test_direct_answer_is_judged_by_the_family_of_its_question() -> None:
    family = FAMILIES["no_tool"]
    examples = family.held_out(200)
    story = next(example for example in examples if example.split == "story")
    names = ("oak", "willow", "pine", "bridge", "wall")
    tree = next(name for name in names if name in story.answer)
    other = story.answer.replace(tree, next(name for name in names if name != tree))
    assert family.accepts(story, other)
    assert not family.accepts(story, other.replace("best", "worst") + " The end.")
    unknown = next(example for example in examples if example.answer == UNKNOWN)
    assert not family.accepts(unknown, "5")


def test_questions_are_held_out_together_with_those_of_their_own_family() -> None:
    for name in ("no_tool", "tool_result"):
        for example in FAMILIES[name].held_out(60):
            assert FAMILIES[example.split].is_held_out(example)


def test_training_conversations_contain_no_held_out_call() -> None:
    rng = Random(3)
    found = 0
    for _ in range(300):
        conversation = training_conversation(rng, WEIGHTS)
        for message in conversation.messages:
            for call in message.get("tool_calls", ()):
                found += 1
                name, text = call["function"]["name"], call["function"]["arguments"]
                assert has(conversation.tools, name)
                example = Example("", "", key=ToolCall(name, json.loads(text), "").text())
                assert not FAMILIES[name].is_held_out(example)
    assert found > 100


def test_training_conversations_state_no_held_out_sum() -> None:
    rng = Random(6)
    sums: list[tuple[str, ...]] = []
    for _ in range(2000):
        for message in training_conversation(rng, WEIGHTS).messages:
            if message["role"] == "assistant":
                sums += re.findall(r"^(\d+) ([+-]) (\d+) = ", message["content"] or "")
    assert len(sums) > 200
    assert not [each for each in sums if is_held_out(int(each[0]), each[1], int(each[2]))]


def test_training_conversations_answer_every_question() -> None:
    rng = Random(4)
    for _ in range(200):
        roles = [message["role"] for message in training_conversation(rng, WEIGHTS).messages]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
        assert "user user" not in " ".join(roles)


def test_offers_are_varied() -> None:
    rng = Random(5)
    offers = [[tool["function"]["name"] for tool in offer(rng)] for _ in range(300)]
    assert [] in offers
    for order in ([CALCULATOR], [LOOKUP], [CALCULATOR, LOOKUP], [LOOKUP, CALCULATOR]):
        assert order in offers
    assert any("get_weather" in each for each in offers)


CALL = ToolCall(CALCULATOR, {EXPRESSION: "12 * 34"}, "408")


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (CALL.text(), True),
        (
            '<tool_call>\n{"arguments":{"expression":"12 * 34"},"name":"calculator"}\n</tool_call>',
            True,
        ),
        (CALL.text().replace("34", "35"), False),
        (CALL.text().replace("calculator", "lookup"), False),
        ('{"name": "calculator", "arguments": {"expression": "12 * 34"}}', False),
        (CALL.text() + CALL.text(), False),
        ("<tool_call>{</tool_call>", False),
        ("12 * 34 = 408", False),
    ],
)
def test_a_call_is_judged_by_name_and_arguments(text: str, is_right: bool) -> None:
    assert is_call(Example("What is 12 * 34?", CALL.text()), text) is is_right
