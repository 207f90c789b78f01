"""Question families, and the split of their questions into training and held-out questions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

HELD_OUT_ONE_IN = 12
_SPLIT_KEY = b"penstock-demo-1"

Message = dict[str, Any]
Tool = dict[str, Any]

CALL_ID = "call_0"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages whose last question has no answer yet, and the tools that the model may call.

    Messages and tools have the form of the OpenAI API.
    """

    messages: list[Message]
    tools: tuple[Tool, ...] = ()


def call_text(name: str, arguments: str) -> str:
    """Return a tool call in the text format of the models.

    Args:
        name: name of the tool.
        arguments: the arguments as JSON text.
    """
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool with its result."""

    name: str
    arguments: dict[str, str]
    result: str

    def text(self) -> str:
        """Return the tool call in the text format of the models."""
        return call_text(self.name, json.dumps(self.arguments))

    def messages(self) -> list[Message]:
        """Return the message with the tool call, and the message with its result."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        call = {"id": CALL_ID, "type": "function", "function": function}
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": CALL_ID, "content": self.result},
        ]


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its expected answer.

    Attributes:
        key: identifies the problem, independently of its wording. Examples with the same key are
            either all training examples or all held out. If `key` is empty, the prompt is the key.
            A held-out question may then ask, in a new wording, about a fact that occurs in
            training.
        history: earlier pairs of a user's and an assistant's message that the question needs.
        again: prompt that replaces `prompt` if an earlier turn of the conversation already contains
            the text to which the question refers (see `Task.drill`).
        tools: tools that the model may call.
        call: tool call that was made after the prompt. The answer follows the result of this call.
        split: name of the question family whose hash decides whether the example is held out. If
            `split` is empty, the family that generated the example is used.
    """

    prompt: str
    answer: str
    key: str = ""
    history: tuple[tuple[str, str], ...] = ()
    again: str = ""
    tools: tuple[Tool, ...] = ()
    call: ToolCall | None = None
    split: str = ""

    def conversation(self) -> Conversation:
        """Return the conversation that the model continues with its answer."""
        return Conversation(self.messages(), self.tools)

    def messages(self) -> list[Message]:
        """Return the messages of the conversation, in the chat format of the OpenAI API.

        The last message is the question, or the result of the tool call.
        """
        messages: list[Message] = []
        for user, assistant in self.history:
            messages.append({"role": "user", "content": user})
            messages.append({"role": "assistant", "content": assistant})
        called = self.call.messages() if self.call else []
        return [*messages, {"role": "user", "content": self.prompt}, *called]


Generator = Callable[[Random], Example]
Drill = Callable[[Random], list[Example]]
Checker = Callable[[Example, str], bool]


def exact(example: Example, text: str) -> bool:
    """Return True if `text` is the expected answer. Spaces around `text` are ignored."""
    return text.strip() == example.answer


@dataclass(frozen=True, slots=True)
class Task:
    """A family of questions, which generates questions and checks answers.

    Attributes:
        weight: relative frequency of the family's questions or drills in training.
        long: whether the family is used only in batches of long rows.
        about: one sentence about the questions, for the model card.
        drill: generates several questions about the same text, so that one long prompt provides
            several training examples. Drills are used only in training.
        tools: whether the family is used only in the training stage about tools.
    """

    name: str
    generate: Generator
    accepts: Checker
    weight: float
    long: bool
    about: str
    drill: Drill | None = None
    tools: bool = False

    def is_held_out(self, example: Example) -> bool:
        """Return True if the example is held out. A keyed hash of the example's key decides it."""
        text = f"{example.split or self.name}\0{example.key or example.prompt}".encode()
        digest = hashlib.blake2b(text, digest_size=8, key=_SPLIT_KEY).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0

    def training_example(self, rng: Random) -> Example:
        """Return a random example that is not held out."""
        while self.is_held_out(example := self.generate(rng)):
            pass
        return example

    def training_examples(self, rng: Random) -> list[Example]:
        """Return the examples of one random drill of this family.

        If the family has no drills, return one random training example.
        """
        if self.drill is None:
            return [self.training_example(rng)]
        while not (examples := [e for e in self.drill(rng) if not self.is_held_out(e)]):
            pass
        return [examples[0], *(replace(example, prompt=example.again) for example in examples[1:])]

    def held_out(self, count: int, seed: int = 0) -> list[Example]:
        """Return `count` different held-out examples, or fewer if the family has fewer.

        Equal seeds give equal examples.
        """
        return self._different(count, Random(f"{self.name}:{seed}"), held_out=True)

    def practice(self, count: int, seed: int = 0) -> list[Example]:
        """Return up to `count` different training examples.

        `curriculum.review_weights` uses these examples to find families with many errors.
        """
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
    tools: bool = False,
) -> Callable[[Generator], Generator]:
    """Return a decorator that registers a generator function as a question family.

    The family has the name of the function. The first line of the function's docstring describes
    the family in the model card.

    Args:
        weight: relative frequency of the family's questions or drills in training.
        long: whether the family is used only in batches of long rows.
        accepts: returns whether a text is a correct answer to an example.
        drill: generates several questions about the same text (see `Task`), or None.
        tools: whether the family is used only in the training stage about tools.
    """

    def register(generate: Generator) -> Generator:
        name = generate.__name__
        about = (generate.__doc__ or "").strip().splitlines()[0]
        FAMILIES[name] = Task(name, generate, accepts, weight, long, about, drill, tools)
        return generate

    return register
