"""Launches Triton kernels: the functions that all launchers share.

Triton kernels run on CUDA and ROCm devices. For tests, TRITON_INTERPRET=1 in the environment makes
the launchers run the kernels on the CPU, where Triton interprets the kernels with numpy. In all
other cases, a launcher runs its CPU version for tensors on a CPU; triton need not be installed.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.fallback import check_device

try:
    import triton
    from triton import language

    tl: Any = language
except ImportError:  # serving on a CPU does not need triton
    triton = None

    class Names:
        """Stand-in for `triton.language` with the names that kernel signatures use."""

        constexpr = Any

    tl = Names

if triton is not None:
    from penstock.kernels.triton_common.kernel_cache import use_seed

    use_seed()

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
"""True if kernels are interpreted on the CPU. Triton reads the variable when it is imported."""


def jit(function: Callable[..., Any] | None = None, *, unspecialized: Sequence[str] = ()) -> Any:
    """Decorate a kernel with `triton.jit`; return it unchanged if triton is not installed.

    Args:
        function: the kernel, if the decorator is used without arguments.
        unspecialized: names of arguments for which Triton must not specialize the kernel: integers
            that differ between steps, and tensors that are not always aligned to 16 bytes. With
            specialization, Triton would compile the kernel again during serving. This happens when
            an integer is first 1 or a multiple of 16, or when a tensor is first unaligned.
    """
    if function is None:
        return lambda function: jit(function, unspecialized=unspecialized)
    if triton is None:
        return function
    return triton.jit(function, do_not_specialize=list(unspecialized))


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Properties of a device by which a launcher chooses its tiles."""

    name: str  # for example sm_90, gfx942 or interpreter
    shared_bytes: int  # maximum shared memory of one program, in bytes
    warp_size: int = 32
    # name of the product, see `tuned_tiles`; "" if no tiles are tuned for the device
    product: str = ""
    multiprocessors: int = 132  # number of multiprocessors; affects grid sizes, but not tiles

    @property
    def converts_e4m3(self) -> bool:
        """True if Triton converts to float8_e4m3fn correctly on this device."""
        return self.capability >= 89

    @property
    def multiplies_int8(self) -> bool:
        """True if Triton multiplies int8 matrices on this device's tensor cores.

        Compute capability 7.5 has such tensor cores, but Triton does not compile for them.
        """
        return self.capability >= 80 or self.name in ("gfx942", "interpreter")

    @property
    def multiplies_e4m3(self) -> bool:
        """True if the device has tensor cores for products of two float8_e4m3fn.

        gfx942 has such units for another encoding only (float8_e4m3fnuz).
        """
        return self.capability >= 89 or self.name == "interpreter"

    @property
    def has_warpgroup_products(self) -> bool:
        """True if products of at least 64 rows use other instructions than those of fewer rows.

        These are the instructions of warpgroups (Hopper) and of tensor memory (data center
        Blackwell). Consumer Blackwell (sm_120) has neither.
        """
        return 90 <= self.capability < 120

    @property
    def capability(self) -> int:
        """Ten times the CUDA compute capability, for example 89 for sm_89; 0 for other devices."""
        return int(self.name.removeprefix("sm_")) if self.is_cuda else 0

    def warps(self, num_threads: int) -> int:
        """Return the number of warps of a program with `num_threads` threads."""
        return max(1, num_threads // self.warp_size)

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("sm_")


INTERPRETER = DeviceInfo(
    "interpreter", shared_bytes=1 << 30, product="interpreter", multiprocessors=2
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded kernel launch, which was not executed."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Recording:
    chip: DeviceInfo
    launches: list[Launch]


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)


@contextmanager
def record_launches(chip: DeviceInfo) -> Iterator[list[Launch]]:
    """Record kernel launches within this context instead of executing them.

    Launchers choose tiles for `chip`, and accept tensors on the "meta" device. The context manager
    yields the list of recorded launches.
    """
    launches: list[Launch] = []
    token = _recording.set(_Recording(chip, launches))
    try:
        yield launches
    finally:
        _recording.reset(token)


def use_triton(tensor: Tensor) -> bool:
    """Return True if a launcher runs its Triton kernel for this tensor, False for its CPU version.

    Raises:
        KernelFallbackError: the CPU version would run, but `fallback.forbid_fallback` forbids it.
        RuntimeError: the tensor is on a GPU, but triton is not installed.
    """
    if tensor.is_cuda:
        if triton is None:
            raise RuntimeError(
                "tensors on a GPU need triton, which is not installed: install triton"
            )
        return True
    if INTERPRETED or (tensor.is_meta and _recording.get() is not None):
        return True
    check_device(tensor)
    return False


def runs_kernels(device: torch.device) -> bool:
    """Return whether launchers run their Triton kernels for tensors on this device."""
    return device.type == "cuda" or (INTERPRETED and device.type == "cpu")


def device_info(tensor: Tensor) -> DeviceInfo:
    """Return the device for which a launcher with the argument `tensor` chooses its tiles."""
    if (recording := _recording.get()) is not None:
        return recording.chip
    return _device_info(tensor.device) if tensor.is_cuda else INTERPRETER


@lru_cache(maxsize=64)
def _device_info(device: torch.device) -> DeviceInfo:
    found = torch.cuda.get_device_properties(device)
    name = f"sm_{found.major}{found.minor}"
    if torch.version.hip is not None:
        name = found.gcnArchName.split(":")[0]
    shared = getattr(found, "shared_memory_per_block_optin", 64 << 10)
    return DeviceInfo(name, shared, found.warp_size, found.name, found.multi_processor_count)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel, unless the grid is empty.

    Args:
        kernel: the kernel.
        grid: number of programs per dimension.
        arguments: runtime arguments. The kernel runs on the device of the first tensor.
        options: constexpr arguments of the kernel, and Triton's options such as `num_warps`.

    Raises:
        TypeError: a tensor is bfloat16, for which Triton's interpreter gives wrong results.
    """
    if (recording := _recording.get()) is not None:
        recording.launches.append(Launch(kernel, arguments, options))
        return
    if 0 in grid:
        return
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    if INTERPRETED and any(tensor.dtype == torch.bfloat16 for tensor in tensors):
        raise TypeError("bfloat16 gives wrong results under TRITON_INTERPRET=1; use float32")
    run_kernel(kernel, grid, tensors[0].device, arguments, options)


def run_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Launch a kernel with `device` as current device.

    Triton launches on the current device, and ignores the device of the arguments.
    """
    with _current(device):
        kernel[grid](*arguments, **options)


def _current(device: torch.device) -> Any:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
