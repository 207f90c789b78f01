"""The measured KV transfer between two processes, with a small cache: all bytes arrive."""

import asyncio

import pytest

from penstock.loadtests.micro.ab_runner import MeasurementFailed
from penstock.loadtests.micro.transfer import Amounts, Destination, describe, measure_once

SMALL = Amounts(tokens=100, layers=2, heads=2, head_dim=8, block_size=16, rounds=2)


@pytest.mark.process
def test_transfer_and_bare_gloo_move_the_same_bytes_in_turns() -> None:
    figures = asyncio.run(measure_once(SMALL))
    assert figures["bytes"] == 7 * 16 * 2 * 2 * 2 * 8 * 4
    for kind in ("transfer", "bare"):
        assert len(figures[kind]["wall"]) == len(figures[kind]["cpu"]) == 2
    assert "bare / transfer" in describe("now", figures)


@pytest.mark.process
def test_changed_byte_fails_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Destination.answer

    async def changed(destination: Destination) -> dict[str, object]:
        found = await answer(destination)
        return {name: 0.5 if name == "fingerprint" else value for name, value in found.items()}

    monkeypatch.setattr(Destination, "answer", changed)
    with pytest.raises(MeasurementFailed, match="differ"):
        asyncio.run(measure_once(SMALL))
