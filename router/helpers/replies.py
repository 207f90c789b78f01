"""Replies of helper processes, and their encoding as items of a frame.

The head of a reply contains the CPU time of the job, and the error if the job was refused.
"""

import json
from typing import NamedTuple

from penstock.router.errors import Code, ServingError

MAX_ERROR_CHARS = 4096
"""Length to which an error's message and field are cut.

They can contain a key of the request that has millions of characters.
"""


class Reply(NamedTuple):
    """The result of a job in a helper process."""

    cpu_microseconds: int
    items: list[bytes]
    error: ServingError | None = None


def encode_reply(reply: Reply) -> list[bytes]:
    """Encode a reply as the items of a frame: the head as JSON, then the reply's own items."""
    head: list[object] = [reply.cpu_microseconds]
    if reply.error is not None:
        error = reply.error
        message = error.message[:MAX_ERROR_CHARS]
        param = error.param and error.param[:MAX_ERROR_CHARS]
        head += [error.code.value, message, param, error.retry_after, error.reason]
    return [json.dumps(head).encode(), *reply.items]


def decode_reply(items: list[bytes]) -> Reply:
    """Decode a reply from the items of its frame.

    Raises:
        ValueError: the frame is not a reply.
    """
    if not items:
        raise ValueError("the reply of a helper process is empty: expected a head as first item")
    microseconds, *error = json.loads(items[0])
    if not error:
        return Reply(microseconds, items[1:])
    code, message, param, retry_after, reason = error
    return Reply(microseconds, [], ServingError(Code(code), message, param, retry_after, reason))
