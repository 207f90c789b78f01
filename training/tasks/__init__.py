"""The question families, which generate the questions for training and testing the demo models.

To add a family, write a function `(Random) -> Example` with the decorator `@family()` in a module
that is imported here.
"""

from training.tasks import arithmetic, facts, lists, reading, smalltalk, stories, tools
from training.tasks.base import (
    FAMILIES,
    Conversation,
    Example,
    Message,
    Task,
    Tool,
    ToolCall,
    family,
)

__all__ = [
    "FAMILIES",
    "Conversation",
    "Example",
    "Message",
    "Task",
    "Tool",
    "ToolCall",
    "arithmetic",
    "facts",
    "family",
    "lists",
    "reading",
    "smalltalk",
    "stories",
    "tools",
]
