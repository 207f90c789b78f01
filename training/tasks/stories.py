"""Question family of requests for a story, with a grammar that generates short stories.

The grammar also decides whether a text is a correct answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from training.tasks.base import Example, family
from training.tasks.words import ANIMALS, NAMES, PLACES, THINGS, person

_PROMPTS = (
    "Tell a short story about {a_animal} named {hero} in a {place}.",
    "Tell me a story about {a_animal} named {hero} in a {place}.",
    "Write a short story about {a_animal} called {hero} in a {place}.",
    "Please tell a story about {a_animal} called {hero} in a {place}.",
)
_PROMPT_PATTERN = re.compile(
    r"about an? (?P<animal>\w+) (?:named|called) (?P<hero>\w+) in a (?P<place>\w+)"
)

# A story consists of one alternative from each of these groups.
_GRAMMAR = (
    (
        "Once upon a time, {a_animal} named {hero} lived in a {place}.",
        "Long ago, {a_animal} named {hero} lived in a quiet {place}.",
        "There once was {a_animal} named {hero} who lived in a {place}.",
    ),
    (
        "One {time}, {hero} found a {thing} near the old {tree}.",
        "One {time}, {hero} saw a {thing} under the {tree}.",
        "One {time}, a {thing} fell from the {tree} right in front of {hero}.",
    ),
    (
        'The {animal} wondered: "Who has lost this {thing}?"',
        '"Somebody must miss this {thing}," said {hero}.',
        "It was the most beautiful {thing} that {hero} had ever seen.",
    ),
    (
        "So {hero} walked all day and asked everyone in the {place}.",
        "So {hero} took the {thing} and set out to find its owner.",
        "{hero} could not sleep that night and left the {place} at dawn.",
    ),
    (
        "At last {hero} met {a_friend_animal} named {friend}, who was very sad.",
        "By the river sat {a_friend_animal} named {friend}, crying softly.",
    ),
    (
        '"That is my {thing}!" cried {friend}.',
        '{friend} looked up and said: "You have found my {thing}!"',
    ),
    (
        "{hero} smiled and gave the {thing} back.",
        "{hero} was glad to help and gave it to {friend}.",
    ),
    (
        "From that day on, {hero} and {friend} were the best of friends.",
        "And so {hero} and {friend} shared a cake and watched the stars.",
        "Since then the two friends meet in the {place} every {time2}.",
    ),
)
_TIMES = ("morning", "evening", "day", "summer", "winter")
_TREES = ("oak", "willow", "pine", "bridge", "wall")


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _slots(rng: Random) -> dict[str, str]:
    animal, friend_animal = rng.sample(ANIMALS, 2)
    hero = person(rng)
    return {
        "animal": animal,
        "a_animal": _with_article(animal),
        "hero": hero,
        "place": rng.choice(PLACES),
        "time": rng.choice(_TIMES),
        "time2": rng.choice(_TIMES),
        "thing": rng.choice(THINGS),
        "tree": rng.choice(_TREES),
        "a_friend_animal": _with_article(friend_animal),
        "friend": rng.choice([name for name in NAMES if name != hero]),
    }


_FREE: dict[str, Sequence[str]] = {
    "a_animal": (),
    "animal": (),
    "hero": (),
    "place": (),
    "a_friend_animal": [_with_article(animal) for animal in ANIMALS],
    "friend": NAMES,
    "thing": THINGS,
    "time": _TIMES,
    "time2": _TIMES,
    "tree": _TREES,
}


def is_story(example: Example, text: str) -> bool:
    """Return True if the grammar can produce `text` with the animal, name and place of the prompt.

    The story then is a correct answer to `example`.
    """
    found = _PROMPT_PATTERN.search(example.prompt)
    if found is None:
        return False
    known = {**found.groupdict(), "a_animal": _with_article(found["animal"])}
    return _derives(_GRAMMAR, text.strip() + " ", known)


def _derives(lines: Sequence[Sequence[str]], text: str, known: dict[str, str]) -> bool:
    """Return True if `text` consists of one alternative of each line in `lines`.

    Args:
        known: words that earlier lines have put into the slots of the grammar, by name of the slot.
    """
    if not lines:
        return not text
    for choice in lines[0]:
        found = re.match(_pattern(choice, known), text)
        if found and _derives(lines[1:], text[found.end() :], known | found.groupdict()):
            return True
    return False


def _pattern(choice: str, known: dict[str, str]) -> str:
    pattern = re.escape(choice + " ")
    for slot, words in _FREE.items():
        word = known.get(slot) or f"(?P<{slot}>{'|'.join(words)})"
        pattern = pattern.replace(re.escape("{" + slot + "}"), word, 1)
        # If a slot occurs twice, both occurrences must match the same word.
        pattern = pattern.replace(re.escape("{" + slot + "}"), known.get(slot) or f"(?P={slot})")
    return pattern


@family(weight=0.5, accepts=is_story)
def story(rng: Random) -> Example:
    """Requests for a story about an animal, a name and a place. Many stories are correct answers.

    Every story that the grammar can produce for the prompt is correct.
    """
    slots = _slots(rng)
    prompt = rng.choice(_PROMPTS).format(**slots)
    text = " ".join(rng.choice(choices) for choices in _GRAMMAR).format(**slots)
    return Example(prompt, text, f"{slots['animal']} {slots['hero']} {slots['place']}")
