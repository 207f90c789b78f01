"""Families of questions, and the split of their examples into training and held-out."""

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
        key: names the problem behind the wording. All examples of a key are on the same side of the
            split. If empty, the key is the prompt; then only the wording of held-out questions is
            new.
        history: earlier (user, assistant) turns that the question needs.
        again: prompt to use if an earlier turn already contained the text (see `Task.drill`).
    """

    prompt: str
    answer: str
    key: str = ""
    history: tuple[tuple[str, str], ...] = ()
    again: str = ""

    def messages(self) -> list[Message]:
        """Return the conversation up to the open question, in the chat format of the OpenAI API."""
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
    """A family of questions: generates them and checks the answers.

    `drill` generates several questions about one text, for training only, so that one long prompt
    trains several answers.
    """

    name: str
    generate: Generator
    accepts: Checker
    weight: float
    long: bool
    about: str
    drill: Drill | None = None

    def is_held_out(self, example: Example) -> bool:
        """Return True if the keyed hash of the example's problem puts it on the held-out side."""
        text = f"{self.name}\0{example.key or example.prompt}".encode()
        digest = hashlib.blake2b(text, digest_size=8, key=_SPLIT_KEY).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0

    def training_example(self, rng: Random) -> Example:
        """Return one example from the training side."""
        while self.is_held_out(example := self.generate(rng)):
            pass
        return example

    def training_examples(self, rng: Random) -> list[Example]:
        """Return one training question, or the consecutive questions of a drill."""
        if self.drill is None:
            return [self.training_example(rng)]
        while not (examples := [e for e in self.drill(rng) if not self.is_held_out(e)]):
            pass
        return [examples[0], *(replace(example, prompt=example.again) for example in examples[1:])]

    def held_out(self, count: int, seed: int = 0) -> list[Example]:
        """Return up to `count` different held-out examples; the same ones for the same seed.

        The list is shorter for families with fewer different questions.
        """
        return self._different(count, Random(f"{self.name}:{seed}"), held_out=True)

    def practice(self, count: int, seed: int = 0) -> list[Example]:
        """Return examples like `held_out`, but from the training side, to find weak families."""
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
    """Register the decorated generator under its own name; its docstring describes the family.

    `weight` is its share of the training's questions or drills. A `long` family is trained in rows
    of its own length.
    """

    def register(generate: Generator) -> Generator:
        name = generate.__name__
        about = (generate.__doc__ or "").strip().splitlines()[0]
        FAMILIES[name] = Task(name, generate, accepts, weight, long, about, drill)
        return generate

    return register
