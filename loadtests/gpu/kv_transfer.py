"""KV transfer test: two processes on one GPU transfer blocks over NCCL; every byte is compared.

NCCL refuses two ranks of a communicator on the same GPU of one host, so each process pretends to be
a separate host (NCCL_HOSTID). NCCL then uses sockets. The test therefore checks correctness; its
speed is not that of two GPUs.

A second test kills the source of a transfer: see `lost_peer`.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.kernels.fallback import fallback_counts, forbid_fallback
from penstock.kernels.kv_cache.checksum import checksum
from penstock.loadtests.gpu import lost_peer
from penstock.loadtests.gpu.options import read_options
from penstock.loadtests.gpu.sections import write_figures
from penstock.loadtests.gpu.transfer_process import (
    Child,
    connected_stores,
    finish,
    release,
    write_line,
)
from penstock.workers.engine.warm_up import warm_up_block_moves
from penstock.workers.kv_transfer.shards import LayerHeadRange, Shard
from penstock.workers.kv_transfer.staging import KvStaging
from penstock.workers.kv_transfer.transport import DESTINATION, SOURCE, RankPair

SECONDS = 30.0  # seconds for which each process waits for the other one
ALL_SECONDS = 36.0  # time limit in seconds of both processes, including their starts
FULL = (32, 8, 16, 128, 256)
SMALL = (2, 2, 4, 8, 16)
"""Shape of the KV cache: layers, heads, block size, head dim, number of blocks."""


def kv_cache(device: torch.device, small: bool, seed: int) -> torch.Tensor:
    """Return a random KV cache: [layers, 2, blocks, heads, block_size, head_dim] float16.

    The values depend on the seed, but not on the device. Only one layer is random, because making
    gigabytes of random values on the host takes long. Each of the other layers is computed from the
    random layer on the device, and differs from that layer in every value.
    """
    layers, heads, block_size, head_dim, num_blocks = SMALL if small else FULL
    shape = (1, 2, num_blocks, heads, block_size, head_dim)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)
    masks = torch.arange(layers, dtype=torch.int16, device=device) * 257
    return (values.to(device) ^ masks.view(-1, 1, 1, 1, 1, 1)).view(torch.float16)


def sides_blocks(num_blocks: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return random ids of the blocks to send, and of the destination's blocks to write."""
    rng = np.random.default_rng(3)
    half = num_blocks // 2
    return (
        rng.permutation(num_blocks)[:half].astype(np.int32),
        rng.permutation(num_blocks)[:half].astype(np.int32),
    )


def run_side(rank: int, device: torch.device, small: bool) -> dict[str, Any]:
    """Run one of the two processes.

    The rank SOURCE sends blocks, and the rank DESTINATION receives and compares them.
    """
    store = connected_stores([0], SECONDS)[0]
    kv = kv_cache(device, small, seed=rank)
    warm_up_block_moves(kv)  # workers also do this at their start
    rectangle = LayerHeadRange(0, kv.shape[0], 0, kv.shape[3])
    staging = KvStaging(kv, rectangle)
    sent, received = sides_blocks(kv.shape[2])
    shard = Shard(rectangle, 0, len(sent) * kv.shape[4])
    pair = RankPair(rank, store, device, "127.0.0.1", SECONDS)
    pair.connected().result(SECONDS)
    began = time.monotonic()
    if rank == SOURCE:
        message = staging.gather(sent, shard)
        finish(pair.send(message))
        seconds = time.monotonic() - began
        release(pair, rank)
        return {"bytes": len(message), "seconds": seconds, "checksum": hex(checksum(message))}
    buffer = staging.empty(len(sent) * kv[:, :, 0].numel() * kv.element_size())
    finish(pair.receive(buffer))
    staging.scatter(received, shard, buffer)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.monotonic() - began
    release(pair, rank)
    expected = kv_cache(device, small, seed=DESTINATION)
    source = kv_cache(device, small, seed=SOURCE)
    expected[:, :, torch.from_numpy(received).long()] = source[:, :, torch.from_numpy(sent).long()]
    same = torch.equal(kv.view(torch.int16), expected.view(torch.int16))
    found = hex(checksum(buffer))
    return {"bytes": len(buffer), "seconds": seconds, "same": same, "checksum": found}


def measure(device: str, small: bool) -> dict[str, Any]:
    """Run both processes and check their results."""
    sides = [
        Child(__spec__.name, _arguments(rank, device, small), {"NCCL_HOSTID": f"penstock-{rank}"})
        for rank in (SOURCE, DESTINATION)
    ]
    threads = [sides[0].relay({0: sides[1]}), sides[1].relay({0: sides[0]})]
    ends = time.monotonic() + ALL_SECONDS
    codes = [side.end(ends) for side in sides]
    for thread in threads:
        thread.join(1.0)
    source, destination = (side.figures for side in sides)
    failures = [f"side {rank} ended with {code}" for rank, code in enumerate(codes) if code]
    if not failures and not destination.get("same"):
        failures.append("the received blocks differ from the sent ones")
    if not failures and source["checksum"] != destination["checksum"]:
        failures.append("the checksums of the two sides differ")
    for rank, figures in enumerate((source, destination)):
        if figures.get("plain_forms"):
            failures.append(f"side {rank} used kernel fallbacks: {figures['plain_forms']}")
    return {"source": source, "destination": destination, "failures": failures}


def _arguments(rank: int, device: str, small: bool) -> list[str]:
    return ["--side", str(rank), "--device", device, *(["--small"] if small else [])]


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--side", type=int)
    side, others = parser.parse_known_args()
    if side.side is None:
        options = read_options("kv_transfer")
        figures = measure(options.device.type, options.small)
        write_figures(options.json, figures)
        lost = lost_peer.measure(options.device.type)
        failures = figures["failures"] + lost.pop("failures")
        write_figures(options.json, figures | {"lost_peer": lost, "failures": failures})
        return 0
    options = read_options("kv_transfer", [*others, "--json", str(Path(os.devnull))])
    with forbid_fallback(options.device):
        figures = run_side(side.side, options.device, options.small)
    write_line(figures | {"plain_forms": fallback_counts()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
