"""`penstock chat`: a conversation in the terminal, over gRPC; without one, a question a line.

An answer whose router dies goes on at another one, or at the one that is started in its place.
"""

import argparse
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
from rich.console import Console

from penstock.cli.flags import Parser
from penstock.loadtests.bench.resuming_client import PAUSE_SECONDS, BadAnswer, Progress
from penstock.protos.inference_pb2 import (
    Chat,
    ChatMessage,
    GenerateRequest,
    ListModelsRequest,
    Sampling,
)
from penstock.protos.inference_pb2_grpc import InferenceStub

DEFAULT = "127.0.0.1:9000"
SECONDS_TO_CONNECT = 10.0
SECONDS_TO_RETURN = 60.0  # for the router of an answer that has begun, or another


class ChatFailed(RuntimeError):
    """The server is not there or does not answer; the message is one line."""


@dataclass(slots=True)
class Conversation:
    """What was said so far, and with whom.

    Args:
        stubs: of `penstock.v1.Inference`, one a router.
        metadata: of every call.
        model: its name; empty: the only one there is.
        sampling: how answers are drawn.
    """

    stubs: Sequence[Any]
    metadata: Sequence[tuple[str, str]]
    model: str
    sampling: Sampling
    messages: list[ChatMessage] = field(default_factory=list)

    def describe(self) -> str:
        """The name of the model that answers. `ChatFailed`."""
        failure = ChatFailed("there is no router to ask")
        for stub in self.stubs:
            try:
                reply = stub.ListModels(
                    ListModelsRequest(),
                    metadata=self.metadata,
                    timeout=SECONDS_TO_CONNECT,
                    wait_for_ready=False,
                )
            except grpc.RpcError as error:
                failure = ChatFailed(_error_text(error))
            else:
                return self.model or ", ".join(model.name for model in reply.models)
        raise failure

    def send(self, question: str) -> Generator[str, None, None]:
        """The answer, piece by piece. `ChatFailed`; a failed question was never said.

        Closing it early ends the answer there: what was heard of it stays said.
        """
        message = ChatMessage(role="user", content=question)
        request = GenerateRequest(
            model=self.model, chat=Chat(messages=[*self.messages, message]), sampling=self.sampling
        )
        answer = ""
        try:
            for text in self._pieces(Progress(request)):
                answer += text
                yield text
        finally:
            if answer:
                self.messages += [message, ChatMessage(role="assistant", content=answer)]

    def _pieces(self, progress: Progress) -> Iterator[str]:
        num_misses, received_at = 0, 0.0
        while not progress.is_over:
            stub = self.stubs[num_misses % len(self.stubs)]
            call = stub.Generate(progress.remaining_request(), metadata=self.metadata)
            try:
                for reply in call:
                    progress.add_reply(reply)
                    received_at = time.monotonic()
                    yield reply.text
                if not progress.is_over:
                    raise ChatFailed("the answer ended in its middle")
            except BadAnswer as error:
                raise ChatFailed(str(error)) from None
            except grpc.RpcError as error:
                num_misses += 1
                is_hopeful = num_misses < len(self.stubs) or (
                    received_at and time.monotonic() - received_at < SECONDS_TO_RETURN
                )
                if error.code() is not grpc.StatusCode.UNAVAILABLE or not is_hopeful:
                    raise ChatFailed(_error_text(error)) from None
                time.sleep(PAUSE_SECONDS)
            finally:
                call.cancel()


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 where the server is not there or failed to answer."""
    given = _parser().parse_args(arguments)
    addresses = [each.removeprefix("grpc://") for each in given.address or [DEFAULT]]
    metadata = [("authorization", f"Bearer {given.api_key}")] if given.api_key else []
    sampling = Sampling(temperature=given.temperature, max_tokens=given.max_tokens)
    with ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(each)) for each in addresses]
        stubs = [InferenceStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
        talk = Conversation(stubs, metadata, given.model, sampling)
        if given.system:
            talk.messages.append(ChatMessage(role="system", content=given.system))
        try:
            return _converse(talk, talk.describe()) if sys.stdin.isatty() else _answer(talk)
        except ChatFailed as error:
            print(f"penstock chat: {', '.join(addresses)}: {error}", file=sys.stderr)
            return 1
        except UnicodeDecodeError:
            print("penstock chat: standard input is not UTF-8 text", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130


def _parser() -> Parser:
    parser = Parser(prog="penstock chat", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--address",
        action="append",
        metavar="HOST:PORT",
        help=f"of a router's gRPC port; repeat it for more routers ({DEFAULT})",
    )
    parser.add_argument("--model", default="", metavar="NAME", help="by default the only one")
    parser.add_argument("--system", default="", metavar="TEXT", help="said before everything else")
    parser.add_argument("--api-key", default="", metavar="TEXT", help="if the server asks for one")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: greedy (0)")
    parser.add_argument(
        "--max-tokens", type=_count, default=512, metavar="N", help="an answer (512)"
    )
    return parser


def _count(text: str) -> int:
    number = int(text)
    if not 0 < number < 2**31:
        raise argparse.ArgumentTypeError(f"expected 1 or more, not {number}")
    return number


def _answer(talk: Conversation) -> int:
    """Every line of standard input is a question; its answer goes to standard output."""
    for line in sys.stdin:
        question = line.strip()
        if not question:
            continue
        for piece in talk.send(question):
            print(piece, end="", flush=True)
        print(flush=True)
    return 0


def _converse(talk: Conversation, name: str) -> int:
    """Ask a person; Ctrl-C stops an answer, and at the prompt the conversation."""
    console = Console(highlight=False)
    console.print(f"[dim]You talk with {name}. Ctrl-D ends; /new starts over.[/]")
    while True:
        try:
            question = console.input("[bold green]you> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if question == "/new":
            talk.messages = [message for message in talk.messages if message.role == "system"]
        elif question:
            show(talk, question, console)


def show(talk: Conversation, question: str, console: Console) -> None:
    """Ask, and print the answer as it comes; Ctrl-C stops it."""
    console.print("[bold cyan]answer> [/]", end="")
    pieces = talk.send(question)
    try:
        for piece in pieces:
            console.out(piece, end="", highlight=False)
    except KeyboardInterrupt:
        console.print("[dim] (stopped)[/]", end="")
    except ChatFailed as error:
        console.print(str(error), style="red", markup=False, end="")
    finally:
        pieces.close()
        console.print()


def _error_text(error: grpc.RpcError) -> str:
    """A failed call in one line."""
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        return "no server answers there: start one with `penstock serve`, or give another --address"
    return details or code.name
