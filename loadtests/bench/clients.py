"""Interface between the load generator and the clients of the different protocols."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Api = Literal["grpc", "completions", "chat"]


class RequestFailed(Exception):
    """A request failed before its answer was complete; the message gives the reason."""


class ServerUnusable(Exception):
    """The server did not describe its model or failed the warm-up; the message says why."""


class Chunk(NamedTuple):
    """One message of a streamed answer."""

    num_tokens: int | None = None  # new tokens; None: one or more, not reported by the protocol
    input_len: int | None = None  # prompt tokens as counted by the server, in the last messages
    output_len: int | None = None  # answer tokens as counted by the server


@dataclass(frozen=True, slots=True)
class Target:
    """The server's address and the settings that all requests share."""

    address: str  # host:port for gRPC, a URL for HTTP
    api: Api
    model: str = ""  # empty: the server's only model
    api_key: str = ""
    timeout: float = 600.0  # seconds per request
    temperature: float = 0.0


class Served(NamedTuple):
    """Description of a model as the server reports it."""

    model: str
    vocab_size: int | None = None
    max_model_len: int | None = None


class Client(Protocol):
    """A client that can describe the server's model and stream answers."""

    async def describe(self) -> Served:
        """Query the server for its model. Raises ServerUnusable."""
        ...

    def stream(self, prompt: list[int], output_len: int) -> AsyncGenerator[Chunk]:
        """Send a prompt (token ids) and yield the messages of its answer.

        The request ignores end-of-text tokens, so the answer has `output_len` tokens.
        Raises RequestFailed.
        """
        ...

    async def close(self) -> None: ...
