"""Workers without a model: ranks in this process, each with its shard of one KV cache.

KV transfers between these workers use real rank pairs. No model is run.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
import torch

from penstock.protos import transfer_pb2_grpc
from penstock.workers.kv_transfer.protocol.messages import Peer
from penstock.workers.kv_transfer.protocol.receive import ExpectedTransfer, TransferResult
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.kv_transfer.rank_endpoints import RankEndpoints
from penstock.workers.kv_transfer.rank_mover import Movers, RankMover
from penstock.workers.kv_transfer.receiver import KvReceiver
from penstock.workers.kv_transfer.sender import KvSender
from penstock.workers.kv_transfer.shards import LayerHeadRange
from penstock.workers.kv_transfer.staging import KvStaging, WorkerIdentity
from penstock.workers.parallel.mesh import Mesh

LAYERS, DIM, POSITIONS = 5, 3, 96
SECONDS = 20.0


def rectangles(mesh: Mesh, heads: int) -> list[LayerHeadRange]:
    found = []
    for rank in range(mesh.num_ranks):
        place = mesh.coord(rank)
        layers, first = place.layers(LAYERS), heads * place.tp_rank // mesh.tp
        num = max(1, heads // mesh.tp)
        found.append(LayerHeadRange(layers.start, layers.stop, first, first + num))
    return found


class Blocks:
    """The KV blocks of all ranks of a worker, and their transfer endpoints.

    `heads` = 0 means MLA, with one cache row per position.
    """

    def __init__(
        self, seed: int, mesh: Mesh, size: int, heads: int = 4, seconds: float = SECONDS
    ) -> None:
        sides, num_heads = (2, heads) if heads else (1, 1)
        generator = torch.Generator().manual_seed(seed)
        shape = (LAYERS, sides, POSITIONS // size, num_heads, size, DIM)
        self.size, self.seconds = size, seconds
        self.before = torch.randn(shape, generator=generator)
        self.rectangles = rectangles(mesh, num_heads)
        self.caches = [cut(self.before, part) for part in self.rectangles]
        parts = zip(self.caches, self.rectangles, strict=True)
        self.stagings = [KvStaging(cache, part) for cache, part in parts]
        movers = [RankMover(each, "127.0.0.1", seconds) for each in self.stagings]
        self.movers = Movers(movers[0], movers[1:])

    def hold(self, whole: torch.Tensor) -> bool:
        """Return True if each rank's cache equals its shard of `whole`."""
        pairs = zip(self.caches, self.rectangles, strict=True)
        return all(torch.equal(cache, cut(whole, part)) for cache, part in pairs)


def cut(whole: torch.Tensor, part: LayerHeadRange) -> torch.Tensor:
    heads = slice(part.first_head, part.last_head)
    return whole[part.first_layer : part.last_layer, :, :, heads].clone()


def positions(whole: torch.Tensor, blocks: Sequence[int], start: int, stop: int) -> torch.Tensor:
    """Return positions [start, stop) of `blocks`: [layers, sides, heads, positions, features]."""
    return whole[:, :, list(blocks)].movedim(2, 3).flatten(3, 4)[:, :, :, start:stop]


def moved(
    target: "Blocks", source: "Blocks", ours: Sequence[int], theirs: Sequence[int], length: int
) -> torch.Tensor:
    """Return the target's expected cache after a transfer of positions [0, length)."""
    flat = target.before[:, :, list(ours)].movedim(2, 3).flatten(3, 4).clone()
    flat[:, :, :, :length] = positions(source.before, theirs, 0, length)
    whole = target.before.clone()
    whole[:, :, list(ours)] = torch.unflatten(flat, 3, (-1, target.size)).movedim(3, 2)
    return whole


@dataclass
class Sides:
    """A sender and a served receiver, with the results of transfers and the epochs already read."""

    source: KvSender
    destination: KvReceiver
    peer: Peer
    verdicts: list[TransferResult] = field(default_factory=list)
    # Epochs whose blocks the source has read completely.
    read: list[int] = field(default_factory=list)

    def expect(self, stop: int, blocks: Sequence[int]) -> int:
        numbers = np.array(blocks, np.int32)
        expected = ExpectedTransfer("r", 7, 2, ("s", "i"), 0, stop, numbers)
        return self.destination.open(expected, self.verdicts.append)

    async def send(self, epoch: int, stop: int, blocks: Sequence[int]) -> None:
        outgoing = OutgoingTransfer("r", 7, 2, epoch, 0, stop, np.array(blocks, np.int32))
        await self.source.send(self.peer, outgoing, lambda: self.read.append(epoch))

    async def verdict(self, num: int = 1) -> TransferResult:
        """Wait until `num` results were reported; return result number `num`."""
        await eventually(lambda: len(self.verdicts) >= num)
        return self.verdicts[num - 1]


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def sides(source: Blocks, destination: Blocks, name: str = "d") -> AsyncIterator[Sides]:
    given = WorkerIdentity(name, "inc", "layout", "127.0.0.1", "secret")
    taking = KvReceiver(given, RankEndpoints(destination.movers), destination.seconds)
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    transfer_pb2_grpc.add_TransferServicer_to_server(taking, server)  # type: ignore[no-untyped-call]
    await server.start()
    own = WorkerIdentity("s", "i", "layout", "127.0.0.1", "")
    sending = KvSender(own, RankEndpoints(source.movers), source.seconds)
    yield Sides(sending, taking, Peer(name, "inc", f"127.0.0.1:{port}", "secret"))
    sending.stop()
    taking.stop()
    await server.stop(0)


class Held:
    """Blocks all calls of one method of an object until `open` is called."""

    def __init__(self, owner: object, method: str) -> None:
        self.num_calls = 0
        self._opened = threading.Event()
        original = getattr(owner, method)

        def held(*args: object) -> object:
            self.num_calls += 1
            assert self._opened.wait(60)
            return original(*args)

        setattr(owner, method, held)

    def open(self) -> None:
        self._opened.set()

    async def reached(self) -> None:
        await eventually(lambda: self.num_calls)
