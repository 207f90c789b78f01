"""Reads conversations in ShareGPT's format: a JSON list of `{"conversations": [{from, value}]}`.

The prompts of the load are the first messages of the conversations. Each answer is as long as the
reply in the conversation. The client has no tokenizer and counts four characters as one token. The
results contain the number of prompt tokens as counted by the server.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

CHARS_PER_TOKEN = 4
MIN_CHARS = 16
"""Conversations with a shorter prompt or reply are left out, as in `vllm bench serve`."""


class BadDataset(ValueError):
    """Raised if the file is not in ShareGPT's format. The message names the wrong entry."""


class Conversation(NamedTuple):
    """The first message of a conversation and the reply to it."""

    prompt: str
    reply: str

    @property
    def input_len(self) -> int:
        """Estimated number of prompt tokens."""
        return len(self.prompt) // CHARS_PER_TOKEN

    @property
    def output_len(self) -> int:
        """Estimated number of tokens of the reply."""
        return len(self.reply) // CHARS_PER_TOKEN


def read_conversations(path: Path) -> list[Conversation]:
    """Read all conversations that have a prompt and a reply. Raises BadDataset and OSError."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadDataset(f"{path}: expected a JSON file ({error})") from None
    if not isinstance(entries, list):
        raise BadDataset(f"{path}: expected a JSON list of conversations")
    found = [each for number, entry in enumerate(entries) for each in _read(path, number, entry)]
    if not found:
        raise BadDataset(
            f"{path}: expected a conversation with a prompt and a reply of at least {MIN_CHARS} "
            "characters each"
        )
    return found


def _read(path: Path, number: int, entry: Any) -> Iterator[Conversation]:
    messages = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(messages, list):
        raise BadDataset(f"{path}: entry {number} has no list in the field `conversations`")
    values = [
        message.get("value") if isinstance(message, dict) else None for message in messages[:2]
    ]
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(values):
        raise BadDataset(
            f"{path}: entry {number}: expected the first two messages to have a string in the "
            "field `value`"
        )
    if len(texts) == 2 and min(map(len, texts)) >= MIN_CHARS:
        yield Conversation(*texts)


def shuffled(
    conversations: list[Conversation], max_input: int | None, max_output: int | None, seed: int
) -> list[Conversation]:
    """Return the conversations that are not too long, in random order.

    Args:
        max_input: leave out conversations with more prompt tokens (estimated).
        max_output: leave out conversations with longer replies (estimated tokens).
    """
    fitting = [
        each
        for each in conversations
        if (max_input is None or each.input_len <= max_input)
        and (max_output is None or each.output_len <= max_output)
    ]
    random.Random(seed).shuffle(fitting)
    return fitting
