"""Compares the default of `penstock serve` with other arrangements of the same cores.

`python -m penstock.loadtests.comparison.arrangements` starts one server per arrangement and keeps
all of them running, but sends load to one at a time. The arrangements are the default (one prefill
and one decode worker), two mixed workers, one mixed worker with all cores, and a fixed pair. In the
fixed pair, an operator has assigned the role of the prefill worker, and each worker keeps half of
the cores. The first two loads of each arrangement are discarded as a warm-up. All loads are sent
over HTTP. Each number of `--streams` gives a closed loop with that number of streams. `--mix` adds
a load whose lengths change every 30 s, and `--trace` adds a thinned trace. `--offline` also
measures the engine alone.
"""

import asyncio
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from penstock.cli.status import NoStatus
from penstock.loadtests.bench.client_http import HttpClient
from penstock.loadtests.bench.clients import Client, Target
from penstock.loadtests.bench.flags import check_least, option, read_flags
from penstock.loadtests.bench.load import Load
from penstock.loadtests.bench.metrics import Goals
from penstock.loadtests.bench.traces import BadTrace, read_trace
from penstock.loadtests.bench.workload import Prompts, ordinary_tokens
from penstock.loadtests.comparison.arrangements.arrangements import (
    ARRANGEMENTS,
    BY_NAME,
    Arrangement,
)
from penstock.loadtests.comparison.arrangements.figures import Sample, sample_of, summary, table
from penstock.loadtests.comparison.arrangements.loads import (
    LoadPlan,
    Thinning,
    changing_mix,
    closed_loop,
    thinned_trace,
)
from penstock.loadtests.comparison.checkpoints import NoCheckpoint, checkpoint
from penstock.loadtests.comparison.engines import BY_NAME as ENGINES
from penstock.loadtests.comparison.environments import NotInstalled, cache_folder
from penstock.loadtests.comparison.process import EngineFailed, EngineProcess
from penstock.loadtests.micro.ab_runner import Quantiles, run
from penstock.loadtests.micro.server import serving

PROGRAM = "python -m penstock.loadtests.comparison.arrangements"
_KNOWN = ", ".join(BY_NAME)
_KV_GIB = 2
_OFFLINE_REQUESTS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the measurement."""

    model: Literal["150m", "1b", "moe", "shipped", "tiny"] = option("150m", "model to serve")
    arrangements: tuple[str, ...] = option(
        (), f"arrangements, of {_KNOWN}; default: those without SLOs"
    )
    streams: tuple[str, ...] = option(("64", "16", "4", "1"), "streams of the closed loops")
    rounds: int = option(3, "number of rounds; each arrangement is measured once per round")
    requests: int = option(3, "closed loop: requests per stream, at least 8 in all")
    input_len: int = option(128, "closed loop: prompt tokens")
    output_len: int = option(64, "closed loop: answer tokens")
    mix: bool = option(False, "also a load whose lengths change every 30 s")
    mix_seconds: float = option(240.0, "seconds of the changing load")
    mix_work: float = option(900.0, "changing load: prompt tokens + 2 x answer tokens, per second")
    trace: str = option("", "also this trace, thinned: FILE")
    trace_seconds: float = option(600.0, "seconds of the trace that are played")
    trace_keep: float = option(0.1, "probability of keeping a request of the trace")
    trace_divide: int = option(4, "divisor of the trace's lengths")
    max_model_len: int = option(4096, "most tokens of a request")
    ttft_ms: float = option(2000.0, "goal of mix and trace: milliseconds to the first token")
    tpot_ms: float = option(150.0, "goal of mix and trace: milliseconds per further token")
    offline: bool = option(False, "also the engine alone: 64 requests in one batch, with all cores")
    serve_flags: str = option("", "further flags of every `penstock serve`, separated by spaces")
    seed: int = option(0, "seed of lengths, times and prompts")
    save_json: str = option("", "write the results to this file")

    def __post_init__(self) -> None:
        for name in self.arrangements:
            if name not in BY_NAME:
                raise ValueError(f"unknown arrangement {name!r}: expected one of {_KNOWN}")
        if not all(each.isdigit() and int(each) for each in self.streams):
            raise ValueError(
                f"--streams must be numbers of at least 1, not {' '.join(self.streams)}"
            )
        names = ("rounds", "requests", "input_len", "output_len", "trace_divide")
        check_least(self, 1, names)
        if self.save_json and not Path(self.save_json).absolute().parent.is_dir():
            raise ValueError(f"--save-json {self.save_json}: its folder does not exist")

    def chosen(self) -> list[Arrangement]:
        """Return the arrangements to measure."""
        return [BY_NAME[name] for name in self.arrangements] or list(ARRANGEMENTS)

    def goals(self) -> Goals:
        """Return the goals of mix and trace."""
        return Goals(ttft=self.ttft_ms, tpot=self.tpot_ms)

    def loads(self) -> list[LoadPlan]:
        """Return the loads of a round. Raises BadTrace and ValueError."""
        lengths = (self.input_len, self.output_len)
        streams = [int(each) for each in self.streams]
        loads = [closed_loop(each, max(8, each * self.requests), *lengths) for each in streams]
        goals = self.goals()
        if self.mix:
            loads.append(changing_mix(self.mix_seconds, 30.0, self.mix_work, goals, self.seed))
        if self.trace:
            sizes = (self.trace_seconds, self.trace_keep, self.trace_divide)
            thinning = Thinning(*sizes, self.max_model_len, self.seed)
            loads.append(thinned_trace(read_trace(Path(self.trace)), thinning, goals))
        if not loads:
            raise ValueError("no load is chosen: give --streams, --mix or --trace")
        return loads


class Servers:
    """The running arrangements, with a client for each."""

    def __init__(self, clients: Mapping[str, Client], vocab_size: int, seed: int) -> None:
        self._clients = clients
        self._vocabulary = ordinary_tokens(vocab_size)
        self._seed = seed
        self._num_loads = 0

    async def measure(self, name: str, load: LoadPlan, number: int) -> Sample:
        """Send a load to one arrangement.

        The prompts of this load differ from those of other rounds and loads. A load that is
        cancelled raises CancelledError instead of giving the figures of a part.
        """
        self._num_loads += 1
        seed = self._seed + 1_000 * self._num_loads + number
        prompts = Prompts(self._vocabulary, seed)
        sent = Load(self._clients[name], prompts, load.plan, load.concurrency)
        await sent.run()
        if sent.interrupted:
            raise asyncio.CancelledError
        return sample_of(sent.outcomes, sent.duration, load.goals)


async def _measure(options: Options) -> dict[str, Any]:
    model = checkpoint(options.model, cache_folder())
    loads, chosen = options.loads(), options.chosen()
    clients: dict[str, HttpClient] = {}
    offline: list[float] = []
    async with AsyncExitStack() as stack:
        for each in chosen:
            more = ("--max-model-len", str(options.max_model_len), *options.serve_flags.split())
            arguments = each.serve_arguments(str(model), _KV_GIB * 1024, more, options.goals())
            running = await stack.enter_async_context(serving(arguments))
            await each.assign_roles(running.metrics_address)
            clients[each.name] = client = HttpClient(Target(running.http_address, "completions"))
            stack.push_async_callback(client.close)
        vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        servers = Servers(clients, int(vocab_size), options.seed)
        engine = _Offline(model, options) if options.offline else None
        if engine is not None:
            stack.callback(engine.close)
        await _warm_up(servers, clients, options)
        rounds = await _rounds(servers, engine, offline, options, loads)
    found = summary(rounds)
    print(table(found))
    saved: dict[str, Any] = {"summary": found, "rounds": [_as_json(each) for each in rounds]}
    if offline:
        saved["offline"] = _offline_figures(offline, rounds)
    return saved


async def _rounds(
    servers: Servers,
    engine: "_Offline | None",
    offline: list[float],
    options: Options,
    loads: Sequence[LoadPlan],
) -> list[dict[str, dict[str, Sample]]]:
    report, names = _reporter(), [each.name for each in options.chosen()]
    rounds: list[dict[str, dict[str, Sample]]] = []
    for number in range(options.rounds):
        shift = number % len(names)
        samples: dict[str, dict[str, Sample]] = {}
        for load in loads:
            measured: dict[str, Sample] = {}
            for name in (*names[shift:], *names[:shift]):
                measured[name] = found = await servers.measure(name, load, number)
                first = f"{found.output_per_second:.0f} tokens/s, first {found.first_median:.0f} ms"
                report(f"round {number + 1}, {load.name}, {name}: {first}")
            samples[load.name] = {name: measured[name] for name in names}
        rounds.append(samples)
        if engine is not None:
            offline.append(await asyncio.to_thread(engine.rate, number))
            report(f"round {number + 1}, engine alone: {offline[-1]:.0f} tokens/s")
    return rounds


async def _warm_up(servers: Servers, clients: Mapping[str, HttpClient], options: Options) -> None:
    """Load each arrangement briefly with one stream and with several, as a warm-up."""
    for name in clients:
        for streams in (1, 16):
            load = closed_loop(streams, 2 * streams, options.input_len, 16)
            await servers.measure(name, load, 0)


def _reporter() -> Callable[[str], None]:
    began = time.monotonic()
    return lambda text: print(f"{time.monotonic() - began:5.0f} s  {text}", file=sys.stderr)


class _Offline:
    """The engine alone with all cores, in a process of its own that is paused between rounds."""

    def __init__(self, model: Path, options: Options) -> None:
        self._options = options
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self._vocab_size = int(config["vocab_size"])
        settings = {
            "model": str(model),
            "threads": len(os.sched_getaffinity(0)),
            "num_requests": _OFFLINE_REQUESTS,
            "max_model_len": options.input_len + options.output_len,
            "kv_gib": 1,
            "kv_cache_dtype": "auto",
        }
        self._process = EngineProcess(ENGINES["penstock"], Path(sys.executable), settings)
        self._generate(-1, 8)
        self._process.pause()

    def rate(self, number: int) -> float:
        """Return the output tokens per second of a batch."""
        self._process.resume()
        try:
            seconds = self._generate(number, self._options.output_len)
        finally:
            self._process.pause()
        return _OFFLINE_REQUESTS * self._options.output_len / seconds

    def close(self) -> None:
        self._process.close()

    def _generate(self, number: int, output_len: int) -> float:
        prompts = Prompts(ordinary_tokens(self._vocab_size), self._options.seed + 500_000 + number)
        plan = closed_loop(1, _OFFLINE_REQUESTS, self._options.input_len, output_len).plan
        return self._process.generate([prompts.tokens(each) for each in plan], output_len).seconds


def _offline_figures(offline: Sequence[float], rounds: Sequence[Any]) -> dict[str, Any]:
    """Print and return the engine's rate, and the default arrangement's rate relative to it."""
    print(f"engine alone: {statistics.median(offline):.0f} tokens/s")
    load = f"{_OFFLINE_REQUESTS} streams"
    found: dict[str, Any] = {"tokens_per_second": list(offline)}
    if load in rounds[0] and "default" in rounds[0][load]:
        pairs = zip(rounds, offline, strict=True)
        ratios = [each[load]["default"].output_per_second / rate for each, rate in pairs]
        print(f"  penstock serve at {load} relative to the engine alone: {Quantiles.of(ratios)}")
        found["ratio"] = dataclasses.asdict(Quantiles.of(ratios))
    return found


def _as_json(samples: Mapping[str, Mapping[str, Sample]]) -> dict[str, Any]:
    return {
        load: {name: dataclasses.asdict(sample) for name, sample in by_name.items()}
        for load, by_name in samples.items()
    }


async def _checked_measure(options: Options) -> dict[str, Any]:
    try:
        return await _measure(options)
    except (BadTrace, EngineFailed, NoCheckpoint, NoStatus, NotInstalled) as error:
        raise ValueError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save the results, and return the exit code.

    The code is 0 for success, 1 if it failed, 2 for wrong flags, 130 after Ctrl-C,
    143 after SIGTERM.
    """
    about = "Throughput and latency of the default, beside other arrangements of the same cores."
    try:
        (options,) = read_flags(PROGRAM, about, (Options,), arguments)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return run(lambda: _checked_measure(options), dataclasses.asdict(options), options.save_json)


if __name__ == "__main__":
    sys.exit(main())
