"""Measures the latency of step plans from rank 0 to the followers.

`python -m penstock.loadtests.micro.plan_latency` measures the time from before rank 0 encodes a
plan until the last follower has decoded the plan. Each rank is a process. Two transports alternate:
shared memory, and gloo over loopback (the transport between nodes).
"""

import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.ab_runner import run
from penstock.workers.parallel.rendezvous import RemoteStore, RendezvousServer
from penstock.workers.parallel.step_broadcast import connect_plan_reader, connect_plan_writer
from penstock.workers.parallel.step_codec import decode, encode, max_plan_bytes
from penstock.workers.scheduling.sequence import StepPlan

_HOST = "127.0.0.1"
_NUM_WARMUPS = 20  # number of first plans that do not count
_SECONDS = 60.0
_TRANSPORTS = ("shared memory", "gloo")


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Settings of the measurement."""

    followers: int = option(3, "number of followers (ranks other than 0)")
    sequences: int = option(64, "number of sequences that decode")
    context: int = option(2048, "context length of each sequence")
    plans: int = option(500, "plans per run")
    pause_us: int = option(2000, "pause between plans in microseconds, in place of a step")
    rounds: int = option(3, "runs of each transport")
    save_json: str = option("", "write the results to this file")


def make_plan(load: Load, number: int) -> StepPlan:
    """Return a plan for a decode step of all sequences, with blocks of 16 tokens."""
    ones = np.ones(load.sequences, np.int32)
    return StepPlan(
        number=number,
        rows=np.arange(load.sequences, dtype=np.int32),
        tokens=ones,
        positions=ones * load.context,
        query_starts=np.arange(load.sequences + 1, dtype=np.int32),
        context_lens=ones * (load.context + 1),
        block_tables=np.ones((load.sequences, -(-load.context // 16) + 1), np.int32),
        slots=ones,
        samples=np.ones(load.sequences, np.bool_),
    )


def follow(pipe: Connection, address: str, load: Load, rank: int, way: str) -> None:
    """Run a follower: receive all plans, then send the monotonic time at which each was decoded."""
    node = "near" if way == _TRANSPORTS[0] else f"node {rank}"
    reader = connect_plan_reader(RemoteStore(address, None), rank, load.followers + 1, node, _HOST)
    pipe.send("ready")
    times = []
    while message := reader.read():
        decode(message)
        times.append(time.monotonic())
    pipe.send(times)


def run_round(load: Load, way: str) -> list[float]:
    """Return, for each plan, the seconds until the slowest follower has decoded the plan."""
    rendezvous = RendezvousServer(_HOST, None, load.followers + 1)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(1, load.followers + 1):
        ours, theirs = context.Pipe()
        arguments = (theirs, rendezvous.address, load, rank, way)
        processes.append(context.Process(target=follow, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    size = max_plan_bytes(load.sequences, load.sequences, -(-load.context // 16) + 1)
    writer = connect_plan_writer(
        rendezvous.store, load.followers + 1, size, "near", _HOST, _SECONDS
    )
    for pipe in pipes:
        pipe.recv()
    begins = []
    for number in range(_NUM_WARMUPS + load.plans):
        time.sleep(load.pause_us * 1e-6)
        begins.append(time.monotonic())
        writer.write(encode(make_plan(load, number + 1)))
    writer.end()
    ends = np.array([pipe.recv() for pipe in pipes]).max(axis=0)
    for process in processes:
        process.join()
    rendezvous.close()
    found: list[float] = (ends - np.array(begins))[_NUM_WARMUPS:].tolist()
    return found


async def _measure(load: Load) -> dict[str, Any]:
    times: dict[str, list[float]] = {way: [] for way in _TRANSPORTS}
    for round_number in range(load.rounds * len(_TRANSPORTS)):
        way = _TRANSPORTS[round_number % len(_TRANSPORTS)]
        times[way] += run_round(load, way)
    found = {}
    for way, each in times.items():
        p50, p99 = (float(np.percentile(each, percent)) * 1e6 for percent in (50, 99))
        found[way] = {"p50_us": p50, "p99_us": p99, "count": len(each)}
        print(f"{way}: p50 {p50:.0f} µs, p99 {p99:.0f} µs of {len(each)} plans")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program = "python -m penstock.loadtests.micro.plan_latency"
    (load,) = read_flags(program, "Latency of step plans to followers.", (Load,), arguments)
    return run(lambda: _measure(load), dataclasses.asdict(load), load.save_json)


if __name__ == "__main__":
    sys.exit(main())
