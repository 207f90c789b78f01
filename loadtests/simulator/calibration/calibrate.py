"""`penstock simulate calibrate`: fits the time model to a running server."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from penstock.cli.client_key import ABOUT
from penstock.common.api_key import BadKey, client_key
from penstock.loadtests.bench.clients import Api, ServerUnusable, Target
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.metrics import Outcome
from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.calibration.fit import (
    BadCalibration,
    StepFit,
    Steps,
    fit_line,
    fit_steps,
    predicted_seconds,
    without_sharing,
)
from penstock.loadtests.simulator.calibration.server import (
    Arrangement,
    MeasuredServer,
    admin_address,
    last_numbers,
    steps_of,
)
from penstock.loadtests.simulator.model.timing import Timing

BURST = 16
"""Number of requests that arrive together, to measure the router's time per request."""


@dataclass(frozen=True, slots=True)
class Calibrating:
    """The server and the calibration load."""

    address: str = option(
        "http://127.0.0.1:8000", "grpc://HOST:PORT or http[s]://HOST:PORT", positional=True
    )
    admin: str = option("", "operators' address; default: that of penstock serve")
    api_key_file: Path | None = option(None, ABOUT)  # noqa: RUF009
    timing: Path = option(Path("timing.yaml"), "write the fitted time model here")  # noqa: RUF009
    batches: str = option("1,4,16", "batch sizes of one worker")
    prompts: str = option("32,128,512", "prompt lengths")
    answer: int = option(32, "answer tokens of a request")
    repeats: int = option(5, "single requests of each prompt length, for the time of a request")


@dataclass(frozen=True, slots=True)
class Measured:
    """All measurements of a calibration load."""

    steps: Steps
    singles: Sequence[Outcome]  # requests that ran one at a time
    burst: Sequence[Outcome]  # requests of one token that arrived together
    arrangement: Arrangement


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    The code is 0 for success, 1 if the server cannot be measured, 2 for wrong options, 130 after
    Ctrl-C.
    """
    about = "Fit the time model of the simulator to the steps of a running server."
    (given,) = read_flags("penstock simulate calibrate", about, (Calibrating,), arguments)
    try:
        batches, prompts = numbers_of(given.batches), numbers_of(given.prompts)
        measured = asyncio.run(_measure(given, batches, prompts))
        fitted = fitted_timing(measured)
        given.timing.write_text("".join(yaml_lines(fitted)), encoding="utf-8")
    except (BadKey, ValueError) as error:
        print(f"penstock simulate calibrate: {error}", file=sys.stderr)
        return 1 if isinstance(error, BadCalibration) else 2
    except (ServerUnusable, OSError) as error:
        print(f"penstock simulate calibrate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\n".join(report(measured, fitted)))
    print(f"written to {given.timing}")
    return 0


def numbers_of(text: str) -> list[int]:
    """Parse a list of numbers such as `1,4,16`. Raises ValueError."""
    numbers = [int(word) if word.strip().isdigit() else 0 for word in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(f"{text!r}: expected numbers of 1 or more, such as 1,4,16")
    return numbers


class ServerOptions(Protocol):
    """Options that name a server."""

    @property
    def address(self) -> str: ...
    @property
    def admin(self) -> str: ...
    @property
    def api_key_file(self) -> Path | None: ...


def server_of(given: ServerOptions) -> MeasuredServer:
    """Return the server that the options name. Raises ValueError and BadKey."""
    scheme, found, rest = given.address.partition("://")
    if not found or scheme not in ("grpc", "http", "https"):
        raise ValueError(
            f"address {given.address!r}: expected grpc://HOST:PORT or http[s]://HOST:PORT"
        )
    address = rest.rstrip("/") if scheme == "grpc" else given.address
    api: Api = "grpc" if scheme == "grpc" else "completions"
    target = Target(address, api, "", client_key(given.api_key_file) or "")
    return MeasuredServer(target, given.admin or admin_address(given.address))


async def _measure(given: Calibrating, batches: Sequence[int], prompts: Sequence[int]) -> Measured:
    server = server_of(given)
    try:
        await server.connect()
        arrangement = await server.arrangement()
        fitting = [each for each in prompts if each + given.answer < server.max_model_len]
        if not fitting:
            raise ServerUnusable(
                f"no prompt length of --prompts fits with its answer in the context of "
                f"{server.max_model_len} tokens: lower --prompts or --answer"
            )
        await server.play(together(1, fitting[0], 4))  # warm-up
        cells, singles = list[Steps](), list[Outcome]()
        after = last_numbers(await server.records())
        decoders = sum(num for role, num in arrangement.pools.items() if role != "prefill")
        for length in fitting:
            for _ in range(given.repeats):
                singles.extend(await server.play(together(1, length, 4)))
            for batch in batches:
                num = min(batch, arrangement.max_sequences) * decoders
                await server.play(together(num, length, given.answer))
                records = await server.records()
                cells.append(steps_of(records, after))
                after = last_numbers(records)
        burst = await server.play(together(BURST, 4, 1))
        return Measured(Steps.joined(cells), singles, burst, await server.arrangement())
    finally:
        await server.close()


def together(count: int, input_len: int, output_len: int) -> list[Planned]:
    """Plan requests that are all sent at the same time."""
    return [Planned(number, 0.0, input_len, output_len) for number in range(count)]


def fitted_timing(measured: Measured) -> StepFit:
    """Fit all parameters of the time model. Raises BadCalibration."""
    given = measured.arrangement
    base = Timing()
    if given.transfer_bandwidth > 0:
        base = replace(
            base,
            kv_bytes=given.kv_bytes,
            bandwidth=given.transfer_bandwidth,
            transfer=given.transfer_seconds,
        )
    fitted = fit_steps(measured.steps, base)
    lengths = np.array([one.input_len for one in measured.singles], np.float64)
    chunk = given.max_batched_tokens
    computed = [fitted.timing.prefill(one.input_len, chunk) for one in measured.singles]
    outside = np.array([one.ttft for one in measured.singles]) - np.array(computed)
    request, request_token = fit_line(lengths, np.maximum(outside, 0.0))
    firsts = np.sort([one.ttft for one in measured.burst])
    _, router = fit_line(np.arange(len(firsts), dtype=np.float64), firsts)
    tokens = fitted.timing.token * 4 + fitted.timing.sequence
    timing = replace(
        fitted.timing,
        request=request,
        request_token=request_token,
        router=max(router - tokens, 0.0),
    )
    return replace(fitted, timing=timing)


def yaml_lines(fitted: StepFit) -> Iterator[str]:
    """Yield the lines of the timing file, in YAML."""
    yield f"# fitted to {fitted.num_steps} steps; mean error {fitted.mean_error:.1%}\n"
    for each in fields(Timing):
        yield f"{each.name}: {getattr(fitted.timing, each.name):.6g}\n"


def report(measured: Measured, fitted: StepFit) -> Iterator[str]:
    """Yield lines with the fitted values, and measured and predicted times of groups of steps."""
    yield from (line.rstrip() for line in yaml_lines(fitted))
    yield f"predicted / measured time of all steps: {fitted.total_ratio:.3f}"
    yield f"{'steps':<28}{'number':>8}{'measured':>12}{'predicted':>12}{'error':>8}"
    steps = without_sharing(measured.steps, fitted.timing.sharing)
    predicted = predicted_seconds(steps, fitted.timing)
    for name, chosen in groups(steps):
        mine = steps.seconds[chosen].mean()
        mean = predicted[chosen].mean()
        yield (
            f"{name:<28}{chosen.sum():>8}{mine * 1000:>9.2f} ms{mean * 1000:>9.2f} ms"
            f"{mean / mine - 1:>8.1%}"
        )


def groups(steps: Steps) -> Iterator[tuple[str, np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    """Yield the nonempty groups of similar steps, each as a name and a mask [n]."""
    decodes = steps.tokens == steps.sequences
    bounds = (0, 1, 4, 16, 64, 10**9)
    for low, high in pairwise(bounds):
        chosen = decodes & (steps.sequences > low) & (steps.sequences <= high)
        if chosen.any():
            yield f"decode, batch up to {high}", chosen
    sizes = (0, 32, 128, 512, 10**9)
    for low, high in pairwise(sizes):
        chosen = ~decodes & (steps.tokens > low) & (steps.tokens <= high)
        if chosen.any():
            yield f"prompt, up to {high} tokens", chosen


if __name__ == "__main__":
    sys.exit(main())
