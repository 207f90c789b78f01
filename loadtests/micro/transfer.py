"""Moves the KV of a long prompt between two processes, and compares with bare gloo.

`python -m penstock.loadtests.micro.transfer` starts a source and a destination process on this
machine. They have random KV and no model, and transfer blocks as two workers do: control channel,
rank pair, checksums, copies between cache and message buffers. Between the transfers, the same two
processes send the same number of bytes from one buffer into another over gloo. Each round measures
both (A B A B ...), so other load on the machine affects both.

The result is the ratio bare / transfer of the times of each round. With `--against DIR`, another
source tree is measured too, alternating with this one.
"""

import asyncio
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from torch._C._distributed_c10d import FileStore

import penstock
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.ab_runner import MeasurementFailed, Quantiles, run
from penstock.loadtests.micro.source_tree import SourceTree
from penstock.protos import transfer_pb2_grpc
from penstock.workers.engine.warm_up import warm_up_block_moves
from penstock.workers.kv_transfer import sender
from penstock.workers.kv_transfer.protocol.messages import Peer
from penstock.workers.kv_transfer.protocol.receive import ExpectedTransfer, TransferResult
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.kv_transfer.rank_endpoints import RankEndpoints
from penstock.workers.kv_transfer.rank_mover import Movers, RankMover
from penstock.workers.kv_transfer.receiver import KvReceiver
from penstock.workers.kv_transfer.sender import KvSender
from penstock.workers.kv_transfer.shards import LayerHeadRange
from penstock.workers.kv_transfer.staging import KvStaging, WorkerIdentity
from penstock.workers.parallel.communicator import Communicator, connect

MODULE = "penstock.loadtests.micro.transfer"
PROGRAM = f"python -m {MODULE}"
SECONDS = 60.0  # timeout of the processes when they wait for each other
BARE_BYTES = 32 << 20  # size of a bare message
HOST = "127.0.0.1"
SOURCE, DESTINATION = 0, 1
WARM_UPS = 2  # rounds that are not counted
NAMES = ("source", "i"), ("destination", "i")
SECRET = "transfer"


@dataclasses.dataclass(frozen=True, slots=True)
class Amounts:
    """The KV to transfer, and the number of rounds."""

    tokens: int = option(4096, "length of the prompt")
    layers: int = option(16, "layers of the model")
    heads: int = option(8, "KV heads")
    head_dim: int = option(64, "features of a KV head; float32")
    block_size: int = option(16, "tokens per KV block")
    rounds: int = option(15, "rounds; each measures the transfer and bare gloo once")

    @property
    def num_blocks(self) -> int:
        return -(-self.tokens // self.block_size)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.layers * 2 * self.heads * self.head_dim * 4

    def flags(self) -> list[str]:
        fields = dataclasses.asdict(self)
        return [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Comparison and output."""

    against: str = option("", "also measure the source tree in this folder")
    runs: int = option(3, "with --against: runs of each tree, alternating")
    once: bool = option(False, "measure this tree only, and print one line of JSON")
    side: str = option("", "used internally: run the destination process, with this folder")
    save_json: str = option("", "write the results to this file")


class Side:
    """One of the two processes: KV, its blocks, and bare gloo to the other process."""

    def __init__(self, rank: int, amounts: Amounts, folder: Path) -> None:
        torch.set_num_threads(1)
        self.rank, self.amounts = rank, amounts
        num_blocks = 2 * amounts.num_blocks
        shape = (amounts.layers, 2, num_blocks, amounts.heads)
        generator = torch.Generator().manual_seed(rank)
        self.kv = torch.empty((*shape, amounts.block_size, amounts.head_dim))
        self.kv.normal_(generator=generator)
        warm_up_block_moves(self.kv)
        rng = np.random.default_rng(rank)
        self.blocks = rng.permutation(num_blocks)[: amounts.num_blocks].astype(np.int32)
        whole = LayerHeadRange(0, amounts.layers, 0, amounts.heads)
        self.movers = Movers(RankMover(KvStaging(self.kv, whole), HOST, SECONDS))
        self._buffer = torch.full((amounts.num_bytes,), rank, dtype=torch.uint8)
        self._store = FileStore(str(folder / "store"), 2)
        self._bare: Communicator | None = None

    def bare(self) -> None:
        """Send or receive all bytes over gloo."""
        if self._bare is None:
            self._bare = connect("gloo", self._store, self.rank, 2, HOST, SECONDS)
        started = [
            self._bare.send([part], DESTINATION, 0)
            if self.rank == SOURCE
            else self._bare.recv([part], SOURCE, 0)
            for part in torch.split(self._buffer, BARE_BYTES)
        ]
        for work in started:
            work.wait()

    def fingerprint(self) -> float:
        """Return a sum over the blocks, in the order of the sequence."""
        blocks = torch.from_numpy(self.blocks).long()
        weights = torch.arange(1, len(blocks) + 1, dtype=torch.float64)
        sums = self.kv[:, :, blocks].double().sum((0, 1, 3, 4, 5))
        return float((sums * weights).sum())


async def run_destination(amounts: Amounts, folder: Path) -> None:
    """Receive transfers, as requested by lines of JSON on stdin; reply on stdout."""
    side = Side(DESTINATION, amounts, folder)
    identity = WorkerIdentity(*NAMES[DESTINATION], "layout", HOST, SECRET)
    receiver = KvReceiver(identity, RankEndpoints(side.movers), SECONDS)
    server = grpc.aio.server()
    port = server.add_insecure_port(f"{HOST}:0")
    transfer_pb2_grpc.add_TransferServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    await server.start()
    reply({"address": f"{HOST}:{port}"})

    def done(result: TransferResult) -> None:
        reply({"reason": result.reason, "bytes": result.num_bytes, "cpu": time.process_time()})

    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        match line.strip():
            case "expect":
                expected = ExpectedTransfer(
                    "router", 1, 1, NAMES[SOURCE], 0, amounts.tokens, side.blocks
                )
                reply({"epoch": receiver.open(expected, done), "cpu": time.process_time()})
            case "bare":
                await asyncio.to_thread(side.bare)
                reply({"cpu": time.process_time()})
            case "fingerprint":
                reply({"fingerprint": side.fingerprint()})
    receiver.stop()
    await server.stop(0)


def reply(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


class Destination:
    """The destination process, seen from the source process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, amounts: Amounts, folder: Path) -> "Destination":
        arguments = ["-m", MODULE, f"--side={folder}", *amounts.flags()]
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdin=pipe, stdout=pipe
            )
        )

    def request(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise MeasurementFailed("the destination process ended")
        message: dict[str, Any] = json.loads(line)
        return message

    async def stop(self) -> None:
        self._process.kill()
        await self._process.wait()


@dataclasses.dataclass(slots=True)
class Times:
    """Wall time and CPU time of both processes, in seconds, of each counted round."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)


async def measure_once(amounts: Amounts) -> dict[str, Any]:
    """Measure the transfer and bare gloo alternately.

    Raises MeasurementFailed if a transfer fails or changes a byte.
    """
    with tempfile.TemporaryDirectory() as folder:
        destination = await Destination.start(amounts, Path(folder))
        try:
            side = Side(SOURCE, amounts, Path(folder))
            address = (await destination.answer())["address"]
            return await _measure(side, destination, address)
        finally:
            await destination.stop()


async def _measure(side: Side, destination: Destination, address: str) -> dict[str, Any]:
    identity = WorkerIdentity(*NAMES[SOURCE], "layout", HOST, "")
    source = KvSender(identity, RankEndpoints(side.movers), SECONDS)
    peer = Peer(*NAMES[DESTINATION], address, SECRET)
    theirs = 0.0

    async def transfer() -> float:
        destination.request("expect")
        epoch = (await destination.answer())["epoch"]
        outgoing = OutgoingTransfer("router", 1, 1, epoch, 0, side.amounts.tokens, side.blocks)
        await source.send(peer, outgoing, lambda: None)
        result = await destination.answer()
        if result["reason"] or result["bytes"] != side.amounts.num_bytes:
            raise MeasurementFailed(f"the transfer failed: {result}")
        return float(result["cpu"])

    async def bare() -> float:
        destination.request("bare")
        await asyncio.to_thread(side.bare)
        return float((await destination.answer())["cpu"])

    async def timed(work: Callable[[], Awaitable[float]], times: Times, counts: bool) -> None:
        nonlocal theirs
        wall, cpu = time.perf_counter(), time.process_time() + theirs
        theirs = await work()
        if counts:
            times.wall.append(time.perf_counter() - wall)
            times.cpu.append(time.process_time() + theirs - cpu)

    found = {"transfer": Times(), "bare": Times()}
    for round_number in range(side.amounts.rounds + WARM_UPS):
        counts = round_number >= WARM_UPS
        await timed(bare, found["bare"], counts)
        await timed(transfer, found["transfer"], counts)
    destination.request("fingerprint")
    if (await destination.answer())["fingerprint"] != side.fingerprint():
        raise MeasurementFailed("the received blocks differ from the sent ones")
    source.stop()
    sizes = {"bytes": side.amounts.num_bytes, "message_bytes": sender.MESSAGE_BYTES}
    return sizes | {name: dataclasses.asdict(times) for name, times in found.items()}


def describe(name: str, figures: dict[str, Any]) -> str:
    """Return the figures of one tree as text."""
    transfer, bare = figures["transfer"], figures["bare"]
    ratios = [b / t for b, t in zip(bare["wall"], transfer["wall"], strict=True)]
    mib = figures["bytes"] / (1 << 20)

    def line(kind: str, times: dict[str, list[float]]) -> str:
        return (
            f"  {kind:<9} {1e3 * Quantiles.of(times['wall']).median:7.1f} ms, "
            f"{figures['bytes'] / Quantiles.of(times['wall']).median / 1e9:5.2f} GB/s, "
            f"CPU time of both processes {1e3 * Quantiles.of(times['cpu']).median:6.1f} ms"
        )

    return "\n".join(
        (
            f"{name}: {mib:.0f} MiB in a transfer",
            line("transfer", transfer),
            line("bare gloo", bare),
            f"  bare / transfer: {Quantiles.of(ratios)}",
        )
    )


async def measure(program: Program, amounts: Amounts) -> dict[str, Any]:
    """Measure this tree, alternating with the tree of `--against` if given; print the figures."""
    here = SourceTree.at(Path(penstock.__file__).parent.parent)
    trees = {"now": here}
    if program.against:
        trees = {"then": SourceTree.at(Path(program.against)), **trees}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for _ in range(program.runs if program.against else 1):
        for name, tree in trees.items():
            module = tree.module((MODULE,))
            runs[name].append(await tree.run("-m", module, "--once", *amounts.flags()))
    merged = {name: _merged(figures) for name, figures in runs.items()}
    for name, figures in merged.items():
        print(describe(name, figures))
    if program.against:
        pairs = zip(runs["then"], runs["now"], strict=True)
        ratios = [_median_wall(then) / _median_wall(now) for then, now in pairs]
        print(f"then / now, time of a transfer: {Quantiles.of(ratios)}")
    print(f"load average: {', '.join(f'{each:.1f}' for each in os.getloadavg())}")
    return {"figures": merged, "load_average": os.getloadavg()}


def _median_wall(figures: dict[str, Any]) -> float:
    return Quantiles.of(figures["transfer"]["wall"]).median


def _merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = dict(runs[0])
    for kind in ("transfer", "bare"):
        merged[kind] = {
            clock: [each for figures in runs for each in figures[kind][clock]]
            for clock in ("wall", "cpu")
        }
    return merged


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, 1 (the measurement failed), 2 (invalid flags) or 130 (Ctrl-C)."""
    about = "Measure KV transfers between two processes beside bare gloo."
    program, amounts = read_flags(PROGRAM, about, (Program, Amounts), arguments)
    if program.side:
        asyncio.run(run_destination(amounts, Path(program.side)))
        return 0

    async def once() -> dict[str, Any]:
        figures = await measure_once(amounts)
        reply(figures)
        return figures

    config = dataclasses.asdict(amounts)
    if program.once:
        return run(once, config, program.save_json)
    return run(lambda: measure(program, amounts), config, program.save_json)


if __name__ == "__main__":
    sys.exit(main())
