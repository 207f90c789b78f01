import asyncio
import math
from collections.abc import AsyncGenerator

import pytest

from penstock.loadtests.bench.clients import Chunk, Prompt, RequestFailed, Served
from penstock.loadtests.bench.load import Load
from penstock.loadtests.bench.metrics import Outcome
from penstock.loadtests.bench.workload import Lengths, Planned, Prompts, drawn_load, ordinary_tokens

PROMPTS = Prompts(ordinary_tokens(1000), 0)


class FakeClient:
    """A client whose answers wait for `gate`, which is set at first."""

    def __init__(self, chunks: list[Chunk] | None = None) -> None:
        self.chunks = [Chunk(1), Chunk(1, 8, 2)] if chunks is None else chunks
        self.sent: list[Prompt] = []
        self.under_way = 0
        self.most_under_way = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.all_started = asyncio.Event()  # set when `expected_running` requests run
        self.expected_running = 0

    async def describe(self) -> Served:
        return Served("fake")

    async def stream(self, prompt: Prompt, output_len: int) -> AsyncGenerator[Chunk]:
        self.sent.append(prompt)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        if self.under_way == self.expected_running:
            self.all_started.set()
        try:
            await self.gate.wait()
            for chunk in self.chunks:
                await asyncio.sleep(0)
                yield chunk
            if output_len == 13:
                raise RequestFailed("unlucky")
        finally:
            self.under_way -= 1

    async def close(self) -> None:
        return None


def plan(count: int, output_len: int = 2) -> list[Planned]:
    return drawn_load(count, math.inf, Lengths(8, 8), Lengths(output_len, output_len), 0)


async def test_every_request_is_sent_once_and_timed() -> None:
    seen: list[int] = []
    load = Load(client := FakeClient(), PROMPTS, plan(20), on_done=lambda o: seen.append(o.number))
    await load.run()
    assert sorted(seen) == list(range(20))
    assert sorted(client.sent) == sorted(PROMPTS.tokens(planned) for planned in plan(20))
    for outcome in load.outcomes:
        assert outcome.error == ""
        assert (outcome.input_len, outcome.output_len, outcome.counts) == (8, 2, [1, 1])
        times = [outcome.due, outcome.released, outcome.start, *outcome.arrivals, load.duration]
        assert times == sorted(times)
    assert not load.interrupted


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_closed_loop_keeps_its_concurrency(concurrency: int) -> None:
    client = FakeClient()
    client.gate.clear()
    client.expected_running = concurrency
    load = Load(client, PROMPTS, plan(12), concurrency)
    running = asyncio.create_task(load.run())
    await asyncio.wait_for(client.all_started.wait(), 30)
    client.gate.set()
    await running
    assert client.most_under_way == concurrency
    assert [o.number for o in load.outcomes] == list(range(12))


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    client = FakeClient()
    client.gate.clear()
    client.expected_running = 12
    running = asyncio.create_task((load := Load(client, PROMPTS, plan(12))).run())
    await asyncio.wait_for(client.all_started.wait(), 30)
    client.gate.set()
    await running
    assert len(load.outcomes) == 12


async def test_no_request_is_sent_before_its_time() -> None:
    load = Load(FakeClient(), PROMPTS, drawn_load(10, 200.0, Lengths(8, 8), Lengths(2, 2), 1))
    await load.run()
    assert all(outcome.start >= outcome.due > 0 for outcome in load.outcomes)
    assert load.duration >= 10 / 200


async def test_failed_request_is_recorded_and_the_load_continues() -> None:
    load = Load(FakeClient(), PROMPTS, [*plan(3), Planned(3, 0.0, 8, 13)], concurrency=1)
    await load.run()
    assert [outcome.error for outcome in load.outcomes] == ["", "", "", "unlucky"]


@pytest.mark.parametrize(
    ("chunks", "output_len", "error"),
    [
        ([Chunk(None), Chunk(0), Chunk(None)], 2, ""),  # this server sends no token counts
        ([Chunk(3), Chunk(2)], 5, ""),
        ([Chunk(None), Chunk(0, 8, 6)], 6, ""),
        ([Chunk(0), Chunk(0, 8, 0)], 0, "the answer had no tokens"),
        ([], 0, "the answer had no tokens"),
    ],
)
async def test_tokens_are_counted(chunks: list[Chunk], output_len: int, error: str) -> None:
    load = Load(FakeClient(chunks), PROMPTS, plan(1))
    await load.run()
    assert (load.outcomes[0].output_len, load.outcomes[0].error) == (output_len, error)


async def test_completed_requests_count_when_interrupted() -> None:
    client = FakeClient()
    ended = asyncio.Event()

    def on_done(_: Outcome) -> None:
        client.gate.clear()
        ended.set()

    load = Load(client, PROMPTS, plan(5), concurrency=1, on_done=on_done)
    running = asyncio.create_task(load.run())
    await asyncio.wait_for(ended.wait(), 30)
    running.cancel()
    await running  # `run` does not raise: it records the cancellation
    assert load.interrupted
    assert [outcome.number for outcome in load.outcomes] == [0]
    assert client.under_way == 0


async def test_requests_waiting_for_a_slot_use_no_tasks() -> None:
    client = FakeClient()
    client.gate.clear()
    client.expected_running = 2
    load = Load(client, PROMPTS, plan(100_000), concurrency=2)
    running = asyncio.create_task(load.run())
    await asyncio.wait_for(client.all_started.wait(), 30)
    assert len(asyncio.all_tasks()) <= 4  # this test, the load, and two running requests
    running.cancel()
    await running
    assert load.interrupted


async def test_waiting_for_a_concurrency_slot_does_not_count_as_client_lag() -> None:
    client = FakeClient()
    client.gate.clear()
    client.expected_running = 1
    at_once = [Planned(number, 0.001 * number, 8, 2) for number in range(6)]
    load = Load(client, PROMPTS, at_once, concurrency=1)
    running = asyncio.create_task(load.run())
    await asyncio.wait_for(client.all_started.wait(), 30)
    await asyncio.sleep(0.1)
    client.gate.set()
    await running
    first, next_one, *others = load.outcomes
    assert next_one.start > next_one.released, "the second request must wait for the slot"
    assert next_one.start >= first.arrivals[0]
    # All other requests became due while the first one took the only slot.
    assert [outcome.released for outcome in others] == [outcome.due for outcome in others]
    assert all(outcome.start > outcome.released for outcome in others)
