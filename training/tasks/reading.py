"""Question families about a given text: recall of one of many facts, and extraction as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from training.tasks.base import Example, family
from training.tasks.words import (
    CITIES,
    COLOURS,
    FRUITS,
    JOBS,
    NAMES,
    OBJECTS,
    invented_name,
    person,
)

_INTRO = ("Here are some facts.", "Read these facts.", "Remember the following.")


def _codes(rng: Random, count: int) -> list[tuple[str, str]]:
    keys = rng.sample([(colour, thing) for colour in COLOURS for thing in OBJECTS], count)
    return [
        (
            f"What is the code of the {colour} {thing}?",
            f"The code of the {colour} {thing} is {rng.randint(0, 9999):04}.",
        )
        for colour, thing in keys
    ]


def _people(rng: Random, count: int) -> list[str]:
    known = rng.sample(NAMES, min(count, len(NAMES)))
    invented = {invented_name(rng) for _ in range(count)} - set(NAMES)
    return rng.sample([*known, *sorted(invented)], count)


def _homes(rng: Random, count: int) -> list[tuple[str, str]]:
    return [
        (f"Where does {name} live?", f"{name} lives in {rng.choice(CITIES)}.")
        for name in _people(rng, count)
    ]


def _tastes(rng: Random, count: int) -> list[tuple[str, str]]:
    return [
        (f"What is the favourite fruit of {name}?", f"The favourite fruit of {name} is {fruit}.")
        for name in _people(rng, count)
        for fruit in [rng.choice(FRUITS)]
    ]


_KINDS: tuple[Callable[[Random, int], list[tuple[str, str]]], ...] = (_codes, _homes, _tastes)


def _all_recalled(rng: Random, count: int) -> list[Example]:
    """Return one question about each of `count` facts, in random order.

    The families `recall` and `recall_long` hold out the same facts.
    """
    facts = rng.choice(_KINDS)(rng, count)
    text = " ".join([rng.choice(_INTRO), *(fact for _, fact in facts)])
    return [
        Example(f"{text} {question}", answer, answer, again=question, split="recall")
        for question, answer in rng.sample(facts, count)
    ]


@family(weight=0.9, drill=lambda rng: _all_recalled(rng, rng.randint(2, 8)))
def recall(rng: Random) -> Example:
    """Give two to eight facts, and ask for one of them. Training never asks for held-out facts."""
    return _all_recalled(rng, rng.randint(2, 8))[0]


# The questions of the drill are about 8 to 60 facts instead of 20 to 60. The model first learns to
# find one fact among a few, and can then learn to find one fact among many.
@family(long=True, drill=lambda rng: _all_recalled(rng, rng.randint(8, 60)))
def recall_long(rng: Random) -> Example:
    """Questions about one of 20 to 60 given facts, in a context of about 200 to 900 tokens."""
    return _all_recalled(rng, rng.randint(20, 60))[0]


_PROFILES = (
    "{name} is {age} years old, works as a {job} and lives in {city}.",
    "The {job} {name} from {city} is {age} years old.",
    "My friend {name} lives in {city}. At the age of {age}, {name} became a {job}.",
    "In {city} there is a {job} called {name}, aged {age}.",
)
_EXTRACT = (
    'Extract the {fields} as JSON from: "{text}"',
    'Give me the {fields} as JSON: "{text}"',
    'Read this text and return the {fields} as JSON: "{text}"',
)
_EXTRACT_AGAIN = (
    "Now give me the {fields} as JSON.",
    "Extract the {fields} as JSON.",
    "And the {fields} as JSON?",
)


def _extractions(rng: Random, count: int) -> list[Example]:
    """Return examples that ask for fields of the same text as JSON, each for different fields.

    Args:
        count: largest number of examples.
    """
    profile: dict[str, str | int] = {
        "name": person(rng),
        "age": rng.randint(18, 99),
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
    }
    text = rng.choice(_PROFILES).format(**profile)
    selections = {tuple(rng.sample(list(profile), rng.randint(1, 4))): None for _ in range(count)}
    return [_extraction(rng, text, {field: profile[field] for field in s}) for s in selections]


def _extraction(rng: Random, text: str, wanted: dict[str, str | int]) -> Example:
    *fields, last = wanted
    listed = f"{', '.join(fields)} and {last}" if fields else last
    prompt = rng.choice(_EXTRACT).format(fields=listed, text=text)
    again = rng.choice(_EXTRACT_AGAIN).format(fields=listed)
    return Example(prompt, json.dumps(wanted), f"{listed}: {text}", again=again)


@family(weight=1.2, drill=lambda rng: _extractions(rng, rng.randint(2, 5)))
def json_extraction(rng: Random) -> Example:
    """Questions that ask to write one to four facts of a text about a person as JSON."""
    return _extractions(rng, 1)[0]


_INTRODUCE = ("My name is {name}.", "Hello, I am {name}.", "Hi! My name is {name}.")
_NAME_QUESTIONS = ("What is my name?", "Do you remember my name?", "Tell me my name.")


@family(weight=0.4)
def remember(rng: Random) -> Example:
    """Questions about the user's name, which an earlier turn of the conversation contains."""
    name = person(rng)
    introduction = (rng.choice(_INTRODUCE).format(name=name), f"Nice to meet you, {name}!")
    codes = tuple(rng.choice(_codes(rng, 1)) for _ in range(rng.randint(0, 1)))
    # In some conversations, the user mentions another fact before the question about the name.
    between = tuple((fact, "I will remember that.") for _, fact in codes)
    return Example(
        rng.choice(_NAME_QUESTIONS), f"Your name is {name}.", name, (introduction, *between)
    )
