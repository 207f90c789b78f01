"""Functions that the launchers of all Triton kernels share.

Triton kernels run on CUDA and ROCm devices. With TRITON_INTERPRET=1 in the environment, the same
launchers run the same kernels on the CPU, for tests: Triton interprets them with numpy. In all
other cases, and if triton is not installed, a launcher runs its CPU version.
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
except ImportError:  # not needed to serve on a CPU
    triton = None

    class Names:
        """Stand-in for `triton.language` with the names that kernel signatures use."""

        constexpr = Any

    tl = Names

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels are interpreted on the CPU. Triton reads the variable when it is imported."""


def jit(function: Callable[..., Any] | None = None, *, unspecialized: Sequence[str] = ()) -> Any:
    """Decorate a kernel with `triton.jit`; return it unchanged if triton is not installed.

    Args:
        function: the kernel, if the decorator is used without arguments.
        unspecialized: names of integers that differ between steps and of tensors whose start is not
            always aligned to 16 bytes. Otherwise Triton compiles the kernel again, while serving,
            when an integer is first 1 or a multiple of 16, or a tensor is first unaligned.
    """
    if function is None:
        return lambda function: jit(function, unspecialized=unspecialized)
    if triton is None:
        return function
    return triton.jit(function, do_not_specialize=list(unspecialized))


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Properties of a device from which a launcher chooses its tiles."""

    name: str  # sm_90, gfx942, interpreter
    num_cores: int  # streaming multiprocessors, or compute units
    shared_bytes: int  # largest shared memory of one program
    warp_size: int = 32

    @property
    def converts_e4m3(self) -> bool:
        """True if Triton on this device converts to float8_e4m3fn correctly."""
        return self.is_cuda and self.name not in ("sm_80", "sm_86")

    def warps(self, num_threads: int) -> int:
        """Return the number of warps of a program with `num_threads` threads."""
        return max(1, num_threads // self.warp_size)

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("sm_")


INTERPRETER = DeviceInfo("interpreter", num_cores=4, shared_bytes=1 << 30)


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
    """Record launches instead of executing them, with the tiles that launchers choose for `chip`.

    Launchers then accept tensors on the "meta" device. Yields the list of launches.
    """
    launches: list[Launch] = []
    token = _recording.set(_Recording(chip, launches))
    try:
        yield launches
    finally:
        _recording.reset(token)


def use_triton(tensor: Tensor) -> bool:
    """Return whether a launcher runs its Triton kernel for this tensor, not its CPU version.

    Raises:
        KernelFallbackError: it would run the CPU version, which `fallback.forbid_fallback` forbids.
        RuntimeError: the tensor is on a GPU, but triton is not installed.
    """
    if tensor.is_cuda:
        if triton is None:
            raise RuntimeError("triton is not installed; it is required for tensors on a GPU")
        return True
    if INTERPRETED or (tensor.is_meta and _recording.get() is not None):
        return True
    check_device(tensor)
    return False


def runs_kernels(device: torch.device) -> bool:
    """Return whether launchers run their Triton kernels for tensors on this device."""
    return device.type == "cuda" or (INTERPRETED and device.type == "cpu")


def device_info(tensor: Tensor) -> DeviceInfo:
    """Return the device that a launcher chooses tiles for, given one of its tensors."""
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
    return DeviceInfo(name, found.multi_processor_count, shared, found.warp_size)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel, unless the grid is empty.

    Args:
        kernel: the kernel.
        grid: number of programs per dimension.
        arguments: its runtime arguments; it runs on the device of the first tensor.
        options: its constexpr arguments, and Triton's options such as `num_warps`.

    Raises:
        TypeError: bfloat16 under the interpreter, which computes it wrongly.
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
    """Launch on `device`, made current first: Triton ignores the device of the arguments."""
    with _current(device):
        kernel[grid](*arguments, **options)


def _current(device: torch.device) -> Any:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def check(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    like: Tensor | None = None,
) -> None:
    """Raise ValueError unless a tensor has a shape and dtype that a kernel can read.

    Its last dimension must be contiguous.

    Args:
        name: name of the tensor, for the message.
        tensor: the tensor.
        shape: for each dimension its size, or a letter that allows any size.
        dtypes: the allowed dtypes.
        like: a tensor that must be on the same device, if any.
    """
    sizes = tensor.shape
    wrong = len(sizes) != len(shape) or any(
        isinstance(expected, int) and expected != size
        for expected, size in zip(shape, sizes, strict=True)
    )
    if wrong:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name}: shape [{expected}] expected, not {list(sizes)}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name}: {names} expected, not {found}")
    if sizes and sizes[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: last dimension not contiguous, its stride is {tensor.stride(-1)}"
        )
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name}: expected on {like.device}, not on {tensor.device}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is contiguous."""
    if not tensor.is_contiguous():
        strides = list(tensor.stride())
        raise ValueError(f"{name}: a contiguous tensor expected, not one of strides {strides}")


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64)
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
