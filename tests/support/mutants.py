"""Mutation tests: replace a module by a copy that has a mistake in its source."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from penstock.kernels.attention import triton as triton_kernels
from penstock.kernels.attention import triton_launch

Change = tuple[str, str]  # (text of the source, its replacement)

KERNEL: dict[str, Change] = {
    "causal mask": (
        "columns[None, :] <= positions[:, None]",
        "columns[None, :] < positions[:, None]",
    ),
    "causal mask, wide": ("columns[None, :] <= pos", "columns[None, :] - 1 <= pos"),
    "window": ("> positions[:, None] - WINDOW", ">= positions[:, None] - WINDOW"),
    "first seen": ("earliest - WINDOW + 1, 0)", "earliest - WINDOW + 2, 0)"),
    "last seen": ("high = latest + 1", "high = latest"),
    "block": ("table + ahead // S", "table + (ahead + 1) // S"),
    "next block": ("ahead = columns + BLOCK_N", "ahead = columns + BLOCK_N - 1"),
    "last block": ("mask=ahead < high", "mask=ahead < high - 1"),
    "slot": ("* S + columns % S) * (D", "* S + (columns + 1) % S) * (D"),
    "loaded": ("(columns >= low) & (columns < high)", "columns < high + 1"),
    "row": ("present = tokens < num_tokens", "present = tokens < num_tokens - 1"),
}
"""Off-by-one mistakes in code that all attention kernels share."""

IN_PARTS: dict[str, Change] = {
    "end of part": (
        "high = tl.minimum(high, end_position)",
        "high = tl.minimum(high, end_position - 1)",
    ),
    "begin of part": ("tl.maximum(low, first_position)", "tl.maximum(low, first_position + 1)"),
    "merge, count": ("there = numbers < count", "there = numbers < count - 1"),
    "merge, token": ("numbers * num_tokens + token\n", "numbers * num_tokens + token // 2\n"),
    "last item": ("tl.load(worker_starts + worker + 1)", "tl.load(worker_starts + worker + 1) - 1"),
    "first item": (
        "range(tl.load(worker_starts + worker),",
        "range(tl.load(worker_starts + worker) + 1,",
    ),
}
"""Off-by-one mistakes in the split-KV kernels."""

NOTHING: Change = ("SPLIT", "SPLIT")


def mutant_of(module: ModuleType, change: Change, folder: Path) -> ModuleType:
    """Return a copy of the module in which `change` replaced every occurrence of a source text.

    Raises AssertionError if the source does not contain the text.
    """
    old, new = change
    source = Path(str(module.__file__)).read_text()
    assert old in source, f"{old!r} is no longer there: mend this test"
    path = folder / "mutant.py"
    path.write_text(source.replace(old, new))
    spec = spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    mutant = module_from_spec(spec)
    # Dataclasses look for their module in sys.modules.
    with mock.patch.dict("sys.modules", {"mutant": mutant}):
        spec.loader.exec_module(mutant)
    return mutant


@contextmanager
def replaced(place: ModuleType, mutant: ModuleType, *names: str) -> Iterator[None]:
    """Replace the attributes `names` of module `place` by those of `mutant`, within the block."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(place, name, getattr(mutant, name)))
        yield


@contextmanager
def expect_failure() -> Iterator[None]:
    """Expect the comparison in the block to fail; fail the test if the mutant is not detected."""
    with pytest.raises(AssertionError, match=r"not close|not equal|NaN|expected"):
        yield


def under_kernel(compare: Callable[[], None], change: Change, folder: Path) -> None:
    """Run `compare` with a mutant of the attention kernels."""
    mutant = mutant_of(triton_kernels, change, folder)
    with replaced(triton_launch, mutant, "attend_kernel", "merge_kernel"):
        compare()
