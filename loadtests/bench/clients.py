"""Interface between the load generator and the clients of the different protocols."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

Api = Literal["grpc", "completions", "chat"]

Prompt = list[int] | str
"""Token ids, or text. For chat, a token id is the number of a word."""


class RequestFailed(Exception):
    """Raised if a request failed before its answer was complete. The message gives the reason."""


class ServerUnusable(Exception):
    """Raised if the server did not describe its model or the warm-up failed.

    The message gives the reason.
    """


class Chunk(NamedTuple):
    """One message of a streamed answer."""

    num_tokens: int | None = None  # number of new tokens; None if unknown (at least one)
    input_len: int | None = None  # prompt tokens counted by the server, only in the last messages
    output_len: int | None = None  # answer tokens counted by the server, only in the last messages


@dataclass(frozen=True, slots=True)
class Target:
    """Address of the server, and the settings that are the same for all requests."""

    address: str  # host:port for gRPC, a URL for HTTP
    api: Api
    model: str = ""  # name of the model, or empty for the only model of the server
    api_key: str = field(default="", repr=False)
    timeout: float = 600.0  # timeout of each request, seconds
    temperature: float = 0.0


class Served(NamedTuple):
    """A model as described by the server."""

    model: str
    vocab_size: int | None = None
    max_model_len: int | None = None


class Client(Protocol):
    """A client that can query the server's model and stream answers."""

    async def describe(self) -> Served:
        """Query the server for its model. Raises ServerUnusable."""
        ...

    def stream(self, prompt: Prompt, output_len: int) -> AsyncGenerator[Chunk]:
        """Send a prompt and yield the messages of its answer.

        End-of-text tokens do not end the answer, so the answer has exactly `output_len` tokens.
        Raises RequestFailed.
        """
        ...

    async def close(self) -> None: ...
