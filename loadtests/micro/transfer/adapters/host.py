"""The source or the destination process of the measured KV transfers.

Runs as `python -P tuned.py WORK [FOLDER]`, where WORK is a `Work` as JSON. Without FOLDER, the
process is the source: it starts the destination and prints the figures as one line of JSON. The
process imports Penstock from the tree on PYTHONPATH, which may be an older commit. It therefore
uses only modules that exist in all measured commits, and one adapter. An adapter is a module in
this folder with

    MESSAGE_BYTES                                  largest message of a transfer
    Source(kv, host, seconds)                      with `send(...)` and `stop()`
    Destination(kv, host, seconds, done)           with `open(...)`, `stop()` and `servicer`

`kv` [layers, 2, blocks, heads, block_size, head_dim] float32 is the KV cache. The adapters'
docstrings specify the methods.
"""

import asyncio
import dataclasses
import hashlib
import importlib.util
import json
import math
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
from penstock.protos import transfer_pb2_grpc
from penstock.workers.parallel.communicator import Communicator, connect

PROGRAM = Path(__file__).with_name("tuned.py")
SECONDS = 60.0  # seconds for which the processes wait for each other
BARE_BYTES = 32 << 20  # bytes of a message of the bare measurement
HOST = "127.0.0.1"
SOURCE, DESTINATION = 0, 1
WARM_UPS = 2  # number of first rounds that do not count


class TransferFailed(RuntimeError):
    """Raised if a transfer failed or changed a byte. The message gives the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The blocks to transfer: `num_blocks` random blocks of a cache with twice as many."""

    num_tokens: int
    block_shape: Sequence[int]  # layers, KV heads, block_size and head_dim
    rounds: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_shape[2])

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Shape of the cache: [layers, 2, blocks, KV heads, block_size, head_dim]."""
        layers, heads, block_size, head_dim = self.block_shape
        return layers, 2, 2 * self.num_blocks, heads, block_size, head_dim

    @property
    def num_bytes(self) -> int:
        """Number of bytes of a transfer."""
        return self.num_blocks * 2 * math.prod(self.block_shape) * torch.float32.itemsize


class Side:
    """One of the two processes, with its KV cache and a bare gloo connection to the other one."""

    def __init__(self, rank: int, work: Work, folder: Path) -> None:
        torch.set_num_threads(1)
        self.rank, self.work = rank, work
        self.kv = torch.empty(work.cache_shape)
        self.kv.normal_(generator=torch.Generator().manual_seed(rank))
        order = np.random.default_rng(rank).permutation(2 * work.num_blocks)
        self.blocks = order[: work.num_blocks].astype(np.int32)
        self._buffer = torch.full((work.num_bytes,), rank, dtype=torch.uint8)
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

    def fingerprint(self) -> str:
        """Return a hash of the blocks' bytes, in the order of the sequence."""
        blocks = self.kv[:, :, torch.from_numpy(self.blocks).long()]
        return hashlib.sha256(blocks.numpy().data).hexdigest()


async def run_destination(work: Work, folder: Path) -> None:
    """Execute commands from stdin (expect, bare, fingerprint). Reply with JSON lines on stdout."""
    side = Side(DESTINATION, work, folder)

    def done(reason: str, num_bytes: int) -> None:
        reply({"reason": reason, "bytes": num_bytes, "cpu": time.process_time()})

    destination = load_adapter().Destination(side.kv, HOST, SECONDS, done)
    server = grpc.aio.server()
    port = server.add_insecure_port(f"{HOST}:0")
    transfer_pb2_grpc.add_TransferServicer_to_server(destination.servicer, server)  # type: ignore[no-untyped-call]
    await server.start()
    reply({"address": f"{HOST}:{port}"})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        match line.strip():
            case "expect":
                epoch = destination.open(work.num_tokens, side.blocks)
                reply({"epoch": epoch, "cpu": time.process_time()})
            case "bare":
                await asyncio.to_thread(side.bare)
                reply({"cpu": time.process_time()})
            case "fingerprint":
                reply({"fingerprint": side.fingerprint()})
    destination.stop()
    await server.stop(0)


def reply(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


class DestinationProcess:
    """Handle of the destination process, which the source process uses."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, work: Work, folder: Path) -> "DestinationProcess":
        arguments = ["-P", str(PROGRAM), json.dumps(dataclasses.asdict(work)), str(folder)]
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
        """Return the next reply. Raises TransferFailed if the process ended."""
        assert self._process.stdout is not None
        async with asyncio.timeout(SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise TransferFailed("the destination process ended before its reply")
        message: dict[str, Any] = json.loads(line)
        return message

    async def stop(self) -> None:
        self._process.kill()
        await self._process.wait()


@dataclasses.dataclass(slots=True)
class Times:
    """Times in seconds: wall time of each counted round, and CPU time of both processes."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)


async def measure(work: Work) -> dict[str, Any]:
    """Measure transfers and bare gloo alternately.

    Raises TransferFailed if a transfer fails or changes a byte.
    """
    with tempfile.TemporaryDirectory() as folder:
        destination = await DestinationProcess.start(work, Path(folder))
        try:
            side = Side(SOURCE, work, Path(folder))
            address = (await destination.answer())["address"]
            return await _alternate(side, destination, address)
        finally:
            await destination.stop()


async def _alternate(side: Side, destination: DestinationProcess, address: str) -> dict[str, Any]:
    adapter, work = load_adapter(), side.work
    source = adapter.Source(side.kv, HOST, SECONDS)
    theirs = 0.0

    async def transfer() -> float:
        destination.request("expect")
        epoch = (await destination.answer())["epoch"]
        await source.send(address, epoch, work.num_tokens, side.blocks)
        result = await destination.answer()
        if result["reason"] or result["bytes"] != work.num_bytes:
            raise TransferFailed(
                f"a transfer of {work.num_bytes} bytes failed; its result is {result}"
            )
        return float(result["cpu"])

    async def bare() -> float:
        destination.request("bare")
        await asyncio.to_thread(side.bare)
        return float((await destination.answer())["cpu"])

    async def timed(step: Callable[[], Awaitable[float]], times: Times, counts: bool) -> None:
        nonlocal theirs
        wall, cpu = time.perf_counter(), time.process_time() + theirs
        theirs = await step()
        if counts:
            times.wall.append(time.perf_counter() - wall)
            times.cpu.append(time.process_time() + theirs - cpu)

    found = {"transfer": Times(), "bare": Times()}
    for round_number in range(work.rounds + WARM_UPS):
        counts = round_number >= WARM_UPS
        await timed(bare, found["bare"], counts)
        await timed(transfer, found["transfer"], counts)
    fingerprint = side.fingerprint()
    destination.request("fingerprint")
    if (await destination.answer())["fingerprint"] != fingerprint:
        raise TransferFailed(
            "the received blocks differ from the sent blocks: their fingerprints are not equal"
        )
    source.stop()
    return {
        "bytes": work.num_bytes,
        "message_bytes": adapter.MESSAGE_BYTES,
        "fingerprint": fingerprint,
        **{name: dataclasses.asdict(times) for name, times in found.items()},
    }


def load_adapter() -> Any:
    """Return the adapter for the tree from which this process imports Penstock."""
    workers = Path(penstock.__file__).parent / "workers"
    name = "on_kv_transfer" if (workers / "kv_transfer").is_dir() else "on_transfer"
    # The module is loaded by path, because this folder does not belong to the imported tree.
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    return adapter


def main() -> None:
    """Run one process. The docstring of this module describes the arguments."""
    work = Work(**json.loads(sys.argv[1]))
    if sys.argv[2:]:
        asyncio.run(run_destination(work, Path(sys.argv[2])))
    else:
        reply(asyncio.run(measure(work)))


if __name__ == "__main__":
    main()
