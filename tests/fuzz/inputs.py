"""Inputs of the fuzz run: a client's requests to one port of a router, as replayable records."""

import base64
import json
import zlib
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

Port: TypeAlias = Literal["http", "admin", "grpc"]


@dataclass(frozen=True, slots=True)
class RawInput:
    """Bytes that a client sends over a new connection, piece by piece.

    `ending` is the client's behaviour after the last piece:

    - read: it reads until the router closes the connection, as the last request demands;
    - close: it closes the connection immediately, while the workers are paused;
    - leave: it keeps the connection open until the run has too many open connections.
    """

    port: Port
    pieces: tuple[bytes, ...]
    ending: Literal["read", "close", "leave"]
    label: str = ""  # route of the request, if the bytes are one valid request


@dataclass(frozen=True, slots=True)
class GrpcInput:
    """A gRPC call with serialized messages.

    `ending` is the client's behaviour: it reads all replies ("read"), cancels the call after the
    first reply ("one"), or cancels it before any reply, while the workers are paused ("cancel").
    """

    method: str
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, str], ...]
    ending: Literal["read", "one", "cancel"]
    timeout: float | None = None


Input: TypeAlias = RawInput | GrpcInput


def to_text(given: Input) -> str:
    """Return an input as text without spaces, for a command line."""
    record = {"kind": type(given).__name__, **asdict(given)}
    data = json.dumps(record, default=lambda value: value.decode("latin-1"))
    return base64.urlsafe_b64encode(zlib.compress(data.encode(), 9)).decode()


def from_text(text: str) -> Input:
    """Return the input that `to_text` wrote."""
    record = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
    if record.pop("kind") == "RawInput":
        pieces = tuple(piece.encode("latin-1") for piece in record.pop("pieces"))
        return RawInput(pieces=pieces, **record)
    messages = tuple(each.encode("latin-1") for each in record.pop("messages"))
    metadata = tuple((name, value) for name, value in record.pop("metadata"))
    return GrpcInput(messages=messages, metadata=metadata, **record)
