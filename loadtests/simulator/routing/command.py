"""`penstock simulate routing`: compares placement strategies.

All strategies serve the same loads in virtual time. The command checks the goals of the strategy
`cost`. The simulation uses the product's dispatcher, placement, prefix index and block pool. The
time model is simpler than that of the other simulations, as in published comparisons: a worker
computes prompts first come, first served, at a fixed number of uncached tokens per second. Answers
have one token.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.traces import BadTrace, read_trace
from penstock.loadtests.bench.workload import TRACE_BLOCK
from penstock.loadtests.simulator.routing.loads import (
    SHORT_TOKENS,
    infinite_cache_tokens,
    long_and_short,
    prompts_of,
    without_sharing,
)
from penstock.loadtests.simulator.routing.run import Outcome, Plan, Prompt, RoutingRun
from penstock.router.routing.placement.routing_strategies import RANKINGS

MIN_HIT_RATIO = 0.92
"""Goal: minimum number of cached tokens of `cost`, relative to an infinite cache."""
MAX_TTFT_RATIO = 0.63
"""Goal: maximum mean TTFT of `cost` with shared prefixes, relative to `least_loaded`."""
TOLERANCE = 1.01
"""Goal: maximum mean TTFT of `cost` on the other loads, relative to `least_loaded`."""
MAX_SHORT_RATIO = 0.25
"""Goal: maximum mean TTFT of short prompts among long ones, relative to `round_robin`."""


@dataclass(frozen=True, slots=True)
class Options:
    """Cluster and load."""

    trace: str = option("", "Mooncake trace (JSON lines)", positional=True)
    workers: int = option(16, "number of workers")
    blocks: int = option(5859, "KV blocks of a worker, 512 tokens each")
    load: float = option(0.95, "prompt tokens, as if never cached, relative to capacity")
    mixed_load: float = option(0.8, "the same, for the load of long and short prompts")
    requests: int = option(0, "only the first requests of the trace; 0: all")
    seed: int = option(0, "the same seed gives the same long and short prompts")
    json: Path | None = option(None, "file for the results")  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one strategy on one load. Times to first token are in seconds."""

    hit_rate: float
    # Cached tokens relative to those of an infinite cache; 0 if an infinite cache has none.
    infinite_ratio: float
    mean: float
    p50: float
    p90: float
    p99: float
    short_mean: float  # mean time of the prompts with at most `SHORT_TOKENS` tokens
    busiest: float  # tokens that the busiest worker computed, relative to the mean


Table: TypeAlias = Mapping[str, Mapping[str, Figures]]
"""Figures by load and strategy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0 if `cost` meets all goals, 1 if it misses one, 2 for wrong options, 130 after Ctrl-C.
    """
    program = "penstock simulate routing"
    about = "Compare the placement strategies on shared and unshared prompts."
    (options,) = read_flags(program, about, (Options,), arguments)
    try:
        loads = _loads(options)
    except (BadTrace, OSError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    table: dict[str, dict[str, Figures]] = {}
    print(HEADER)
    try:
        for name, (prompts, load) in loads.items():
            plan = _plan(prompts, load, options)
            for strategy in RANKINGS:
                outcome = RoutingRun(plan, strategy).play(prompts)
                found = figures(prompts, outcome)
                table.setdefault(name, {})[strategy] = found
                print(_row(name, strategy, found), flush=True)
    except KeyboardInterrupt:
        return 130
    missed = missed_goals(table)
    print("\n".join(missed) or "all goals are met")
    if options.json is not None:
        rows = {
            name: {strategy: asdict(each) for strategy, each in by_strategy.items()}
            for name, by_strategy in table.items()
        }
        options.json.write_text(json.dumps({"figures": rows, "missed": missed}, indent=1) + "\n")
    return 1 if missed else 0


def _loads(options: Options) -> Mapping[str, tuple[Sequence[Prompt], float]]:
    """Return the prompts and the load factor of each load, by name of the load.

    Raises:
        ValueError: an option is wrong.
    """
    for name in ("workers", "blocks", "load", "mixed_load"):
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(
                f"--{name.replace('_', '-')} must be above 0 and finite, "
                f"not {getattr(options, name):g}"
            )
    if not options.trace:
        raise ValueError("no trace is given: pass the path of a Mooncake trace")
    rows = read_trace(Path(options.trace))[: options.requests or None]
    if not any(row.blocks for row in rows) or rows[-1].at <= 0:
        raise ValueError(
            f"{options.trace}: expected a Mooncake trace with hash_ids and with timestamps above 0"
        )
    longest = max(row.input_len for row in rows)
    if longest > options.blocks * TRACE_BLOCK:
        raise ValueError(
            f"--blocks ({options.blocks}) is too small for the trace's longest prompt, which has "
            f"{longest} tokens: raise --blocks"
        )
    shared = prompts_of(rows)
    return {
        "shared": (shared, options.load),
        "unshared": (without_sharing(shared), options.load),
        "long and short": (long_and_short(options.seed), options.mixed_load),
    }


def _plan(prompts: Sequence[Prompt], load: float, options: Options) -> Plan:
    rate = sum(prompt.num_tokens for prompt in prompts) / prompts[-1].at
    return Plan(options.workers, options.blocks, TRACE_BLOCK, rate / options.workers / load)


def figures(prompts: Sequence[Prompt], outcome: Outcome) -> Figures:
    """Return the figures of a run."""
    seconds = np.array(outcome.seconds)
    is_short = np.array([prompt.num_tokens <= SHORT_TOKENS for prompt in prompts])
    computed = np.array(list(outcome.computed_tokens.values()))
    total, bound = sum(prompt.num_tokens for prompt in prompts), infinite_cache_tokens(prompts)
    p50, p90, p99 = np.quantile(seconds, (0.5, 0.9, 0.99)).tolist()
    return Figures(
        outcome.cached_tokens / total,
        outcome.cached_tokens / bound if bound else 0.0,
        float(seconds.mean()),
        *(p50, p90, p99),
        float(seconds[is_short].mean()) if is_short.any() else 0.0,
        float(computed.max() / computed.mean()),
    )


def missed_goals(table: Table) -> list[str]:
    """Return one line for each goal that `cost` misses."""
    shared, unshared, mixed = table["shared"], table["unshared"], table["long and short"]
    checks = [
        (
            shared["cost"].infinite_ratio >= MIN_HIT_RATIO,
            f"shared: hits are below {MIN_HIT_RATIO:.0%}",
        ),
        (
            shared["cost"].mean <= MAX_TTFT_RATIO * shared["least_loaded"].mean,
            f"shared: mean TTFT is above {MAX_TTFT_RATIO} x least_loaded",
        ),
        (
            unshared["cost"].mean <= TOLERANCE * unshared["least_loaded"].mean,
            f"unshared: mean TTFT is above {TOLERANCE} x least_loaded",
        ),
        (
            mixed["cost"].mean <= TOLERANCE * mixed["least_loaded"].mean,
            f"long and short: mean TTFT is above {TOLERANCE} x least_loaded",
        ),
        (
            mixed["cost"].short_mean <= MAX_SHORT_RATIO * mixed["round_robin"].short_mean,
            f"long and short: TTFT of short prompts is above {MAX_SHORT_RATIO} x round_robin",
        ),
    ]
    return [f"missed: {message}" for is_met, message in checks if not is_met]


HEADER = (
    "| load | strategy | cached | of infinite cache | TTFT mean | p50 | p90 | p99 | short, mean "
    "| busiest worker |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def _row(load: str, strategy: str, of: Figures) -> str:
    """Return the table row of a load and a strategy, in Markdown."""
    times = (of.mean, of.p50, of.p90, of.p99, of.short_mean)
    ratio = f"{of.infinite_ratio:.1%}" if of.infinite_ratio else "-"
    shown = [f"{each:.2f} s" if each else "-" for each in times]
    cells = (load, strategy, f"{of.hit_rate:.1%}", ratio, *shown)
    return f"| {' | '.join(cells)} | {of.busiest:.2f} x |"


if __name__ == "__main__":
    sys.exit(main())
