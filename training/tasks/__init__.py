"""Generated families of questions: what the demo models learn and are measured on.

A new family is one function `(Random) -> Example` under `@family()` in a module imported here.
"""

from training.tasks import arithmetic, facts, lists, reading, smalltalk, stories
from training.tasks.base import FAMILIES, Example, Message, Task, family

__all__ = [
    "FAMILIES",
    "Example",
    "Message",
    "Task",
    "arithmetic",
    "facts",
    "family",
    "lists",
    "reading",
    "smalltalk",
    "stories",
]
