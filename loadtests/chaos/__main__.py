"""Kills, stops and cuts off a real cluster's processes while clients stream, and compares.

`python -m penstock.loadtests.chaos`: a cluster is served as by `penstock serve`; every request is
answered once undisturbed; then clients ask all the time while worker processes are killed (-9),
stopped for a while or for good, and cut off, at random and at certain moments. Every answer is held
against the undisturbed one: with `--deterministic` bit by bit, else each position once and another
token only where the two nearly tied.
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
from penstock.cluster.placement.placement import PlacementError
from penstock.cluster.ray_session import RayFailed, RaySession
from penstock.cluster.spec.spec import (
    ClusterSpec,
    EngineSpec,
    ModelSpec,
    Pools,
    PoolSpec,
    RouterSpec,
)
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.report import commit, machine
from penstock.loadtests.chaos.answers import Divergence, Stream, compare, near_tie
from penstock.loadtests.chaos.clients import ANSWER_SECONDS, Clients
from penstock.loadtests.chaos.cluster import Cluster, ClusterFailed
from penstock.loadtests.chaos.fault_runner import FaultRunner
from penstock.loadtests.chaos.faults import plan_faults
from penstock.loadtests.chaos.outcome import by_kind, by_moment, effects_of, errors_of, table
from penstock.loadtests.chaos.request_mix import make_requests

REST_SECONDS = 120.0  # in which everybody has to be there again, and nothing held
BEST = 20  # log probabilities that a near tie is judged by


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What is done."""

    faults: int = option(200, "how many")
    seed: int = option(0, "of the requests and of the faults")
    clients: int = option(12, "that stream all the time")
    num_requests: int = option(28, "different requests")
    least_tokens: int = option(60, "of an answer")
    most_tokens: int = option(240, "of an answer")
    seconds: float = option(3600.0, "after which no more faults are made")
    pause: float = option(0.5, "seconds between the end of a fault and the search for the next")
    near_tie: float = option(1e-3, "how far apart two tokens may be that count as tied")
    ray_kill: bool = option(False, "kill ranks through Ray too")
    kill_router: bool = option(False, "kill the router too: clients ask it again")
    save_json: str = option("", "write what came of it to this file")


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """The cluster."""

    model: str = option("", "checkpoint folder; by default the small sibling of what ships")
    prefill: int = option(2, "workers")
    decode: int = option(3, "workers")
    mixed: int = option(0, "workers")
    tp: int = option(1, "ranks of each worker")
    deterministic: bool = option(False, "answers have to be the same bit by bit")
    worker_timeout_seconds: float = option(4.0, "a worker silent for so long is lost")
    step_timeout_seconds: float = option(6.0, "one that answers nobody for so long is replaced")
    kv_cache_mib: int = option(64, "of each worker")

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
            models={self.folder.name: ModelSpec(deterministic=self.deterministic)},
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
    """Tell it, with the seconds since the start."""
    print(f"{time.monotonic() - _BEGAN:7.1f} {text}", flush=True)


class ChaosRun:
    """One run, on a cluster that serves."""

    def __init__(self, options: Options, served: Served, cluster: Cluster) -> None:
        self._options = options
        self._served = served
        self._cluster = cluster
        lengths = (options.least_tokens, options.most_tokens)
        self._requests = make_requests(options.num_requests, options.seed, lengths)
        self._faults = FaultRunner(cluster, options.pause, print_line)
        self._clients = Clients(cluster.grpc, self._may_retry)

    async def run(self) -> dict[str, Any]:
        options = self._options
        right = await self._clients.all_once(self._requests)
        broken = [stream for stream in right if stream.error or stream.problems]
        if broken:
            what = broken[0].error or broken[0].problems[0]
            raise ClusterFailed(f"undisturbed, {broken[0].name} failed: {what}")
        print_line(f"{len(right)} answers, undisturbed")
        also = [kind.replace("_", " ") for kind in ("ray_kill", "kill_router")
                if getattr(options, kind)]  # fmt: skip
        plan = plan_faults(options.faults, options.seed, also)
        began = time.time()
        first = len(self._clients.streams)
        self._clients.start(options.clients, self._requests, options.seed)
        try:
            await self._faults.run(plan, options.seconds)
            async with asyncio.timeout(2 * ANSWER_SECONDS):
                await self._clients.finish()
            seconds = time.time() - began
            streams = self._clients.streams[first:]
            left = await self._until_rest() + self._still_frozen()
            found = self._compare(streams, right)
            judged = await self._check_divergences(found.pop("partings"))
        finally:
            await self._clients.close()
        return self._outcome(streams, seconds) | found | judged | {"left": left}

    def _may_retry(self, began: float) -> bool:
        """Whether the router was killed under a call that began then."""
        return any(down > began - 5.0 for down in self._faults.router_down)

    async def _until_rest(self) -> list[str]:
        """Wait until all are there again and nothing is held; says what does not come to rest."""
        if not await self._cluster.wait_until_complete(REST_SECONDS):
            return ["a worker did not come back"]
        deadline = time.monotonic() + REST_SECONDS
        while left := await self._held():
            if time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.1)
        return []

    async def _held(self) -> list[str]:
        state = await self._cluster.snapshot()
        if state is None:
            return ["there is no router"]
        left = [f"the router has {state.streams} requests"] if state.streams else []
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
        return {"same": num_same, "wrong": wrong, "partings": divergences}

    async def _check_divergences(self, divergences: Sequence[Divergence]) -> dict[str, Any]:
        """Which of the other tokens nearly tied with the right ones."""
        apart, unexplained = [], []
        for divergence in divergences:
            position = len(divergence.before)
            scores = await self._clients.scores(
                divergence.request, divergence.choice, position, BEST
            )
            gap = None if scores is None else near_tie(divergence, scores, _noise(divergence))
            where = (
                f"{divergence.request.kind}, position {position}: "
                f"{divergence.wrong}, not {divergence.right}"
            )
            if gap is not None and gap <= self._options.near_tie:
                apart.append(gap)
            else:
                shown = "cannot be told" if gap is None else f"is {gap:.4f}"
                unexplained.append(f"{where}; how far they were apart {shown}")
        return {"near_ties": len(apart), "widest_tie": max(apart, default=None),
                "other_tokens": unexplained}  # fmt: skip

    def _outcome(self, streams: Sequence[Stream], seconds: float) -> dict[str, Any]:
        hits = effects_of(self._faults.injected, streams, self._cluster.placements)
        errors, allowed = errors_of(streams, hits, self._cluster.placements)
        made = [
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
            "kinds": by_kind(hits),
            "moments": by_moment(hits),
            "errors": errors,
            "lost_twice": allowed,
            "made": made,
        }

    def _still_frozen(self) -> list[str]:
        """What was stopped for good and has not been ended."""
        frozen = [each for each in self._faults.injected if each.fault.kind == "freeze"]
        left = [each for each in frozen if psutil.pid_exists(each.pid)]
        return [f"{each.title}, process {each.pid}, is stopped and still there" for each in left]


def _noise(divergence: Divergence) -> dict[int, float]:
    """What the draw of that token added to the log probabilities of the two."""
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
    """What must not be."""
    return [*found["wrong"], *found["other_tokens"], *found["errors"], *found["left"]]


def summary(found: dict[str, Any]) -> str:
    """For people."""
    every = found["kinds"]["all"]
    return "\n".join(
        [
            "",
            *table(found["kinds"], "fault"),
            "",
            *table(found["moments"], "moment"),
            "",
            f"{every['faults']} faults in {found['seconds']:.0f} s, {every['hit']} of them under a "
            f"live stream; {found['streams']} streams of {found['tokens']} tokens: "
            f"{found['same']} the same as undisturbed, {found['near_ties']} with another token "
            f"that nearly tied, {len(found['lost_twice'])} ended because workers were lost under "
            "them twice",
            f"wrong: {len(found['wrong']) + len(found['other_tokens'])}, "
            f"errors: {len(found['errors'])}, left behind: {len(found['left'])}",
            *(f"  {each}" for each in failures(found)[:20]),
        ]
    )


async def _run(options: Options, served: Served) -> dict[str, Any]:
    cluster = Cluster(served.spec(), served.folder, print_line)
    try:
        await cluster.start()
        print_line("the cluster serves")
        return await ChaosRun(options, served, cluster).run()
    finally:
        await cluster.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 where every stream was right, 1 where one was not or nothing came of it."""
    about = "Kill, stop and cut off a cluster's processes while clients stream, and compare."
    program = "python -m penstock.loadtests.chaos"
    options, served = read_flags(program, about, (Options, Served), arguments)
    try:
        with RaySession(None):
            found = asyncio.run(_run(options, served))
    except (ClusterFailed, RayFailed, PlacementError, TimeoutError) as error:
        print(f"{program}: {error or 'streams did not end'}", file=sys.stderr)
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
