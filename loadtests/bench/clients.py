"""What every protocol's client looks like to the load."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Api = Literal["grpc", "completions", "chat"]


class RequestFailed(Exception):
    """One request did not come to a complete answer; the message says why."""


class ServerUnusable(Exception):
    """The server cannot be asked what it serves; the message says why."""


class Chunk(NamedTuple):
    """One message of an answer."""

    num_tokens: int | None = None  # new tokens in it; None: some, the protocol does not say
    input_len: int | None = None  # what the server counted, in the last messages
    output_len: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what they all have in common."""

    address: str  # host:port for gRPC, a URL for HTTP
    api: Api
    model: str = ""  # empty: the only one there
    api_key: str = ""
    timeout: float = 600.0  # seconds a request may take
    temperature: float = 0.0


class Served(NamedTuple):
    """What the server said of its model."""

    model: str
    vocab_size: int | None = None
    max_model_len: int | None = None


class Client(Protocol):
    async def describe(self) -> Served:
        """Ask what is served. Raises ServerUnusable."""
        ...

    def stream(self, prompt: list[int], output_len: int) -> AsyncGenerator[Chunk]:
        """Send a prompt (token ids) and yield the messages of its answer.

        The answer is made to be `output_len` tokens long. Raises RequestFailed.
        """
        ...

    async def close(self) -> None: ...
