"""Generated families of questions: what the demo models learn and are measured on.

A new family is one function `(Random) -> Example` under `@family()` in a module imported here.
"""

from training.families import arithmetic, facts, lists, reading, smalltalk, stories
from training.families.base import FAMILIES, Example, Family, Message, family

__all__ = [
    "FAMILIES",
    "Example",
    "Family",
    "Message",
    "arithmetic",
    "facts",
    "family",
    "lists",
    "reading",
    "smalltalk",
    "stories",
]
