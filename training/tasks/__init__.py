"""Generated families of questions, on which the demo models are trained and measured.

To add a family, write a function `(Random) -> Example` under `@family()` in a module imported here.
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
