"""`penstock explain` with routers and stub workers, and with wrong ids, keys and addresses."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from penstock.cli import main
from penstock.cli.explain_view import TEXTS
from penstock.router.config import RouterConfig
from tests.support.api_keys import EVERY_ROLE, OPERATOR, key_file, user_keys
from tests.support.served_router import Served, client_of, model_folder, serving
from tests.support.stub_worker import StubWorker

USER = "open-sesame-of-a-user"


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    keys = (*user_keys(USER, "another-user-of-it"), *EVERY_ROLE)
    config = RouterConfig(model_folder(tmp_path), "stub", api_keys=keys)
    peers: dict[str, StubWorker] = {}
    workers = [StubWorker("p0", "prefill", peers=peers), StubWorker("d0", "decode", peers=peers)]
    async with serving(config, *workers) as served:
        yield served


async def complete(served: Served, name: str = "") -> str:
    async with client_of(served, USER) as http:
        body = {"prompt": "a-secret-prompt", "max_tokens": 3}
        headers = {"x-request-id": name} if name else {}
        reply = await http.post("/v1/completions", json=body, headers=headers)
        assert reply.status_code == 200
        return reply.headers["x-request-id"]


def command(*arguments: str) -> "asyncio.Future[int]":
    return asyncio.ensure_future(asyncio.to_thread(main, ["explain", *arguments]))


async def test_timeline_shows_workers_reasons_and_phases(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = await complete(served)
    key = ["--api-key-file", str(key_file(tmp_path, USER))]
    assert await command(name, served.url, *key) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"{name} at router-0"
    assert lines[1].startswith("length after ")
    assert any("placed on p0, then d0: apart: unmeasured" in line for line in lines)
    assert any("first token from p0" in line for line in lines)
    assert any("sent to d0, with KV from p0: planned" in line for line in lines)
    assert any(line.startswith("→ p0 prefill") for line in lines)
    assert any("decode " in line and "■" in line for line in lines)
    assert "secret" not in out


async def test_json_is_the_whole_explanation_and_operators_see_all_requests(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = await complete(served, "of a/client %2F")
    key = ["--api-key-file", str(key_file(tmp_path, OPERATOR)), "--json"]
    for given in ((served.url, *key), (*key, served.admin_url)):
        assert await command(name, *given) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["request_id"], found["requests"][0]["tenant"]) == (name, "key-1")
        assert {event["kind"] for event in found["requests"][0]["events"]} <= TEXTS.keys()


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        ("unknown", USER, "no explanation of the request 'unknown'"),
        ("", "close-sesame-of-nobody", "no valid API key"),
    ],
)
async def test_refusal_is_one_line(
    served: Served,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    key: str,
    words: str,
) -> None:
    name = name or await complete(served)
    given = ["--api-key-file", str(key_file(tmp_path, key))]
    assert await command(name, served.url, *given) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("penstock explain: http://")
    assert error.count("\n") == 1


async def test_other_server_and_wrong_address_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await command("x", "http://127.0.0.1:1") == 1
    assert "cannot reach a router" in capsys.readouterr().err
    assert await command("x", "http://") == 2
    assert "invalid URL" in capsys.readouterr().err


async def test_explanation_is_gone_after_the_ring(served: Served) -> None:
    async with client_of(served, USER) as http:
        first = await complete(served)
        served.router.frontend.explanations._max_ended = 2
        path = f"/v1/requests/{first}/explain"
        assert (await http.get(path)).status_code == httpx.codes.OK
        for _ in range(2):
            await complete(served)
        assert (await http.get(path)).status_code == httpx.codes.NOT_FOUND
