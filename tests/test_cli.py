"""The command line without a cluster: what it refuses, in one line, before anything starts."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from penstock import __version__
from penstock.cli import checkpoint, fetch, flags, main, serve
from penstock.cli.chat import ChatFailed, Conversation, show
from penstock.cli.view import Bars, Lines
from penstock.cluster.spec.spec import parse
from penstock.cluster.status import status_events
from penstock.protos import inference_pb2, inference_pb2_grpc
from penstock.workers.models.config import BadCheckpoint, UnsupportedModel
from tests.support.serving import PATIENCE

SMALL = checkpoint.SHIPPED.parent / "demo-small"


def run(*arguments: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=PATIENCE)


# ------------------------------------------------------------------ the command itself


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {__version__}\n"


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    error = capsys.readouterr().err
    known = "serve, chat, status, role, bench, simulate"
    assert error == f"penstock: there is no command 'sevre'; known are {known}\n"


@pytest.mark.parametrize("command", ["serve", "chat", "status", "role", "bench"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"penstock {command}" in capsys.readouterr().out


# ------------------------------------------------------------------ serve: what is refused


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be broken."""
    return Path(shutil.copytree(SMALL, tmp_path / "model"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a serve with these arguments is refused with."""
    try:
        code: object = main(["serve", *arguments])
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("penstock serve: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--http-prot", "1"], "unrecognized arguments: --http-prot"),
        (["--http-port", "x"], "invalid int value: 'x'"),
        (["--http-port"], "expected one argument"),
        (["--http-port", "70000"], "router.http_port: expected from 0 to 65535, not 70000"),
        (["--http-port", "9000"], "HTTP and gRPC cannot share port 9000"),
        (["--dtype", "int4"], "invalid choice: 'int4'"),
        (["--decode", "2"], "no worker prefills"),
        (["--prefill", "0", "--decode", "0"], "no worker prefills"),
        (["--ep", "2"], "ep: 2 does not divide tp (1)"),
        (
            [str(SMALL), "--mixed", "0", "--max-mixed", "1", "--tp", "3"],
            "pools.mixed: ",
        ),
        (["--config", "none.yaml"], "none.yaml: cannot be read"),
        (["a", "b"], "unrecognized arguments: b"),
        (["no-such-folder"], "is not a folder"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--host", "192.0.2.77"], "cannot listen on 192.0.2.77"),
        (["--ray-address", "127.0.0.1:1"], "--ray-address 127.0.0.1:1: nothing answers"),
        (["--ray-address", "127.0.0.1:99999"], "nothing answers there"),
        (["--ray-address", "ray://127.0.0.1:1"], "give HOST:PORT of the cluster's head"),
        (["--ray-address", "somewhere"], "give HOST:PORT of the cluster's head"),
    ],
)
def test_bad_flags(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *arguments)


def test_a_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("engine: {block_sise: 16}\n")
    assert "engine.block_sise: unknown key" in refused(capsys, "--config", str(path))


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(capsys, str(SMALL), "--http-port", str(port), "--grpc-port", "0")
        assert f"cannot listen on 127.0.0.1 port {port}" in said
        assert "--http-port" in said
        assert "--grpc-port" in refused(capsys, "--grpc-port", str(port), "--http-port", "0")


def test_a_port_that_was_just_used_is_free() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client.connect(("127.0.0.1", port))
        server.accept()[0].close()
    serve.check_ports(parse({"router": {"http_port": port, "grpc_port": 0}}))


def test_checkpoints_that_ship_are_whole() -> None:
    checkpoint.check(checkpoint.find())
    checkpoint.check(SMALL)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file(model: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (model / name).unlink()
    assert name in refused(capsys, str(model), "--http-port", "0", "--grpc-port", "0")


@pytest.mark.parametrize("size", [0, 4, 1000, -1])
def test_half_copied_weights(model: Path, size: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(BadCheckpoint, match="corrupt or half-copied") as refusal:
        checkpoint.check(model)
    assert "\n" not in str(refusal.value)


def test_a_missing_shard(model: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (model / "model.safetensors").rename(model / "one.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match=r"two\.safetensors is missing"):
        checkpoint.check(model)


def test_an_index_that_makes_no_sense(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(BadCheckpoint, match="weight_map"):
        checkpoint.check(model)


def test_an_unknown_architecture_without_transformers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.models.spec.find_spec", lambda name: None)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["FooModel"]}))
    with pytest.raises(UnsupportedModel, match=r"FooModel.*LlamaForCausalLM"):
        checkpoint.check(model)


@pytest.mark.parametrize(("status", "said"), [(404, "refuses it (404)"), (None, "be reached")])
def test_a_hub_that_does_not_give_it(
    status: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def snapshot_download(*_: object, **__: object) -> str:
        if status is None:
            raise LocalEntryNotFoundError("a long story\nof many lines")
        error = HfHubHTTPError.__new__(HfHubHTTPError)
        error.response = type("Response", (), {"status_code": status})()
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(checkpoint.NoModel) as refusal:
        checkpoint.find("some/model")
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_hub_name_becomes_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: f"/cache/{name}")
    assert checkpoint.find("some/model") == Path("/cache/some/model")


def test_fetching_into_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[tuple[str, list[str], Path]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str], local_dir: Path) -> str:
        asked.append((name, allow_patterns, local_dir))
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert fetch.main(["some/model", str(tmp_path)]) == 0
    assert fetch.main(["some/model", str(tmp_path), "--without-weights"]) == 0
    assert asked[0] == ("some/model", checkpoint.WANTED_FILES, tmp_path)
    assert set(asked[0][1]) - set(asked[1][1]) == {"*.safetensors"}


def test_fetching_says_what_was_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        fetch.main(["no-hub-name", str(tmp_path)])
    assert end.value.code == 2
    assert "expected a name like owner/model" in capsys.readouterr().err

    def download(*_: object) -> None:
        raise checkpoint.NoModel("some/model is no folder here, and the hub refuses it (404)")

    monkeypatch.setattr(fetch, "download", download)
    assert fetch.main(["some/model", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("the hub refuses it (404)\n")


def test_without_its_weights_a_checkpoint_can_be_looked_through(model: Path) -> None:
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    checkpoint.check(model, with_weights=False)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is missing"):
        checkpoint.check(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json is missing"):
        checkpoint.check(model, with_weights=False)


def test_default_name_of_a_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    assert checkpoint.default_name(".") == model.name
    assert checkpoint.default_name(f"{model}/") == model.name
    assert checkpoint.default_name("org/name") == "org/name"
    (model / "org" / "name").mkdir(parents=True)
    assert checkpoint.default_name("org/name") == "name"


def test_bundled_model_is_not_hidden_by_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert checkpoint.find("demo") == checkpoint.find() == checkpoint.SHIPPED
    assert checkpoint.find("./demo") == tmp_path / "demo"


def test_refusals_come_before_ray_and_without_a_traceback() -> None:
    result = run("serve", "--decode", "2")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


# ------------------------------------------------------------------ serve: what it shows


def test_the_greeting_can_be_pasted() -> None:
    spec = parse({"models": {"demo-small": {}}, "router": {"host": "0.0.0.0", "api_keys": ["k"]}})
    lines = serve.greeting(spec, SMALL, status_events.Serving("0.0.0.0:80", "0.0.0.0:90"), 1.25)
    text = "\n".join(lines)
    assert "demo-small is served after 1.2 s" in text
    assert "curl http://127.0.0.1:80/v1/chat/completions -H 'Authorization: Bearer" in text
    assert "penstock chat --address 127.0.0.1:90 --api-key" in text


def test_the_greeting_tells_of_all_routers() -> None:
    spec = flags.read_spec(["--routers", "2"])
    assert spec.routers == 2
    serving = status_events.Serving("a:80", "a:90", [("a:81", "a:91")])
    assert "and on http://a:81 and a:91" in serve.greeting(spec, SMALL, serving, 1.0)


def test_a_model_without_a_chat_template_is_greeted_with_a_completion(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    lines = serve.greeting(
        parse({}), model, status_events.Serving("127.0.0.1:80", "127.0.0.1:90"), 1.0
    )
    assert any("http://127.0.0.1:80/v1/completions" in line for line in lines)


STORY: list[tuple[str, status_events.StatusEvent]] = [
    ("Ray", status_events.Progress("starting")),
    ("Ray", status_events.Ready(5.0)),
    ("decode worker 0", status_events.Progress("weights", 0, 2_000_000)),
    ("decode worker 0", status_events.Progress("weights", 1_000_000, 2_000_000)),
    ("decode worker 0", status_events.Progress("warming up", 2_000_000, 2_000_000)),
    ("decode worker 0", status_events.Ready(3.0)),
    ("decode worker 0", status_events.LogLine("something [bold]odd")),
    ("", status_events.Serving("a", "b")),
    ("decode worker 0", status_events.Died("its process died", 0.5)),
    ("decode worker 0", status_events.GivenUp("no such folder", 60.0)),
    ("decode worker 0", status_events.Waiting("weights", 20.4, "1.0 of 2.0 MB")),
    ("", status_events.Draining(30.0)),
    ("", status_events.Draining(25.0, 3)),
]


def test_lines_say_each_stage_once() -> None:
    said: list[str] = []
    lines = Lines(said.append)
    for title, notice in STORY:
        lines(title, notice)
    assert said == [
        "Ray: starting",
        "Ray: ready after 5.0 s",
        "decode worker 0: weights (2.0 MB)",
        "decode worker 0: warming up (2.0 MB)",
        "decode worker 0: ready after 3.0 s",
        "something [bold]odd",
        "decode worker 0: its process died; it is started again in 0.5 s",
        "decode worker 0: no such folder; it is given up for 60 s, the others go on",
        "decode worker 0: weights, 1.0 of 2.0 MB; 20 s so far",
        "draining: what runs has 30 s; Ctrl-C again ends it at once",
        "draining: 3 requests have not ended, 25 s are left",
    ]


def test_bars_show_bytes_and_seconds_and_then_lines() -> None:
    screen = StringIO()
    bars = Bars(Console(file=screen, force_terminal=True, width=100, color_system=None))
    try:
        for title, notice in STORY[:4]:
            bars(title, notice)
        bars.refresh()
        assert "1.0 of 2.0 MB" in screen.getvalue()
        for title, notice in STORY[4:]:
            bars(title, notice)
    finally:
        bars.close()
    shown = screen.getvalue()
    assert "✓" in shown
    assert "something [bold]odd" in shown
    assert "decode worker 0: its process died" in shown


# ------------------------------------------------------------------ signals


def test_the_first_signal_is_a_wish_and_the_second_an_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[object] = []
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "_exit", lambda code: happened.append(code))
    interrupts = serve.Interrupts()
    interrupts.abandon = lambda: happened.append("abandoned")
    before = [signal.getsignal(each) for each in serve.SIGNALS]
    try:
        interrupts.install()
        interrupts.first = lambda: happened.append("first")
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.wanted
        assert happened == ["first"], "one press of Ctrl-C may arrive twice"
        now[0] += 2 * serve.ECHO_SECONDS
        signal.raise_signal(signal.SIGINT)
        assert happened == ["first", "abandoned", serve.STOPPED_BY_SIGNAL]
    finally:
        for number, handler in zip(serve.SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_a_signal_while_ray_starts_is_known_even_if_its_exception_is_lost() -> None:
    interrupts = serve.Interrupts()
    before = [signal.getsignal(each) for each in serve.SIGNALS]
    try:
        interrupts.install()
        assert not interrupts.wanted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupts.wanted
    finally:
        for number, handler in zip(serve.SIGNALS, before, strict=True):
            signal.signal(number, handler)


# ------------------------------------------------------------------ chat


@dataclass
class Talker(inference_pb2_grpc.InferenceServicer):
    """Answers with how many messages it was sent, then with what they were."""

    requests: list[Any] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    refuse: bool = False

    def ListModels(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        return inference_pb2.ListModelsReply(models=[inference_pb2.Model(name="parrot")])

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.requests.append(request)
        if self.refuse:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is\ntoo long")
        yield inference_pb2.GenerateReply(text=f"{len(request.chat.messages)} ")
        yield inference_pb2.GenerateReply(text="heard", finish_reason="stop")


@pytest.fixture
def talker() -> Iterator[tuple[Talker, str]]:
    server, servicer = grpc.server(ThreadPoolExecutor(2)), Talker()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(0).wait()


def chat(arguments: list[str], given: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", StringIO(given))
    return main(["chat", *arguments])


def test_chat_keeps_what_was_said(
    talker: tuple[Talker, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servicer, address = talker
    given = ["--address", f"grpc://{address}", "--system", "be brief", "--api-key", "k"]
    assert chat([*given, "--max-tokens", "7"], "one\n\n  two \n", monkeypatch) == 0
    assert capsys.readouterr().out == "2 heard\n4 heard\n"
    said = [(each.role, each.content) for each in servicer.requests[1].chat.messages]
    assert said == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "2 heard"),
        ("user", "two"),
    ]
    assert servicer.requests[0].sampling.max_tokens == 7


def test_chat_with_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert chat(["--address", address], "hello\n", monkeypatch) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"penstock chat: {address}: no server answers there")
    assert error.count("\n") == 1


def test_chat_with_bytes_that_are_no_text(
    talker: tuple[Talker, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(["chat", "--address", talker[1]]) == 2
    assert capsys.readouterr().err == "penstock chat: standard input is not UTF-8 text\n"


def test_chat_says_why_it_was_refused_in_one_line(
    talker: tuple[Talker, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servicer, address = talker
    servicer.refuse = True
    assert chat(["--address", address], "hello\n", monkeypatch) == 1
    assert capsys.readouterr().err == f"penstock chat: {address}: the prompt is too long\n"


def test_a_refused_question_was_never_said(talker: tuple[Talker, str]) -> None:
    servicer, address = talker
    servicer.refuse = True
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        talk = Conversation([stub], [], "", inference_pb2.Sampling())
        with pytest.raises(ChatFailed, match="the prompt is too long"):
            list(talk.send("hello"))
        assert talk.messages == []
        servicer.refuse = False
        pieces = talk.send("hello")
        assert next(pieces) == "1 "
        pieces.close()
        assert [each.content for each in talk.messages] == ["hello", "1 "]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_chat_with_a_person(
    talker: tuple[Talker, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servicer, address = talker
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


def test_a_person_may_stop_an_answer_and_hear_of_failures(
    talker: tuple[Talker, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, address = talker
    screen = StringIO()
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        talk = Conversation([stub], [], "", inference_pb2.Sampling())
        console = Console(file=screen, highlight=False)
        monkeypatch.setattr(console, "out", interrupted)
        show(talk, "hello", console)
        assert "(stopped)" in screen.getvalue()
        assert [each.content for each in talk.messages] == ["hello", "1 "]
        servicer.refuse = True
        show(talk, "hello", console)
        assert "the prompt is too long" in screen.getvalue()


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


class Dying(Talker):
    """Tells half an answer, then its connection breaks; and nothing from tokens so far."""

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.requests.append(request)
        yield inference_pb2.GenerateReply(tokens=[5, 6], text="half ", seed=77)
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def test_chat_goes_on_at_another_router(
    talker: tuple[Talker, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servicer, address = talker
    server, dying = grpc.server(ThreadPoolExecutor(2)), Dying()
    inference_pb2_grpc.add_InferenceServicer_to_server(dying, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        both = ["--address", f"127.0.0.1:{port}", "--address", address]
        assert chat(both, "hello\n", monkeypatch) == 0
    finally:
        server.stop(0).wait()
    assert capsys.readouterr().out == "half 1 heard\n"
    assert len(dying.requests) == 1
    (rest,) = servicer.requests
    assert [list(each.tokens) for each in rest.resume_from] == [[5, 6]]
    assert rest.sampling.seed == 77


@pytest.mark.parametrize(
    "arguments", [["--adress", "x"], ["--max-tokens", "many"], ["--max-tokens", "-1"]]
)
def test_bad_flags_of_chat(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["chat", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
