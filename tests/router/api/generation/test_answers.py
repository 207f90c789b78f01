"""The answers of a call are merged, and freed in slices."""

import asyncio

import pytest

from penstock.router.api.generation import response
from penstock.router.api.generation.response import Answers
from penstock.router.requests.response_stream import Delta


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
