"""Rules for compiled kernels: resources, tensor cores, wide loads and pipelined copies."""

from penstock.kernels.triton_common.launch import DeviceInfo
from tests.aot.case import AotCase
from tests.aot.compiling import Artefact

MIN_WIDE_SHARE = 0.5
"""Smallest allowed share of 16-byte loads in the bytes that a streaming kernel reads. The other
loads read offsets and scalars."""

MIN_RESIDENT_WARPS = 8
"""Number of warps that must fit on a multiprocessor: two for each of its four schedulers."""

DEEP = 4
"""Number of copies in flight from which on fewer warps are enough: two tiles ahead, with two copies
per tile."""


def complaints(artefact: Artefact, kernel: str, case: AotCase, chip: DeviceInfo) -> list[str]:
    """Return a message for each rule that this kernel breaks."""
    found = []
    if artefact.spilled:
        found.append(f"spills: {artefact.spilled} bytes of registers in local memory")
    if artefact.shared_bytes > chip.shared_bytes:
        found.append(
            f"shared memory: {artefact.shared_bytes} bytes, but {chip.name} has {chip.shared_bytes}"
        )
    if kernel in case.products and not artefact.tensor_core:
        found.append("does not use tensor cores")
    if kernel in case.streams and artefact.wide_share < MIN_WIDE_SHARE:
        found.append(f"reads only {artefact.wide_share:.0%} of its bytes with 16-byte loads")
    if kernel in case.products and chip.is_cuda:
        found += _unhidden_latency(artefact, chip)
    return found


def _unhidden_latency(artefact: Artefact, chip: DeviceInfo) -> list[str]:
    """Return messages for loads whose latency is not hidden by other warps or by early copies."""
    found = []
    for loop in artefact.loops:
        if loop.buffers < 2:
            found.append(
                f"copies not pipelined: {loop.buffers} buffers of a tile in a loop, at least 2 "
                "expected (more stages, or an address that the same iteration loads?)"
            )
        elif loop.in_flight < 1:
            found.append("copies not pipelined: a loop waits for all copies in every iteration")
    deep = all(loop.in_flight >= DEEP for loop in artefact.loops)
    if not deep and (warps := artefact.resident_warps(chip)) < MIN_RESIDENT_WARPS:
        found.append(
            f"{warps} warps on a multiprocessor of {chip.name}, at least {MIN_RESIDENT_WARPS} "
            f"expected: {artefact.registers} registers and {artefact.shared_bytes} bytes of "
            f"shared memory with {artefact.num_warps} warps"
        )
    return found
