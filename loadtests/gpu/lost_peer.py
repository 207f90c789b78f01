"""KV transfer whose source is killed: the destination must survive and receive from a new source.

The destination receives a message, waits for another, and the parent then kills the source. The
wait must fail, the pair must be released, and a transfer from a second source must succeed.

The test runs over gloo with tensors on the CPU. On a machine with GPUs, it also runs over NCCL, on
two GPUs if there are two. A single GPU is used by all processes. NCCL accepts this only if each
process claims to be a separate host. If NCCL still refuses, the result says that NCCL was not run.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from penstock.loadtests.gpu.transfer_process import (
    RELEASE_SECONDS,
    Child,
    connected_stores,
    finish,
    release,
    write_line,
)
from penstock.workers.kv_transfer.transport import DESTINATION, SOURCE, PairBroken, RankPair

MODULE = "penstock.loadtests.gpu.lost_peer"
# Timeout of the rendezvous. It is long, because the other process may still be starting.
CONNECT_SECONDS = 20.0
LOST_SECONDS = 5.0  # timeout of an operation, the same as in a worker
ALL_SECONDS = 36.0  # time limit of all processes, in seconds
MESSAGE_BYTES = 1 << 20
FIRST, SECOND = 0, 1
"""Numbers of the two sources, and of their pairs with the destination."""


def message(number: int, device: torch.device) -> torch.Tensor:
    """Return the message of source `number`. All processes compute the same message."""
    generator = torch.Generator().manual_seed(number)
    values = torch.randint(256, (MESSAGE_BYTES,), generator=generator, dtype=torch.uint8)
    return values.to(device)


def run_source(number: int, device: torch.device) -> dict[str, Any]:
    """Send one message. The first source then waits until the parent kills it."""
    store = connected_stores([number], CONNECT_SECONDS)[number]
    pair = RankPair(SOURCE, store, device, "127.0.0.1", LOST_SECONDS)
    pair.connected().result(CONNECT_SECONDS)
    finish(pair.send(message(number, device)))
    if number == FIRST:
        sys.stdin.close()
        time.sleep(10 * ALL_SECONDS)
    release(pair, SOURCE)
    return {"sent": MESSAGE_BYTES}


def run_destination(device: torch.device) -> dict[str, Any]:
    """Receive from the first source until it is killed, and then from the second one."""
    stores = connected_stores([FIRST, SECOND], CONNECT_SECONDS)
    pair = RankPair(DESTINATION, stores[FIRST], device, "127.0.0.1", LOST_SECONDS)
    try:
        pair.connected().result(CONNECT_SECONDS)
    except PairBroken as error:
        return {"not_connected": str(error)}
    figures: dict[str, Any] = {"first": _receives(pair, FIRST, device)}
    buffer = torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    waiting = pair.receive(buffer)
    write_line({"waiting": True})  # the parent kills the source when it has read this line
    began = time.monotonic()
    try:
        finish(waiting)
    except PairBroken as error:
        figures |= {"error": str(error), "lost_seconds": time.monotonic() - began}
        pair.keep(buffer)
    began = time.monotonic()
    pair.close().result(RELEASE_SECONDS)
    figures["release_seconds"] = time.monotonic() - began
    began = time.monotonic()
    other = RankPair(DESTINATION, stores[SECOND], device, "127.0.0.1", LOST_SECONDS)
    other.connected().result(CONNECT_SECONDS)
    figures["second"] = _receives(other, SECOND, device)
    figures["recovery_seconds"] = time.monotonic() - began
    release(other, DESTINATION)
    return figures


def _receives(pair: RankPair, number: int, device: torch.device) -> bool:
    """Receive a message and return whether it is the message of source `number`."""
    buffer = torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    finish(pair.receive(buffer))
    return torch.equal(buffer, message(number, device))


def run_processes(devices: tuple[str, str], hosts: bool) -> dict[str, Any]:
    """Run the three processes.

    Returns the figures of the destination, and `failures`.

    Args:
        devices: devices of the sources and of the destination.
        hosts: whether each process claims to be a separate host, for NCCL on one GPU.
    """

    def start(role: str, device: str) -> Child:
        environment = {"NCCL_HOSTID": f"penstock-{role}"} if hosts else {}
        return Child(MODULE, ["--role", role, "--device", device], environment)

    ends = time.monotonic() + ALL_SECONDS
    destination = start("destination", devices[1])
    sources = [start(str(number), devices[0]) for number in (FIRST, SECOND)]
    thread = destination.relay(dict(enumerate(sources)))
    for source in sources:
        source.relay({FIRST: destination, SECOND: destination})
    destination.reported.wait(max(0.0, ends - time.monotonic()))
    sources[FIRST].process.kill()
    code = destination.end(ends)
    for source in sources:
        source.end(0.0)
    thread.join(1.0)  # wait until the thread has read the last report
    figures = dict(destination.figures)
    if code == 0 and "not_connected" in figures and hosts:
        return {"not_run": figures["not_connected"], "failures": []}
    return figures | {"failures": failures_of(code, figures)}


def failures_of(code: int | str, figures: Mapping[str, Any]) -> list[str]:
    """Return a message for each failure of the destination."""
    if code:
        return [f"the destination ended with {code}: {figures.get('raised', 'no report')}"]
    if "not_connected" in figures:
        return [f"the destination did not connect: {figures['not_connected']}"]
    failures = [
        f"the message of the {name} source did not arrive intact"
        for name in ("first", "second")
        if not figures.get(name)
    ]
    if "error" not in figures:
        failures.append("the receive from the killed source did not fail")
    return failures


def measure(device: str) -> dict[str, Any]:
    """Run the test over gloo, and over NCCL if there is a GPU."""
    with ThreadPoolExecutor() as pool:
        runs = {"gloo": pool.submit(run_processes, ("cpu", "cpu"), hosts=False)}
        if device == "cuda":
            two = torch.cuda.device_count() >= 2
            devices = ("cuda:0", "cuda:1" if two else "cuda:0")
            name = "NCCL on two GPUs" if two else "NCCL on one GPU"
            runs[name] = pool.submit(run_processes, devices, hosts=not two)
        found = {name: run.result() for name, run in runs.items()}
    failures = [
        f"lost peer, {name}: {each}" for name, run in found.items() for each in run.pop("failures")
    ]
    return {**found, "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--role", choices=("destination", str(FIRST), str(SECOND)), required=True)
    parser.add_argument("--device", type=torch.device, required=True)
    given = parser.parse_args()
    try:
        if given.role == "destination":
            write_line(run_destination(given.device))
        else:
            write_line(run_source(int(given.role), given.device))
    except Exception as error:
        write_line({"raised": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
