"""`penstock simulate load`: simulates a cluster under a load and writes charts as an HTML page."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.cluster.autoscaling.autoscaler import (
    TTFT_SLO_POLICY,
    TTFT_SLO_UTILIZATION,
    TTFT_SLO_WAIT_SECONDS,
    PoolLimits,
)
from penstock.common.number_text import number_text
from penstock.loadtests.bench.flags import check_least, read_flags
from penstock.loadtests.bench.traces import BadTrace
from penstock.loadtests.bench.workload import Lengths, Planned
from penstock.loadtests.simulator.model.timing import BadTiming, Timing, read_timing
from penstock.loadtests.simulator.scaling.call import Call
from penstock.loadtests.simulator.scaling.cells import about_cells, figures_of_cells, run_cells
from penstock.loadtests.simulator.scaling.cluster import Cluster, ClusterPlan
from penstock.loadtests.simulator.scaling.goals import BUSY, Figures, figures, workers_needed
from penstock.loadtests.simulator.scaling.load_options import (
    KINDS,
    Arriving,
    Kind,
    Serving,
    WrongOptions,
)
from penstock.loadtests.simulator.scaling.page import Chart, Line, page
from penstock.loadtests.simulator.scaling.scalers import (
    Clairvoyant,
    CpuTarget,
    PenstockScaler,
    QueueThreshold,
    Scaler,
    Static,
)
from penstock.loadtests.simulator.scaling.workloads import (
    from_trace,
    replicated,
    sinusoid,
    steps,
    varying,
)
from penstock.workers.scheduling.config import SchedulerConfig

SLOT_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0 on success, 1 if requests never end, 2 for wrong options, 130 after Ctrl-C.
    """
    about = "Simulate a cluster under a load: latencies, worker hours, a page of charts."
    arriving, serving = read_flags("penstock simulate load", about, (Arriving, Serving), arguments)
    try:
        _check(arriving, serving)
        load, plan = load_of(arriving), plan_of(arriving, serving)
        if serving.compare:
            return _compare(load, plan, serving)
        if serving.cells > 1:
            return _play_cells(load, plan, serving.cells)
        return _play(load, plan, serving)
    except (WrongOptions, BadTrace, BadTiming, OSError) as error:
        print(f"penstock simulate load: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"penstock simulate load: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _check(arriving: Arriving, serving: Serving) -> None:
    curve = ("low", "high", "period", "copies", "speed", "seconds")
    sizes = ("max_sequences", "max_batched_tokens", "kv_tokens", "block_size")
    for record, names in ((arriving, curve), (serving, ("most", "busy", *sizes))):
        for name in names:
            if not 0 < getattr(record, name) < math.inf:
                raise WrongOptions(
                    f"--{name.replace('_', '-')} must be above 0 and finite, "
                    f"not {getattr(record, name):g}"
                )
    if arriving.low > arriving.high:
        raise WrongOptions(f"--low ({arriving.low:g}) must not be above --high ({arriving.high:g})")
    delays = (("--cold-start", serving.cold_start), ("--promised", serving.promised))
    for flag, value in (*delays, ("--seed", arriving.seed)):
        if not 0 <= value < 2**63:
            raise WrongOptions(
                f"{flag} must be at least 0 and below 2^63, not {number_text(value)}"
            )
    check_least(serving, 0, ("mixed", "prefill", "decode"), WrongOptions)
    if bool(serving.prefill) != bool(serving.decode):
        raise WrongOptions("--prefill and --decode must be given together")
    if not (serving.mixed or serving.prefill):
        raise WrongOptions("there are no workers: give --mixed, or --prefill and --decode")
    if serving.compare and serving.prefill:
        raise WrongOptions("--compare works with --mixed only, not with --prefill and --decode")
    _check_cells(serving)


def _check_cells(serving: Serving) -> None:
    check_least(serving, 1, ("cells",), WrongOptions)
    for role in ("mixed", "prefill", "decode"):
        if (count := getattr(serving, role)) % serving.cells:
            raise WrongOptions(f"--cells ({serving.cells}) must divide --{role} ({count})")
    if serving.cells > 1 and serving.scaler != "static":
        raise WrongOptions("--cells above 1 needs `--scaler static`")
    if serving.cells > 1 and (serving.page or serving.compare):
        raise WrongOptions("--cells above 1 cannot be used with --page or --compare")


def load_of(arriving: Arriving) -> list[Planned]:
    """Return the requests of the simulation. Raises WrongOptions, BadTrace and OSError."""
    if arriving.trace is not None:
        rows = from_trace(arriving.trace, arriving.seconds, arriving.speed, 10**6, 10**6)
        copies, own = arriving.copies, arriving.own_prompts
        load = rows if copies == 1 else replicated(rows, copies, arriving.seed, own)
    else:
        try:
            inputs, outputs = Lengths.parse(arriving.input_len), Lengths.parse(arriving.output_len)
        except ValueError as error:
            raise WrongOptions(str(error)) from None
        low, high = arriving.low, arriving.high
        waves = steps(low, high, arriving.period / 2)
        rate = waves if arriving.shape == "steps" else sinusoid(low, high, arriving.period)
        load = varying(rate, high, arriving.seconds, inputs, outputs, arriving.seed)
    if not load:
        raise WrongOptions("no request arrives within --seconds")
    return load


def plan_of(arriving: Arriving, serving: Serving) -> ClusterPlan:
    """Return the settings of the cluster. Raises WrongOptions, BadTiming and OSError."""
    timing = Timing() if serving.timing is None else read_timing(serving.timing)
    try:
        limits = SchedulerConfig(
            num_blocks=max(1, serving.kv_tokens // serving.block_size),
            max_model_len=min(serving.kv_tokens, 1 << 18),
            block_size=serving.block_size,
            max_sequences=serving.max_sequences,
            max_batched_tokens=serving.max_batched_tokens,
            max_queued=10**6,
        )
    except ValueError as error:
        raise WrongOptions(str(error)) from None
    pools = {"mixed": serving.mixed}
    if serving.prefill:
        pools = {"prefill": serving.prefill, "decode": serving.decode}
    return ClusterPlan(
        pools,
        limits,
        timing,
        serving.cold_start,
        ttft_slo_seconds=serving.promised,
        single_steps=serving.single_steps,
        routing=serving.routing,
        seed=arriving.seed,
    )


# ------------------------------------------------------------------ running


def scaler_of(
    kind: Kind, load: Sequence[Planned], plan: ClusterPlan, most: int, busy: float = BUSY
) -> Scaler:
    limits = {name: PoolLimits(least=1, most=most, gpus=1) for name in plan.pools}
    match kind:
        case "penstock":
            return _product(limits, plan)
        case "queue":
            return QueueThreshold(limits)
        case "cpu":
            return CpuTarget(limits)
        case "clairvoyant":
            return clairvoyant_of(load, plan, most, busy)
        case "static":
            return Static(plan.pools)


def _product(limits: Mapping[str, PoolLimits], plan: ClusterPlan) -> PenstockScaler:
    """Return Penstock's autoscaler, with the settings that `cluster/autoscaling` uses."""
    if not plan.ttft_slo_seconds:
        return PenstockScaler(limits)
    aims = {
        name: replace(one, wait_seconds=TTFT_SLO_WAIT_SECONDS, busy=TTFT_SLO_UTILIZATION)
        for name, one in limits.items()
    }
    return PenstockScaler(aims, TTFT_SLO_POLICY)


def clairvoyant_of(
    load: Sequence[Planned], plan: ClusterPlan, most: int, busy: float = BUSY
) -> Clairvoyant:
    wanted = {name: needs_of(load, plan, busy) for name in plan.pools}
    return Clairvoyant(wanted, SLOT_SECONDS, plan.cold_start + 2 * SLOT_SECONDS, most)


def needs_of(load: Sequence[Planned], plan: ClusterPlan, busy: float = BUSY) -> list[int]:
    """Return the workers needed in each slot of SLOT_SECONDS, at the utilization `busy`."""
    return workers_needed(load, plan.timing, plan.limits.max_batched_tokens, SLOT_SECONDS, busy)


def simulate(
    kind: Kind, load: Sequence[Planned], plan: ClusterPlan, most: int, busy: float = BUSY
) -> tuple[Cluster, Figures]:
    """Run the simulation to its end. Only the clairvoyant scaler uses `busy`.

    Raises RuntimeError if requests never end.
    """
    cluster = Cluster(plan, load, scaler_of(kind, load, plan, most, busy))
    cluster.run()
    return cluster, figures(cluster, plan)


HEADER = (
    *("", "goals kept", "TTFT p50", "p99", "TPOT p50", "p99", "worker hours", "most workers"),
    *("busy", "changes/h"),
)


def row(name: str, of: Figures) -> list[str]:
    return [
        name,
        f"{of.kept:.2%}",
        *(f"{seconds:.3f} s" for seconds in (of.ttft_p50, of.ttft_p99)),
        *(f"{seconds * 1000:.1f} ms" for seconds in (of.tpot_p50, of.tpot_p99)),
        f"{of.worker_hours:.2f}",
        f"{of.most_workers}",
        f"{of.busy:.0%}",
        f"{of.scalings_an_hour:.0f}",
    ]


def _play(load: Sequence[Planned], plan: ClusterPlan, serving: Serving) -> int:
    started, computed = time.monotonic(), time.process_time()
    cluster, of = simulate(serving.scaler, load, plan, serving.most, serving.busy)
    rows = [row(serving.scaler, of)]
    _show(rows, cluster, time.monotonic() - started)
    print(f"{time.process_time() - computed:.1f} s of CPU time in one process")
    _draw(serving, rows, {serving.scaler: cluster})
    return 0


def _play_cells(load: Sequence[Planned], plan: ClusterPlan, num: int) -> int:
    started = time.monotonic()
    cells = run_cells(plan, load, num)
    print(about_cells(cells, time.monotonic() - started))
    print_table(HEADER, [row(f"{num} cells", figures_of_cells(cells, plan))])
    return 0


def _compare(load: Sequence[Planned], plan: ClusterPlan, serving: Serving) -> int:
    peak = static_peak(load, plan, serving.most)
    rows, started = [], time.monotonic()
    clusters: dict[str, Cluster] = {}
    for kind in KINDS:
        start = replace(plan, pools={"mixed": peak}) if kind == "static" else plan
        clusters[kind], of = simulate(kind, load, start, serving.most, serving.busy)
        rows.append(row("static peak" if kind == "static" else kind, of))
    _show(rows, clusters["static"], time.monotonic() - started)
    _draw(serving, rows, clusters)
    return 0


def static_peak(load: Sequence[Planned], plan: ClusterPlan, most: int) -> int:
    """Return the smallest static number of mixed workers that meets the goals of 99.5% of requests.

    Returns `most` if no smaller number is enough.
    """
    # Simulating a much too small cluster takes long, so the search starts from an estimate.
    low, high, step = 1, most, 1
    middle = max(needs_of(load, plan, busy=1.0))
    while low < high:
        middle = min(max(middle, low), high - 1)
        if _suffices(load, plan, middle):
            high, middle = middle, middle - step
        else:
            low, middle = middle + 1, middle + step
        step *= 2
    return low


def _suffices(load: Sequence[Planned], plan: ClusterPlan, count: int) -> bool:
    try:
        fixed = replace(plan, pools={"mixed": count})
        return simulate("static", load, fixed, count)[1].kept >= 0.995
    except RuntimeError:
        return False


def _show(rows: Sequence[Sequence[str]], cluster: Cluster, seconds: float) -> None:
    num_events, num_steps = cluster.clock.num_events, cluster.num_steps
    print(
        f"{len(cluster.calls)} requests, {cluster.clock.now:.0f} s, simulated in {seconds:.1f} s: "
        f"{num_steps} steps, {num_events} events, {num_events / seconds:.0f} a second"
    )
    print_table(HEADER, rows)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for line in (header, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


# ------------------------------------------------------------------ the page


def _draw(serving: Serving, rows: Sequence[Sequence[str]], of: Mapping[str, Cluster]) -> None:
    if serving.page is None:
        return
    about = [
        f"{len(next(iter(of.values())).calls)} requests; cold start {serving.cold_start:g} s. "
        "Goals: TTFT of at most 2 s plus five times the prompt's prefill time alone, "
        "TPOT of at most twice the time of a decode step alone.",
    ]
    text = page("penstock simulate load", about, HEADER, rows, charts_of(of))
    serving.page.write_text(text, encoding="utf-8")


def charts_of(clusters: Mapping[str, Cluster]) -> list[Chart]:
    """Return charts of workers, queues and latencies over time. Each cluster is one line."""
    named = clusters.items()
    return [
        Chart("Workers paid for", "", [_workers(name, of) for name, of in named]),
        Chart("Requests that wait", "", [_sampled(name, of, "queued") for name, of in named]),
        Chart("Sequences that run", "", [_sampled(name, of, "running") for name, of in named]),
        Chart(
            "Time to the first token, 99% of a minute's requests",
            "s",
            [Line(name, _p99(of.calls)) for name, of in named],
        ),
    ]


def _sampled(name: str, of: Cluster, field: str) -> Line:
    return Line(name, [(one.at, float(getattr(one, field))) for one in of.samples])


def _workers(name: str, of: Cluster) -> Line:
    points = [(one.at, float(one.serving + one.pending + one.draining)) for one in of.samples]
    return Line(name, points, stepped=True)


def _p99(calls: Sequence[Call]) -> list[tuple[float, float]]:
    minutes: dict[int, list[float]] = {}
    for call in calls:
        if call.status == "ok":
            minutes.setdefault(int(call.planned.due / 60), []).append(call.ttft)
    return [
        (60.0 * minute + 30, sorted(values)[int(0.99 * (len(values) - 1))])
        for minute, values in sorted(minutes.items())
    ]


if __name__ == "__main__":
    sys.exit(main())
