"""An AOT case: one call of an operation, whose Triton kernels `make aot` compiles without a GPU.

`tests/aot/cases` has one file per folder of `kernels/`. A case calls the operation with tensors on
the "meta" device, so its kernels are compiled with the tiles, the alignment and the other options
that the launcher chooses for these tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.triton_common.launch import DeviceInfo

KB = 1 << 10

SM_80 = DeviceInfo("sm_80", shared_bytes=163 * KB)
SM_89 = DeviceInfo("sm_89", shared_bytes=99 * KB)
SM_90 = DeviceInfo("sm_90", shared_bytes=227 * KB)
SM_100 = DeviceInfo("sm_100", shared_bytes=227 * KB)
GFX942 = DeviceInfo("gfx942", shared_bytes=64 * KB, warp_size=64)

CHIPS = (SM_80, SM_89, SM_90, SM_100, GFX942)


@dataclass(frozen=True, slots=True)
class AotCase:
    """One call of an operation, with the shapes and dtypes of an existing model.

    The call must launch every kernel that `products` and `streams` name.
    """

    name: str  # name of the configuration, such as "llama 8b, bf16"
    call: Callable[[], object]
    products: tuple[str, ...] = ()  # names of kernels that must use tensor cores
    streams: tuple[str, ...] = ()  # names of kernels that must move 16 bytes per access
    chips: tuple[DeviceInfo, ...] = CHIPS  # GPU types for which the kernels are compiled
    # whether a GPU has the units that the kernels need; otherwise they are not compiled for it
    supports: Callable[[DeviceInfo], bool] = lambda chip: True

    @property
    def targets(self) -> list[DeviceInfo]:
        """GPU types of `chips` that support the kernels."""
        return [chip for chip in self.chips if self.supports(chip)]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return an argument of a kernel: a tensor on the "meta" device, which has no data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def kernel_name(kernel: Any) -> str:
    """Return the name of a kernel, as used in `products` and `streams`."""
    return str(kernel.__name__)
