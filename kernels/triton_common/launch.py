"""What the launchers of all Triton kernels share.

Triton computes on CUDA and ROCm devices. With TRITON_INTERPRET=1 in the environment it also
"computes" on the CPU, for tests: the same launchers then take the same kernels, op by op in numpy.
Everywhere else, and where triton is not installed, a launcher has its CPU form.
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
except ImportError:  # a machine that serves on its CPU
    triton = None

    class Names:
        """What the signatures of kernels name."""

        constexpr = Any

    tl = Names

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels are interpreted on the CPU. Triton reads the variable when it is imported."""


def jit(function: Callable[..., Any] | None = None, *, unspecialized: Sequence[str] = ()) -> Any:
    """`triton.jit` where there is a triton; bare, or with names of arguments of changing value.

    unspecialized: integers that differ from step to step, and tensors that do not always begin at a
    multiple of 16 bytes: without it a kernel is compiled anew, in the middle of serving, when an
    integer first is 1 or a multiple of 16, or a tensor first is not so aligned.
    """
    if function is None:
        return lambda function: jit(function, unspecialized=unspecialized)
    if triton is None:
        return function
    return triton.jit(function, do_not_specialize=list(unspecialized))


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a launcher may know of a device when it chooses its tiles."""

    name: str  # sm_90, gfx942, interpreter
    num_cores: int  # streaming multiprocessors, or compute units
    shared_bytes: int  # of shared memory, at most, of one program
    warp_size: int = 32

    @property
    def converts_e4m3(self) -> bool:
        """Whether it converts to float8_e4m3fn, and does so rightly."""
        return self.is_cuda and self.name not in ("sm_80", "sm_86")

    def warps(self, num_threads: int) -> int:
        """Warps of a program of so many threads."""
        return max(1, num_threads // self.warp_size)

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("sm_")


INTERPRETER = DeviceInfo("interpreter", num_cores=4, shared_bytes=1 << 30)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch, as it would have been."""

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
    """Launchers choose as on `chip` and take "meta" tensors; what they launch is noted, not run."""
    launches: list[Launch] = []
    token = _recording.set(_Recording(chip, launches))
    try:
        yield launches
    finally:
        _recording.reset(token)


def use_triton(tensor: Tensor) -> bool:
    """Whether a launcher takes its kernel for this tensor, or its CPU form; `KernelFallbackError`
    where that may not be, see `fallback.forbid_fallback`."""
    if tensor.is_cuda:
        if triton is None:
            raise RuntimeError("a CUDA device needs triton, which is not installed")
        return True
    if INTERPRETED or (tensor.is_meta and _recording.get() is not None):
        return True
    check_device(tensor)
    return False


def runs_kernels(device: torch.device) -> bool:
    """Whether launchers take their kernels for what is on this device."""
    return device.type == "cuda" or (INTERPRETED and device.type == "cpu")


def device_info(tensor: Tensor) -> DeviceInfo:
    """The device that a launch with this tensor is for."""
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
    """Launches a kernel; nothing, where the grid is empty. `options`: constants, num_warps, ...

    TypeError for bfloat16 under the interpreter, which computes it wrongly without a word.
    """
    if (recording := _recording.get()) is not None:
        recording.launches.append(Launch(kernel, arguments, options))
        return
    if 0 in grid:
        return
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    if INTERPRETED and any(tensor.dtype == torch.bfloat16 for tensor in tensors):
        raise TypeError("kernels take no bfloat16 under TRITON_INTERPRET: wrong results")
    run_kernel(kernel, grid, tensors[0].device, arguments, options)


def run_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Triton launches on the current device, whatever its arguments are on: so that is `device`."""
    with _current(device):
        kernel[grid](*arguments, **options)


def _current(device: torch.device) -> Any:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def power_of_2(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()


def check(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    like: Tensor | None = None,
) -> None:
    """ValueError, which says what was expected, unless a kernel may read `tensor` as announced.

    shape: a size, or a letter for any, of every dimension; like: must be on the same device.
    Elements of the last dimension lie side by side.
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
    """ValueError unless the whole tensor is contiguous."""
    if not tensor.is_contiguous():
        strides = list(tensor.stride())
        raise ValueError(f"{name}: a contiguous tensor expected, not one of strides {strides}")


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64)
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
