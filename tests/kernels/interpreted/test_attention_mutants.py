"""The comparison with the reference notices every off-by-one planted in kernels and plan."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from penstock.kernels import attention, attention_kernel, attention_tiles
from tests.support.attention import check, small_tiles

pytestmark = pytest.mark.interpreted

KERNEL = {
    "causal mask": (
        "columns[None, :] <= positions[:, None]",
        "columns[None, :] < positions[:, None]",
    ),
    "causal mask, wide": ("columns[None, :] <= pos", "columns[None, :] - 1 <= pos"),
    "window": ("> positions[:, None] - WINDOW", ">= positions[:, None] - WINDOW"),
    "first seen": ("earliest - WINDOW + 1, 0)", "earliest - WINDOW + 2, 0)"),
    "all see, window": (
        "tl.maximum(latest - WINDOW + 1, low)",
        "tl.maximum(earliest - WINDOW, low)",
    ),
    "all see, causal": ("tl.minimum(earliest + 1, high)", "tl.minimum(latest + 1, high)"),
    "last seen": ("high = latest + 1", "high = latest"),
    "end of part": (
        "tl.minimum(high, (which + 1) * SPLIT)",
        "tl.minimum(high, (which + 1) * SPLIT - 1)",
    ),
    "begin of part": ("tl.maximum(low, which * SPLIT)", "tl.maximum(low, which * SPLIT + 1)"),
    "block": ("table + columns // S", "table + (columns + 1) // S"),
    "slot": ("+ columns % S) * (D", "+ (columns + 1) % S) * (D"),
    "loaded": ("(columns >= low) & (columns < high)", "columns < high + 1"),
    "row": ("present = tokens < num_tokens", "present = tokens < num_tokens - 1"),
    "merge, count": ("there = numbers < count", "there = numbers < count - 1"),
    "merge, token": ("* part_tokens + token\n", "* part_tokens + token // 2\n"),
    "alone": ("alone = count == 1", "alone = count <= 2"),
}

PLAN = {
    "first part": ("firsts = (low // SPLIT)", "firsts = (low // SPLIT + 1)"),
    "parts": ("(contexts + SPLIT - 1) // SPLIT - firsts", "contexts // SPLIT - firsts"),
    "tiles": ("(lengths * group + of_chunks.rows - 1) // ", "(lengths * group) // "),
    "lowest": ("lengths - self.window + 1", "lengths - self.window + 2"),
    "rows of parts": ("parts.tokens if parts else 1,", "1,"),
    "merges": ("len(parts.items) > int(is_few.sum())", "False"),
}


def mutant_of(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) >= 1, f"{old!r} is no longer there: mend this test"
    path = folder / "mutant.py"
    path.write_text(source.replace(old, new))
    spec = spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    mutant = module_from_spec(spec)
    # Dataclasses look their module up.
    with mock.patch.dict("sys.modules", {"mutant": mutant}):
        spec.loader.exec_module(mutant)
    return mutant


@contextmanager
def swapped(place: ModuleType, mutant: ModuleType, *names: str) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(place, name, getattr(mutant, name)))
        yield


def compare_all() -> None:
    for window in (0, 50):
        check([(1, 33), (11, 100), (2, 82)], (1, 3, 16), 8, window)


def test_the_sound_kernels_pass() -> None:
    compare_all()


@pytest.mark.parametrize("name", KERNEL)
def test_a_broken_kernel_is_noticed(name: str, tmp_path: Path) -> None:
    mutant = mutant_of(attention_kernel, *KERNEL[name], tmp_path)
    with swapped(attention_tiles, mutant, "attend_tiles", "merge_parts"), noticed():
        compare_all()


@pytest.mark.parametrize("name", PLAN)
def test_a_broken_plan_is_noticed(name: str, tmp_path: Path) -> None:
    mutant = mutant_of(attention_tiles, *PLAN[name], tmp_path)
    with swapped(attention, mutant, "TiledPlan", "Batch"), small_tiles(mutant), noticed():
        compare_all()


@contextmanager
def noticed() -> Iterator[None]:
    with pytest.raises(AssertionError, match=r"not close|NaN|expected"):
        yield
