"""The command line without a cluster: errors are one line and come before anything starts."""

import json
import shutil
import socket
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from penstock import __version__, cli
from penstock.cli import checkpoint, fetch, flags, main, serve
from penstock.cli.view import Bars, Lines
from penstock.cluster.spec.spec import parse
from penstock.cluster.status import status_events
from penstock.loadtests.micro.server import free_ports
from penstock.workers.models.config import BadCheckpoint, UnsupportedModel
from tests.support.api_keys import key_file
from tests.support.serving import TIMEOUT_SECONDS

SMALL = checkpoint.SHIPPED.parent / "demo-small"


def run(*arguments: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    return subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )


# ------------------------------------------------------------------ the command itself


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {__version__}\n"


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    error = capsys.readouterr().err
    known = "serve, chat, status, explain, role, bench, simulate"
    assert error == f"penstock: unknown command 'sevre'; expected one of {known}\n"


def test_command_whose_output_has_no_reader_ends_quietly() -> None:
    code = (
        "import sys, types, penstock.cli as cli; sys.modules['endless'] = types.SimpleNamespace("
        "main=lambda rest: [print(n, flush=True) for n in range(10**6)]); "
        "cli.COMMANDS['chat'] = ('endless', ''); sys.exit(cli.main(['chat']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.wait(TIMEOUT_SECONDS) == 141
        assert process.stderr.read() == b""


@pytest.mark.parametrize("command", ["serve", "chat", "status", "explain", "role", "bench"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"penstock {command}" in capsys.readouterr().out


# ------------------------------------------------------------------ serve: errors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a checkpoint, which tests may damage."""
    return Path(shutil.copytree(SMALL, tmp_path / "model"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one-line error of `penstock serve` with these arguments."""
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
    ("arguments", "message"),
    [
        (["--http-prot", "1"], "unrecognized arguments: --http-prot"),
        (["--http-port", "x"], "invalid int value: 'x'"),
        (["--http-port"], "expected one argument"),
        (["--http-port", "70000"], "--http-port: expected from 0 to 65535, not 70000"),
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
        (
            ["--host", "no.such.host.invalid", "--allow-anonymous"],
            "): give another --http-port or --host",
        ),
        (["--host", "192.0.2.77", "--allow-anonymous"], "cannot listen on 192.0.2.77"),
        (["--host", "0.0.0.0"], "router.host: 0.0.0.0 can be reached from other machines, and"),
        (["--host", "::"], "or --allow-anonymous if"),
        (["--chat-template", "none.jinja"], "chat_template: the file none.jinja cannot be read"),
        (["--ray-address", "127.0.0.1:1"], "--ray-address 127.0.0.1:1: cannot connect ("),
        (["--ray-address", "127.0.0.1:99999"], "cannot connect ("),
        (["--ray-address", "ray://127.0.0.1:1"], "expected HOST:PORT of the cluster's"),
        (["--ray-address", "somewhere"], "expected HOST:PORT of the cluster's head"),
    ],
)
def test_bad_flags_give_a_one_line_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize("command", ["serve", "chat", "status", "explain", "role", "bench"])
@pytest.mark.parametrize("arguments", [["--api-key", "sk-1"], ["--api-key=sk-1"], ["--api-key"]])
def test_keys_on_the_command_line_are_refused_and_not_repeated(
    command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, *arguments])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "use --api-key-file FILE or the variable PENSTOCK_API_KEY" in error
    assert error.count("\n") == 1
    assert "sk-1" not in error


@pytest.mark.parametrize("command", ["chat", "status", "explain", "role", "bench"])
def test_client_with_a_bad_key_file_ends_before_it_calls(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ["--api-key-file", str(key_file(tmp_path, "sk-1", mode=0o644))]
    needed = {"role": ["decode-0", "mixed"], "explain": ["chatcmpl-1"]}
    assert main([command, *needed.get(command, []), *file]) == 2
    error = capsys.readouterr().err
    assert "the file can be read or written by other users" in error
    assert error.count("\n") == 1


def test_server_with_a_bad_key_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "sk-short")
    error = refused(capsys, str(SMALL))
    assert "PENSTOCK_API_KEY: the key has fewer than 16 characters" in error
    assert "sk-short" not in error


def test_unknown_key_in_the_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("engine: {block_sise: 16}\n")
    assert "engine.block_sise: unknown key" in refused(capsys, "--config", str(path))


def test_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(capsys, str(SMALL), "--http-port", str(port), "--grpc-port", "0")
        assert f"cannot listen on 127.0.0.1 port {port}" in message
        assert "stop the process that uses it, or give another" in message
        assert "--http-port" in message
        assert "--grpc-port" in refused(capsys, "--grpc-port", str(port), "--http-port", "0")


def test_a_port_that_was_just_used_is_free() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Take a port that the kernel does not use for outgoing connections.
        server.bind(("127.0.0.1", free_ports(1)[0]))
        server.listen()
        port = server.getsockname()[1]
        client.connect(("127.0.0.1", port))
        server.accept()[0].close()
    serve.check_ports(parse({"router": {"http_port": port, "grpc_port": 0}}))


def test_bundled_checkpoints_are_complete() -> None:
    checkpoint.check(checkpoint.find())
    checkpoint.check(SMALL)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_of_a_checkpoint_is_named(
    model: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / name).unlink()
    assert name in refused(capsys, str(model), "--http-port", "0", "--grpc-port", "0")


@pytest.mark.parametrize("size", [0, 4, 1000, -1])
def test_half_copied_weights_are_refused(model: Path, size: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(BadCheckpoint, match="corrupt or incomplete") as refusal:
        checkpoint.check(model)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "m.gguf is missing"),
        (b"PK\3\4 and more", "m.gguf is not a GGUF file: it begins with b'PK"),
        (b"GGUF\1\0\0\0", "m.gguf has GGUF version 1: expected 2 or 3"),
        (b"GGUF\0\0\0\3", "m.gguf is a big-endian GGUF file"),
        (b"GGUF\3\0\0\0\1\0\0\0", "m.gguf is corrupt or incomplete"),
    ],
)
def test_bad_gguf_file_gives_a_one_line_error(
    content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    assert words in refused(capsys, str(path), "--http-port", "0", "--grpc-port", "0")


def test_folder_with_a_gguf_file_only_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    line = refused(capsys, str(tmp_path), "--http-port", "0", "--grpc-port", "0")
    assert f"give the path of the file, such as {tmp_path / 'm.gguf'}" in line


def test_missing_shard_is_named(model: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (model / "model.safetensors").rename(model / "one.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match=r"two\.safetensors is missing"):
        checkpoint.check(model)


@pytest.mark.parametrize("weight_map", ["3", '{"a": 3}', '{"a": "../one"}', '{"a": "/etc/passwd"}'])
def test_invalid_index_of_weights_is_refused(model: Path, weight_map: str) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
    with pytest.raises(BadCheckpoint, match="weight_map"):
        checkpoint.check(model)


def test_index_next_to_a_single_file_of_weights_is_ignored(model: Path) -> None:
    index = {"weight_map": {"a": "gone.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint.check(model)


def test_unknown_architecture_is_refused_without_transformers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.models.spec.find_spec", lambda name: None)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["FooModel"]}))
    with pytest.raises(UnsupportedModel, match=r"FooModel.*LlamaForCausalLM"):
        checkpoint.check(model)


@pytest.mark.parametrize(
    ("status", "message"), [(404, "refused the download (HTTP 404)"), (None, "be reached")]
)
def test_failed_download_gives_a_one_line_error(
    status: int | None, message: str, monkeypatch: pytest.MonkeyPatch
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
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_hub_name_becomes_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, *, revision, **_: f"/cache/{name}/{revision}",
    )
    assert checkpoint.find("some/model") == Path("/cache/some/model/None")
    assert checkpoint.find("some/model", "0123abc") == Path("/cache/some/model/0123abc")


def test_unknown_revision_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import RevisionNotFoundError

    def snapshot_download(*_: object, **__: object) -> str:
        raise RevisionNotFoundError.__new__(RevisionNotFoundError)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(checkpoint.NoModel, match="no revision 'v9' of this model"):
        checkpoint.find("some/model", "v9")


@pytest.mark.parametrize("name", ["demo", "folder"])
def test_revision_of_a_local_model_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(checkpoint.NoModel, match=f"revision 'v1' cannot be used with {name}"):
        checkpoint.find(name, "v1")


def test_fetching_into_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    downloads: list[tuple[str, list[str], Path]] = []
    revisions: list[str | None] = []

    def snapshot_download(
        name: str, revision: str | None, local_dir: Path, **patterns: list[str]
    ) -> str:
        assert patterns["ignore_patterns"] == checkpoint.OTHER_WEIGHTS
        downloads.append((name, patterns["allow_patterns"], local_dir))
        revisions.append(revision)
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert fetch.main(["some/model", str(tmp_path)]) == 0
    assert fetch.main(["some/model", str(tmp_path), "--without-weights", "--revision=v1"]) == 0
    assert revisions == [None, "v1"]
    assert downloads[0] == ("some/model", checkpoint.WANTED_FILES, tmp_path)
    assert set(downloads[0][1]) - set(downloads[1][1]) == {"*.safetensors"}


def test_each_tensor_of_a_hub_model_is_downloaded_once() -> None:
    from huggingface_hub.utils._paths import filter_repo_objects

    used = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "LICENSE"]
    other = ["original/model--00001.safetensors", "metal/model.safetensors"]
    other += ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    wanted, unused = checkpoint.WANTED_FILES, checkpoint.OTHER_WEIGHTS
    found = filter_repo_objects(used + other, allow_patterns=wanted, ignore_patterns=unused)
    assert list(found) == used


def test_failed_fetch_reports_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        fetch.main(["no-hub-name", str(tmp_path)])
    assert end.value.code == 2
    assert "expected a hub name like owner/model" in capsys.readouterr().err

    def download(*_: object) -> None:
        raise checkpoint.NoModel("some/model is no folder here, and the hub refuses it (404)")

    monkeypatch.setattr(fetch, "download", download)
    assert fetch.main(["some/model", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("the hub refuses it (404)\n")


def test_checkpoint_can_be_checked_without_its_weights(model: Path) -> None:
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
    assert checkpoint.default_name("org/missing.gguf") == "missing"
    assert checkpoint.default_name("some/folder/m-00001-of-00003.gguf") == "m"
    (model / "org" / "name").mkdir(parents=True)
    assert checkpoint.default_name("org/name") == "name"


def test_bundled_model_is_not_hidden_by_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert checkpoint.find("demo") == checkpoint.find() == checkpoint.SHIPPED
    assert checkpoint.find("./demo") == tmp_path / "demo"


def test_wrong_pools_are_refused_without_starting_ray() -> None:
    result = run("serve", "--decode", "2")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


# ------------------------------------------------------------------ serve: output


def test_greeting_has_commands_that_can_be_pasted() -> None:
    spec = parse({"models": {"demo-small": {}}, "router": {"host": "0.0.0.0"}})
    lines = serve.greeting(
        spec, SMALL, status_events.Serving("0.0.0.0:80", "0.0.0.0:90", "127.0.0.1:81"), 1.25, True
    )
    text = "\n".join(lines)
    assert "demo-small is served after 1.2 s" in text
    assert "No API key is needed" not in text
    assert 'curl http://127.0.0.1:80/v1/chat/completions -H "Authorization: Bearer' in text
    assert "penstock chat --address 127.0.0.1:90" in text
    assert "PENSTOCK_API_KEY must contain" in text


def test_greeting_says_that_other_machines_need_no_key() -> None:
    serving = status_events.Serving("0.0.0.0:80", "0.0.0.0:90", "127.0.0.1:81")
    for host, is_open in (("0.0.0.0", True), ("127.0.0.1", False)):
        spec = parse({"router": {"host": host, "allow_anonymous": True}})
        text = "\n".join(serve.greeting(spec, SMALL, serving, 1.0, False))
        assert ("No API key is needed: whoever reaches" in text) == is_open


def test_greeting_lists_all_routers() -> None:
    spec = flags.read_spec(["--routers", "2"])
    assert spec.routers == 2
    serving = status_events.Serving("a:80", "a:90", "a:70", [("a:81", "a:91", "a:71")])
    lines = serve.greeting(spec, SMALL, serving, 1.0, has_keys=False)
    assert "and on http://a:81 and a:91" in lines
    assert "for operators: http://a:70, http://a:71" in lines
    assert any(line.endswith(" status http://a:70") for line in lines)


def test_greeting_without_a_chat_template_shows_a_completion(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    lines = serve.greeting(
        parse({}),
        model,
        status_events.Serving("127.0.0.1:80", "127.0.0.1:90", "127.0.0.1:81"),
        1.0,
        False,
    )
    assert any("http://127.0.0.1:80/v1/completions" in line for line in lines)


EVENTS: list[tuple[str, status_events.StatusEvent]] = [
    ("Ray", status_events.Progress("starting")),
    ("Ray", status_events.Ready(5.0)),
    ("decode worker 0", status_events.Progress("weights", 0, 2_000_000)),
    ("decode worker 0", status_events.Progress("weights", 1_000_000, 2_000_000)),
    ("decode worker 0", status_events.Progress("warming up", 2_000_000, 2_000_000)),
    ("decode worker 0", status_events.Ready(3.0)),
    ("decode worker 0", status_events.LogLine("something [bold]odd")),
    ("", status_events.Serving("a", "b", "c")),
    ("decode worker 0", status_events.Died("its process died", 0.5)),
    ("decode worker 0", status_events.GivenUp("no such folder", 60.0)),
    ("decode worker 0", status_events.Waiting("weights", 20.4, "1.0 of 2.0 MB")),
    ("", status_events.Draining(30.0)),
    ("", status_events.Draining(25.0, 3)),
]


def test_lines_print_each_stage_once() -> None:
    printed: list[str] = []
    lines = Lines(printed.append)
    for title, event in EVENTS:
        lines(title, event)
    assert printed == [
        "Ray: starting",
        "Ray: ready after 5.0 s",
        "decode worker 0: weights (2.0 MB)",
        "decode worker 0: warming up (2.0 MB)",
        "decode worker 0: ready after 3.0 s",
        "something [bold]odd",
        "decode worker 0: its process died; it is started again in 0.5 s",
        "decode worker 0: no such folder; the next try is in 60 s, and the other processes "
        "continue",
        "decode worker 0: weights, 1.0 of 2.0 MB; 20 s so far",
        "draining: running requests have 30 s; Ctrl-C again stops at once",
        "draining: 3 requests have not ended, 25 s are left",
    ]


def test_bars_show_bytes_and_marks_and_print_lines() -> None:
    screen = StringIO()
    bars = Bars(Console(file=screen, force_terminal=True, width=100, color_system=None))
    try:
        for title, event in EVENTS[:4]:
            bars(title, event)
        bars.refresh()
        assert "1.0 of 2.0 MB" in screen.getvalue()
        for title, event in EVENTS[4:]:
            bars(title, event)
    finally:
        bars.close()
    shown = screen.getvalue()
    assert "✓" in shown
    assert "something [bold]odd" in shown
    assert "decode worker 0: its process died" in shown


# ------------------------------------------------------------------ signals


def test_interrupt_during_the_import_of_a_command_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupt)
    assert cli.main(["status"]) == 130
    assert capfd.readouterr() == ("", "")
