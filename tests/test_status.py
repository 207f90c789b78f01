"""`penstock status` with a router and stub workers, and with other servers."""

import asyncio
import http.server
import io
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from rich.console import Console

from penstock.cli import main
from penstock.cli.status import fetch
from penstock.cli.status_view import duration, number, page
from penstock.protos import worker_pb2 as pb
from penstock.protos.worker_codec import encode_worker_load
from penstock.router.config import RouterConfig
from penstock.router.observability.snapshot import (
    PoolScaling,
    RouterState,
    Scaling,
    ScalingDecision,
)
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from tests.support.api_keys import EVERY_ROLE, METRICS
from tests.support.demo_served import FOLDER
from tests.support.served_router import Served, model_folder, serving, until
from tests.support.stub_worker import StubWorker

BUSY = pb.Load(
    queued=123_456,
    queued_tokens=9_876_543,
    running=256,
    used_blocks=60_000,
    leased_blocks=20_000,
    reserved_blocks=10_000,
    cached_blocks=5_000,
    free_blocks=5_000,
    prompt_tokens_computed=999_000_000,
    prompt_tokens_cached=1_000_000,
    preemptions=54_321,
    step_micros=12_345_678,
)


@pytest_asyncio.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """A router with a busy prefill and a dead decode worker; PENSTOCK_API_KEY holds a key."""
    monkeypatch.setenv("PENSTOCK_API_KEY", METRICS)
    config = RouterConfig(model_folder(tmp_path), "stub", api_keys=EVERY_ROLE)
    names = {"prefill-worker-0-on-a-long-name": "prefill", "decode-worker-0": "decode"}
    workers = [StubWorker(name, role) for name, role in names.items()]
    async with serving(config, *workers) as served:
        workers[0].send(pb.ToRouter(step=pb.Step(load=BUSY)))
        take_snapshot = served.router.frontend.take_snapshot
        await until(lambda: any(pool.running for pool in take_snapshot().pools))
        await workers[1].stop()
        await until(lambda: len(served.router.frontend.workers()) == 1)
        yield served


def rendered(status: dict[str, object], width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(page(status, "http://127.0.0.1:8000", 1e9))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def has_blocks(served: Served, count: int) -> bool:
    """Return whether the last load report of the only worker has `count` blocks."""
    (worker,) = served.router.frontend.take_snapshot().workers
    return worker.numbers is not None and worker.numbers.load.num_blocks == count


def command(*arguments: str) -> "asyncio.Future[int]":
    return asyncio.ensure_future(asyncio.to_thread(main, ["status", *arguments]))


async def test_the_tables_fit_80_columns(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = rendered(await asyncio.to_thread(fetch, served.admin_url, METRICS))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "stub at http://127.0.0.1:8000: serving" in text
    (dead,) = (line for line in lines if line.startswith("decode-worker-0"))
    assert dead.split()[1:] == ["down"] + ["-"] * 8
    (busy,) = (line for line in lines if "12.3 s" in line)
    for word in ("ready", "90%", "1.6M", "256", "123k", "9.9M", "0%", "54k"):
        assert word in busy.split(), (word, busy)
    assert await command(served.admin_url) == 0
    assert "decode-worker-0" in capsys.readouterr().out


async def test_int8_cache_has_almost_twice_the_capacity_of_bfloat16_in_the_same_memory(
    tmp_path: Path,
) -> None:
    """Send the loads of two engines with models, and read the column "of" that `status` prints."""
    config = RouterConfig(model_folder(tmp_path), "stub")
    shown, sequences = {}, {}
    for name in ("bfloat16", "int8"):
        engine = Engine(WorkerConfig(name, FOLDER, kv_cache_mib=8, kv_cache_dtype=name))
        assert engine.cache.data.nbytes <= 8 << 20
        load = engine.load()
        worker = StubWorker(name)
        worker.welcome.block_size = engine.limits.block_size
        async with serving(config, worker) as served:
            worker.send(pb.ToRouter(step=pb.Step(load=encode_worker_load(load))))
            await until(partial(has_blocks, served, load.num_blocks))
            status = await asyncio.to_thread(fetch, served.admin_url)
        (row,) = (line.split() for line in rendered(status) if line.startswith(name))
        shown[name] = row[row.index("0%") + 1]
        kv_tokens = status["workers"][0]["numbers"]["kv_tokens"]
        sequences[name] = kv_tokens / engine.limits.max_model_len
    assert shown == {"bfloat16": "16k", "int8": "31k"}
    # A head has 32 features: 64 bytes in bfloat16; 34 bytes in int8, with a float16 scale.
    assert sequences["int8"] / sequences["bfloat16"] == pytest.approx(64 / 34, rel=1e-3)
    assert [int(each) for each in sequences.values()] == [8, 15]


async def test_pool_sizes_and_scaling_decisions_are_shown(served: Served) -> None:
    served.router.frontend.scaling = Scaling(
        [
            PoolScaling(
                *(
                    "decode",
                    0,
                    12,
                    10,
                    8,
                    1,
                    "7.9 workers' KV caches in use",
                    "the budget of 9 GPUs",
                    2,
                ),
                waits=["decode worker 3: weights, 6.2 of 16.0 MB; 40 s so far"],
            ),
            PoolScaling("mixed", 1, 1, 1, 0, 0, "3 requests wait", "one worker leaves at a time"),
        ],
        [ScalingDecision(1e9 - 90, "decode", "decode: 5 to 10: 7.9 workers' KV caches in use")],
    )
    lines = rendered(await asyncio.to_thread(fetch, served.admin_url, METRICS))
    assert max(map(len, lines)) <= 80
    assert "mixed, always 1: 3 requests wait" in lines
    assert "decode, 0 to 12: 7.9 workers' KV caches in use; held by the budget of 9 GPUs" in lines
    assert "  decode worker 3: weights, 6.2 of 16.0 MB; 40 s so far" in lines
    assert "  2 failed to start and will be retried: see the log" in lines
    assert "90.0 s ago: decode: 5 to 10: 7.9 workers' KV caches in use" in lines
    (pool,) = (line.split() for line in lines if line.startswith("decode  "))
    assert pool[:5] == ["decode", "10", "8", "1", "0"]


async def test_all_routers_are_shown_where_there_are_several(served: Served) -> None:
    lines = rendered(await asyncio.to_thread(fetch, served.admin_url, METRICS))
    assert not [line for line in lines if line.startswith("router")]
    served.router.frontend.routers = [
        RouterState("router-0", "ready", "10.11.12.13:8000", "10.11.12.13:9000", streams=99),
        RouterState("router-1", "down", "10.11.12.14:8000", "10.11.12.14:9000", 1234, 7, 56_789),
    ]
    lines = rendered(await asyncio.to_thread(fetch, served.admin_url, METRICS))
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.startswith("router-")]
    assert rows == [
        ["router-0", "ready", "10.11.12.13:8000", "10.11.12.13:9000", "0", "0", "0"],
        ["router-1", "down", "10.11.12.14:8000", "10.11.12.14:9000", "1.2k", "7", "57k"],
    ], "the router's own row must be current"


async def test_json_flag_prints_the_status_of_the_router(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    address = served.admin_url.removeprefix("http://")
    assert await command(address, "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert [worker["state"] for worker in status["workers"]] == ["down", "ready"]


async def test_watch_shows_the_status_again_until_ctrl_c(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.status.time.sleep", pause)
    assert await command(served.admin_url, "--watch", "2") == 0
    assert pauses == [2.0] * 3
    assert "decode-worker-0" in capsys.readouterr().out


async def test_missing_or_wrong_key_gives_a_one_line_error(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("", "close-sesame"):
        monkeypatch.setenv("PENSTOCK_API_KEY", key)
        for arguments in ([], ["--watch"]):
            assert await command(served.admin_url, *arguments) == 1
            error = capsys.readouterr().err
            assert error.count("\n") == 1
            assert "give --api-key-file or PENSTOCK_API_KEY" in error
            assert not key or key not in error


async def test_router_without_workers_is_shown(served: Served) -> None:
    config = replace(served.router.frontend.config, api_keys=())
    async with serving(config) as empty:
        lines = rendered(await asyncio.to_thread(fetch, empty.admin_url))
    assert lines[0].endswith("no worker is connected")
    assert "nothing" in lines[-1] + lines[-2]


class OtherServer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """Run a server that is not Penstock: a web server, or a socket that sends `answer`."""
    if answer is None:
        with http.server.HTTPServer(("127.0.0.1", 0), OtherServer) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def respond() -> None:
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.sendall(answer)
            connection.close()

        threading.Thread(target=respond, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "not the operators' port of a Penstock router"),
        (b"\x00\x00\x06\x04\x00\x00", "not an HTTP server"),
    ],
)
def test_answer_of_another_server_gives_a_one_line_error(
    answer: bytes | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(answer) as url:
        assert main(["status", url]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("http://127.0.0.1:1", 1, "cannot reach a router at 127.0.0.1 port 1 (Connection refused)"),
        ("http://no.such.host.invalid:80", 1, "cannot reach a router"),
        ("ftp://127.0.0.1", 2, "invalid URL"),
        ("http://127.0.0.1:99999", 2, "invalid URL"),
        ("http://", 2, "invalid URL"),
        ("two words", 2, "invalid URL"),
    ],
)
def test_wrong_address_gives_a_one_line_error(
    url: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", url]) == code
    error = capsys.readouterr().err
    assert error.startswith("penstock status: ")
    assert error.count("\n") == 1
    assert words in error


@pytest.mark.parametrize("seconds", ["0", "soon", "nan", "-1"])
def test_invalid_watch_interval_is_refused(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--watch", seconds])
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (999.6, "1.0k"), (1234, "1.2k"), (9950, "10k"), (12_345_678, "12M")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 ms"),
        (0.0034, "3.4 ms"),
        (0.12, "120 ms"),
        (0.9996, "1.0 s"),
        (12.34, "12.3 s"),
        (840.0, "14 min"),
        (10800.0, "3 h"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
