"""Question families about facts of the calendar and of units."""

from __future__ import annotations

from random import Random

from training.tasks.base import Example, family
from training.tasks.words import COUNT_WORDS, listed

DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = listed(
    "January February March April May June July August September October November December"
)

_STEPS = (
    "Which {unit} comes {steps} {side} {start}?",
    "What {unit} is {steps} {side} {start}?",
    "Tell me the {unit} that comes {steps} {side} {start}.",
    "Which {unit} is it {steps} {side} {start}?",
    "Name the {unit} that is {steps} {side} {start}.",
    "{steps} {side} {start}: which {unit} is that?",
)
# Each entry has a larger unit, a smaller unit, how many smaller units make one larger unit, and the
# maximum count of larger units in a question.
_DECIMAL = (
    ("metre", "centimetre", 100, 999),
    ("metre", "millimetre", 1000, 999),
    ("centimetre", "millimetre", 10, 999),
    ("kilometre", "metre", 1000, 999),
    ("kilogram", "gram", 1000, 999),
    ("litre", "millilitre", 1000, 999),
    ("euro", "cent", 100, 999),
)
_TABLED = (
    ("week", "day", 7, 12),
    ("day", "hour", 24, 7),
    ("hour", "minute", 60, 12),
    ("minute", "second", 60, 12),
    ("year", "month", 12, 12),
    ("dozen", "egg", 12, 12),
)
_UNITS = (
    "How many {small}s are {count}?",
    "How many {small}s are there in {count}?",
    "Convert {count} to {small}s.",
    "Express {count} in {small}s.",
    "How many {small}s do {count} make?",
)


def _plural(count: int, unit: str) -> str:
    return f"{count} {unit}" if count == 1 or unit == "dozen" else f"{count} {unit}s"


def _walk(rng: Random, names: list[str], unit: str, farthest: int) -> Example:
    start = rng.randrange(len(names))
    steps = rng.randint(1, farthest)
    side, sign = rng.choice((("after", 1), ("before", -1)))
    end = names[(start + sign * steps) % len(names)]
    word = COUNT_WORDS[steps] if rng.random() < 0.6 else str(steps)
    distance = f"{word} {unit}{'' if steps == 1 else 's'}"
    prompt = rng.choice(_STEPS).format(unit=unit, steps=distance, side=side, start=names[start])
    prompt = prompt[0].upper() + prompt[1:]
    return Example(prompt, f"{distance.capitalize()} {side} {names[start]} comes {end}.")


@family(weight=0.6)
def days(rng: Random) -> Example:
    """The days before or after a weekday; held-out questions reword facts seen in training."""
    return _walk(rng, DAYS, "day", 10)


@family(weight=2.0)
def months(rng: Random) -> Example:
    """The months before or after a month; held-out questions reword facts seen in training."""
    return _walk(rng, MONTHS, "month", 6)


@family(weight=0.5)
def units(rng: Random) -> Example:
    """Questions about decimal conversions of units. No held-out number occurs in training."""
    large, small, factor, top = rng.choice(_DECIMAL)
    return _conversion(
        rng, large, small, factor, rng.randint(1, rng.choice((9, 99, top))), keyed=True
    )


@family(weight=0.4)
def time_units(rng: Random) -> Example:
    """Conversions of hours, dozens and others; held-out questions reword facts seen in training."""
    large, small, factor, top = rng.choice(_TABLED)
    return _conversion(rng, large, small, factor, rng.randint(1, top), keyed=False)


def _conversion(
    rng: Random, large: str, small: str, factor: int, count: int, *, keyed: bool
) -> Example:
    amount = _plural(count, large)
    prompt = rng.choice(_UNITS).format(small=small, count=amount)
    verb = "is" if count == 1 else "are"
    key = f"{large}:{small}:{count}" if keyed else ""
    return Example(prompt, f"{amount} {verb} {_plural(count * factor, small)}.", key)
