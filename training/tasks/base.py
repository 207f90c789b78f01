"""Question families, and the split of their questions into training and held-out questions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

HELD_OUT_ONE_IN = 12
_SPLIT_KEY = b"penstock-demo-1"

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its expected answer.

    Attributes:
        key: identifies the problem, whatever its wording. Examples with the same key are all
            training examples or all held out. If empty, the prompt is the key: then a held-out
            question may ask about a known fact, in a new wording.
        history: earlier (user, assistant) turns that the question needs.
        again: prompt to use instead if an earlier turn already contains the text (see
            `Task.drill`).
    """

    prompt: str
    answer: str
    key: str = ""
    history: tuple[tuple[str, str], ...] = ()
    again: str = ""

    def messages(self) -> list[Message]:
        """Return the conversation, ending with the question, in the OpenAI API's chat format."""
        messages: list[Message] = []
        for user, assistant in self.history:
            messages.append({"role": "user", "content": user})
            messages.append({"role": "assistant", "content": assistant})
        return [*messages, {"role": "user", "content": self.prompt}]


Generator = Callable[[Random], Example]
Drill = Callable[[Random], list[Example]]
Checker = Callable[[Example, str], bool]


def exact(example: Example, text: str) -> bool:
    """Return True if `text` is exactly the expected answer, ignoring surrounding spaces."""
    return text.strip() == example.answer


@dataclass(frozen=True, slots=True)
class Task:
    """One family of questions: generates questions and checks answers.

    `drill` generates several questions about the same text, so that one long prompt provides
    several training examples; it is used only in training.
    """

    name: str
    generate: Generator
    accepts: Checker
    weight: float
    long: bool
    about: str
    drill: Drill | None = None

    def is_held_out(self, example: Example) -> bool:
        """Return True if the example is held out, decided by a keyed hash of its problem."""
        text = f"{self.name}\0{example.key or example.prompt}".encode()
        digest = hashlib.blake2b(text, digest_size=8, key=_SPLIT_KEY).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0

    def training_example(self, rng: Random) -> Example:
        """Return one random training example, that is, one that is not held out."""
        while self.is_held_out(example := self.generate(rng)):
            pass
        return example

    def training_examples(self, rng: Random) -> list[Example]:
        """Return one training example, or those of one drill if the family has drills."""
        if self.drill is None:
            return [self.training_example(rng)]
        while not (examples := [e for e in self.drill(rng) if not self.is_held_out(e)]):
            pass
        return [examples[0], *(replace(example, prompt=example.again) for example in examples[1:])]

    def held_out(self, count: int, seed: int = 0) -> list[Example]:
        """Return up to `count` different held-out examples; equal seeds give equal examples.

        The list is shorter if the family has fewer different questions.
        """
        return self._different(count, Random(f"{self.name}:{seed}"), held_out=True)

    def practice(self, count: int, seed: int = 0) -> list[Example]:
        """Return up to `count` different training examples, to find families with many errors."""
        return self._different(count, Random(f"practice:{self.name}:{seed}"), held_out=False)

    def _different(self, count: int, rng: Random, *, held_out: bool) -> list[Example]:
        found: dict[tuple[object, ...], Example] = {}
        for example in self._draws(rng, 200 * count):
            if self.is_held_out(example) == held_out:
                found.setdefault((example.history, example.prompt), example)
            if len(found) == count:
                break
        return list(found.values())

    def _draws(self, rng: Random, limit: int) -> Iterator[Example]:
        return (self.generate(rng) for _ in range(limit))


FAMILIES: dict[str, Task] = {}


def family(
    *,
    weight: float = 1.0,
    long: bool = False,
    accepts: Checker = exact,
    drill: Drill | None = None,
) -> Callable[[Generator], Generator]:
    """Register the decorated generator as a question family with the name of the function.

    The first line of the generator's docstring describes the family. `weight` is the relative
    frequency of its questions or drills in training. Families with `long` are used only in batches
    of long rows.
    """

    def register(generate: Generator) -> Generator:
        name = generate.__name__
        about = (generate.__doc__ or "").strip().splitlines()[0]
        FAMILIES[name] = Task(name, generate, accepts, weight, long, about, drill)
        return generate

    return register
