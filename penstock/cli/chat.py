"""Chat with a server over gRPC. Without a terminal, each input line is a question.

If a router fails during an answer, the answer continues at another router, or at the same router
once it has been restarted.
"""

import argparse
import re
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
from rich.console import Console
from rich.markup import escape

from penstock.cli.client_key import add_key_file
from penstock.cli.flags import Parser
from penstock.common.api_key import BadKey, client_key
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
# If a router fails during an answer, the call is repeated for this many seconds after the last
# piece of text.
SECONDS_TO_RETURN = 60.0
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters other than tab and line break, which could control the terminal."""


class ChatFailed(RuntimeError):
    """The server cannot be reached or does not answer. The message has only one line."""


@dataclass(slots=True)
class Conversation:
    """A conversation with a model.

    Args:
        stubs: gRPC stubs of `penstock.v1.Inference`, one per router.
        metadata: gRPC metadata of every call.
        model: name of the model, or "" for the server's only model.
        sampling: sampling parameters of the answers.
        messages: the messages of the conversation so far.
    """

    stubs: Sequence[Any]
    metadata: Sequence[tuple[str, str]]
    model: str
    sampling: Sampling
    messages: list[ChatMessage] = field(default_factory=list)

    def describe(self) -> str:
        """Return the name of the model that answers. Raise `ChatFailed` if no router replies."""
        failure = ChatFailed("no router address was given")
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
        """Yield the answer to `question` piece by piece.

        The question and the received part of the answer are added to the conversation. This also
        happens if the generator is closed early or fails. If no text was received, the conversation
        is not changed.

        Raises:
            ChatFailed: the answer could not be completed.
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
                    raise ChatFailed(
                        "the server ended the stream before the answer was complete: see its log"
                    )
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
    """Run the command. Return 1 if the server cannot be reached or fails, and 2 for bad input."""
    given = _parser().parse_args(arguments)
    try:
        key = client_key(given.api_key_file)
    except BadKey as error:
        print(f"penstock chat: {error}", file=sys.stderr)
        return 2
    addresses = [each.removeprefix("grpc://") for each in given.address or [DEFAULT]]
    metadata = [("authorization", f"Bearer {key}")] if key else []
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
        help=f"gRPC address of a router; repeat for more routers ({DEFAULT})",
    )
    parser.add_argument(
        "--model", default="", metavar="NAME", help="model name; by default the only one"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    add_key_file(parser)
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="sampling temperature (0)"
    )
    parser.add_argument(
        "--max-tokens",
        type=_count,
        default=512,
        metavar="N",
        help="limit of tokens per answer (512)",
    )
    return parser


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number < 2**31:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 1 to {2**31 - 1}, not {text[:40]!r}"
        )
    return number


def printable(text: str) -> str:
    """Return a text of the server for a terminal, with U+FFFD for each control character."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _answer(talk: Conversation) -> int:
    """Answer each line of standard input on standard output.

    Control characters are replaced only if standard output is a terminal.
    """
    shown = printable if sys.stdout.isatty() else str
    for line in sys.stdin:
        question = line.strip()
        if not question:
            continue
        for piece in talk.send(question):
            print(shown(piece), end="", flush=True)
        print(flush=True)
    return 0


def _converse(talk: Conversation, name: str) -> int:
    """Chat interactively. Ctrl-C stops an answer, and ends the chat if no answer is running."""
    console = Console(highlight=False)
    shown = escape(printable(name))
    console.print(f"[dim]Chatting with {shown}. Ctrl-D quits; /new starts a new conversation.[/]")
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
    """Send a question and print the answer as it arrives. Ctrl-C stops the answer."""
    console.print("[bold cyan]answer> [/]", end="")
    pieces = talk.send(question)
    try:
        for piece in pieces:
            console.out(printable(piece), end="", highlight=False)
    except KeyboardInterrupt:
        console.print("[dim] (stopped)[/]", end="")
    except ChatFailed as error:
        console.print(str(error), style="red", markup=False, end="")
    finally:
        pieces.close()
        console.print()


def _error_text(error: grpc.RpcError) -> str:
    """Return the error of a failed gRPC call in one line."""
    code, details = error.code(), printable(" ".join((error.details() or "").split()))
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        return "no server answers there: start one with `penstock serve`, or give another --address"
    return details or code.name
