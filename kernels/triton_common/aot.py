"""What is compiled ahead of time, to be sure of it without the device: see `make aot`.

Every file with a kernel yields its cases. A case calls the launcher itself, with tensors on the
"meta" device: what is compiled is what the launcher would have launched, tiles, alignment and all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.triton_common.launch import DeviceInfo

KB = 1 << 10

SM_80 = DeviceInfo("sm_80", num_cores=108, shared_bytes=163 * KB)
SM_89 = DeviceInfo("sm_89", num_cores=142, shared_bytes=99 * KB)
SM_90 = DeviceInfo("sm_90", num_cores=132, shared_bytes=227 * KB)
SM_100 = DeviceInfo("sm_100", num_cores=148, shared_bytes=227 * KB)
GFX942 = DeviceInfo("gfx942", num_cores=304, shared_bytes=64 * KB, warp_size=64)

CHIPS = (SM_80, SM_89, SM_90, SM_100, GFX942)
E4M3_CHIPS = tuple(chip for chip in CHIPS if chip.converts_e4m3)


@dataclass(frozen=True, slots=True)
class AotCase:
    """One call of a launcher in a configuration that models really have.

    products and streams name kernels by their function: those that must use tensor cores, and
    those that must move 16 bytes at a time. All must be launched by the call.
    """

    name: str  # of the configuration, such as "llama 8b, bf16"
    call: Callable[[], object]
    products: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    chips: tuple[DeviceInfo, ...] = CHIPS


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory, as an argument of a case."""
    return torch.empty(shape, dtype=dtype, device="meta")


def kernel_name(kernel: Any) -> str:
    """Its function's, as `products` and `streams` have it."""
    return str(kernel.__name__)
