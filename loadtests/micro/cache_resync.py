"""Measures how fast a restarted router learns which blocks its workers have cached.

`python -m penstock.loadtests.micro.cache_resync` starts stub workers in another process. The stubs
report cached blocks with the same messages as real workers. In each round, a new router connects to
the workers. The command prints the time until the router's index has all blocks, the CPU time of
the router, and the CPU time of the longest callback of its event loop. In the last round, the
router then disconnects from the workers, and the command prints the longest callback while their
blocks are removed. It returns 1 if the median time exceeds one second.
"""

import asyncio
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import penstock
from penstock.loadtests.bench.flags import option, read_flags
from penstock.protos.serving.grpc_settings import configure_grpc

if TYPE_CHECKING:  # this import loads gRPC, which must happen after `configure_grpc`
    from penstock.router.server import RunningRouter

MODEL = Path(penstock.__file__).parent / "models" / "demo-small"
GOAL_SECONDS = 1.0
POLL_SECONDS = 0.001
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the measurement."""

    workers: int = option(1, "number of workers")
    blocks: int = option(1_000_000, "cached blocks of all workers together")
    rounds: int = option(5, "number of routers that connect, one after the other")
    save_json: str = option("", "write the results to this file")


@dataclass(frozen=True, slots=True)
class Round:
    """Figures of one router, in seconds."""

    seconds: float  # until the index has all blocks
    cpu: float  # CPU time of the router's process meanwhile
    longest_callback: float  # CPU time of the longest callback of the event loop
    # The same, while the blocks of lost workers are removed; None if not measured.
    longest_removal: float | None


async def measure(settings: Settings) -> list[Round]:
    """Run the workers, and measure the rounds."""
    per_worker = settings.blocks // settings.workers
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.loadtests.micro.stub_workers"),
        *("--count", str(settings.workers), "--cached-blocks", str(per_worker)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        addresses = json.loads(await process.stdout.readline())
        total = per_worker * settings.workers
        await measure_router(addresses, total)  # the first round also imports modules
        last = settings.rounds - 1
        return [
            await measure_router(addresses, total, number == last)
            for number in range(settings.rounds)
        ]
    finally:
        process.kill()
        await process.wait()


async def measure_router(
    workers: dict[str, str], num_blocks: int, with_removal: bool = False
) -> Round:
    """Start a router, and wait until it knows `num_blocks` cached blocks of the workers.

    Args:
        workers: addresses by name.
        num_blocks: number of cached blocks of all workers together.
        with_removal: whether the router loses the workers afterwards.
    """
    from penstock.router.config import RouterConfig
    from penstock.router.server import serve_router

    router = await serve_router(RouterConfig(MODEL, "m", http_port=0, grpc_port=0))
    gc.collect()
    try:
        with longest_callback() as longest:
            start, cpu = time.perf_counter(), time.process_time()
            await router.set_workers(workers)
            await until(lambda: num_known(router) >= num_blocks)
            seconds, used = time.perf_counter() - start, time.process_time() - cpu
        if not with_removal:
            return Round(seconds, used, longest(), None)
        index = router.frontend._dispatcher.prefix_index
        with longest_callback() as longest_removal:
            await router.set_workers({})
            await until(lambda: index.is_empty)
        return Round(seconds, used, longest(), longest_removal())
    finally:
        await router.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true, for at most `TIMEOUT_SECONDS`."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not condition():
            await asyncio.sleep(POLL_SECONDS)


def num_known(router: "RunningRouter") -> int:
    """Return how many cached blocks a router knows."""
    return sum(worker.num_indexed_blocks for worker in router.frontend.workers())


@contextlib.contextmanager
def longest_callback() -> Iterator[Callable[[], float]]:
    """Measure all callbacks of asyncio's event loop; yield a function that returns the longest."""
    original: Callable[[asyncio.Handle], None] = asyncio.Handle._run
    longest = 0.0

    def run(handle: asyncio.Handle) -> None:
        nonlocal longest
        start = time.thread_time()
        original(handle)
        longest = max(longest, time.thread_time() - start)

    with mock.patch.object(asyncio.Handle, "_run", run):
        yield lambda: longest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if the median time exceeds `GOAL_SECONDS`, otherwise 0."""
    about = "Measure how fast a router learns the cached blocks of its workers."
    (settings,) = read_flags("micro.cache_resync", about, (Settings,), arguments)
    configure_grpc()  # gRPC reads these settings when it is imported
    rounds = asyncio.run(measure(settings))
    print(f"{settings.blocks} blocks of {settings.workers} workers: ms, median (least to most)")
    for name in ("seconds", "cpu", "longest_callback", "longest_removal"):
        values = [1000 * value for each in rounds if (value := getattr(each, name)) is not None]
        print(f"{name}: {statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})")
    if settings.save_json:
        rows = [asdict(each) for each in rounds]
        Path(settings.save_json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(statistics.median(each.seconds for each in rounds) > GOAL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
