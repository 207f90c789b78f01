"""The answers of a call are merged; answers and prompts are freed in slices."""

import asyncio
from typing import Any

import httpx
import pytest

from penstock.router.api.generation import response
from penstock.router.api.generation.response import Answers
from penstock.router.requests import slices
from penstock.router.requests.response_stream import Delta
from tests.support.served_router import Served, until


def delta(choice: int, position: int) -> Delta:
    return Delta(0, choice, position, [7], "x", [None])


class CountedSlices:
    """Counts the pauses, instead of pausing when a slice has lasted long enough."""

    num_pauses = 0

    async def pause(self) -> None:
        CountedSlices.num_pauses += 1
        await asyncio.sleep(0)


async def test_answers_are_freed_with_a_pause_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response, "Slices", CountedSlices)
    monkeypatch.setattr(slices, "Slices", CountedSlices)
    answers = Answers()
    for choice in (2, 0, 1):
        answers.add(delta(choice, 0))
        answers.add(delta(choice, 1))
    merged = await answers.merged()
    assert [each.choice for each in merged] == [0, 1, 2]
    assert [list(each.tokens) for each in merged] == [[7, 7]] * 3
    CountedSlices.num_pauses = 0
    await answers.release()
    assert merged == []
    assert CountedSlices.num_pauses == 6  # one for each builder, and one for each merged answer
    await answers.release()
    assert CountedSlices.num_pauses == 6


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_prompts_are_freed_one_by_one_at_the_end_of_a_call(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    """Freeing 1,024 prompts of 4 KiB in one callback takes 15 ms."""
    released: list[list[Any]] = []

    async def release(items: list[Any]) -> None:
        released.append(list(items))
        await slices.release(items)
        assert items == []

    monkeypatch.setattr(response, "release", release)
    body = {"prompt": [[5, 6], [7], [8, 9]], "max_tokens": 1, "stream": is_streamed}
    async with httpx.AsyncClient(base_url=served.url) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    await until(lambda: [[5, 6], [7], [8, 9]] in released)
