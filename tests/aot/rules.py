"""Rules for compiled kernels: spills, shared memory, use of tensor cores, and wide loads."""

from penstock.kernels.triton_common.launch import DeviceInfo
from tests.aot.case import AotCase
from tests.aot.compiling import Artefact

MIN_WIDE_SHARE = 0.5
"""Share of a streaming kernel's reads that must be 16-byte loads; the rest are offsets, scalars."""


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
    return found
