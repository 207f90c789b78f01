"""Chaos test: injects faults into a real cluster while clients stream, and checks every answer.

`python -m penstock.loadtests.chaos` starts a cluster as `penstock serve` does. It runs every
request once without faults to get reference answers. Then clients send requests continuously while
faults are injected at random times and in chosen situations. Worker processes are killed (SIGKILL),
stopped (SIGSTOP, temporarily or permanently) or disconnected. Every answer is compared with its
reference: with `--deterministic` it must be bitwise identical. Otherwise every position must arrive
exactly once, and a different token is accepted only if the two tokens nearly tied.
"""

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from penstock.cli.checkpoint import SHIPPED
from penstock.cluster.placement.placement_plan import PlacementError
from penstock.cluster.ray_session import RayFailed, RaySession
from penstock.cluster.spec.router_spec import RouterSpec
from penstock.cluster.spec.spec import (
    ClusterSpec,
    EngineSpec,
    ModelSpec,
    Pools,
    PoolSpec,
)
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.report import commit, machine
from penstock.loadtests.chaos.answers import Divergence, Stream, compare, near_tie
from penstock.loadtests.chaos.checkpoint import reading_tools
from penstock.loadtests.chaos.clients import ANSWER_SECONDS, Clients, router_was_down
from penstock.loadtests.chaos.cluster import Cluster, ClusterFailed
from penstock.loadtests.chaos.fault_runner import FaultRunner
from penstock.loadtests.chaos.faults import plan_faults
from penstock.loadtests.chaos.outcome import by_kind, by_moment, effects_of, errors_of, table
from penstock.loadtests.chaos.request_mix import make_requests

# Time limit of two waits: until all workers serve again, and then until all blocks are released.
REST_SECONDS = 120.0
BEST = 20  # number of top log probabilities that a near-tie check requests


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the test."""

    faults: int = option(200, "number of faults")
    seed: int = option(0, "seed of the requests and faults")
    clients: int = option(12, "number of clients that stream concurrently")
    num_requests: int = option(28, "number of distinct requests")
    least_tokens: int = option(60, "minimum answer length in tokens")
    most_tokens: int = option(240, "maximum answer length in tokens")
    seconds: float = option(3600.0, "time after which no more faults are injected")
    pause: float = option(0.5, "seconds between a fault and the search for the next")
    near_tie: float = option(1e-3, "largest score difference of two tokens that count as tied")
    ray_kill: bool = option(False, "also kill ranks through Ray")
    kill_router: bool = option(False, "also kill the router; clients then retry their requests")
    save_json: str = option("", "write the results to this file")


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """Settings of the cluster."""

    model: str = option("", "checkpoint folder; default: the bundled demo-small model")
    prefill: int = option(2, "number of prefill workers")
    decode: int = option(3, "number of decode workers")
    mixed: int = option(0, "number of mixed workers")
    tp: int = option(1, "ranks of each worker (tensor parallel)")
    deterministic: bool = option(False, "require answers that are equal bit by bit")
    worker_timeout_seconds: float = option(4.0, "silence after which a worker counts as lost")
    step_timeout_seconds: float = option(6.0, "time after which a hung worker is replaced")
    kv_cache_mib: int = option(64, "KV cache of each worker in MiB")

    @property
    def folder(self) -> Path:
        return Path(self.model) if self.model else SHIPPED.parent / "demo-small"

    def spec(self) -> ClusterSpec:
        pools = {
            role: PoolSpec(
                replicas=getattr(self, role),
                tp=self.tp,
                threads=1,
                kv_cache_mib=self.kv_cache_mib,
            )
            for role in ("prefill", "decode", "mixed")
        }
        return ClusterSpec(
            models={
                self.folder.name: ModelSpec(
                    deterministic=self.deterministic,
                    # The server cannot derive the parser from the chat template of the bundled
                    # model.
                    tool_call_parser="hermes",
                )
            },
            router=RouterSpec(
                http_port=0,
                grpc_port=0,
                worker_timeout_seconds=self.worker_timeout_seconds,
                drain_seconds=5.0,
            ),
            engine=EngineSpec(step_timeout_seconds=self.step_timeout_seconds),
            pools=Pools(**pools),
            log_format="keys",
        )


_BEGAN = time.monotonic()


def print_line(text: str) -> None:
    """Print a line of text that starts with the seconds since the start of the test."""
    print(f"{time.monotonic() - _BEGAN:7.1f} {text}", flush=True)


class ChaosRun:
    """Runs the test once on a cluster that already serves."""

    def __init__(self, options: Options, served: Served, cluster: Cluster) -> None:
        self._options = options
        self._served = served
        self._cluster = cluster
        lengths = (options.least_tokens, options.most_tokens)
        self._requests = make_requests(options.num_requests, options.seed, lengths)
        self._faults = FaultRunner(cluster, options.pause, print_line)
        self._clients = Clients(cluster.grpc, cluster.http, self._may_retry)

    async def run(self) -> dict[str, Any]:
        """Run the test and return its results. Raises ClusterFailed and TimeoutError."""
        try:
            return await self._run()
        finally:
            await self._clients.close()

    async def _run(self) -> dict[str, Any]:
        options = self._options
        right = await self._clients.all_once(self._requests)
        broken = [stream for stream in right if stream.error or stream.problems]
        if broken:
            what = broken[0].error or broken[0].problems[0]
            raise ClusterFailed(f"request {broken[0].name} failed before any fault: {what}")
        print_line(f"{len(right)} reference answers received")
        also = [kind.replace("_", " ") for kind in ("ray_kill", "kill_router")
                if getattr(options, kind)]  # fmt: skip
        plan = plan_faults(options.faults, options.seed, also)
        began = time.time()
        first = len(self._clients.streams)
        self._clients.start(options.clients, self._requests, options.seed)
        await self._faults.run(plan, options.seconds)
        async with asyncio.timeout(2 * ANSWER_SECONDS):
            await self._clients.finish()
        seconds = time.time() - began
        streams = self._clients.streams[first:]
        left = await self._until_rest() + self._still_frozen()
        found = self._compare(streams, right)
        judged = await self._check_divergences(found.pop("divergences"))
        return self._outcome(streams, seconds) | found | judged | {"not_released": left}

    def _may_retry(self, began: float) -> bool:
        """Return whether a call that began at `began` may have failed because no router ran."""
        ready = self._cluster.ready_times("router 0")
        return router_was_down(began, self._faults.router_down, ready)

    async def _until_rest(self) -> list[str]:
        """Wait until all workers serve and hold no requests or blocks.

        Returns the problems that remain at the time limit, or [].
        """
        if not await self._cluster.wait_until_complete(REST_SECONDS):
            return [f"not all workers served again within {REST_SECONDS:g} s"]
        deadline = time.monotonic() + REST_SECONDS
        while left := await self._held():
            if time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.1)
        return []

    async def _held(self) -> list[str]:
        state = await self._cluster.snapshot()
        if state is None:
            return ["the router does not run"]
        left = [f"the router has {state.streams} requests"] if state.streams else []
        listed = {worker.worker for worker in state.workers}
        missing = [each.name for each in self._cluster.workers if each.name not in listed]
        left += [f"the router does not list {name}" for name in missing]
        for worker in state.workers:
            blocks = {} if worker.numbers is None else worker.numbers.blocks
            held = {name: blocks[name] for name in ("used", "leased", "reserved") if name in blocks}
            if worker.requests or not held or any(held.values()):
                left.append(f"{worker.worker} has {worker.requests} requests, blocks {held}")
        return left

    def _compare(self, streams: Sequence[Stream], right: Sequence[Stream]) -> dict[str, Any]:
        known = {stream.request.number: stream for stream in right}
        wrong: list[str] = []
        divergences: list[Divergence] = []
        num_same = 0
        for stream in streams:
            if stream.error:
                wrong += [f"{stream.name}: {each}" for each in stream.problems]
                continue
            exact = self._served.deterministic
            problems, found = compare(stream, known[stream.request.number], exact)
            wrong += [f"{stream.name}: {each}" for each in problems]
            divergences += found
            num_same += not problems and not found
        return {"equal": num_same, "wrong": wrong, "divergences": divergences}

    async def _check_divergences(self, divergences: Sequence[Divergence]) -> dict[str, Any]:
        """Classify each difference from a reference answer as a near tie or as unexplained."""
        apart, unexplained = [], []
        for divergence in divergences:
            position = len(divergence.before)
            scores = await self._clients.scores(
                divergence.request, divergence.choice, position, BEST
            )
            gap = None if scores is None else near_tie(divergence, scores, _noise(divergence))
            where = (
                f"{divergence.request.kind}, position {position}: "
                f"token {divergence.wrong}, expected {divergence.right}"
            )
            if gap is not None and gap <= self._options.near_tie:
                apart.append(gap)
            else:
                shown = "unknown" if gap is None else f"{gap:.4f}"
                unexplained.append(f"{where}; their score difference is {shown}")
        return {"near_ties": len(apart), "largest_tie": max(apart, default=None),
                "unexplained": unexplained}  # fmt: skip

    def _outcome(self, streams: Sequence[Stream], seconds: float) -> dict[str, Any]:
        hits = effects_of(self._faults.injected, streams, self._cluster.placements)
        errors, allowed = errors_of(streams, hits, self._cluster.placements)
        injected = [
            {
                "kind": each.injected.fault.kind,
                "moment": each.injected.moment,
                "worker": each.injected.title,
                "pid": each.injected.pid,
                "at": round(each.injected.at, 3),
                "streams": len(each.streams),
                "recovery_seconds": [round(one, 3) for one in each.recoveries],
            }
            for each in hits
        ]
        return {
            "seconds": seconds,
            "streams": len(streams),
            "tokens": sum(stream.num_tokens for stream in streams),
            "constrained": sum(stream.num_complete_forms for stream in streams),
            "kinds": by_kind(hits),
            "moments": by_moment(hits),
            "errors": errors,
            "allowed_errors": allowed,
            "injected": injected,
        }

    def _still_frozen(self) -> list[str]:
        """Return a message for each process that was frozen and not killed afterwards."""
        frozen = [each for each in self._faults.injected if each.fault.kind == "freeze"]
        left = [each for each in frozen if psutil.pid_exists(each.pid)]
        return [f"{each.title}: frozen process {each.pid} was not killed" for each in left]


def _noise(divergence: Divergence) -> dict[int, float]:
    """Return the Gumbel noise that sampling added to the log probabilities of the two tokens."""
    sampling = divergence.request.sampling
    if not sampling["temperature"]:
        return {}
    import numpy as np

    from penstock.kernels.sampling.philox import gumbel_noise

    at = np.array([len(divergence.before)]), np.array([divergence.choice])
    most = 1 + max(divergence.right, divergence.wrong)
    noise = gumbel_noise(np.array([sampling["seed"]], np.uint64), *at, most)[0]
    return {token: float(noise[token]) for token in (divergence.right, divergence.wrong)}


def failures(found: dict[str, Any]) -> list[str]:
    """Return the problems that make the test fail."""
    return [*found["wrong"], *found["unexplained"], *found["errors"], *found["not_released"]]


def summary(found: dict[str, Any]) -> str:
    """Format the results as text."""
    every = found["kinds"]["all"]
    return "\n".join(
        [
            "",
            *table(found["kinds"], "fault"),
            "",
            *table(found["moments"], "moment"),
            "",
            f"{every['faults']} faults in {found['seconds']:.0f} s, {every['hit']} of which hit a "
            f"running stream; {found['streams']} streams with {found['tokens']} tokens and "
            f"{found['constrained']} complete constrained answers: "
            f"{found['equal']} equal to their reference, {found['near_ties']} with another token "
            f"that nearly tied, {len(found['allowed_errors'])} failed because two workers were "
            "lost during the request",
            f"wrong: {len(found['wrong']) + len(found['unexplained'])}, "
            f"errors: {len(found['errors'])}, not released: {len(found['not_released'])}",
            *(f"  {each}" for each in failures(found)[:20]),
        ]
    )


async def _run(options: Options, served: Served) -> dict[str, Any]:
    with reading_tools(served.folder) as folder:
        cluster = Cluster(served.spec(), folder, print_line)
        try:
            await cluster.start()
            print_line("the cluster serves")
            return await ChaosRun(options, served, cluster).run()
        finally:
            await cluster.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test and return the exit code.

    The code is 0 if the test passed, 1 if it failed or could not run, and 130 after Ctrl-C.
    """
    about = "Inject faults into a cluster while clients stream, and check every answer."
    program = "python -m penstock.loadtests.chaos"
    options, served = read_flags(program, about, (Options, Served), arguments)
    try:
        with RaySession(None):
            found = asyncio.run(_run(options, served))
    except (ClusterFailed, RayFailed, PlacementError, TimeoutError) as error:
        print(f"{program}: {error or 'the streams did not end in time'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(summary(found), flush=True)
    if options.save_json:
        head = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine(),
            "options": dataclasses.asdict(options),
            "cluster": dataclasses.asdict(served),
        }
        text = json.dumps({**head, **found}, indent=1, default=str)
        Path(options.save_json).write_text(text + "\n", encoding="utf-8")
    return 1 if failures(found) else 0


if __name__ == "__main__":
    sys.exit(main())
