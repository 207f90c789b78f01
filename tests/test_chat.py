"""`penstock chat`, with a stub in place of the server."""

import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO, StringIO, TextIOWrapper
from typing import Any

import grpc
import pytest
from rich.console import Console

from penstock.cli import main
from penstock.cli.chat import ChatFailed, Conversation, show
from penstock.protos import inference_pb2, inference_pb2_grpc


@dataclass
class StubServer(inference_pb2_grpc.InferenceServicer):
    """A server that answers with the number of messages that it received."""

    requests: list[Any] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    refuse: bool = False
    ending: str = "heard"

    def ListModels(self, request: Any, context: grpc.ServicerContext) -> Any:
        return inference_pb2.ListModelsReply(models=[inference_pb2.Model(name="parrot")])

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.requests.append(request)
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        if self.refuse:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is\ntoo long\x1b[2J")
        yield inference_pb2.GenerateReply(text=f"{len(request.chat.messages)} ")
        yield inference_pb2.GenerateReply(text=self.ending, finish_reason="stop")


@pytest.fixture
def stub_server() -> Iterator[tuple[StubServer, str]]:
    server, servicer = grpc.server(ThreadPoolExecutor(2)), StubServer()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(0).wait()


def chat(arguments: list[str], given: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", StringIO(given))
    return main(["chat", *arguments])


def test_chat_sends_the_whole_conversation(
    stub_server: tuple[StubServer, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servicer, address = stub_server
    monkeypatch.setenv("PENSTOCK_API_KEY", "k")
    given = ["--address", f"grpc://{address}", "--system", "be brief"]
    assert chat([*given, "--max-tokens", "7"], "one\n\n  two \n", monkeypatch) == 0
    assert capsys.readouterr().out == "2 heard\n4 heard\n"
    messages = [(each.role, each.content) for each in servicer.requests[1].chat.messages]
    assert messages == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "2 heard"),
        ("user", "two"),
    ]
    assert servicer.requests[0].sampling.max_tokens == 7
    assert servicer.keys == ["Bearer k"] * 2


def test_chat_without_a_server_gives_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert chat(["--address", address], "hello\n", monkeypatch) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"penstock chat: {address}: no server answers there")
    assert error.count("\n") == 1


def test_chat_input_must_be_utf_8(
    stub_server: tuple[StubServer, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(["chat", "--address", stub_server[1]]) == 2
    assert capsys.readouterr().err == "penstock chat: standard input is not UTF-8 text\n"


def test_refused_chat_gives_a_one_line_error(
    stub_server: tuple[StubServer, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servicer, address = stub_server
    servicer.refuse = True
    assert chat(["--address", address], "hello\n", monkeypatch) == 1
    assert capsys.readouterr().err == f"penstock chat: {address}: the prompt is too long\ufffd[2J\n"


def test_refused_question_is_removed_from_the_conversation(
    stub_server: tuple[StubServer, str],
) -> None:
    servicer, address = stub_server
    servicer.refuse = True
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        conversation = Conversation([stub], [], "", inference_pb2.Sampling())
        with pytest.raises(ChatFailed, match="the prompt is too long"):
            list(conversation.send("hello"))
        assert conversation.messages == []
        servicer.refuse = False
        pieces = conversation.send("hello")
        assert next(pieces) == "1 "
        pieces.close()
        assert [each.content for each in conversation.messages] == ["hello", "1 "]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_interactive_chat_skips_empty_lines_and_can_start_anew(
    stub_server: tuple[StubServer, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servicer, address = stub_server
    typed = iter(["one", "", "two", "/new", "three"])

    def read(*_: object) -> str:
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["chat", "--address", address]) == 0
    shown = capsys.readouterr().out
    assert "parrot" in shown
    assert shown.count("heard") == 3
    assert [len(each.chat.messages) for each in servicer.requests] == [1, 3, 1]


def test_interactive_chat_shows_interruptions_and_errors(
    stub_server: tuple[StubServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, address = stub_server
    screen = StringIO()
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        conversation = Conversation([stub], [], "", inference_pb2.Sampling())
        console = Console(file=screen, highlight=False)
        monkeypatch.setattr(console, "out", interrupted)
        show(conversation, "hello", console)
        assert "(stopped)" in screen.getvalue()
        assert [each.content for each in conversation.messages] == ["hello", "1 "]
        servicer.refuse = True
        show(conversation, "hello", console)
        assert "the prompt is too long\ufffd[2J" in screen.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_answers_cannot_control_the_terminal(
    stub_server: tuple[StubServer, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
) -> None:
    servicer, address = stub_server
    servicer.ending = "\x1b]0;title\x07\t\u00e9\x9b2J\r"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert chat(["--address", address], "hello\n", monkeypatch) == 0
    printed = "\ufffd]0;title\ufffd\t\u00e9\ufffd2J\ufffd" if is_terminal else servicer.ending
    assert capsys.readouterr().out == f"1 {printed}\n"
    screen = StringIO()
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        talk = Conversation([stub], [], "", inference_pb2.Sampling())
        show(talk, "hello", Console(file=screen, highlight=False))
    assert not set(screen.getvalue()) & {"\x1b", "\x07", "\x9b", "\r"}
    assert talk.messages[-1].content == f"1 {servicer.ending}"


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


class FailingServer(StubServer):
    """A server that sends half an answer, then fails with UNAVAILABLE."""

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.requests.append(request)
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        yield inference_pb2.GenerateReply(tokens=[5, 6], text="half ", seed=77)
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def test_chat_resumes_at_another_router(
    stub_server: tuple[StubServer, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servicer, address = stub_server
    server, failing = grpc.server(ThreadPoolExecutor(2)), FailingServer()
    inference_pb2_grpc.add_InferenceServicer_to_server(failing, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        both = ["--address", f"127.0.0.1:{port}", "--address", address]
        assert chat(both, "hello\n", monkeypatch) == 0
    finally:
        server.stop(0).wait()
    assert capsys.readouterr().out == "half 1 heard\n"
    assert len(failing.requests) == 1
    (rest,) = servicer.requests
    assert [list(each.tokens) for each in rest.resume_from] == [[5, 6]]
    assert rest.sampling.seed == 77


@pytest.mark.parametrize(
    "arguments", [["--adress", "x"], ["--max-tokens", "many"], ["--max-tokens", "-1"]]
)
def test_bad_flags_of_chat_give_a_one_line_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["chat", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
