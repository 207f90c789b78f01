"""Broadcasts step plans from rank 0 to the other ranks of a worker.

Ranks on the node of rank 0 read the plans from shared memory. Ranks on other nodes receive the
plans over gloo between the hosts, even if the ranks use GPUs. An empty message marks the end.
"""

import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from penstock.workers.parallel.collectives import RankLost
from penstock.workers.parallel.communicator import Communicator, connect, first_sentence
from penstock.workers.parallel.shm_ring import ShmRingReader, ShmRingWriter

# Maximum number of unread messages: a power of two, and larger than the number of plans in flight.
NUM_SLOTS = 32
# No timeout: an idle worker may send nothing for a long time. If a peer exits, its socket fails.
_FOR_EVER = timedelta(days=365)


class PlanReader(Protocol):
    """Receiving side of the broadcast."""

    def read(self) -> bytes:
        """Wait for the next message and return it; raise `RankLost` if rank 0 is lost."""
        ...


class PlanWriter:
    """Sending side of the broadcast, in rank 0."""

    def __init__(self, ring: ShmRingWriter | None, remote: Sequence["RemoteWriter"]) -> None:
        self._ring = ring
        self._remote = remote
        self._lock = threading.Lock()

    def write(self, message: bytes) -> None:
        """Send a message to all other ranks, from any thread; raise `RankLost` if one is lost."""
        with self._lock:
            for one in self._remote:
                one.write(message)
            if self._ring is not None:
                self._ring.write(message)

    def end(self) -> None:
        """Send the end marker."""
        self.write(b"")


class RemoteWriter:
    """Sends messages to one rank on another node."""

    def __init__(self, communicator: Communicator, rank: int, seconds: float) -> None:
        self._communicator = communicator
        self._rank = rank
        self._timeout = timedelta(seconds=seconds)
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []

    def write(self, message: bytes) -> None:
        size = torch.tensor([len(message)])
        tensors = [size]
        if message:
            tensors.append(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        try:
            for work, _ in self._sending:
                work.wait(self._timeout)
            self._sending = [
                (self._communicator.send([tensor], self._rank, 0), tensor) for tensor in tensors
            ]
        except RuntimeError as error:
            raise RankLost(first_sentence(error)) from error


class RemoteReader:
    """Receives messages from one rank (default: rank 0) on another node."""

    def __init__(self, communicator: Communicator, rank: int = 0) -> None:
        self._communicator = communicator
        self._rank = rank

    def read(self) -> bytes:
        (size,) = self._receive(torch.zeros(1, dtype=torch.int64)).tolist()
        if not size:
            return b""
        return self._receive(torch.empty(size, dtype=torch.uint8)).numpy().tobytes()

    def _receive(self, into: torch.Tensor) -> torch.Tensor:
        try:
            self._communicator.recv([into], self._rank, 0).wait(_FOR_EVER)
        except RuntimeError as error:
            raise RankLost(first_sentence(error)) from error
        return into


class LocalReader:
    """Receives messages from rank 0 through shared memory.

    The reader also keeps the communicator of all ranks, if there is one. Otherwise it would be
    closed while other ranks still connect to it, and their connecting would fail.
    """

    def __init__(self, ring: ShmRingReader, communicator: Communicator | None) -> None:
        self._ring = ring
        self._communicator = communicator

    def read(self) -> bytes:
        return self._ring.read()


def node_name() -> str:
    """Return a name that is equal in two processes only if they can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        # Shared memory is used on Linux only, so no other process of this machine has this name.
        return f"process {os.getpid()}"
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


def connect_plan_writer(
    store: Store, num_ranks: int, max_bytes: int, node: str, host: str, seconds: float
) -> PlanWriter:
    """Create rank 0's side of the broadcast; wait until the other ranks have connected.

    Args:
        max_bytes: Maximum size of a message.
        node: Result of `node_name` in this process.
        seconds: Timeout of each write.
    """
    near = [rank for rank in range(1, num_ranks) if _get_text(store, f"node {rank}") == node]
    far = [rank for rank in range(1, num_ranks) if rank not in near]
    ring = ShmRingWriter(len(near), NUM_SLOTS, max_bytes, seconds) if near else None
    info = {"readers": near, "pid": os.getpid()}
    if ring is not None:
        info |= {"path": ring.path, "shape": ring.shape}
    store.set("plans", json.dumps(info))
    communicator = connect_hosts(store, "plans", 0, num_ranks, host) if far else None
    for rank in near:
        _get_text(store, f"reads {rank}")
    if ring is not None:
        ring.close()
    return PlanWriter(ring, [RemoteWriter(communicator, rank, seconds) for rank in far]
                      if communicator else [])  # fmt: skip


def connect_plan_reader(
    store: Store, rank: int, num_ranks: int, node: str, host: str
) -> PlanReader:
    """Create the reader of a rank other than 0; `node` is the `node_name` of this process."""
    store.set(f"node {rank}", node)
    info = json.loads(_get_text(store, "plans"))
    far = len(info["readers"]) < num_ranks - 1
    communicator = connect_hosts(store, "plans", rank, num_ranks, host) if far else None
    if rank not in info["readers"]:
        assert communicator is not None
        return RemoteReader(communicator)
    index = info["readers"].index(rank)
    ring = ShmRingReader(info["path"], tuple(info["shape"]), index, _liveness_check(info["pid"]))
    store.set(f"reads {rank}", "yes")
    return LocalReader(ring, communicator)


def connect_hosts(store: Store, name: str, rank: int, num_ranks: int, host: str) -> Communicator:
    """Create a gloo communicator between the hosts of all ranks, without an idle timeout."""
    prefixed = PrefixStore(name, store)
    return connect("gloo", prefixed, rank, num_ranks, host, _FOR_EVER.total_seconds())


def _get_text(store: Store, key: str) -> str:
    return store.get(key).decode()


def _liveness_check(pid: int) -> Callable[[], bool]:
    """Return a function: True while process `pid` runs, then False, even if its id is reused."""
    import psutil  # imported here because single-GPU installations may lack it, see docs/gpu.md

    process = psutil.Process(pid)

    def is_alive() -> bool:
        with suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    return is_alive
