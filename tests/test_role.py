"""`penstock role` with a router and stub workers, and with wrong addresses."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rich.console import Console

from penstock.cli import main
from penstock.cli.status import fetch
from penstock.cli.status_view import page
from penstock.router.config import RouterConfig
from tests.support.api_keys import EVERY_ROLE, OPERATOR, key_file, user_keys
from tests.support.served_router import Served, model_folder, serving
from tests.support.stub_worker import StubWorker


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    config = RouterConfig(
        model_folder(tmp_path), "stub", api_keys=(*user_keys("open-sesame"), *EVERY_ROLE)
    )
    async with serving(config, StubWorker("decode-0", "decode")) as served:
        yield served


def command(*arguments: str) -> "asyncio.Future[int]":
    return asyncio.ensure_future(asyncio.to_thread(main, ["role", *arguments]))


async def test_a_worker_gets_another_role_and_the_status_shows_it(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ["--api-key-file", str(key_file(tmp_path, OPERATOR))]
    assert await command("decode-0", "mixed", served.admin_url, *key) == 0
    assert capsys.readouterr().out == "decode-0 is now a mixed worker\n"
    status = await asyncio.to_thread(fetch, served.admin_url, OPERATOR)
    assigned = status["roles"]["decode-0"]
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(page(status, served.admin_url, assigned["at"] + 90))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "decode-0: a mixed worker for 90.0 s, set by ops" in lines
    assert [line.split()[:1] for line in lines if line.startswith("mixed ")] == [["mixed"]]


@pytest.mark.parametrize(
    ("worker", "role", "key", "words"),
    [
        (
            "decode-9",
            "mixed",
            OPERATOR,
            "unknown worker 'decode-9': known workers: decode-0 (HTTP 404)",
        ),
        (
            "decode-0",
            "mixed",
            "open-sesame",
            "has the role 'user', but this call needs the role 'operator' (HTTP 403)",
        ),
        ("decode-0", "mixed", "close-sesame", "no valid API key"),
    ],
)
async def test_refusal_gives_a_one_line_error(
    served: Served,
    worker: str,
    role: str,
    key: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", key)
    assert await command(worker, role, served.admin_url) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
    assert key not in error


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["decode-0", "mixed", "http://127.0.0.1:1"], 1, "cannot reach a router"),
        (["decode-0", "mixed", "two words"], 2, "invalid URL"),
    ],
)
def test_wrong_address_gives_a_one_line_error(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["role", *arguments]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_unknown_role_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["role", "decode-0", "boss"])
    assert end.value.code == 2
    assert "invalid choice: 'boss'" in capsys.readouterr().err
