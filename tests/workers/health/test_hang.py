"""A worker whose step never ends writes a crash dump and exits; routers see their streams end."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.workers.health.crash_dump import STACKS, STATE
from penstock.workers.health.watchdog import EXIT_HUNG
from tests.support.attached_router import TIMEOUT_SECONDS, AttachedRouter, greedy
from tests.support.tiny import tiny_checkpoint
from tests.support.worker_process import worker_process

pytestmark = [pytest.mark.process, pytest.mark.timeout(1200)]

PROMPT = [171, 172, 173, 174]
STEPS = 6


async def test_worker_with_a_hung_step_writes_a_crash_dump_and_exits(tmp_path: Path) -> None:
    checkpoint, dumps = tiny_checkpoint(tmp_path / "tiny"), tmp_path / "dumps"
    settings = {"hang_after": STEPS, "step_timeout_seconds": 4.0, "crash_dump_dir": str(dumps)}
    async with worker_process("w0", checkpoint, **settings) as worker:
        router = await AttachedRouter(worker.address).open()
        await router.submit(1, PROMPT, greedy(max_tokens=50))
        await router.until(lambda: len(router.answers[1, 1]) == STEPS)
        await router.until_closed()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert await worker.process.wait() == EXIT_HUNG
        await router.close()
    (path,) = dumps.iterdir()
    assert "run_or_hang" in (path / STACKS).read_text()
    state = json.loads((path / STATE).read_text())
    assert state["why"].startswith("the engine made no progress for ")
    (sequence,) = state["scheduler"]["sequences"]
    assert (sequence["phase"], sequence["prompt_len"]) == ("running", len(PROMPT))
    assert sequence["num_tokens"] == len(PROMPT) + STEPS
    assert state["scheduler"]["ledger"] == "balances"
    assert len(state["scheduler"]["steps_in_flight"]) == 1
    assert not set(PROMPT) <= set(numbers(state)), "a crash dump must not contain the prompt"


def numbers(found: Any) -> Iterator[float]:
    """Yield every number in nested dicts and lists."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        for each in found:
            yield from numbers(each)
    elif isinstance(found, int | float):
        yield found
