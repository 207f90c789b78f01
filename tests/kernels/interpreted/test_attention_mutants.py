"""Mutation tests: comparisons with the reference detect off-by-one errors in kernels and plans.

The tests cover split KV, the batch-invariant path (`one_path`), cascade attention and quantized
caches.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.kernels.attention import op as attention
from penstock.kernels.attention import triton_launch, triton_plan
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

pytestmark = [pytest.mark.interpreted, pytest.mark.long]

PLAIN_KERNEL: dict[str, Change] = {
    **KERNEL,
    **IN_PARTS,
    "unmasked columns, window": (
        "tl.maximum(latest - WINDOW + 1, low)",
        "tl.maximum(earliest - WINDOW, low)",
    ),
    "unmasked columns, causal": ("tl.minimum(earliest + 1, high)", "tl.minimum(latest + 1, high)"),
    "partial row": ("(partial_row + tokens)", "(partial_row + tokens // 2)"),
    "final": ("elif partial_row >= 0:", "elif partial_row > 0:"),
    "row tile": ("items + 5 * item + 1) * BLOCK_M", "items + 5 * item + 1) * BLOCK_M + 1"),
    "nothing to merge": ("(num_own == 0)", "(num_own <= 2)"),
    "tokens to merge": ("token >= num_tokens", "token >= num_tokens - 1"),
}

PLAIN_PLAN: dict[str, Change] = {
    "tokens of merges": (
        "num_rows, merge_tokens = work.num_partial_rows, work.merge_tokens",
        "num_rows, merge_tokens = work.num_partial_rows, 1",
    ),
    "few rows": ("        few.rows,\n", "        chunk.rows,\n"),
    "chunk rows": ("        chunk.rows,\n", "        2 * chunk.rows,\n"),
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
    "tiles of one size": ("return fixed, fixed", "return fixed, fixed._replace(columns=32)"),
}

ONE_PATH_LAUNCH: dict[str, Change] = {
    "sequential partitions": ("BLOCK_P=1 if self.one_path else ", "BLOCK_P="),
    "partitions in order": ("SPLIT=0 if partials else work_items.SPLIT", "SPLIT=0"),
}

PREFIX_KERNEL: dict[str, Change] = {
    **{name: KERNEL[name] for name in ("causal mask, wide", "last seen", "block", "slot", "row")},
    **{name: IN_PARTS[name] for name in ("end of part", "begin of part", "merge, count")},
    "row tile": ("items + 5 * item + 1) * BLOCK_M", "items + 5 * item + 1) * BLOCK_M + 1"),
    "count of partitions": ("count = num_own + num_shared", "count = num_own + num_shared - 1"),
    "index of shared partition": ("(numbers - num_own) *", "(numbers - num_own - 1) *"),
    "token of shared partition": ("num_sequences + sequence", "num_sequences + sequence // 2"),
    "own or shared": ("tl.where(numbers < num_own,", "tl.where(numbers <= num_own,"),
    "nothing to merge": ("(num_own == 0)", "(num_own <= 1)"),
}

PREFIX_PLAN: dict[str, Change] = {
    "whole partitions": (
        "prefix // work_items.SPLIT * work_items.SPLIT",
        "-(-prefix // work_items.SPLIT) * work_items.SPLIT",
    ),
    "start positions": ("starts[1:] + np.int32(self.prefix)", "starts[1:]"),
    "first row": (
        "self._prefix(len(query), num_rows, shape)",
        "self._prefix(len(query), 0, shape)",
    ),
}

PREFIX_LAUNCH: dict[str, Change] = {
    "offset of shared sums in the merge": (
        "num_shared, layout.num_partial_rows, batch_size",
        "num_shared, layout.num_partial_rows - 1, batch_size",
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
        check([(1, 33), (11, 100), (2, 82), (8, 20)], (1, 3, 16), 8, window)


def compare_one_path() -> None:
    for window in (0, 50):
        check_one_path([(17, 100), (1, 33), (2, 82)], [(4, 1)], window)


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
    plan: dict[str, Change]  # changes of `triton_plan`
    launch: dict[str, Change]  # changes of `triton_launch`


FORMS = {
    "plain": Form(compare_plain, PLAIN_KERNEL, PLAIN_PLAN, {}),
    "one path": Form(compare_one_path, ONE_PATH_KERNEL, ONE_PATH_PLAN, ONE_PATH_LAUNCH),
    "prefix": Form(compare_prefix, PREFIX_KERNEL, PREFIX_PLAN, PREFIX_LAUNCH),
    "codes": Form(compare_codes, CODES_KERNEL, {}, {}),
}


def under_plan(compare: Callable[[], None], change: Change, folder: Path) -> None:
    mutant = mutant_of(triton_plan, change, folder)
    with replaced(attention, mutant, "TiledPlan"), small_tiles(mutant):
        compare()


def under_launch(compare: Callable[[], None], change: Change, folder: Path) -> None:
    mutant = mutant_of(triton_launch, change, folder)
    with replaced(triton_plan, mutant, "AttentionCall"):
        compare()


UNDER = {"kernel": under_kernel, "plan": under_plan, "launch": under_launch}

MUTANTS = [
    (form, part, name) for form in FORMS for part in UNDER for name in getattr(FORMS[form], part)
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", UNDER)
def test_unchanged_source_passes(form: str, part: str, tmp_path: Path) -> None:
    UNDER[part](FORMS[form].compare, NOTHING, tmp_path)


@pytest.mark.parametrize(("form", "part", "name"), MUTANTS)
def test_a_mutant_is_detected(form: str, part: str, name: str, tmp_path: Path) -> None:
    with expect_failure():
        UNDER[part](FORMS[form].compare, getattr(FORMS[form], part)[name], tmp_path)


@pytest.mark.parametrize("name", PREFIX_FOUND)
def test_a_mutant_prefix_search_is_detected(name: str, tmp_path: Path) -> None:
    mutant = mutant_of(attention, PREFIX_FOUND[name], tmp_path)
    with replaced(checks, mutant, "plan_attention"), expect_failure():
        compare_prefix()


def test_an_undetected_mutant_fails_the_test() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), expect_failure():
        check([(1, 3)], (1, 1, 16), 8)
