"""Question families about tools: calls of a calculator and a look-up, and their results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from random import Random

from training.tasks.arithmetic import is_held_out
from training.tasks.base import (
    FAMILIES,
    Conversation,
    Example,
    Message,
    Tool,
    ToolCall,
    exact,
    family,
)
from training.tasks.lists import COPIED
from training.tasks.offers import CALCULATOR, EXPRESSION, KEY, LOOKUP, has, offer
from training.tasks.smalltalk import UNKNOWN
from training.tasks.words import CITIES, NAMES, WORDS, invented_name

_BINARY = {
    "+": (
        "What is {a} + {b}?",
        "What is {a}+{b}?",
        "{a} + {b} = ?",
        "How much is {a} plus {b}?",
        "How much is {a} + {b}?",
        "Add {a} and {b}.",
        "Calculate {a} + {b}.",
        "What is the sum of {a} and {b}?",
    ),
    "-": (
        "What is {a} - {b}?",
        "What is {a}-{b}?",
        "{a} - {b} = ?",
        "How much is {a} minus {b}?",
        "How much is {a} - {b}?",
        "Subtract {b} from {a}.",
        "Calculate {a} - {b}.",
        "What is the difference between {a} and {b}?",
    ),
    "*": (
        "What is {a} * {b}?",
        "What is {a}*{b}?",
        "What is {a} x {b}?",
        "{a} * {b} = ?",
        "How much is {a} times {b}?",
        "How much is {a} * {b}?",
        "Multiply {a} by {b}.",
        "Multiply {a} and {b}.",
        "Calculate {a} * {b}.",
        "What is the product of {a} and {b}?",
    ),
    "/": (
        "What is {a} / {b}?",
        "What is {a}/{b}?",
        "{a} / {b} = ?",
        "How much is {a} divided by {b}?",
        "How much is {a} / {b}?",
        "Divide {a} by {b}.",
        "Calculate {a} / {b}.",
    ),
}
_COMPOUND = (
    "What is {text}?",
    "How much is {text}?",
    "Calculate {text}.",
    "Compute {text}.",
    "Evaluate {text}.",
)
_LOOK_UP = (
    "Look up {key}.",
    "Please look up {key}.",
    "What is the entry of {key}?",
    "What is the entry for {key}?",
    "Find the entry of {key}.",
    "Give me the entry of {key}.",
    "What is stored under {key}?",
    "What does the table say about {key}?",
)
_MISSING = ("not found", "none", "None", "null", "no entry", "unknown", "unknown key")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CODE = _LETTERS + "0123456789"
# If `tool_choice` demands a tool call, a grammar forces the answer to begin with one of these
# texts. The model learns to continue such a start, but not to write the start itself.
FORCED_STARTS = ('[{"name": "', f'{{"{EXPRESSION}": "', f'{{"{KEY}": "')
_FORCED_FRACTION = 0.12
_SUM = re.compile(r"(\d+) ([+-]) (\d+)")
_SUMS = ("addition", "subtraction", "addition_large", "multiplication")


@dataclass(frozen=True, slots=True)
class Round:
    """A question that needs a tool, as two examples: one for the tool call, one for the answer."""

    call: Example
    answer: Example


Maker = Callable[[Random, tuple[Tool, ...]], Round]


def calculation(rng: Random, tools: tuple[Tool, ...]) -> Round:
    """Return a question whose answer needs the calculator.

    The answer is never a sum or a difference that another family holds out.
    """
    prompt, expression, result = _compound(rng) if rng.random() < 0.25 else _binary(rng)
    if (found := _SUM.fullmatch(expression)) and is_held_out(
        int(found[1]), found[2], int(found[3])
    ):
        return calculation(rng, tools)
    call = ToolCall(CALCULATOR, {EXPRESSION: expression}, result)
    return _round(prompt, call, f"{expression} = {result}", tools)


def entry(rng: Random, tools: tuple[Tool, ...]) -> Round:
    """Return a question about an entry that only the look-up knows."""
    key = _key(rng)
    # A lower-case key is always quoted. In the tool call, the key follows a quote as well. After a
    # space, the key would have other tokens, so that the model could not copy it.
    is_quoted = key[0].islower() or rng.random() < 0.4
    prompt = rng.choice(_LOOK_UP).format(key=f'"{key}"' if is_quoted else key)
    is_missing = rng.random() < 0.08
    result = rng.choice(_MISSING) if is_missing else _value(rng)
    answer = (
        f'There is no entry for "{key}".' if is_missing else f'The entry of "{key}" is {result}.'
    )
    return _round(prompt, ToolCall(LOOKUP, {KEY: key}, result), answer, tools)


def _round(prompt: str, call: ToolCall, answer: str, tools: tuple[Tool, ...]) -> Round:
    text = call.text()
    return Round(
        Example(prompt, text, text, tools=tools, split=call.name),
        Example(prompt, answer, text, tools=tools, call=call, split=call.name),
    )


def direct(rng: Random, tools: tuple[Tool, ...]) -> Example:
    """Return a question that the model answers without a tool call.

    The question needs no tool, or needs a tool that is missing. If the tool is missing, the answer
    is UNKNOWN.
    """
    lacking = [make for name, make in ROUNDS.items() if not has(tools, name)]
    if lacking and (not tools or rng.random() < 0.4):
        return replace(_hard(rng.choice(lacking), rng, tools), answer=UNKNOWN)
    families = [
        each
        for each in FAMILIES.values()
        if not each.tools and not each.long and not (has(tools, CALCULATOR) and each.name in _SUMS)
    ]
    chosen = rng.choices(families, [each.weight for each in families])[0]
    return replace(chosen.generate(rng), tools=tools, split=chosen.name)


def _hard(make: Maker, rng: Random, tools: tuple[Tool, ...]) -> Example:
    """Return a question that the model cannot answer without calling a tool."""
    while True:
        example = make(rng, tools).call
        # The model can calculate with smaller numbers without a calculator.
        if make is entry or re.search(r"\d{4}", example.prompt):
            return example


ROUNDS: dict[str, Maker] = {
    CALCULATOR: calculation,
    LOOKUP: entry,
}


def training_conversation(rng: Random, weights: Mapping[str, float]) -> Conversation:
    """Return a conversation of training questions and answers in which random tools are offered.

    Args:
        weights: weight of each family, by its name.
    """
    tools = offer(rng)
    kinds = [name for name in ROUNDS if has(tools, name)]
    chances = [weights[name] for name in (*kinds, "no_tool")]
    messages: list[Message] = []
    is_going_on = True
    while is_going_on:
        kind = rng.choices((*kinds, "no_tool"), chances)[0]
        task = FAMILIES[kind]
        if kind == "no_tool":
            while task.is_held_out(example := direct(rng, tools)):
                pass
            messages += [*example.messages(), _assistant(example.answer)]
        else:
            while task.is_held_out((found := ROUNDS[kind](rng, tools)).call):
                pass
            call = found.answer.call
            assert call is not None
            if rng.random() < _FORCED_FRACTION:
                return Conversation(
                    [*messages, *found.call.messages(), _assistant(_forced(rng, call))], tools
                )
            messages += [*found.answer.messages(), _assistant(found.answer.answer)]
        is_going_on = rng.random() < 0.6
    return Conversation(messages, tools)


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _forced(rng: Random, call: ToolCall) -> str:
    """Return a tool call in a form that a grammar forces if `tool_choice` demands a tool call.

    The form is either an array of calls or only the arguments of one call.
    """
    if rng.random() < 0.3:
        return json.dumps(call.arguments)
    return json.dumps([{"name": call.name, "parameters": call.arguments}])


def _offer_with(rng: Random, name: str) -> tuple[Tool, ...]:
    while not has(tools := offer(rng), name):
        pass
    return tools


def is_call(example: Example, text: str) -> bool:
    """Return True if `text` is the expected tool call. White space in the JSON is ignored."""
    return _parsed(text) == _parsed(example.answer)


def _parsed(text: str) -> object:
    found = re.fullmatch(r"\s*<tool_call>(.*)</tool_call>\s*", text, re.DOTALL)
    try:
        return json.loads(found[1]) if found else text
    except ValueError:
        return text


@family(weight=1.2, accepts=is_call, tools=True)
def calculator(rng: Random) -> Example:
    """Questions that need a call of a calculator, for numbers of up to six digits."""
    return calculation(rng, _offer_with(rng, CALCULATOR)).call


@family(weight=1.2, accepts=is_call, tools=True)
def lookup(rng: Random) -> Example:
    """Questions that need a look-up of a key: a code, a name, a number or some words."""
    return entry(rng, _offer_with(rng, LOOKUP)).call


@family(tools=True)
def tool_result(rng: Random) -> Example:
    """Questions whose answer follows from the result of a `calculator` or `lookup` call."""
    name = rng.choice((CALCULATOR, LOOKUP))
    return ROUNDS[name](rng, _offer_with(rng, name)).answer


def is_direct_answer(example: Example, text: str) -> bool:
    """Return True if `text` is a correct answer without a tool call.

    The question belongs to the family `example.split`, which checks the answer. If that family
    needs tools, the answer must be exactly the expected one.
    """
    own = FAMILIES[example.split]
    return exact(example, text) if own.tools else own.accepts(example, text)


@family(weight=1.2, accepts=is_direct_answer, tools=True)
def no_tool(rng: Random) -> Example:
    """Questions for which no offered tool is needed or helps. The answer is not a tool call."""
    return direct(rng, offer(rng))


def _number(rng: Random) -> str:
    """Return a number of one to six digits, sometimes with one or two decimals."""
    digits = rng.randint(1, 6)
    number = rng.randrange(10 ** (digits - 1), 10**digits)
    if rng.random() < 0.12:
        return f"{number}.{rng.randint(1, 99)}"
    return str(number)


def _binary(rng: Random) -> tuple[str, str, str]:
    """Return the question, the expression and the result of an operation on two numbers."""
    sign = rng.choice("++--***//")
    a, b = _number(rng), _number(rng)
    if sign == "/" and rng.random() < 0.7:
        b = str(rng.randint(2, 999))
        a = str(int(b) * rng.randint(2, 9999))
    prompt = rng.choice(_BINARY[sign]).format(a=a, b=b)
    return prompt, f"{a} {sign} {b}", _result(Decimal(a), sign, Decimal(b))


def _result(a: Decimal, sign: str, b: Decimal) -> str:
    """Return the result of an operation, rounded to six decimals, without trailing zeros."""
    number = a / b if sign == "/" else _apply(a, sign, b)
    text = f"{number:.6f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _compound(rng: Random) -> tuple[str, str, str]:
    """Return the question, the expression and the result of two operations on integers."""
    a, b, c = (Decimal(rng.randrange(1, 10 ** rng.randint(1, 4))) for _ in range(3))
    first, second = rng.choice("+-*"), rng.choice("+-*")
    text = rng.choice((f"{a} {first} {b} {second} {c}", f"({a} {first} {b}) {second} {c}"))
    result = _apply(_apply(a, first, b), second, c)
    if second == "*" and first != "*" and text[0] != "(":
        result = _apply(a, first, b * c)
    return rng.choice(_COMPOUND).format(text=text), text, str(result)


def _apply(a: Decimal, sign: str, b: Decimal) -> Decimal:
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def _code(rng: Random, low: int, high: int) -> str:
    return "".join(rng.choices(_CODE, k=rng.randint(low, high)))


def _key(rng: Random) -> str:
    """Return a random key: a code, a name, a number, or words joined by a sign."""
    kind = rng.randrange(8)
    if kind == 0:
        return _code(rng, 3, 8)
    if kind == 1:
        return f"{_code(rng, 2, 3)}-{rng.randrange(10 ** rng.randint(2, 5))}"
    if kind == 2:
        return rng.choice((invented_name(rng), rng.choice(NAMES), rng.choice(CITIES)))
    if kind == 3:
        return f"{invented_name(rng)} {invented_name(rng)}"
    if kind == 4:
        return str(rng.randrange(10 ** rng.randint(2, 6)))
    if kind == 5:
        return f"{rng.choice(WORDS)}-{rng.randrange(10 ** rng.randint(1, 5))}"
    if kind == 6:
        return rng.choice("-_ ").join(rng.choices(WORDS, k=rng.randint(1, 3)))
    return invented_name(rng).lower() + rng.choice(("", str(rng.randint(0, 99))))


def _value(rng: Random) -> str:
    """Return a random entry of one to four words, names, codes and numbers."""
    return " ".join(_piece(rng) for _ in range(rng.choice((1, 1, 2, 3, 4))))


def _piece(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(COPIED)
    if kind < 0.7:
        return rng.choice((invented_name(rng), invented_name(rng).lower()))
    if kind < 0.85:
        return str(rng.randrange(10 ** rng.randint(1, 6)))
    return _code(rng, 2, 6)
