"""Makes the tools that conversations offer: a calculator, a look-up, and tools without use.

No question needs the tools without use. The model learns to ignore them.
"""

from __future__ import annotations

from random import Random

from training.tasks.base import Tool
from training.tasks.words import WORDS

CALCULATOR, EXPRESSION = "calculator", "expression"
LOOKUP, KEY = "lookup", "key"

_ABOUT_CALCULATOR = (
    "Evaluates an arithmetic expression.",
    "Evaluates an expression.",
    "Calculates the value of an arithmetic expression.",
    "Computes the result of a calculation.",
    "Evaluate a mathematical expression and return the result.",
    "A calculator for numbers of any size.",
    "Does arithmetic.",
)
_ABOUT_LOOKUP = (
    "Returns the entry of a key.",
    "Looks up a key in a table.",
    "Finds the entry that is stored under a key.",
    "Look up the value of a key in the database.",
    "Returns what the database knows about a key.",
    "Gets an entry by its key.",
    "Searches a table.",
)
_OTHERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("get_weather", "Returns the weather in a city.", ("city",)),
    ("send_email", "Sends an email.", ("to", "subject", "text")),
    ("set_timer", "Sets a timer.", ("minutes",)),
    ("translate", "Translates a text.", ("text", "language")),
    ("play_music", "Plays a song.", ("title",)),
    ("get_time", "Returns the time of day.", ()),
)


def offer(rng: Random) -> tuple[Tool, ...]:
    """Return the tools of a random conversation, in random order.

    With probability 1/12, the conversation has no tools.
    """
    if rng.random() < 1 / 12:
        return ()
    offered = [tool for tool in (_calculator(rng), _lookup(rng)) if rng.random() < 0.72]
    if not offered or rng.random() < 0.25:
        offered.append(_other(rng))
    rng.shuffle(offered)
    return tuple(offered)


def has(tools: tuple[Tool, ...], name: str) -> bool:
    """Return True if one of the tools has the name `name`."""
    return any(tool["function"]["name"] == name for tool in tools)


def _calculator(rng: Random) -> Tool:
    return _tool(rng, CALCULATOR, rng.choice(_ABOUT_CALCULATOR), (EXPRESSION,))


def _lookup(rng: Random) -> Tool:
    return _tool(rng, LOOKUP, rng.choice(_ABOUT_LOOKUP), (KEY,))


def _other(rng: Random) -> Tool:
    return _tool(rng, *rng.choice(_OTHERS))


def _tool(rng: Random, name: str, about: str, parameters: tuple[str, ...]) -> Tool:
    """Return a tool with a given name and given parameters.

    The tool's description may be missing or consist of random words, because users may describe a
    tool in any way.
    """
    kind = {"type": "string"} if rng.random() < 0.9 else {}
    schema = {
        "type": "object",
        "properties": {parameter: kind for parameter in parameters},
        "required": list(parameters),
    }
    function: dict[str, object] = {"name": name, "description": about, "parameters": schema}
    chance = rng.random()
    if chance < 0.1:
        del function["description"]
    elif chance < 0.25:
        words = rng.choices(WORDS, k=rng.randint(3, 10))
        function["description"] = " ".join(words).capitalize() + "."
    return {"type": "function", "function": function}
