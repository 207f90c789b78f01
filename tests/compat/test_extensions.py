"""Extensions of other servers to the OpenAI API, which a router serves or refuses.

The tests cover the rows "extension" of `review_rows.txt`, a review of the OpenAI API.
"""

from dataclasses import replace
from typing import Any

import openai
import pytest

from penstock.router.config import RouterConfig
from tests.support.openai_client import HELLO, connect, message_of
from tests.support.priorities import spy_priorities
from tests.support.served_router import Served, serving
from tests.support.stub_worker import StubWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_priority_reaches_the_queue(
    client: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = spy_priorities(served, monkeypatch)
    for priority in (-7, None, 3):
        more = {"priority": priority}
        await client.completions.create(model="stub", prompt="x", max_tokens=1, extra_body=more)
        await client.chat.completions.create(
            model="stub", messages=HELLO, max_tokens=1, extra_body=more
        )
    assert found == [-7, -7, 0, 0, 3, 3]
    for wrong in ("high", 1.5, 2**31):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.completions.create(
                model="stub", prompt="x", extra_body={"priority": wrong}
            )
        assert refusal.value.param == "priority"


async def test_pages_of_allowed_origins_may_read_answers(config: RouterConfig) -> None:
    origin = "https://chat.example"
    call: dict[str, Any] = {"model": "stub", "messages": HELLO, "max_tokens": 1}
    for allowed in ((origin,), ()):
        open_to = replace(config, allowed_origins=allowed)
        async with serving(open_to, StubWorker()) as served, connect(served) as client:
            raw = client.chat.completions.with_raw_response
            response = await raw.create(**call, extra_headers={"Origin": origin})
            granted = response.headers.get("access-control-allow-origin")
            assert granted == (origin if allowed else None)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("get", "/../ping"),
        ("post", "/chat/completions/batch"),
        ("get", "/files"),
        ("post", "/files"),
        ("get", "/batches"),
        ("post", "/batches"),
    ],
)
async def test_routes_that_are_not_served_are_named(client: Any, method: str, path: str) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        await getattr(client, method)(path, cast_to=object)
    assert path.removeprefix("/..") in message_of(refusal.value)


async def test_roles_of_ones_own_are_refused(client: Any) -> None:
    messages: list[Any] = [{"role": "robot", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="role must be one of system,") as refusal:
        await client.chat.completions.create(model="stub", messages=messages)
    assert refusal.value.param == "messages"
