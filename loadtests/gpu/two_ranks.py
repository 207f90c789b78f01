"""Runs collectives and an engine with two ranks, in two processes with a GPU each, over NCCL.

1. The collectives of a worker's ranks: see `rank_collectives`.
2. An engine with one rank, on the first GPU, answers two loads.
3. A deterministic engine with two ranks must pass the check that workers make at their start, and
   give the same tokens in batches of different sizes.
4. An engine with two ranks answers the loads of the first engine.

The section needs two GPUs, and protobuf for the messages between ranks. If one is missing, the
result says that nothing was run. On a CPU, the processes use gloo.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from penstock.kernels.fallback import fallback_counts, forbid_fallback
from penstock.loadtests.gpu.beside_torch import LEAST_EQUAL, PenstockEngine
from penstock.loadtests.gpu.models import SHAPES, random_model, save_weights, small
from penstock.loadtests.gpu.options import Options, read_options
from penstock.loadtests.gpu.rank_collectives import NUM_RANKS, check_collectives
from penstock.loadtests.gpu.replay import Answer, Request, replay, speed_ratios, summary
from penstock.loadtests.gpu.sections import read_figures, write_figures
from penstock.loadtests.gpu.transfer_process import LOOPBACK
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.determinism_check import check_batch_invariance
from penstock.workers.engine.engine import Engine
from penstock.workers.parallel.collectives import make_process_group
from penstock.workers.rank.follower import Follower
from penstock.workers.rank.process_tuning import NCCL_VARIABLES

MODULE = "penstock.loadtests.gpu.two_ranks"
SECONDS = 72.0  # time limit of both processes on a GPU in seconds; the section has 80 s
INTERPRETED_SECONDS = 220.0
RANKS_SECONDS = 40.0  # timeout in seconds of an operation between the ranks
LOST_SECONDS = 3.0  # seconds for which a rank may continue after the other one has failed
WEIGHTS_KEY = "the weights are written"
LOADS = {"1 request": [Request(400, 64)], "32 requests": [Request(400, 64)] * 32}
SMALL_LOADS = {"1 request": [Request(20, 6)], "3 requests": [Request(20, 6)] * 3}
NUM_SINGLE = 3
"""Size of the largest of the small batches for the deterministic engine.

The engine answers the whole last load, and batches of the first 1, 2, ..., NUM_SINGLE requests of
that load.
"""


def absent(device: str) -> str:
    """Return what this machine lacks for two ranks, or "" if it lacks nothing."""
    if device == "cuda" and (count := torch.cuda.device_count()) < NUM_RANKS:
        return f"two GPUs are needed, and torch finds {count}"
    try:
        import google.protobuf  # noqa: F401
    except ImportError:
        return "protobuf is not installed: see `make gpu-carry` in docs/gpu.md"
    return ""


class Rank:
    """The engines of one rank, with the requests of the loads."""

    def __init__(self, number: int, options: Options, folder: Path) -> None:
        self._number, self._options, self._folder = number, options, folder
        self.store: Store = FileStore(str(folder / "store"), NUM_RANKS)
        self.loads = SMALL_LOADS if options.small else LOADS
        self._config = SHAPES[options.model].config
        if options.small:
            self._config = small(self._config)

    def worker(self, tp: int, deterministic: bool, measures: bool) -> WorkerConfig:
        """Return the settings of an engine with `tp` ranks.

        Args:
            measures: on a GPU, whether the KV cache gets all remaining memory.
        """
        longest = max(each.prompt_len + each.output_len for each in self.loads["1 request"])
        on_gpu = self._options.device.type == "cuda"
        return WorkerConfig(
            name="ranks",
            model=self._folder,
            device=self._options.device.type,
            tp=tp,
            rank=self._number if tp > 1 else 0,
            deterministic=deterministic,
            max_sequences=max(map(len, self.loads.values())),
            max_batched_tokens=2048 if on_gpu else 64,
            max_model_len=longest + 16,
            kv_cache_mib=(2048 if on_gpu else 4) if not (measures and on_gpu) else None,
            ranks_seconds=RANKS_SECONDS if on_gpu else INTERPRETED_SECONDS,
        )

    def collectives(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Check the collectives in two groups: sums in rank order, or in the library's order."""
        device = self._options.device
        groups = {
            name: make_process_group(
                PrefixStore(name, self.store),
                range(NUM_RANKS),
                self._number,
                device,
                "127.0.0.1",
                RANKS_SECONDS,
                in_rank_order=name == "in rank order",
            )
            for name in ("in rank order", "in the library's order")
        }
        return check_collectives(groups, self._number, device, self._options.dtype)

    def follow(self, name: str, deterministic: bool, measures: bool) -> None:
        """Run rank 1 of an engine until the engine ends."""
        config = self.worker(NUM_RANKS, deterministic, measures)
        Follower(config, PrefixStore(name, self.store), lambda done, total: None).run()

    def lead(self, name: str, deterministic: bool, measures: bool) -> Engine:
        """Start rank 0 of an engine."""
        config = self.worker(NUM_RANKS, deterministic, measures)
        return Engine(config, store=PrefixStore(name, self.store))

    def engine_of_one_rank(self) -> Engine:
        """Write the weights and start an engine with one rank."""
        options = self._options
        decoder = random_model(self._folder, self._config, options.dtype, options.device)
        save_weights(self._folder, decoder)
        self.store.set(WEIGHTS_KEY, "1")
        return Engine(self.worker(1, False, False), decoder=decoder)

    def answers(self, engine: Engine, requests: Sequence[Request]) -> list[Answer]:
        """Replay requests. Equal requests get the same prompts in every engine."""
        rng = np.random.default_rng(0)
        prompts = [rng.integers(2, engine.spec.vocab_size, each.prompt_len) for each in requests]
        engine.reset_scheduler(engine.limits)
        driven = PenstockEngine(engine, "ranks")
        try:
            return replay(driven, requests, [each.tolist() for each in prompts])
        finally:
            driven.stop()

    def all_answers(self, engine: Engine) -> dict[str, list[Answer]]:
        engine.warm_up()
        for requests in self.loads.values():  # the first replay is a warm-up and is not measured
            self.answers(engine, [replace(each, output_len=2) for each in requests])
        return {name: self.answers(engine, requests) for name, requests in self.loads.items()}


ENGINES = (("deterministic", True, False), ("plain", False, True))
"""Engines of two ranks, as arguments of `Rank.lead`: `name`, `deterministic`, `measures`."""


def run_leader(rank: Rank) -> Iterator[dict[str, Any]]:
    """Run rank 0 and yield the results so far after each part."""
    figures: dict[str, Any] = {"collectives": {}, "loads_of_ranks": {}, "failures": []}
    for name, found in rank.collectives():
        figures["collectives"][name] = found
    yield figures
    engine = rank.engine_of_one_rank()
    single = rank.all_answers(engine)
    figures["stage"] = "one rank"
    yield figures
    del engine
    gc.collect()
    for name, deterministic, measures in ENGINES:
        engine = rank.lead(name, deterministic, measures)
        try:
            if deterministic:
                figures["failures"] += check_deterministic(rank, engine)
            else:
                together = rank.all_answers(engine)
                figures["kv_blocks"] = engine.limits.num_blocks
                figures["loads_of_ranks"] = compare(rank.loads, single, together)
        finally:
            engine.stop()
        del engine
        gc.collect()
        figures["stage"] = f"two ranks, {name}"
        yield figures
    figures["failures"] += different(figures["loads_of_ranks"])
    yield figures


def check_deterministic(rank: Rank, engine: Engine) -> list[str]:
    """Return a failure if answers of a deterministic engine depend on the size of the batch."""
    check_batch_invariance(engine)
    engine.warm_up()
    requests = list(rank.loads.values())[-1]
    together = rank.answers(engine, requests)
    prompts = [requests[:number] for number in range(1, NUM_SINGLE + 1)]
    fewer = [rank.answers(engine, each)[-1] for each in prompts]
    wrong = [
        number for number, answer in enumerate(fewer) if answer.tokens != together[number].tokens
    ]
    if not wrong:
        return []
    return [f"deterministic engine: answers {wrong} differ in a batch of another size"]


def compare(
    loads: Mapping[str, Sequence[Request]],
    single: Mapping[str, Sequence[Answer]],
    together: Mapping[str, Sequence[Answer]],
) -> dict[str, dict[str, Any]]:
    """Return the figures of each load with one and two ranks, with ratios and equal tokens."""
    found = {}
    for name, requests in loads.items():
        one, two = summary(requests, single[name]), summary(requests, together[name])
        pairs = list(zip(single[name], together[name], strict=True))
        found[name] = {
            "one_rank": one,
            "two_ranks": two,
            "ratios": speed_ratios(two, one),
            "equal_first_tokens": float(np.mean([a.tokens[0] == b.tokens[0] for a, b in pairs])),
            "equal_answers": float(np.mean([a.tokens == b.tokens for a, b in pairs])),
        }
    return found


def different(loads: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a failure if runs with one and two ranks differ in too many first tokens.

    Only the larger load counts.
    """
    name, found = list(loads.items())[-1]
    fraction = found["equal_first_tokens"]
    if fraction >= LEAST_EQUAL:
        return []
    return [f"{name}: only {fraction:.0%} of the first tokens are those of one rank"]


def run_follower(rank: Rank) -> Iterator[dict[str, Any]]:
    """Run rank 1 and yield the results so far."""
    figures: dict[str, Any] = {"collectives": dict(rank.collectives())}
    yield figures
    rank.store.wait([WEIGHTS_KEY], timedelta(seconds=INTERPRETED_SECONDS))
    for name, deterministic, measures in ENGINES:
        rank.follow(name, deterministic, measures)
        gc.collect()
    figures["ended"] = True
    yield figures


def run_rank(number: int, options: Options, folder: Path) -> int:
    """Run the section in the process of rank `number` and write its results to a file."""
    rank = Rank(number, options, folder)
    with forbid_fallback(options.device):
        for figures in run_follower(rank) if number else run_leader(rank):
            write_figures(options.json, figures)
    if fallback_counts():
        fallbacks = f"kernel fallbacks were used: {fallback_counts()}"
        failures = [*figures.get("failures", []), fallbacks]
        write_figures(options.json, figures | {"failures": failures})
    return 0


def measure(options: Options) -> dict[str, Any]:
    """Run both ranks and return their results."""
    if reason := absent(options.device.type):
        return {"not_run": reason, "failures": []}
    seconds = SECONDS if options.device.type == "cuda" else INTERPRETED_SECONDS
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as temporary:
        folder = Path(temporary)
        processes = [_start(number, options, folder) for number in range(NUM_RANKS)]
        failures = _wait(processes, time.monotonic() + seconds, folder)
        leader, follower = (read_figures(folder / f"{rank}.json") for rank in range(NUM_RANKS))
    failures += leader.pop("failures", []) + follower.pop("failures", [])
    for rank, figures in enumerate((leader, follower)):
        failures += [
            f"{name}: wrong on rank {rank}: relative error {found['error']:.1e}"
            for name, found in figures.get("collectives", {}).items()
            if not found["passed"]
        ]
    return {"about": SHAPES[options.model].about, **leader, "failures": failures}


def _start(number: int, options: Options, folder: Path) -> "subprocess.Popen[bytes]":
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environment = {**NCCL_VARIABLES, **os.environ, **LOOPBACK}
    if options.device.type == "cuda":
        # Each rank sees one GPU, as Ray arranges for a worker's ranks.
        environment["CUDA_VISIBLE_DEVICES"] = visible[number]
    command = [sys.executable, "-m", MODULE, "--rank", str(number), "--ranks-folder", str(folder)]
    command += ["--json", str(folder / f"{number}.json"), "--device", options.device.type]
    command += ["--model", options.model, *(["--small"] if options.small else [])]
    with (folder / f"{number}.txt").open("wb") as words:
        return subprocess.Popen(command, env=environment, stdout=words, stderr=words)


def _wait(processes: Sequence["subprocess.Popen[bytes]"], ends: float, folder: Path) -> list[str]:
    """Wait for the ranks and return the failures.

    If one rank fails, the other one is killed after `LOST_SECONDS`.
    """
    failed = False
    while any(process.poll() is None for process in processes) and time.monotonic() < ends:
        if not failed and any(process.poll() for process in processes):
            failed, ends = True, min(ends, time.monotonic() + LOST_SECONDS)
        time.sleep(0.1)
    failures = []
    for rank, process in enumerate(processes):
        code = process.poll()
        process.kill()
        process.wait()
        if code != 0:
            reason = "was stopped" if code is None else f"exited with code {code}"
            last = (folder / f"{rank}.txt").read_text(errors="replace")[-1000:].strip()
            done = json.dumps(read_figures(folder / f"{rank}.json").get("stage", "collectives"))
            failures.append(f"rank {rank} {reason}; its last results: {done}; output:\n{last}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks-folder", type=Path)
    own, others = parser.parse_known_args()
    options = read_options("two_ranks", others)
    if own.rank is not None:
        return run_rank(own.rank, options, own.ranks_folder)
    write_figures(options.json, measure(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
