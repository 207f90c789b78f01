"""Question families about lists: copying, sorting, reversing and counting."""

from __future__ import annotations

from random import Random

from training.tasks.base import Example, family
from training.tasks.words import CITIES, COLOURS, JOBS, NAMES, WORDS, invented_name

_ASCENDING = (
    "Sort these numbers: {items}",
    "Put these numbers in order: {items}",
    "Sort from smallest to largest: {items}",
)
_DESCENDING = (
    "Sort these numbers in descending order: {items}",
    "Sort from largest to smallest: {items}",
)
_ALPHABET = (
    "Sort these words: {items}",
    "Put these words in alphabetical order: {items}",
    "Sort alphabetically: {items}",
)
_COPY = ('Repeat exactly: "{text}"', 'Copy this text: "{text}"', 'Say this back to me: "{text}"')
_REVERSE = (
    "Reverse this list: {items}",
    "Write this list backwards: {items}",
    "Say these words in reverse order: {items}",
)
_COUNT = (
    "How many words are in this list: {items}?",
    "Count the words: {items}",
    "How many words do you see here: {items}?",
)
# Words that the model must copy in the family `copy` and in entries of the look-up. If words
# occurred only in one place of one kind of question, they would get similar embeddings, and the
# model would confuse them in its answers. Copying shows the model these words in other contexts.
COPIED = (*WORDS, *CITIES, *JOBS, *COLOURS, *NAMES)
_LARGEST = (
    "What is the {word} number in this list: {items}?",
    "Find the {word} of these numbers: {items}",
    "Which of these numbers is the {word}: {items}?",
)


def _numbers(rng: Random, low: int, high: int) -> list[int]:
    return rng.sample(range(100), rng.randint(low, high))


def _joined(items: list[int] | list[str]) -> str:
    return ", ".join(str(item) for item in items)


@family(weight=1.5)
def sort_numbers(rng: Random) -> Example:
    """Questions that ask to sort three to six different numbers below 100, in either order."""
    numbers = _numbers(rng, 3, 6)
    downwards = rng.random() < 0.4
    prompt = rng.choice(_DESCENDING if downwards else _ASCENDING).format(items=_joined(numbers))
    answer = _joined(sorted(numbers, reverse=downwards))
    return Example(prompt, answer, _joined(sorted(numbers)))


@family(weight=2.2)
def sort_words(rng: Random) -> Example:
    """Questions that ask to sort three to five words from a list of about 150 words."""
    words = rng.sample(WORDS, rng.randint(3, 5))
    prompt = rng.choice(_ALPHABET).format(items=_joined(words))
    return Example(prompt, _joined(sorted(words)), _joined(sorted(words)))


@family(weight=1.5)
def copy(rng: Random) -> Example:
    """Ask for an exact copy of a text of words, invented names, codes and numbers."""
    text = " ".join(_piece(rng) for _ in range(rng.randint(2, 9)))
    return Example(rng.choice(_COPY).format(text=text), text, text)


def _piece(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(COPIED)
    if kind < 0.8:
        return invented_name(rng)
    if kind < 0.9:
        return str(rng.randint(0, 9999))
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789") for _ in range(4))


@family(weight=0.7)
def reverse(rng: Random) -> Example:
    """Questions that ask to write three to six words in reverse order."""
    words = rng.sample(WORDS, rng.randint(3, 6))
    prompt = rng.choice(_REVERSE).format(items=_joined(words))
    return Example(prompt, _joined(words[::-1]), _joined(words))


@family(weight=0.3)
def count(rng: Random) -> Example:
    """Questions about the number of words in a list of two to nine words."""
    words = rng.sample(WORDS, rng.randint(2, 9))
    prompt = rng.choice(_COUNT).format(items=_joined(words))
    return Example(prompt, f"There are {len(words)} words.", _joined(words))


@family(weight=0.7)
def largest(rng: Random) -> Example:
    """Questions about the largest or the smallest of three to seven numbers below 100."""
    numbers = _numbers(rng, 3, 7)
    word = rng.choice(("largest", "smallest"))
    best = max(numbers) if word == "largest" else min(numbers)
    prompt = rng.choice(_LARGEST).format(word=word, items=_joined(numbers))
    return Example(prompt, f"The {word} number is {best}.", _joined(sorted(numbers)))
