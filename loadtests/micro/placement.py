"""Measures the time of a placement decision with a large prefix index.

`python -m penstock.loadtests.micro.placement` fills the index of a router with the blocks of many
conversations and then places prompts that extend them. A decision matches the prompt with the index
and chooses the worker. The command prints the CPU time of a decision, of the match alone and of
hashing the prompt, and the memory of the index for each block. Prompts share a system prompt that
all workers have cached. With `--split`, half of the workers are prefill workers and the others
decode workers, with measured speeds and KV transfers. With `--shared`, all of them also share the
cores of one machine, as the workers of `penstock serve` do on a CPU.
"""

import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from penstock.common.block_hash import extend_chain
from penstock.common.sampling_params import SamplingParams
from penstock.common.worker_load import WorkerLoad
from penstock.loadtests.bench.flags import option, read_flags
from penstock.router.routing.events import Request, WorkerInfo
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.prefix_knowledge import PrefixKnowledge
from penstock.router.routing.placement.routing_strategies import policy_of
from penstock.router.routing.prefix_cache.prefix_index import START, PrefixIndex
from penstock.router.routing.worker_registry import LivenessBounds, WorkerRegistry
from penstock.router.routing.worker_view import ResourceUsage

T = TypeVar("T")

BLOCK = 16
GOALS = {16: 20.0, 1024: 60.0}
"""Goals for a decision in microseconds, by number of workers."""
SYSTEM_BLOCKS, NEW_BLOCKS = 50, 25


@dataclass(frozen=True, slots=True)
class Load:
    """Settings of the measurement."""

    workers: tuple[str, ...] = option(("16", "1024"), "numbers of workers")
    blocks: int = option(1_000_000, "different blocks in the index")
    depth: int = option(750, "blocks of a prompt")
    decisions: int = option(2000, "decisions that are measured")
    split: bool = option(False, "prefill and decode workers instead of mixed ones")
    shared: bool = option(False, "the workers of --split, sharing the cores of one machine")
    seed: int = option(0, "the same seed gives the same blocks")
    save_json: str = option("", "write the results to this file")


@dataclass(frozen=True, slots=True)
class Figures:
    """CPU times in microseconds, and the bytes of the index per (block, worker) pair.

    The times are medians, except for the two percentiles of `decision`.
    """

    workers: int
    decision: float
    decision_p10: float
    decision_p90: float
    decision_warm: float  # time of repeated decisions, whose blocks are in the CPU's caches
    match: float
    bytes_per_block: float
    pairs: int  # number of (block, worker) pairs


class Fixture:
    """A router's index and workers, with the conversations that the workers have cached."""

    def __init__(self, load: Load, num_workers: int) -> None:
        self.rng = random.Random(load.seed)
        self.registry = WorkerRegistry(LivenessBounds())
        self.index = PrefixIndex()
        self.knowledge = PrefixKnowledge(self.index)
        self.policy = policy_of("cost")
        self.names = [f"worker-{number:04}" for number in range(num_workers)]
        has_pools, machine = load.split or load.shared, "machine" if load.shared else ""
        for number, name in enumerate(self.names):
            role = "mixed" if not has_pools else "decode" if number % 2 else "prefill"
            sizes = (BLOCK, 10**6, 10**6, 10**4)
            info = WorkerInfo(name, "1", role, "layout", *sizes, machine=machine)
            self.registry.add(info, self._new_load(), 0.0)
        if has_pools:
            self._split()
        self.chats: list[tuple[Sequence[int], str]] = []
        self.num_pairs = 0
        self._fill(load)

    def _new_load(self) -> WorkerLoad:
        return WorkerLoad(queued_tokens=self.rng.randrange(20_000))

    def _split(self) -> None:
        """Record measured speeds of prefill workers, decode workers and KV transfers."""
        for view in self.registry.views():
            computes = view.role == "prefill"
            for step in range(1, 11):
                view.update_load(
                    WorkerLoad(
                        num_steps=step,
                        step_seconds=0.02 * step,
                        running=3,
                        prompt_seconds=0.1 * step * computes,
                        prompt_tokens_computed=500 * step * computes,
                    ),
                    0.02 * step,
                )
            view.update_load(view.load._replace(queued_tokens=self.rng.randrange(20_000)), 1.0)
        for number in range(5):
            self.registry.transfer_costs.add(2000 + number, 10**8, 0.02)

    def _fill(self, load: Load) -> None:
        system = self._new_blocks(SYSTEM_BLOCKS)
        for name in self.names:
            self._store(name, system, START)
        num_blocks, own = SYSTEM_BLOCKS, load.depth - SYSTEM_BLOCKS - NEW_BLOCKS
        while num_blocks < load.blocks:
            # Each document is shared by two conversations and cached by a few workers.
            document = self._new_blocks(own // 2)
            names = self.rng.sample(self.names, min(3, len(self.names)))
            for name in names:
                self._store(name, document, system[-1])
            for name in names[:2]:
                rest = self._new_blocks(own - len(document))
                self._store(name, rest, document[-1])
                self.chats.append(([*system, *document, *rest], name))
                num_blocks += len(rest)
            num_blocks += len(document)

    def _new_blocks(self, count: int) -> list[int]:
        return [self.rng.getrandbits(64) for _ in range(count)]

    def _store(self, name: str, blocks: Sequence[int], parent: int) -> None:
        self.index.store(name, blocks, parent)
        self.num_pairs += len(blocks)

    def request(self, number: int) -> Request:
        """Return a request that extends a conversation. The request's hashes are new objects."""
        blocks, _ = self.rng.choice(self.chats)
        hashes = [int(str(block)) for block in blocks] + self._new_blocks(NEW_BLOCKS)
        prompt = range(len(hashes) * BLOCK + 5)
        return Request(number, prompt, SamplingParams(), prompt_hashes={BLOCK: hashes})

    def decide(self, request: Request) -> str:
        """Return the worker for a request.

        The measured calls are those of `RequestTable`.
        """
        cached = self.knowledge.cached_tokens(request, 1.0)
        demand = Demand(
            request.id,
            len(request.prompt),
            1,
            256,
            cached_tokens=cached,
            prompt_hashes=request.prompt_hashes,
        )
        views, costs = self.registry.views(), self.registry.transfer_costs
        placement = self.policy.choose(demand, views, costs, 1000.0)
        assert placement is not None
        return placement.worker

    def book(self, request: Request, worker: str) -> None:
        """Record the placement on `worker`, and a load report of a random worker."""
        view = self.registry.get(worker)
        assert view is not None
        view.set_usage(request.id, ResourceUsage(1, 0), 400)
        view.remove(request.id)
        self.knowledge.placed(request, worker, BLOCK)
        self.knowledge.computed(request.id, 0.0)
        other = self.registry.get(self.rng.choice(self.names))
        assert other is not None
        other.update_load(other.load._replace(queued_tokens=self.rng.randrange(20_000)), 1.0)


def measure(load: Load, num_workers: int) -> Figures:
    """Return the figures for a number of workers."""
    fixture = Fixture(load, num_workers)
    gc.collect()
    gc.freeze()
    decisions, matches = [], []
    for number in range(load.decisions):
        request = fixture.request(number)
        seconds, worker = timed(lambda request=request: fixture.decide(request))  # type: ignore[misc]
        decisions.append(seconds)
        fixture.book(request, worker)
        hashes = fixture.request(number).prompt_hashes[BLOCK]
        matches.append(timed(lambda hashes=hashes: fixture.index.levels(hashes))[0])  # type: ignore[misc]
    return Figures(
        num_workers,
        1e6 * statistics.median(decisions),
        1e6 * statistics.quantiles(decisions, n=10)[0],
        1e6 * statistics.quantiles(decisions, n=10)[-1],
        warm_microseconds(fixture),
        1e6 * statistics.median(matches),
        bytes_per_block(load, num_workers),
        fixture.num_pairs,
    )


def warm_microseconds(fixture: Fixture) -> float:
    """Return the median CPU time of a decision whose data is in the CPU's caches."""
    requests = [fixture.request(number) for number in range(20)]

    def round_trip() -> None:
        for request in requests:
            fixture.decide(request)

    round_trip()
    times = [timed(round_trip)[0] for _ in range(50)]
    return 1e6 * statistics.median(times) / len(requests)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the CPU seconds that `work` takes in this thread, and the result of `work`."""
    start = time.thread_time()
    result = work()
    return time.thread_time() - start, result


def bytes_per_block(load: Load, num_workers: int) -> float:
    """Return the bytes of memory per (block, worker) pair. They are measured on a smaller index."""
    small = Load(load.workers, min(load.blocks, 100_000), load.depth)
    tracemalloc.start()
    fixture = Fixture(small, num_workers)
    fixture.chats.clear()
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / fixture.num_pairs


def hash_microseconds(depth: int) -> float:
    """Return the median CPU time of hashing the blocks of a prompt."""
    tokens = np.arange(depth * BLOCK, dtype=np.int32)
    times = [timed(lambda: extend_chain([], b"", tokens, BLOCK))[0] for _ in range(50)]
    return 1e6 * statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if a decision takes longer than its goal, otherwise 0."""
    about = "Measure the time of a placement decision with a large prefix index."
    (load,) = read_flags("micro.placement", about, (Load,), arguments)
    hashing = hash_microseconds(load.depth)
    print(f"hashing {load.depth} blocks: {hashing:.0f} us")
    found = []
    for number in load.workers:
        figures = measure(load, int(number))
        found.append(figures)
        print(
            f"{figures.workers} workers: decision {figures.decision:.1f} us "
            f"(p10 {figures.decision_p10:.1f}, p90 {figures.decision_p90:.1f}), "
            f"of which match {figures.match:.1f} us; warm {figures.decision_warm:.1f} us; "
            f"{figures.bytes_per_block:.0f} bytes for each of {figures.pairs} pairs",
            flush=True,
        )
    if load.save_json:
        rows = {"hashing": hashing, "figures": [asdict(each) for each in found]}
        Path(load.save_json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(each.decision > GOALS.get(each.workers, float("inf")) for each in found))


if __name__ == "__main__":
    sys.exit(main())
