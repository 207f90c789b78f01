"""What compiled kernels are held to."""

from penstock.kernels.triton_common.aot import AotCase
from penstock.kernels.triton_common.launch import DeviceInfo
from tests.aot.compiling import Artefact

LEAST_WIDE = 0.5
"""Of what a streaming kernel's instructions read; offsets and the like come in smaller pieces."""


def complaints(artefact: Artefact, kernel: str, case: AotCase, chip: DeviceInfo) -> list[str]:
    """Why this kernel, in this case and for this chip, is not good enough; empty where it is."""
    found = []
    if artefact.spilled:
        found.append(f"spills: {artefact.spilled} bytes of registers go to memory and back")
    if artefact.shared_bytes > chip.shared_bytes:
        limit = f"{chip.shared_bytes} that {chip.name} has"
        found.append(f"shared memory: {artefact.shared_bytes} bytes, more than the {limit}")
    if kernel in case.products and not artefact.tensor_core:
        found.append("a product without tensor cores")
    if kernel in case.streams and artefact.wide_share < LEAST_WIDE:
        share = f"{artefact.wide_share:.0%} of what it reads"
        found.append(f"a streaming kernel that reads 16 bytes at a time only for {share}")
    return found
