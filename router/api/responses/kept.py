"""The texts of a request body that the router keeps until the response is sent (`ChatBody.kept`).

For a large body, a helper process makes these texts. The router only joins and copies them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic_core import to_json

from penstock.router.requests.chat import num_chars, num_chars_of
from penstock.router.requests.json_text import dumps


@dataclass(frozen=True, slots=True)
class KeptContent:
    """The kept texts of one body.

    Attributes:
        shown: the fields that a response repeats, as the members of a JSON object.
        num_instructions: bytes of the first message if it contains the instructions, else 0.
        other_chars: number of characters of the instructions and of the tools, which are counted in
            `Chat.num_chars` but are not stored.
        ids: ids of the input items that are to be stored, one per line.
        items: these items as JSON, one per line.
    """

    shown: bytes
    num_instructions: int
    other_chars: int
    ids: bytes
    items: bytes

    @classmethod
    def make(
        cls,
        shown: Mapping[str, Any],
        instructions: Sequence[Mapping[str, Any]],
        items: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> Self:
        """Return the kept texts of a body.

        Args:
            shown: the fields that a response repeats.
            instructions: the message with the instructions as a list of one item, or an empty list.
            items: the input items that are to be stored.
            tools: the tools that the chat template gets.
        """
        return cls(
            dumps(shown)[1:-1].encode(),
            sum(len(dumps(message).encode()) for message in instructions),
            sum(map(num_chars_of, instructions)) + num_chars(tools),
            "\n".join(item["id"] for item in items).encode(),
            # `to_json` per item is faster than `dumps` for many small items.
            b"\n".join(map(to_json, items)),
        )

    def frames(self) -> Sequence[bytes]:
        """Return the texts as frames of bytes, from which `read` restores the texts."""
        head = json.dumps([self.num_instructions, self.other_chars]).encode()
        return [head, self.shown, self.ids, self.items]

    @classmethod
    def read(cls, frames: Sequence[bytes]) -> Self:
        """Restore the texts from the result of the method `frames`."""
        head, shown, ids, items = frames
        num_instructions, other_chars = json.loads(head)
        return cls(shown, num_instructions, other_chars, ids, items)
