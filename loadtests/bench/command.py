"""`penstock bench`: send a load to a running server and report its latencies and throughput."""

import asyncio
import dataclasses
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.loadtests.bench import report, workload
from penstock.loadtests.bench.client_grpc import GrpcClient
from penstock.loadtests.bench.client_http import WORDS, HttpClient
from penstock.loadtests.bench.clients import Client, RequestFailed, Served, ServerUnusable, Target
from penstock.loadtests.bench.load import Load
from penstock.loadtests.bench.metrics import Figures, Goals, Outcome, figures
from penstock.loadtests.bench.options import (
    Options,
    WrongOptions,
    check_results,
    goals_of,
    plan_of,
    read_options,
    target_of,
)
from penstock.loadtests.bench.sweep import text
from penstock.loadtests.bench.sweep.run import check_sweep, run_sweep
from penstock.loadtests.bench.sweep.step import as_json
from penstock.loadtests.bench.sweep.svg import draw
from penstock.loadtests.bench.traces import BadTrace

_SHOWN_ERRORS = 5
_LATE_MS = 100.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    The code is 0 for success, 1 for failed requests or no server, 2 for wrong options, 130 after
    Ctrl-C.
    """
    options = read_options(argv)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_bench(options))
    except (WrongOptions, BadTrace) as error:
        print(f"penstock bench: {error}", file=sys.stderr)
        return 2
    except (ServerUnusable, OSError) as error:
        print(f"penstock bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def _bench(options: Options) -> int:
    target, goals = target_of(options), goals_of(options.results.goodput)
    check_results(options.results, options.sweep)
    check_sweep(options.sweep, options.work, goals)
    plan = plan_of(options.work)
    client = HttpClient(target) if target.address.startswith("http") else GrpcClient(target)
    try:
        served = await client.describe()
        vocabulary = _vocabulary(options, target, served)
        prompts = workload.Prompts(vocabulary, options.work.seed)
        _check_fit(plan, served)
        seconds = await _warm_up(client, prompts, plan[0], options.work.num_warmups)
        if options.sweep.sweep and goals is not None:
            return await _sweep(options, served, client, goals, vocabulary, 1 / seconds)
        with _progress(len(plan)) as on_done:
            load = Load(client, prompts, plan, options.work.concurrency, on_done)
            await load.run()
    finally:
        await client.close()
    return _finish(options, served, load, goals)


async def _sweep(
    options: Options,
    served: Served,
    client: Client,
    goals: Goals,
    vocabulary: range,
    default_rate: float,
) -> int:
    """Run a sweep, print and save its results, and return the exit code."""
    print(text.HEADER, flush=True)
    result = await run_sweep(
        client,
        options.work,
        options.sweep,
        goals,
        vocabulary,
        options.work.rate or default_rate,
        _progress,
        lambda step: print(text.step_line(step), flush=True),
    )
    knee = result.knee()
    if result.steps:
        print("\n".join(text.plot(result.by_rate, knee)))
    print(text.conclusion(result, goals, options.sweep.attainment), flush=True)
    if options.results.save_json is not None:
        config = _config(options, served)
        steps = [report.as_json(each.figures, {}) | as_json(each) for each in result.by_rate]
        saved = {"config": config, "knee": None if knee is None else knee.rate, "steps": steps}
        options.results.save_json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if options.sweep.save_svg is not None and result.steps:
        title = f"{served.model}: load and latency"
        drawn = draw(result.by_rate, knee, goals, title)
        options.sweep.save_svg.write_text(drawn, encoding="utf-8")
    if result.interrupted:
        return 130
    return 0 if knee is not None else 1


def _finish(options: Options, served: Served, load: Load, goals: Goals | None) -> int:
    """Print and save the results, and return the exit code."""
    measured = figures(load.outcomes, load.duration, goals)
    rate = math.inf if options.work.rate is None else options.work.rate
    for note in _notes(load, measured):
        print(note, file=sys.stderr)
    print(report.block(measured, rate, options.work.concurrency), flush=True)
    if options.results.save_json is not None:
        saved = report.as_json(measured, _config(options, served))
        if options.results.save_rows:
            saved["requests"] = report.rows(load.outcomes)
        options.results.save_json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if load.interrupted:
        return 130
    return 1 if measured.failed and not options.results.allow_failures else 0


def _vocabulary(options: Options, target: Target, served: Served) -> range:
    if target.api == "chat" or options.work.dataset is not None:
        return range(len(WORDS))
    vocab_size = options.server.vocab_size or served.vocab_size
    if vocab_size is None:
        raise WrongOptions(
            "the server does not report its vocabulary size: add --vocab-size, or use --api chat"
        )
    try:
        return workload.ordinary_tokens(vocab_size)
    except ValueError as error:
        source = "the server" if options.server.vocab_size is None else "--vocab-size"
        raise WrongOptions(f"{source}: {error}") from None


def _check_fit(plan: Sequence[workload.Planned], served: Served) -> None:
    """Raise WrongOptions if a planned request exceeds the server's context length."""
    if served.max_model_len is None:
        return
    longest = max(plan, key=lambda planned: planned.input_len + planned.output_len)
    length = longest.input_len + longest.output_len
    if length > served.max_model_len:
        raise WrongOptions(
            f"request {longest.number} and its answer have {length} tokens, but {served.model} "
            f"accepts at most {served.max_model_len}: lower --input-len or --output-len "
            "(for a trace or a dataset: --max-input-len or --max-output-len)"
        )


async def _warm_up(
    client: Client, prompts: workload.Prompts, like: workload.Planned, count: int
) -> float:
    """Send `count` warm-up requests with the lengths of `like`, one after the other.

    Returns the seconds that the last request took.

    Raises:
        ServerUnusable: a request failed.
    """
    began = time.perf_counter()
    for number in range(count):
        began = time.perf_counter()
        prompt = like.text[::-1] or prompts.warmup(number, like.input_len)
        try:
            async for _ in client.stream(prompt, like.output_len):
                pass
        except RequestFailed as failure:
            raise ServerUnusable(f"the warm-up request failed: {failure}") from None
    return time.perf_counter() - began


@contextmanager
def _progress(count: int) -> Iterator[Any]:
    """Show a progress bar if stderr is a terminal.

    Yields a function that the load calls with the outcome of each finished request.
    """
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"))
    with Progress(
        "requests", *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("requests", total=count, failed="")
        failed = 0

        def on_done(outcome: Outcome) -> None:
            nonlocal failed
            failed += bool(outcome.error)
            progress.update(task, advance=1, failed=f"[red]{failed} failed" if failed else "")

        yield on_done


def _notes(load: Load, measured: Figures) -> Iterator[str]:
    """Yield warnings about the results, such as interruption, failures or short answers."""
    if load.interrupted:
        yield f"interrupted: {len(load.outcomes)} of {len(load.plan)} requests had finished"
    errors = Counter(outcome.error for outcome in load.outcomes if outcome.error)
    for error, count in errors.most_common(_SHOWN_ERRORS):
        yield f"failed, {count} times: {error}" if count > 1 else f"failed: {error}"
    if len(errors) > _SHOWN_ERRORS:
        yield f"and {len(errors) - _SHOWN_ERRORS} more kinds of failure"
    if measured.short:
        yield f"{measured.short} answers were shorter than requested"
    if measured.lag.p99 > _LATE_MS:
        yield (
            f"this client was late: it sent 1% of requests {measured.lag.p99:.0f} ms or more "
            "after their scheduled time, so the load was lighter than requested"
        )


def _config(options: Options, served: Served) -> dict[str, Any]:
    """Return the options as JSON values, without the API key."""
    config = dataclasses.asdict(options)
    config["served"] = served._asdict()
    text = json.dumps(config, default=str)
    # JSON has no infinite numbers, such as in `--rate inf`.
    return dict(json.loads(text, parse_constant=lambda number: number.replace("Infinity", "inf")))


if __name__ == "__main__":
    sys.exit(main())
