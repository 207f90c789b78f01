"""Options of `penstock bench`, and their conversion to a plan, a target and latency goals."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.client_key import ABOUT
from penstock.common.api_key import BadKey, client_key
from penstock.common.number_text import number_text
from penstock.loadtests.bench import datasets, workload
from penstock.loadtests.bench.clients import Api, Target
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.metrics import Goals
from penstock.loadtests.bench.traces import read_trace

_FROM_ZERO = ("num_warmups", "prefix_len")


class WrongOptions(ValueError):
    """Raised if options are invalid, contradictory or do not fit the server.

    The message explains the fix.
    """


@dataclass(frozen=True, slots=True)
class Server:
    """The server under load."""

    address: str = option(
        "grpc://127.0.0.1:9000",
        "grpc://HOST:PORT, or http[s]://HOST:PORT for the OpenAI API",
        positional=True,
    )
    api: Api | None = option(None, "default: grpc for grpc://, completions for http://")  # noqa: RUF009
    model: str = option("", "model name; default: the only model (over HTTP: the first)")
    api_key_file: Path | None = option(None, ABOUT)  # noqa: RUF009
    vocab_size: int | None = option(
        None, "vocabulary size from which prompts are drawn; default: as reported by the server"
    )
    timeout: float = option(600.0, "seconds after which a request fails")


@dataclass(frozen=True, slots=True)
class Work:
    """Requests and arrival times."""

    num_requests: int | None = option(
        None, "number of requests; default: 100, or all of the trace", also=("--num-prompts",)
    )
    rate: float | None = option(
        None,
        "requests per second, as a Poisson process (open loop); inf: all at once",
        also=("--request-rate",),
    )
    concurrency: int | None = option(
        None,
        "maximum requests in flight; without --rate, always this many (closed loop)",
        also=("--max-concurrency",),
    )
    input_len: str = option(
        "128", "prompt tokens (words for chat): N, LOW-HIGH (uniform) or lognormal:LOW-HIGH"
    )
    output_len: str = option("64", "answer tokens, same format; end-of-text tokens are ignored")
    prefix_len: int = option(0, "tokens of a shared prefix before each prompt; 0: none")
    num_prefixes: int = option(1, "number of different shared prefixes")
    dataset: Path | None = option(  # noqa: RUF009
        None, "take prompts and lengths of answers from conversations in ShareGPT's format (JSON)"
    )
    trace: Path | None = option(  # noqa: RUF009
        None, "take times, lengths and shared prefixes from Mooncake JSON lines or an Azure CSV"
    )
    trace_speed: float = option(1.0, "speed factor for replaying the trace")
    max_input_len: int | None = option(
        None, "longest prompt: longer ones of a trace are truncated, those of a dataset left out"
    )
    max_output_len: int | None = option(
        None, "longest answer: longer ones of a trace are truncated, those of a dataset left out"
    )
    temperature: float = option(0.0, "sampling temperature; 0 is greedy")
    num_warmups: int = option(1, "warm-up requests, sent first and not measured")
    seed: int = option(0, "the same seed gives the same requests at the same times")


_DEFAULT = Work()


@dataclass(frozen=True, slots=True)
class Results:
    """Results and exit code."""

    goodput: tuple[str, ...] = option(
        (),
        "limits that a good request meets, in milliseconds or with a unit: ttft:2s tpot:50 e2el:9s",
        also=("--goal",),
    )
    save_json: Path | None = option(None, "write results, options and machine to this file")  # noqa: RUF009
    save_rows: bool = option(False, "also write the timings of every request to that file")
    allow_failures: bool = option(False, "exit with 0 even if requests failed")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Search for the highest rate that keeps the goals."""

    sweep: bool = option(
        False, "measure steps of rising rates, and find the highest rate that keeps every --goal"
    )
    step_seconds: float = option(20.0, "seconds in which the requests of a step are sent")
    attainment: float = option(
        0.99, "fraction of the requests of a step that must meet every --goal"
    )
    precision: float = option(
        1.1,
        "end when the lowest failed rate is at most this multiple of the highest successful rate",
    )
    save_svg: Path | None = option(None, "draw throughput and latencies over the rate to this file")  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class Options:
    """All options of the command."""

    server: Server = Server()
    work: Work = Work()
    results: Results = Results()
    sweep: Sweep = Sweep()


def read_options(arguments: Sequence[str] | None) -> Options:
    """Parse the command line.

    If it is invalid, the process exits with 2 and a one-line message.
    """
    about = (
        "Send a load to a running server and print a report in the format of `vllm bench serve`."
    )
    read = read_flags("penstock bench", about, (Server, Work, Results, Sweep), arguments)
    return Options(*read)


def target_of(options: Options) -> Target:
    """Return the server and request settings that the options describe. Raises WrongOptions."""
    server = options.server
    scheme, found, rest = server.address.partition("://")
    if not found or scheme not in ("grpc", "http", "https") or not rest:
        raise WrongOptions(
            f"address {server.address!r}: expected grpc://HOST:PORT or http[s]://HOST:PORT"
        )
    api = server.api or ("grpc" if scheme == "grpc" else "completions")
    if (api == "grpc") != (scheme == "grpc"):
        raise WrongOptions(
            f"--api {api} cannot be used with an address that begins with {scheme}://"
        )
    if not server.timeout > 0:
        raise WrongOptions(f"--timeout must be above 0 seconds, not {server.timeout:g}")
    if options.work.temperature < 0:
        raise WrongOptions(f"--temperature must be 0 or more, not {options.work.temperature:g}")
    address = rest.rstrip("/") if scheme == "grpc" else server.address
    try:
        key = client_key(server.api_key_file)
    except BadKey as error:
        raise WrongOptions(str(error)) from None
    return Target(address, api, server.model, key, server.timeout, options.work.temperature)


def goals_of(pairs: Sequence[str]) -> Goals | None:
    """Parse goals such as `ttft:200 tpot:50` (milliseconds). Raises WrongOptions."""
    read: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        read[name] = _milliseconds(text)
        if name not in ("ttft", "tpot", "e2el") or not read[name] >= 0:
            raise WrongOptions(
                f"--goal {pair!r}: expected METRIC:TIME, where METRIC is ttft, tpot or e2el and "
                "TIME is in milliseconds or has a unit, such as ttft:2000 or ttft:2s"
            )
    return Goals(**read) if read else None


def _milliseconds(text: str) -> float:
    """Return a time in milliseconds, or -1 if the text is invalid. The default unit is ms."""
    number, factor = text.removesuffix("ms"), 1.0
    if number == text and text.endswith("s"):
        number, factor = text[:-1], 1000.0
    try:
        return float(number) * factor
    except ValueError:
        return -1.0


def check_results(results: Results, sweep: Sweep) -> None:
    """Check, before the load starts, that the results can be written. Raises WrongOptions."""
    if results.save_rows and sweep.sweep:
        raise WrongOptions("--save-rows cannot be used with --sweep: leave it out")
    if results.save_json is None and results.save_rows:
        raise WrongOptions("--save-rows requires --save-json FILE, the file that gets the rows")
    check_file("--save-json", results.save_json)


def check_file(name: str, path: Path | None) -> None:
    """Check that a file of option `name` can be written. Raises WrongOptions."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise WrongOptions(f"{name} {path}: expected the path of a file in an existing folder")


def plan_of(work: Work, num_used: int = 0) -> list[workload.Planned]:
    """Plan the requests: from a trace or a dataset if one is given, else random ones.

    The plan is shorter than `num_requests` if the trace or the dataset has fewer requests.

    Args:
        num_used: number of requests that an earlier plan with the same seed has taken from the
            dataset. The plan begins with the conversation after them.

    Raises WrongOptions and BadTrace.
    """
    _check_work(work)
    if work.trace is not None:
        return _plan_trace(work, work.trace)
    if work.dataset is not None:
        return _plan_dataset(work, work.dataset, num_used)
    try:
        inputs = workload.Lengths.parse(work.input_len)
        outputs = workload.Lengths.parse(work.output_len)
    except ValueError as error:
        raise WrongOptions(str(error)) from None
    count = 100 if work.num_requests is None else work.num_requests
    rate = math.inf if work.rate is None else work.rate
    plan = workload.drawn_load(count, rate, inputs, outputs, work.seed)
    if work.prefix_len:
        return workload.with_prefixes(plan, work.prefix_len, work.num_prefixes)
    return plan


@functools.lru_cache(maxsize=1)
def _conversations(path: Path) -> list[datasets.Conversation]:
    """Return the conversations of a dataset. Each step of a sweep plans its requests from them."""
    return datasets.read_conversations(path)


def _plan_dataset(work: Work, path: Path, num_used: int) -> list[workload.Planned]:
    try:
        found = _conversations(path)
    except OSError as error:
        raise WrongOptions(f"--dataset {path}: {error.strerror}") from None
    except datasets.BadDataset as error:
        raise WrongOptions(f"--dataset {error}") from None
    fitting = datasets.shuffled(found, work.max_input_len, work.max_output_len, work.seed)
    if not fitting:
        raise WrongOptions(
            f"--dataset {path}: all conversations are longer than --max-input-len or "
            "--max-output-len: raise these limits"
        )
    count = 100 if work.num_requests is None else work.num_requests
    chosen = fitting[num_used : num_used + count]
    rate = math.inf if work.rate is None else work.rate
    times = workload.arrivals(len(chosen), rate, work.seed).tolist()
    return [
        workload.Planned(number, due, each.input_len, each.output_len, text=each.prompt)
        for number, (due, each) in enumerate(zip(times, chosen, strict=True))
    ]


def _plan_trace(work: Work, path: Path) -> list[workload.Planned]:
    try:
        rows = read_trace(path)[: work.num_requests]
    except OSError as error:
        raise WrongOptions(f"--trace {path}: {error.strerror}") from None
    rows = [workload.capped(row, work.max_input_len, work.max_output_len) for row in rows]
    if not rows:
        raise WrongOptions(f"{path}: the trace contains no requests")
    if work.rate is not None:
        return workload.traced_load(
            rows, workload.arrivals(len(rows), work.rate, work.seed).tolist()
        )
    return workload.traced_load(rows, [row.at / work.trace_speed for row in rows])


def _check_work(work: Work) -> None:
    counts = ("num_requests", "concurrency", "max_input_len", "max_output_len", "num_prefixes")
    for name in (*counts, *_FROM_ZERO):
        value, least = getattr(work, name), 0 if name in _FROM_ZERO else 1
        if value is not None and value < least:
            raise WrongOptions(f"--{name.replace('_', '-')} must be {least} or more, not {value}")
    if work.rate is not None and not work.rate > 0:
        raise WrongOptions(
            f"--rate must be above 0 requests per second (inf: all at once), not {work.rate:g}"
        )
    if not 0 < work.trace_speed < math.inf:
        raise WrongOptions(f"--trace-speed must be above 0 and finite, not {work.trace_speed:g}")
    if not 0 <= work.seed < 2**63:
        raise WrongOptions(f"--seed must be from 0 to 2^63 - 1, not {number_text(work.seed)}")
    if work.trace is None and work.trace_speed != 1:
        raise WrongOptions("--trace-speed requires --trace")
    if work.rate is not None and work.trace_speed != 1:
        raise WrongOptions("--rate replaces the times of the trace: leave out --trace-speed")
    if work.num_prefixes != 1 and not work.prefix_len:
        raise WrongOptions("--num-prefixes requires --prefix-len")
    _check_source(work)


def _check_source(work: Work) -> None:
    """Check the options that only some sources of requests use. Raises WrongOptions."""
    if work.trace is None and work.dataset is None:
        if work.max_input_len or work.max_output_len:
            raise WrongOptions("--max-input-len and --max-output-len require --trace or --dataset")
        return
    if work.trace is not None and work.dataset is not None:
        raise WrongOptions("--trace and --dataset cannot be used together: leave out one of them")
    if work.prefix_len:
        raise WrongOptions("--prefix-len cannot be used with --trace or --dataset: leave out one")
    if (work.input_len, work.output_len) != (_DEFAULT.input_len, _DEFAULT.output_len):
        raise WrongOptions(
            "--input-len and --output-len cannot be used with --trace or --dataset, which have "
            "their own lengths: use --max-input-len and --max-output-len to limit these"
        )
