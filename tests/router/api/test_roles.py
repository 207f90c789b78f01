"""/role over HTTP: permissions, and the effects of assigning a role."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from penstock.common.api_key import ApiKey
from penstock.router.config import RouterConfig
from penstock.router.observability import role_recorder
from penstock.router.observability.role_registry import Assignment
from tests.support.api_keys import EVERY_ROLE, METRICS, OPERATOR, user_keys
from tests.support.served_router import Served, client_of, serving, until
from tests.support.stub_worker import StubWorker

KEYS = (*user_keys("user", "admin-user"), *EVERY_ROLE)
BODY = {"prompt": "hi", "max_tokens": 3}


async def post_role(http: httpx.AsyncClient, worker: str, role: str) -> tuple[int, dict[str, Any]]:
    reply = await http.post("/role", json={"worker": worker, "role": role})
    return reply.status_code, reply.json()


def roles(served: Served) -> dict[str, str]:
    return {each.worker: each.role for each in served.router.frontend.take_snapshot().workers}


async def test_new_requests_follow_the_new_role(config: RouterConfig) -> None:
    peers: dict[str, StubWorker] = {}
    workers = [StubWorker("p0", "prefill", peers=peers), StubWorker("d0", "decode", peers=peers)]
    async with serving(config, *workers) as served, client_of(served) as http:
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        assert [len(worker.submits) for worker in workers] == [1, 1]
        assert await post_role(http, "p0", "mixed") == (200, {"worker": "p0", "role": "mixed"})
        assert await post_role(http, "d0", "decode") == (200, {"worker": "d0", "role": "decode"})
        assert roles(served) == {"p0": "mixed", "d0": "decode"}
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        assert [len(worker.submits) for worker in workers] == [2, 1], (
            "a mixed worker prefills and decodes"
        )
        status = (await http.get("/status")).json()
        assert {name: assignment["role"] for name, assignment in status["roles"].items()} == {
            "p0": "mixed",
            "d0": "decode",
        }
        assert {pool["pool"]: pool["workers"] for pool in status["pools"]} == {
            "mixed": 1,
            "decode": 1,
        }
        assert status["placed"] == {"apart: unmeasured": 1}


async def test_restarted_worker_keeps_its_role(config: RouterConfig) -> None:
    worker = StubWorker("w0", "decode")
    async with serving(config, worker) as served, client_of(served) as http:
        assert (await post_role(http, "w0", "prefill"))[0] == 200
        port = int(worker.address.rpartition(":")[2])
        await worker.stop()
        await until(lambda: not served.router.frontend.workers())
        assert roles(served) == {"w0": "prefill"}
        await worker.start(port)
        await until(lambda: served.router.frontend.workers())
        assert [each.role for each in served.router.frontend.workers()] == ["prefill"]


async def test_newest_assignment_wins_whichever_router_received_it(config: RouterConfig) -> None:
    async with serving(config, StubWorker()) as served, client_of(served) as http:
        assert (await post_role(http, "w0", "decode"))[0] == 200
        frontend = served.router.frontend
        frontend.roles.merge({"w0": Assignment("prefill", 1.0, "ops")})
        assert roles(served) == {"w0": "decode"}, "an older assignment is ignored"
        frontend.roles.merge({"w0": Assignment("prefill", 1e12, "ops")})
        assert roles(served) == {"w0": "prefill"}


async def test_response_waits_for_the_supervisor(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, Assignment]] = []
    async with serving(config, StubWorker()) as served, client_of(served) as http:
        frontend = served.router.frontend
        frontend.roles.send = lambda worker, assignment: sent.append((worker, assignment))
        posting = asyncio.create_task(post_role(http, "w0", "decode"))
        await until(lambda: sent)
        assert roles(served) == {"w0": "mixed"}
        assert not posting.done()
        frontend.roles.merge(dict(sent))
        assert await posting == (200, {"worker": "w0", "role": "decode"})
        assert roles(served) == {"w0": "decode"}
        monkeypatch.setattr(role_recorder, "SECONDS_TO_RECORD", 0.02)
        reply = await http.post("/role", json={"worker": "w0", "role": "prefill"})
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
        assert "the role was not recorded" in reply.json()["error"]["message"]
        assert roles(served) == {"w0": "decode"}


@pytest.mark.parametrize(
    ("keys", "host", "key", "code"),
    [
        ((), "127.0.0.1", "", 200),
        ((), "0.0.0.0", "", 403),
        (KEYS, "127.0.0.1", "", 401),
        (KEYS, "127.0.0.1", "another", 401),
        (KEYS, "127.0.0.1", "user", 403),
        (KEYS, "127.0.0.1", "admin-user", 403),
        (KEYS, "127.0.0.1", METRICS, 403),
        (KEYS, "127.0.0.1", OPERATOR, 200),
        (KEYS, "0.0.0.0", OPERATOR, 200),
    ],
)
async def test_only_operators_may_assign_roles(
    config: RouterConfig, keys: tuple[ApiKey, ...], host: str, key: str, code: int
) -> None:
    config = replace(config, api_keys=keys, admin_host=host)
    async with serving(config, StubWorker()) as served:
        port = served.admin_url.rpartition(":")[2]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30
        ) as http:
            status_code, reply = await post_role(http, "w0", "decode")
        assert (status_code, roles(served)["w0"]) == (code, "decode" if code == 200 else "mixed")
        if code == 403:
            assert "role 'operator'" in reply["error"]["message"]
            assert OPERATOR not in str(reply)
            assert METRICS not in str(reply)
        if code == 200:
            name = "ops" if keys else "anonymous"
            assert served.router.frontend.take_snapshot().roles["w0"].by == name


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"worker": "w0", "role": "boss"}, 400, "unknown role 'boss'"),
        ({"worker": "w9", "role": "decode"}, 404, "unknown worker 'w9': known workers: w0"),
        ({"worker": "w0"}, 400, "send"),
        ({"worker": "w" * 5000, "role": "decode"}, 400, "send"),
        ({"worker": "w0", "role": 1}, 400, "send"),
        ({"worker": ["w0"], "role": "decode"}, 400, "send"),
        ({"worker": "w0", "role": "decode", "now": True}, 400, "send"),
        ([], 400, "send"),
        (None, 400, "send"),
    ],
)
async def test_invalid_role_request_is_refused(
    served: Served, body: object, code: int, words: str
) -> None:
    async with client_of(served) as http:
        reply = await http.post("/role", json=body)
        assert (reply.status_code, roles(served)) == (code, {"w0": "mixed"})
        assert words in reply.json()["error"]["message"]
        for content in (b"{", b"\xff", b"[" * 100_000):
            headers = {"content-type": "application/json"}
            assert (await http.post("/role", content=content, headers=headers)).status_code == 400
        assert (await http.get("/role")).status_code == 405
