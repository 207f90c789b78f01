"""Under which name Triton keeps a compiled kernel: another name is another compilation."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock.kernels.triton_common.aot import SM_90, kernel_name
from penstock.kernels.triton_common.launch import Launch, record_launches


def specializations(call: Callable[[], object]) -> set[tuple[Any, ...]]:
    """Of all kernels that a call on the "meta" device would launch on a GPU."""
    with record_launches(SM_90) as launches:
        call()
    return {_specialization(each) for each in launches}


def _specialization(launch: Launch) -> tuple[Any, ...]:
    parameters = launch.kernel.params
    arguments = tuple(
        (parameter.name, _kind(parameter, value))
        for parameter, value in zip(parameters, launch.arguments, strict=False)
    )
    return kernel_name(launch.kernel), *arguments, *sorted(launch.options.items())


def _kind(parameter: Any, value: object) -> object:
    """What of an argument is compiled in: of a tensor whether it begins at a multiple of 16 bytes,
    of an integer how wide it is, whether it is 1, and whether a multiple of 16."""
    free = parameter.do_not_specialize
    if isinstance(value, Tensor):
        # Memory begins at more than 16 bytes; only a view may not.
        aligned = value.storage_offset() * value.itemsize % 16 == 0
        return value.dtype, free or aligned
    if isinstance(value, int) and not isinstance(value, bool):
        wide = not -(1 << 31) <= value < 1 << 31
        return wide if free else (wide, value == 1, value % 16 == 0)
    return value if value is None else type(value)
