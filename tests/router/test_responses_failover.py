"""The events of a response are the same when its worker dies at any position."""

from pathlib import Path
from typing import Any

import pytest

from penstock.router.config import RouterConfig
from tests.support.mortal_worker import MortalWorker, interrupted
from tests.support.responses_client import (
    ADD,
    FULL,
    TEMPLATE,
    TOKENIZER,
    events_of,
    tokens_of,
    without_ids,
)
from tests.support.served_router import Served, serving
from tests.support.tokenizers import write_folder

TOKENS = tokens_of(FULL.replace("I add.", "Grüße 😀"))
BODY = {"input": "sum?", "tools": [ADD], "stream": True}


async def stream(served: Served) -> list[Any]:
    """Return the events of a stream without ids and numbers; neighboring deltas are merged."""
    found: list[Any] = []
    for event in await events_of(served.url, BODY):
        event.pop("sequence_number")
        last = found[-1] if found else {"type": ""}
        if event["type"].endswith("delta") and last["type"] == event["type"]:
            last["delta"] += event["delta"]
        else:
            found.append(without_ids(event))
    return found


@pytest.mark.asyncio
async def test_events_are_the_same_when_the_worker_dies(tmp_path: Path) -> None:
    config = RouterConfig(write_folder(tmp_path / "model", TOKENIZER, TEMPLATE), "stub")
    async with serving(config, MortalWorker("w0", TOKENS)) as served:
        expected = await stream(served)
    response = expected[-1]["response"]
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    for position in range(1, len(TOKENS), 12):
        assert await interrupted(config, TOKENS, position, stream) == expected, position
