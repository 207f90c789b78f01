"""Options of `penstock simulate load`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.loadtests.bench.flags import option
from penstock.loadtests.simulator.scaling.goals import BUSY
from penstock.router.routing.placement.routing_strategies import Strategy

Kind = Literal["static", "penstock", "queue", "cpu", "clairvoyant"]
KINDS: Sequence[Kind] = ("static", "penstock", "queue", "cpu", "clairvoyant")


class WrongOptions(ValueError):
    """Raised for contradictory or out-of-range options. The message names the option."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """Requests that arrive."""

    trace: Path | None = option(None, "Mooncake JSON lines or an Azure CSV")  # noqa: RUF009
    shape: Literal["steps", "sinusoid"] = option("sinusoid", "load curve without --trace")
    low: float = option(0.5, "lowest rate, requests per second")
    high: float = option(4.0, "highest rate, requests per second")
    period: float = option(1200.0, "seconds per wave, or per two steps")
    input_len: str = option("lognormal:256-4096", "prompt tokens, as for penstock bench")
    output_len: str = option("lognormal:16-512", "answer tokens")
    copies: float = option(1.0, "multiply the users of the trace by this")
    own_prompts: bool = option(False, "no copy of the trace shares blocks of prompts with another")
    speed: float = option(1.0, "multiply the speed of the trace by this")
    seconds: float = option(1200.0, "seconds during which requests arrive")
    seed: int = option(0, "the same seed gives the same run")


@dataclass(frozen=True, slots=True)
class Serving:
    """Workers and scaler."""

    mixed: int = option(2, "mixed workers at the start")
    prefill: int = option(0, "prefill workers at the start (with --decode, instead of --mixed)")
    decode: int = option(0, "decode workers at the start")
    routing: Strategy = option("cost", "placement strategy")  # noqa: RUF009
    scaler: Kind = option("static", "scaler that sets the number of workers")  # noqa: RUF009
    compare: bool = option(False, "compare all scalers and static peak capacity (--mixed)")
    most: int = option(64, "most workers in a pool")
    busy: float = option(BUSY, "target utilization of the clairvoyant scaler")
    cold_start: float = option(30.0, "seconds until a new worker serves")
    timing: Path | None = option(None, "time model: a YAML file")  # noqa: RUF009
    max_sequences: int = option(64, "most running sequences per worker")
    max_batched_tokens: int = option(2048, "most tokens per step")
    promised: float = option(0.0, "time-to-first-token SLO of the router, seconds; 0: none")
    kv_tokens: int = option(400_000, "KV cache of a worker, in tokens")
    block_size: int = option(64, "tokens per KV block; more than in an engine, to save time")
    cells: int = option(1, "routers, each with an equal part of the workers, in a process each")
    single_steps: bool = option(False, "simulate each step as an event: slower, same result")
    page: Path | None = option(None, "write charts to this file, as one HTML page")  # noqa: RUF009
