"""Question families about sums, differences, products and comparisons."""

from __future__ import annotations

from random import Random

from training.tasks.base import FAMILIES, Example, family

_ADD = (
    "What is {a} + {b}?",
    "What is {a}+{b}?",
    "{a} + {b} = ?",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "What is the sum of {a} and {b}?",
)
_SUBTRACT = (
    "What is {a} - {b}?",
    "What is {a}-{b}?",
    "{a} - {b} = ?",
    "How much is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "What is the difference between {a} and {b}?",
)
_MULTIPLY = (
    "What is {a} x {b}?",
    "What is {a} * {b}?",
    "How much is {a} times {b}?",
    "Multiply {a} by {b}.",
    "Calculate {a} x {b}.",
    "What is the product of {a} and {b}?",
)
_COMPARE = (
    "Which number is {word}, {a} or {b}?",
    "Which is {word}: {a} or {b}?",
    "Tell me which number is {word}, {a} or {b}.",
)


def _key(a: int, sign: str, b: int) -> str:
    # The key ignores the order of the operands of a sum. Otherwise 4 + 3 could be held out,
    # although the model sees 3 + 4 in training.
    return f"{min(a, b)}+{max(a, b)}" if sign == "+" else f"{a}{sign}{b}"


def is_held_out(a: int, sign: str, b: int) -> bool:
    """Return True if a family of sums or differences holds out `a` + `b` or `a` - `b`."""
    if max(a, b) > (999 if sign == "+" else 99) or (sign == "-" and b > a):
        return False
    sums = "addition" if max(a, b) < 100 else "addition_large"
    name = sums if sign == "+" else "subtraction"
    return FAMILIES[name].is_held_out(Example("", "", _key(a, sign, b)))


def _sum(rng: Random, a: int, b: int) -> Example:
    prompt = rng.choice(_ADD).format(a=a, b=b)
    return Example(prompt, f"{a} + {b} = {a + b}", _key(a, "+", b))


@family(weight=1.5)
def addition(rng: Random) -> Example:
    """Questions about sums of two numbers below 100. No held-out pair occurs in training."""
    return _sum(rng, rng.randint(0, 99), rng.randint(0, 99))


@family(weight=2.2)
def subtraction(rng: Random) -> Example:
    """Questions about differences of two numbers below 100. No held-out pair occurs in training."""
    b, a = sorted((rng.randint(0, 99), rng.randint(0, 99)))
    return Example(rng.choice(_SUBTRACT).format(a=a, b=b), f"{a} - {b} = {a - b}", _key(a, "-", b))


# Only few of the possible sums occur in training, so the model must learn the general rule of
# carrying digits.
@family(weight=3.0)
def addition_large(rng: Random) -> Example:
    """Questions about sums of two numbers below 1000. No held-out pair occurs in training.

    At least one of the numbers is above 99.
    """
    a, b = rng.sample((rng.randint(100, 999), rng.randint(0, rng.choice((99, 999, 999)))), 2)
    return _sum(rng, a, b)


@family(weight=0.7)
def multiplication(rng: Random) -> Example:
    """Products of two numbers up to 12; held-out questions reword facts seen in training."""
    a, b = rng.randint(1, 12), rng.randint(1, 12)
    return Example(rng.choice(_MULTIPLY).format(a=a, b=b), f"{a} x {b} = {a * b}")


@family(weight=0.7)
def comparison(rng: Random) -> Example:
    """Questions about the larger or smaller of two numbers. No held-out pair occurs in training.

    Both numbers are below 1000.
    """
    top = rng.choice((99, 999))
    a, b = rng.sample(range(top + 1), 2)
    word = rng.choice(("larger", "smaller"))
    answer, other = (max(a, b), min(a, b)) if word == "larger" else (min(a, b), max(a, b))
    prompt = rng.choice(_COMPARE).format(word=word, a=a, b=b)
    return Example(prompt, f"{answer} is {word} than {other}.", f"{min(a, b)},{max(a, b)}")
