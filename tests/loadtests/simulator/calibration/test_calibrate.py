"""Calibration reads step records from a router and recovers the parameters of the time model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.bench.clients import ServerUnusable, Target
from penstock.loadtests.bench.metrics import Outcome
from penstock.loadtests.simulator.calibration.calibrate import (
    Measured,
    fitted_timing,
    numbers_of,
    report,
    together,
    yaml_lines,
)
from penstock.loadtests.simulator.calibration.fit import predicted_seconds
from penstock.loadtests.simulator.calibration.server import (
    Arrangement,
    MeasuredServer,
    busy_fraction,
    last_numbers,
    steps_of,
)
from penstock.loadtests.simulator.model.timing import Floats, Timing, read_timing
from penstock.protos import worker_pb2 as pb
from penstock.protos.worker_codec import unpack_tokens
from penstock.router.config import RouterConfig
from tests.loadtests.simulator.calibration.test_fit import TIMING, grid
from tests.support.served_router import model_folder, serving
from tests.support.stub_worker import StubWorker

NO_TRANSFERS = Arrangement({"mixed": 1}, 64, 512, 1000, 0.0, 0.0, 0.0)
GAP = 0.0005  # pause between two steps in seconds


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RouterConfig:
    return RouterConfig(model_folder(tmp_path_factory.mktemp("served")), "stub")


def records() -> pb.StepRecords:
    """Return the records of steps whose durations are exactly those of the time model `TIMING`."""
    steps = grid()
    return pb.StepRecords(
        number=range(1, len(steps) + 1),
        ended=np.cumsum(steps.seconds + GAP),
        seconds=steps.seconds,
        tokens=steps.tokens.astype(int),
        sequences=steps.sequences.astype(int),
        positions=steps.positions.astype(int),
        pairs=steps.pairs,
    )


def outcome(input_len: int, ttft: float) -> Outcome:
    return Outcome(0, 0.0, input_len, 1, start=0.0, arrivals=[ttft], output_len=1)


def singles(timing: Timing, chunk: int, request: float, per_token: float) -> Sequence[Outcome]:
    return [
        outcome(length, timing.prefill(length, chunk) + request + per_token * length)
        for length in (32, 128, 512)
        for _ in range(3)
    ]


async def test_served_steps_give_the_time_model_that_made_them(config: RouterConfig) -> None:
    worker = StubWorker("w0")
    worker.steps = records()
    async with serving(config, worker) as served:
        server = MeasuredServer(Target(served.url, "completions"), served.admin_url)
        await server.connect()
        found = await server.records()
        arrangement = await server.arrangement()
        outcomes = await server.play(together(3, 5, 2))
        await server.close()
        again = MeasuredServer(Target(served.url, "completions"), served.admin_url)
        await again.connect()
        await again.play(together(3, 5, 2))
        await again.close()
    prompts = [tuple(unpack_tokens(submit.prompt)) for submit in worker.submits]
    assert len(set(prompts)) == 6  # the second command does not find its prompts in a prefix cache
    assert [one.output_len for one in outcomes] == [2, 2, 2]
    assert arrangement.pools == {"mixed": 1}
    assert last_numbers(found) == {"w0": len(grid())}
    assert len(steps_of(found, last_numbers(found))) == 0
    steps = steps_of(found, {})
    measured = Measured(steps, singles(TIMING, 512, 0.01, 1e-5), [outcome(4, 0.03)], NO_TRANSFERS)
    timing = fitted_timing(measured).timing
    assert predicted_seconds(steps, timing) == pytest.approx(grid().seconds + GAP, rel=1e-3)


async def test_an_unreachable_port_is_reported_with_the_option(config: RouterConfig) -> None:
    async with serving(config, StubWorker("w0")) as served:
        server = MeasuredServer(Target(served.url, "completions"), served.url)
        with pytest.raises(ServerUnusable, match="/steps"):
            await server.records()
        await server.close()


def test_times_outside_of_the_engine_are_fitted() -> None:
    steps = grid()
    alone = singles(TIMING, 512, 0.012, 2e-5)
    burst = [outcome(4, 0.03 + 0.002 * number) for number in range(16)]
    transfers = Arrangement({"prefill": 1, "decode": 1}, 64, 512, 1000, 4096.0, 2e9, 0.004)
    fitted = fitted_timing(Measured(steps, alone, burst, transfers))
    timing = fitted.timing
    assert timing.request == pytest.approx(0.012, rel=0.05)
    assert timing.request_token == pytest.approx(2e-5, rel=0.1)
    assert timing.router == pytest.approx(0.002 - 4 * TIMING.token - TIMING.sequence, rel=0.1)
    assert (timing.kv_bytes, timing.bandwidth, timing.transfer) == (4096.0, 2e9, 0.004)


def test_the_timing_file_is_one_that_the_simulator_reads(tmp_path: Path) -> None:
    alone = singles(TIMING, 512, 0.012, 2e-5)
    measured = Measured(grid(), alone, [outcome(4, 0.03)], NO_TRANSFERS)
    fitted = fitted_timing(measured)
    path = tmp_path / "timing.yaml"
    path.write_text("".join(yaml_lines(fitted)))
    assert predicted_seconds(grid(), read_timing(path)) == pytest.approx(grid().seconds, rel=1e-3)
    lines = list(report(measured, fitted))
    assert any(line.startswith("decode, batch up to 16") for line in lines)
    assert any(line.startswith("prompt, up to 128") for line in lines)


def test_lists_of_numbers_are_parsed() -> None:
    assert numbers_of("1,4, 16") == [1, 4, 16]
    with pytest.raises(ValueError, match="expected numbers"):
        numbers_of("1,x")


intervals = st.lists(st.tuples(st.floats(0.01, 2), st.floats(0, 2)), min_size=1, max_size=12)


@given(intervals, intervals)
def test_busy_fraction_is_the_overlap_with_the_other_workers_steps(
    own: list[tuple[float, float]], other: list[tuple[float, float]]
) -> None:
    (starts, ends), (their_starts, their_ends) = map(laid_out, (own, other))
    found = busy_fraction(ends, ends - starts, their_ends, their_ends - their_starts)
    for start, end, fraction in zip(starts, ends, found, strict=True):
        overlaps = np.minimum(end, their_ends) - np.maximum(start, their_starts)
        assert fraction == pytest.approx(np.maximum(overlaps, 0).sum() / (end - start), abs=1e-6)


def laid_out(steps: list[tuple[float, float]]) -> tuple[Floats, Floats]:
    """Return the start and end of each step, from the durations and the pauses."""
    durations, pauses = np.array(steps).T
    ends = (durations + pauses).cumsum()
    return ends - durations, ends


def test_steps_of_several_workers_are_marked_as_shared() -> None:
    columns = {name: [1.0, 1.0] for name in ("tokens", "sequences", "positions", "pairs")}
    columns["number"] = [1.0, 2.0]
    first = {"ended": [1.0, 2.0], "seconds": [1.0, 1.0], **columns}
    second = {"ended": [1.5, 4.0], "seconds": [0.5, 1.0], **columns}
    steps = steps_of({"a": first, "b": second}, {})
    assert steps.others.tolist() == [0.0, 0.5, 1.0, 0.0]
