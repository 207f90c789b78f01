"""Specializations of Triton kernels. Triton compiles a kernel once per specialization."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock.kernels.triton_common.launch import Launch, record_launches
from tests.aot.case import SM_90, kernel_name


def specializations(call: Callable[[], object]) -> set[tuple[Any, ...]]:
    """Return the specializations of all kernels that a call on the "meta" device would launch."""
    with record_launches(SM_90) as launches:
        call()
    return {specialization(each) for each in launches}


def specialization(launch: Launch) -> tuple[Any, ...]:
    parameters = launch.kernel.params
    arguments = tuple(
        (parameter.name, _kind(parameter, value))
        for parameter, value in zip(parameters, launch.arguments, strict=False)
    )
    return kernel_name(launch.kernel), *arguments, *sorted(launch.options.items())


def _kind(parameter: Any, value: object) -> object:
    """Return those properties of an argument by which Triton specializes a kernel.

    For a tensor: its dtype, and whether it is aligned to 16 bytes. For an integer: its width,
    whether it is 1, and whether it is a multiple of 16.
    """
    free = parameter.do_not_specialize
    if isinstance(value, Tensor):
        # Allocations are always aligned to 16 bytes, so only a view may be unaligned.
        aligned = value.storage_offset() * value.itemsize % 16 == 0
        return value.dtype, free or aligned
    if isinstance(value, int) and not isinstance(value, bool):
        wide = not -(1 << 31) <= value < 1 << 31
        return wide if free else (wide, value == 1, value % 16 == 0)
    return value if value is None else type(value)
