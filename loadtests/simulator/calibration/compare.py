"""`penstock simulate compare`: plays a load against a running server and in the simulator."""

import asyncio
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.cli.client_key import ABOUT
from penstock.common.api_key import BadKey
from penstock.loadtests.bench.clients import ServerUnusable
from penstock.loadtests.bench.flags import check_least, option, read_flags
from penstock.loadtests.bench.metrics import Outcome
from penstock.loadtests.bench.traces import BadTrace, read_trace
from penstock.loadtests.bench.workload import Lengths, Planned, drawn_load
from penstock.loadtests.simulator.calibration.calibrate import server_of
from penstock.loadtests.simulator.calibration.comparison import (
    HEADER,
    Latencies,
    Row,
    charts_of,
    compare,
)
from penstock.loadtests.simulator.calibration.server import Arrangement
from penstock.loadtests.simulator.model.timing import BadTiming, Timing, read_timing
from penstock.loadtests.simulator.scaling.cluster import Cluster, ClusterPlan
from penstock.loadtests.simulator.scaling.load import print_table
from penstock.loadtests.simulator.scaling.page import page
from penstock.loadtests.simulator.scaling.scalers import Static
from penstock.workers.scheduling.config import SchedulerConfig

_FIGURES = ("due", "input_len", "output_len")


@dataclass(frozen=True, slots=True)
class Served:
    """The server."""

    address: str = option(
        "http://127.0.0.1:8000", "grpc://HOST:PORT or http[s]://HOST:PORT", positional=True
    )
    admin: str = option("", "operators' address; default: that of penstock serve")
    api_key_file: Path | None = option(None, ABOUT)  # noqa: RUF009
    seed: int = option(0, "the same seed gives the same lengths and arrival times")


@dataclass(frozen=True, slots=True)
class Playing:
    """The load, and the results."""

    timing: Path | None = option(None, "time model, from penstock simulate calibrate")  # noqa: RUF009
    recorded: Path | None = option(  # noqa: RUF009
        None, "file of penstock bench --save-json FILE --save-rows"
    )
    trace: Path | None = option(None, "Mooncake JSON lines or an Azure CSV")  # noqa: RUF009
    keep: float = option(1.0, "keep each request of the trace with this probability")
    divide: int = option(1, "divide the lengths of the trace by this")
    seconds: float = option(60.0, "seconds of the load")
    rate: float = option(2.0, "requests per second without --recorded and --trace; inf: a burst")
    num_requests: int = option(32, "number of requests of a burst")
    input_len: str = option("lognormal:32-256", "prompt tokens, as for penstock bench")
    output_len: str = option("lognormal:8-64", "answer tokens")
    runs: int = option(2, "measured runs")
    page: Path | None = option(None, "write the comparison to this file, as one HTML page")  # noqa: RUF009
    save_json: Path | None = option(None, "write the figures to this file")  # noqa: RUF009


class WrongOptions(ValueError):
    """Raised if options cannot be used. The message is one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0 if all predictions are met, 1 if one is missed or the server cannot be measured, 2 for
        wrong options, 130 after Ctrl-C.
    """
    about = "Play a load against a running server and in the simulator; compare the latencies."
    served, playing = read_flags("penstock simulate compare", about, (Served, Playing), arguments)
    try:
        timing, load = _timing_of(playing), load_of(playing, served.seed)
        arrangement, measured = asyncio.run(_measure(served, playing.runs, load))
        predicted = simulated(load, arrangement, timing)
        rows = compare(measured, predicted)
        _write(playing, arrangement, rows, measured, predicted)
    except (WrongOptions, BadTiming, BadTrace, BadKey, ValueError) as error:
        print(f"penstock simulate compare: {error}", file=sys.stderr)
        return 2
    except (ServerUnusable, OSError, RuntimeError) as error:
        print(f"penstock simulate compare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(_title(arrangement, len(load)))
    print_table(HEADER, [row.cells() for row in rows])
    return 0 if all(row.is_met for row in rows) else 1


def load_of(playing: Playing, seed: int) -> list[Planned]:
    """Return the load that the options describe. Raises WrongOptions, BadTrace and OSError."""
    if not 0 < playing.keep <= 1:
        raise WrongOptions(f"--keep must be above 0 and at most 1, not {playing.keep:g}")
    check_least(playing, 1, ("divide", "runs", "num_requests"), WrongOptions)
    if playing.recorded is not None:
        load = recorded_load(playing.recorded)
    elif playing.trace is not None:
        load = thinned(playing.trace, playing.seconds, playing.keep, playing.divide, seed)
    else:
        inputs, outputs = Lengths.parse(playing.input_len), Lengths.parse(playing.output_len)
        burst = math.isinf(playing.rate)
        count = playing.num_requests if burst else max(1, int(playing.rate * playing.seconds))
        load = drawn_load(count, playing.rate, inputs, outputs, seed)
    if not load:
        if playing.recorded is not None:
            raise WrongOptions(f"--recorded {playing.recorded}: the file has no requests")
        raise WrongOptions("the load has no requests: raise --seconds or --keep")
    return load


def recorded_load(path: Path) -> list[Planned]:
    """Return the requests of a file of `penstock bench --save-rows`. Raises WrongOptions."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["requests"]
        found = [tuple(float(row[name]) for name in _FIGURES) for row in rows]
    except (ValueError, KeyError, TypeError):
        raise WrongOptions(
            f"{path}: expected a file that penstock bench wrote with --save-rows"
        ) from None
    found.sort()
    return [Planned(number, due, int(a), int(b)) for number, (due, a, b) in enumerate(found)]


def thinned(path: Path, seconds: float, keep: float, divide: int, seed: int) -> list[Planned]:
    """Return the first `seconds` of a trace. Each request is kept with probability `keep`."""
    random = np.random.Generator(np.random.Philox(key=[seed, 5]))
    rows = [row for row in read_trace(path) if row.at <= seconds]
    kept = [row for row, drawn in zip(rows, random.random(len(rows)), strict=True) if drawn < keep]
    return [
        Planned(number, row.at, max(1, row.input_len // divide), max(1, row.output_len // divide))
        for number, row in enumerate(kept)
    ]


def simulated(load: Sequence[Planned], arrangement: Arrangement, timing: Timing) -> Latencies:
    """Return the latencies of the load on simulated workers."""
    limits = SchedulerConfig(
        num_blocks=arrangement.kv_blocks,
        max_model_len=arrangement.kv_blocks * arrangement.block_size,
        block_size=arrangement.block_size,
        max_sequences=arrangement.max_sequences,
        max_batched_tokens=arrangement.max_batched_tokens,
        enough_prompt_tokens=arrangement.enough_prompt_tokens,
        tpot_slo_seconds=arrangement.tpot_slo_seconds,
    )
    # If the workers slowed each other down in the calibration, they share the cores of one machine.
    # In that case routers also learn step times, so that they can compare the speed of one busy
    # worker with that of several.
    is_shared = timing.sharing > 0
    plan = ClusterPlan(
        arrangement.pools,
        limits,
        timing,
        ttft_slo_seconds=arrangement.ttft_slo_seconds,
        is_one_machine=is_shared,
        reports_step_seconds=is_shared,
    )
    cluster = Cluster(plan, load, Static(arrangement.pools))
    cluster.run()
    calls = cluster.calls
    return Latencies(
        [call.planned.due for call in calls],
        [call.ttft for call in calls],
        [call.tpot for call in calls if call.num_tokens > 1],
    )


async def _measure(
    served: Served, runs: int, load: Sequence[Planned]
) -> tuple[Arrangement, list[Latencies]]:
    server = server_of(served)
    try:
        await server.connect()
        longest = max(one.input_len + one.output_len for one in load)
        if longest > server.max_model_len:
            raise WrongOptions(
                f"a request has {longest} tokens, but the server accepts at most "
                f"{server.max_model_len}: lower --input-len or --output-len, or for a trace raise "
                "--divide"
            )
        await server.play(load[:1])
        measured = [_latencies(await server.play(load)) for _ in range(runs)]
        return await server.arrangement(), measured
    finally:
        await server.close()


def _latencies(outcomes: Sequence[Outcome]) -> Latencies:
    return Latencies(
        [one.due for one in outcomes],
        [one.ttft for one in outcomes],
        [one.tpot for one in outcomes if one.output_len > 1],
    )


def _timing_of(playing: Playing) -> Timing:
    if playing.timing is None:
        raise WrongOptions(
            "the time model is missing: give --timing FILE, a file that penstock simulate "
            "calibrate wrote"
        )
    return read_timing(playing.timing)


def _title(arrangement: Arrangement, num_requests: int) -> str:
    pools = ", ".join(f"{count} {role}" for role, count in sorted(arrangement.pools.items()))
    return f"{num_requests} requests; workers: {pools}"


def _write(
    playing: Playing,
    arrangement: Arrangement,
    rows: Sequence[Row],
    measured: Sequence[Latencies],
    predicted: Latencies,
) -> None:
    """Write the HTML page and the JSON file, if their options are set."""
    title = _title(arrangement, len(predicted.due))
    if playing.page is not None:
        about = [
            f"{title}. A prediction is met within 10%, or between the first two measured runs."
        ]
        cells = [row.cells() for row in rows]
        charts = charts_of(measured, predicted)
        text = page("Measured and simulated", about, HEADER, cells, charts)
        playing.page.write_text(text, encoding="utf-8")
    if playing.save_json is not None:
        figures: list[dict[str, Any]] = [
            {
                "name": row.name,
                "measured": [_known(value) for value in row.measured],
                "predicted": _known(row.predicted),
            }
            for row in rows
        ]
        saved = {"workers": dict(arrangement.pools), "load": title, "figures": figures}
        playing.save_json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


def _known(value: float) -> float | None:
    """Return a value for JSON, which has no NaN."""
    return None if math.isnan(value) else value


if __name__ == "__main__":
    sys.exit(main())
