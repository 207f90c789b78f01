"""Compares the cost of Penstock's router with that of other routers on this machine.

`python -m penstock.loadtests.comparison.routers` runs every router in front of a stub without a
model. Penstock's router has a stub worker of our own protocol, and the other routers have an OpenAI
HTTP stub. Both stubs have the same step time. Clients stream `/v1/completions` over plain sockets.
The routers are measured in turn. CPU time is that of the router's whole process tree under load,
minus its CPU time when idle. Other load on the machine therefore has little effect on the figures.
First-token times are relative to the OpenAI stub without a router. First-token times and the
highest rates (`--saturate`) need a quiet machine. At the highest rates, a router may send several
tokens in one write.

The other routers forward bytes. Penstock's router also tokenizes the prompt, decodes the tokens and
applies stop conditions, which other systems do in the engine's server.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.loadtests.bench.flags import check_least, option, read_flags
from penstock.loadtests.comparison.environments import (
    NotInstalled,
    cache_folder,
    is_installed,
    python_of,
)
from penstock.loadtests.comparison.routers.figures import Sample, summary
from penstock.loadtests.comparison.routers.rounds import Rounds, Work
from penstock.loadtests.comparison.routers.routers import BY_NAME, PEERS, PENSTOCK, Router
from penstock.loadtests.micro.ab_runner import Quantiles, run

PROGRAM = "python -m penstock.loadtests.comparison.routers"
_KNOWN = ", ".join(BY_NAME)


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the measurement."""

    routers: tuple[str, ...] = option((), f"routers to compare with, of {_KNOWN}; default: all")
    install: bool = option(False, "install these routers' environments; do not measure")
    rounds: int = option(5, "number of rounds; each router is measured once per round")
    streams: int = option(64, "concurrent streams")
    output_len: int = option(200, "tokens per stream")
    step_ms: float = option(20.0, "step time of the stubs in milliseconds")
    probes: int = option(20, "single requests per router and round, for the time to first token")
    idle_seconds: float = option(4.0, "seconds for which an idle router is measured")
    saturate: bool = option(False, "also find the highest tokens/s that each router sustains")
    save_json: str = option("", "write the results to this file")

    def __post_init__(self) -> None:
        for name in self.routers:
            if name not in BY_NAME:
                raise ValueError(f"unknown router {name!r}: expected one of {_KNOWN}")
        check_least(self, 1, ("rounds", "streams", "output_len", "probes"))
        for flag, number in (("--step-ms", self.step_ms), ("--idle-seconds", self.idle_seconds)):
            if not 0 < number < math.inf:
                raise ValueError(f"{flag} must be above 0 and finite, not {number:g}")
        if self.save_json and not Path(self.save_json).absolute().parent.is_dir():
            raise ValueError(f"--save-json {self.save_json}: its folder does not exist")

    def chosen(self) -> list[Router]:
        """Return the other routers to measure."""
        return [each for each in PEERS if not self.routers or each.name in self.routers]

    def work(self) -> Work:
        return Work(**{each.name: getattr(self, each.name) for each in dataclasses.fields(Work)})


def check_installed(routers: Sequence[Router], cache: Path) -> None:
    """Raise ValueError if the environment of a router is missing."""
    missing = [each.name for each in routers if not is_installed(each.environment, cache)]
    if missing:
        names = " ".join(missing)
        raise ValueError(
            f"routers that are not installed: {names}. Run `{PROGRAM} --install --routers {names}`"
        )


async def measure(options: Options, cache: Path) -> dict[str, Any]:
    """Run the rounds, print the table and return all results."""
    peers = [(each, python_of(each.environment, cache)) for each in options.chosen()]
    began = time.monotonic()
    results: list[dict[str, Sample]] = []
    async with Rounds(peers, options.work()) as rounds:
        for number in range(options.rounds):

            def report(target: str, number: int = number) -> None:
                seconds = time.monotonic() - began
                line = f"{seconds:5.0f} s  round {number + 1} of {options.rounds}: {target}"
                print(line, file=sys.stderr, flush=True)

            results.append(await rounds.run(number, report))
        about = {target.name: target.about for target in rounds.targets}
        titles = {target.name: target.title for target in rounds.targets}
    rows = summary(results, PENSTOCK.name)
    print(table(rows, titles))
    samples = [
        {name: dataclasses.asdict(sample) for name, sample in round_.items()} for round_ in results
    ]
    return {"about": about, "rounds": samples, "summary": rows}


def table(rows: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """Return the summary as text.

    Each router has a line with medians and 10th to 90th percentiles.
    """
    columns = {
        "cpu_us_per_token": "CPU µs/token",
        "ratio": "to Penstock's",
        "added_single_ms": "first token +ms",
        "added_burst_ms": "of a burst +ms",
        "max_tokens_per_second": "max tokens/s",
    }
    shown = [key for key in columns if all(key in row for row in rows.values())]
    heads = ["", *(columns[key] for key in shown), "writes/token", "idle cores"]
    lines = [heads]
    for name, row in rows.items():
        cells = [_cell(Quantiles(**row[key])) for key in shown]
        numbers = (f"{row['writes_per_token']:.2f}", f"{row['idle_cores']:.3f}")
        lines.append([titles[name], *cells, *numbers])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(values: Quantiles) -> str:
    digits = 0 if abs(values.median) >= 100 else 1 if abs(values.median) >= 10 else 2
    median, low, high = (f"{x:,.{digits}f}" for x in (values.median, values.low, values.high))
    return f"{median} ({low} to {high})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or install the environments, and return the exit code.

    The code is 0 for success, 1 if a measurement failed, 2 for wrong flags or a router that is not
    installed, and 130 after Ctrl-C.
    """
    about = "Router CPU time per token and added first-token time, beside other routers."
    cache = cache_folder()
    try:
        (options,) = read_flags(PROGRAM, about, (Options,), arguments)
        if not options.install:
            check_installed(options.chosen(), cache)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    if options.install:
        return _install(options.chosen(), cache)
    return run(lambda: measure(options, cache), dataclasses.asdict(options), options.save_json)


def _install(routers: Sequence[Router], cache: Path) -> int:
    try:
        for router in routers:
            print(f"{router.name}: {python_of(router.environment, cache)}")
    except (NotInstalled, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
