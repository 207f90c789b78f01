"""Cases for `make aot`, which compiles the Triton kernels ahead of time, without a GPU.

Every file with a Triton kernel defines `aot_cases`. A case calls the real launcher with tensors on
the "meta" device, so the kernel is compiled with the tiles, the alignment and the other options
that the launcher chooses for these tensors.
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
    """One call of a launcher, with the shapes and dtypes of an existing model.

    The call must launch every kernel that `products` and `streams` name.
    """

    name: str  # name of the configuration, such as "llama 8b, bf16"
    call: Callable[[], object]
    products: tuple[str, ...] = ()  # names of kernels that must use tensor cores
    streams: tuple[str, ...] = ()  # names of kernels that must move 16 bytes per access
    chips: tuple[DeviceInfo, ...] = CHIPS  # chips to compile for


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without data, on the "meta" device, as an argument for a case."""
    return torch.empty(shape, dtype=dtype, device="meta")


def kernel_name(kernel: Any) -> str:
    """Return the name of a kernel, as used in `products` and `streams`."""
    return str(kernel.__name__)
