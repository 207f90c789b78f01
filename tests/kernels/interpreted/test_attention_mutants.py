"""Mutation tests: comparisons with the reference detect off-by-one errors in kernels and plans.

The tests cover split KV, the batch-invariant path (`one_path`), cascade attention and caches of
codes with scales.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.kernels.attention import op as attention
from penstock.kernels.attention import triton_launch
from tests.support import attention as checks
from tests.support.attention import check, check_one_path, check_prefix, small_tiles
from tests.support.mutants import (
    IN_PARTS,
    KERNEL,
    NOTHING,
    Change,
    expect_failure,
    mutant_of,
    replaced,
    under_kernel,
)

pytestmark = pytest.mark.interpreted

PLAIN_KERNEL: dict[str, Change] = {
    **KERNEL,
    **IN_PARTS,
    "unmasked columns, window": (
        "tl.maximum(latest - WINDOW + 1, low)",
        "tl.maximum(earliest - WINDOW, low)",
    ),
    "unmasked columns, causal": ("tl.minimum(earliest + 1, high)", "tl.minimum(latest + 1, high)"),
    "single partition": ("single = count == 1", "single = count <= 2"),
}

PLAIN_PLAN: dict[str, Change] = {
    "first partition": ("firsts = (low // SPLIT)", "firsts = (low // SPLIT + 1)"),
    "partitions": ("(contexts + SPLIT - 1) // SPLIT - firsts", "contexts // SPLIT - firsts"),
    "tiles": ("(lengths * group + of_chunks.rows - 1) // ", "(lengths * group) // "),
    "lowest": ("lengths - self.window + 1", "lengths - self.window + 2"),
    "tokens of partitions": ("partitions.tokens if partitions else 1,", "1,"),
    "merges": ("len(partitions.items) > int(is_few.sum())", "False"),
}

ONE_PATH_KERNEL: dict[str, Change] = {
    **KERNEL,
    **IN_PARTS,
    "first partition of loop": (
        "first_partition = low // SPLIT",
        "first_partition = low // SPLIT + 1",
    ),
    "number of partitions": (
        "(high + SPLIT - 1) // SPLIT - first_partition",
        "high // SPLIT - first_partition",
    ),
    "begin of partition": (
        "tl.maximum(begin, (first_partition + partition) * SPLIT)",
        "tl.maximum(begin, (first_partition + partition) * SPLIT - 1)",
    ),
    "end of partition": (
        "tl.minimum(high, (first_partition + partition + 1) * SPLIT)",
        "tl.minimum(high, (first_partition + partition + 1) * SPLIT + 1)",
    ),
    "total before a partition": ("all_total * fade + total", "all_total + total"),
}

ONE_PATH_PLAN: dict[str, Change] = {
    **{name: PLAIN_PLAN[name] for name in ("first partition", "partitions", "tiles", "lowest")},
    "tiles of one size": ("return fixed, fixed", "return fixed, fixed._replace(columns=32)"),
    "sequential partitions": ("BLOCK_P=1 if self.one_path else ", "BLOCK_P="),
}

PREFIX_KERNEL: dict[str, Change] = {
    **{name: KERNEL[name] for name in ("causal mask, wide", "last seen", "block", "slot", "row")},
    **{name: IN_PARTS[name] for name in ("end of part", "begin of part", "merge, count")},
    "tile of rows": ("tl.program_id(2) * BLOCK_M", "tl.program_id(2) * BLOCK_M + 1"),
    "all merged": ("if SPLIT and not (SEQUENTIAL or ALL_MERGED)", "if SPLIT and not SEQUENTIAL"),
    "count of partitions": ("count = num_own + num_shared", "count = num_own + num_shared - 1"),
    "index of shared partition": ("(numbers - num_own) *", "(numbers - num_own - 1) *"),
    "token of shared partition": ("num_sequences + sequence", "num_sequences + sequence // 2"),
    "own or shared": ("tl.where(numbers < num_own,", "tl.where(numbers <= num_own,"),
    "nothing to merge": ("| (count == 1)", "| (count <= 2)"),
}

PREFIX_PLAN: dict[str, Change] = {
    "own partitions": (".clamp(min=self.prefix // SPLIT)", ".clamp(min=self.prefix // SPLIT + 1)"),
    "own partitions, all": (".clamp(min=self.prefix // SPLIT)", ".clamp(min=0)"),
    "shared partitions": ("[self.prefix // SPLIT]", "[self.prefix // SPLIT - 1]"),
    "whole partitions": ("prefix // SPLIT * SPLIT", "-(-prefix // SPLIT) * SPLIT"),
    "start positions": ("(starts[1:] + self.prefix)", "starts[1:]"),
    "tiles of rows": (
        "-(-partitions.tokens * group // tiles",
        "(partitions.tokens * group // tiles",
    ),
    "offset of shared sums": ("sums[own:]", "sums[own - 1 :]"),
    "offset of shared sums in the merge": (
        "len(items.items) * partitions.tokens,",
        "len(items.items) * partitions.tokens - 1,",
    ),
}

PREFIX_FOUND: dict[str, Change] = {
    "own token": ("int(context_lens.min() - 1)", "int(context_lens.min())"),
    "first different block": ("else same.argmin()", "else same.argmin() + 1"),
    "a window": ("not (one_path or window)", "not one_path"),
    "one path": ("not (one_path or window)", "not window"),
    "small batch": (">= MIN_SHARED_TOKENS", ">= MIN_SHARED_TOKENS - 1"),
}


def compare_plain() -> None:
    for window in (0, 50):
        check([(1, 33), (11, 100), (2, 82)], (1, 3, 16), 8, window)


def compare_one_path() -> None:
    for window in (0, 50):
        check_one_path([(11, 100), (1, 33), (2, 82)], [(4, 1)], window)


def compare_prefix() -> None:
    check_prefix(8, 48, [49, 64], 32)
    check_prefix(8, 64, [64], 32)
    check_prefix(11, 64, [65, 97], 64)
    check_prefix(8, 48, [70], 32)
    check_prefix(8, 64, [65], 0, window=50)
    check_prefix(8, 64, [65], 0, one_path=True)
    check_prefix(7, 64, [65], 0)


CODES_KERNEL: dict[str, Change] = {
    "slot of the codes": ("page + columns % S * D", "page + (columns + 1) % S * D"),
    "slot of the scale": ("// 2 + columns % S", "// 2 + (columns + 1) % S"),
    "first scale": ("(page + S * D) // 2", "page // 2"),
    "scales of values": ("scale_at + side_stride // 2", "scale_at"),
    "gain": ("acc *= UNIT / GAIN", "acc *= UNIT"),
    "bits of FP8": ("(bits & 0x7F) << 7", "(bits & 0x3F) << 7"),
    "unit of FP8": ("factor = scale * UNIT", "factor = scale"),
}


def compare_codes() -> None:
    for name in ("int8", "fp8"):
        check([(1, 33), (9, 20)], (2, 2, 16), 16, cached=name)


class Form(NamedTuple):
    """A comparison with the reference, and the mutants that it must detect."""

    compare: Callable[[], None]
    kernel: dict[str, Change]
    plan: dict[str, Change]


FORMS = {
    "plain": Form(compare_plain, PLAIN_KERNEL, PLAIN_PLAN),
    "one path": Form(compare_one_path, ONE_PATH_KERNEL, ONE_PATH_PLAN),
    "prefix": Form(compare_prefix, PREFIX_KERNEL, PREFIX_PLAN),
    "codes": Form(compare_codes, CODES_KERNEL, {}),
}


def under_plan(compare: Callable[[], None], change: Change, folder: Path) -> None:
    mutant = mutant_of(triton_launch, change, folder)
    with replaced(attention, mutant, "TiledPlan", "Batch"), small_tiles(mutant):
        compare()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("under", [under_kernel, under_plan])
def test_unchanged_source_passes(
    form: str, under: Callable[[Callable[[], None], Change, Path], None], tmp_path: Path
) -> None:
    under(FORMS[form].compare, NOTHING, tmp_path)


@pytest.mark.parametrize(
    ("form", "name"), [(form, name) for form in FORMS for name in FORMS[form].kernel]
)
def test_a_mutant_kernel_is_detected(form: str, name: str, tmp_path: Path) -> None:
    with expect_failure():
        under_kernel(FORMS[form].compare, FORMS[form].kernel[name], tmp_path)


@pytest.mark.parametrize(
    ("form", "name"), [(form, name) for form in FORMS for name in FORMS[form].plan]
)
def test_a_mutant_plan_is_detected(form: str, name: str, tmp_path: Path) -> None:
    with expect_failure():
        under_plan(FORMS[form].compare, FORMS[form].plan[name], tmp_path)


@pytest.mark.parametrize("name", PREFIX_FOUND)
def test_a_mutant_prefix_search_is_detected(name: str, tmp_path: Path) -> None:
    mutant = mutant_of(attention, PREFIX_FOUND[name], tmp_path)
    with replaced(checks, mutant, "plan_attention"), expect_failure():
        compare_prefix()


def test_an_undetected_mutant_fails_the_test() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), expect_failure():
        check([(1, 3)], (1, 1, 16), 8)
